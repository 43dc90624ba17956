"""openvino-genai as a worker: texts, and loads in its continuous batching pipeline, without HTTP and drafters.

Modes of texts: plain, draft, lookup. Their options: batches, True for several prompts at a time; backend, PA (genai's
default), SDPA, or None for all of genai's defaults; prefix_caching.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai  # type: ignore[import-not-found]
import protocol

LOOKUP_NGRAM = 3


def scheduler(options: dict[str, Any]) -> Any:
    """Return genai's default scheduler for a text at a time, but without prefix caching.

    The driver gives the same prompt to several configurations, and warms up: with a cached prefix there would be almost
    no prefill left. genai loses nothing without it, because looking prefixes up takes time; and with prefix caching,
    sampling with a draft fails. ``max_num_batched_tokens`` is unlimited, as in genai's default; the class's own 256
    would read long prompts in chunks.
    """
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = options.get("prefix_caching", False)
    config.max_num_batched_tokens = 2**64 - 1
    return config


class FirstToken(genai.StreamerBase):
    """A streamer to note the times of tokens, without decoding them to text."""

    def __init__(self, watch: protocol.Watch) -> None:
        super().__init__()
        self._watch = watch

    def write(self, token: int | list[int]) -> Any:
        self._watch.tokens(1 if isinstance(token, int) else len(token))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def generation_config(length: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = length, True, False
    return config


def config_of(setup: protocol.Setup, request: protocol.Request, length: int) -> Any:
    config = generation_config(length)
    if request.temperature > 0:
        config.do_sample, config.temperature, config.rng_seed = True, request.temperature, request.seed
        config.top_p = 1.0
        if request.top_k:
            config.top_k = request.top_k
    if setup.mode == "lookup":
        config.max_ngram_size = LOOKUP_NGRAM
    if setup.mode != "plain":
        if request.k is None:
            raise protocol.Refusal("its drafters need a number of tokens to propose")
        config.num_assistant_tokens = request.k
    return config


def tensor(ids: list[int]) -> ov.Tensor:
    return ov.Tensor(np.array([ids], dtype=np.int64))


def pipeline_properties(setup: protocol.Setup) -> dict[str, Any]:
    """Return the properties of a pipeline with the drafter of a mode."""
    if setup.mode == "draft":
        draft = genai.draft_model(setup.draft_folder, "CPU", **setup.draft_properties)
        return setup.properties | {"draft_model": draft}
    return setup.properties | ({"prompt_lookup": True} if setup.mode == "lookup" else {})


def load_texts(setup: protocol.Setup) -> protocol.Generate:
    properties: dict[str, Any] = pipeline_properties(setup)
    if setup.options.get("batches"):
        several = genai.ContinuousBatchingPipeline(setup.target, scheduler(setup.options), "CPU", properties)

        def generate_batch(request: protocol.Request, watch: protocol.Watch) -> protocol.TokenLists:
            del watch  # it streams single texts only
            configs = [config_of(setup, request, length) for length in request.each_length]
            texts = several.generate([tensor(ids) for ids in request.prompts], configs)
            return [list(text.m_generation_ids[0]) for text in texts]

        return generate_batch
    backend = setup.options.get("backend", "PA")
    if backend:
        properties["ATTENTION_BACKEND"] = backend
    if backend == "PA":
        properties["scheduler_config"] = scheduler(setup.options)
    pipeline = genai.LLMPipeline(setup.target, "CPU", **properties)

    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.TokenLists:
        config = config_of(setup, request, request.max_tokens)
        return [list(pipeline.generate(tensor(request.prompt), config, FirstToken(watch)).tokens[0])]

    return generate


def load_serving(setup: protocol.Setup) -> protocol.RunLoad:
    """Load the pipeline with the scheduler's defaults: prompts are read in chunks of at most 256 tokens.

    Prefix caching is off, as in the other benchmarks.
    """
    pipeline = genai.ContinuousBatchingPipeline(setup.target, genai.SchedulerConfig(), "CPU", setup.properties)

    def run(load: protocol.Load) -> list[protocol.Timeline]:
        running: dict[int, Any] = {}
        timelines: dict[int, protocol.Timeline] = {}
        while running or not load.sent_all:
            for number in load.due():
                timelines[number] = protocol.Timeline(load.now)
                config = generation_config(load.tokens[number])
                running[number] = pipeline.add_request(number, tensor(load.prompts[number]), config)
            pipeline.step()
            for number, handle in list(running.items()):
                if handle.can_read():
                    handle.read()
                    timelines[number].pieces.append(load.now)
                if handle.get_status() != genai.GenerationStatus.RUNNING and not handle.can_read():
                    del running[number]
                    load.answered()
        return [timelines[number] for number in sorted(timelines)]

    return run


if __name__ == "__main__":
    protocol.serve(["openvino-genai", "openvino"], texts=load_texts, loads=load_serving)
