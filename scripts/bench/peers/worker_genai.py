"""openvino-genai as a worker that generates texts.

Modes: plain, draft, lookup. Options: batches, True for several prompts at a time; backend, PA (its own default), SDPA,
or None to leave everything to its defaults; max_ngram_size, for lookup; prefix_caching and batched_tokens, for its
scheduler. With a draft model, k=None selects its dynamic mode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai  # type: ignore[import-not-found]
import protocol

DYNAMIC_THRESHOLD = 0.4  # of the draft's confidence, as in its documentation
LOOKUP_NGRAM = 3


def scheduler(options: dict[str, Any]) -> Any:
    """Return its own default scheduler for one text at a time, but without prefix caching.

    The driver gives the same prompt to several configurations, and warms up: with a cached prefix there would be almost
    nothing to read before the first token. Looking prefixes up isn't free, so it loses nothing without them; and with
    them, sampling with a draft fails. ``max_num_batched_tokens`` has no limit, as in its default; the class's own 256
    would read long prompts in chunks.
    """
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = options.get("prefix_caching", False)
    config.max_num_batched_tokens = options.get("batched_tokens", 2**64 - 1)
    return config


class FirstToken(genai.StreamerBase):
    """A streamer that reports when tokens come, without decoding them to text."""

    def __init__(self, watch: protocol.Watch) -> None:
        super().__init__()
        self._watch = watch

    def write(self, token: int | list[int]) -> Any:
        self._watch.tokens(1 if isinstance(token, int) else len(token))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def config_of(setup: protocol.Setup, request: protocol.Request, length: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = length, True, False
    if request.temperature > 0:
        config.do_sample, config.temperature, config.rng_seed = True, request.temperature, request.seed
        config.top_p = 1.0
        if request.top_k:
            config.top_k = request.top_k
    if setup.mode == "lookup":
        config.max_ngram_size = setup.options.get("max_ngram_size", LOOKUP_NGRAM)
    if setup.mode in ("draft", "lookup"):
        if request.k is not None:
            config.num_assistant_tokens = request.k
        elif setup.mode == "draft":
            config.assistant_confidence_threshold = DYNAMIC_THRESHOLD
        else:
            raise protocol.Refusal("its lookup has no dynamic mode")
    return config


def tensor(ids: list[int]) -> ov.Tensor:
    return ov.Tensor(np.array([ids], dtype=np.int64))


def drafting(setup: protocol.Setup) -> dict[str, Any]:
    """Return the properties of a pipeline with the drafter of a mode."""
    if setup.mode == "draft":
        draft = genai.draft_model(setup.draft_folder, "CPU", **setup.draft_properties)
        return setup.properties | {"draft_model": draft}
    return setup.properties | ({"prompt_lookup": True} if setup.mode == "lookup" else {})


def load(setup: protocol.Setup) -> protocol.Generate:
    properties: dict[str, Any] = drafting(setup)
    if setup.options.get("batches"):
        several = genai.ContinuousBatchingPipeline(setup.target, scheduler(setup.options), "CPU", properties)

        def batch(request: protocol.Request, watch: protocol.Watch) -> protocol.Texts:
            del watch  # it streams single texts only
            configs = [config_of(setup, request, length) for length in request.each_length]
            results = several.generate([tensor(ids) for ids in request.prompts], configs)
            return protocol.Texts([list(result.m_generation_ids[0]) for result in results])

        return batch
    backend = setup.options.get("backend", "PA")
    if backend:
        properties["ATTENTION_BACKEND"] = backend
    if backend == "PA":
        properties["scheduler_config"] = scheduler(setup.options)
    pipeline = genai.LLMPipeline(setup.target, "CPU", **properties)

    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.Texts:
        result = pipeline.generate(
            tensor(request.prompt), config_of(setup, request, request.max_tokens), FirstToken(watch)
        )
        return protocol.Texts([list(result.tokens[0])])

    return generate


if __name__ == "__main__":
    protocol.serve_texts(load, ["openvino-genai", "openvino"])
