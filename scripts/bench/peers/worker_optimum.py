"""Hugging Face's ``generate`` as a worker: greedy texts.

Options: runtime, torch (eager PyTorch on a checkpoint, in bf16) or openvino (optimum-intel on an exported folder).
"""

from __future__ import annotations

from typing import Any

import protocol
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """A streamer to note the times of tokens; its first call is for the prompt."""

    def __init__(self, watch: protocol.Watch) -> None:
        self._watch, self._prompt = watch, True

    def put(self, value: Any) -> None:
        del value
        if not self._prompt:
            self._watch.tokens()
        self._prompt = False

    def end(self) -> None:
        pass


def model_of(folder: str, properties: dict[str, str], options: dict[str, Any]) -> Any:
    if options.get("runtime", "torch") == "openvino":
        from optimum.intel import OVModelForCausalLM

        model: Any = OVModelForCausalLM.from_pretrained(folder, ov_config=dict(properties))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    # Without EOS, to generate texts of the requested length.
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def load_texts(setup: protocol.Setup) -> protocol.Generate:
    target = model_of(setup.target, setup.properties, setup.options)

    @torch.inference_mode()
    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.TokenLists:
        ids = torch.tensor([request.prompt])
        options: dict[str, Any] = {"max_new_tokens": request.max_tokens, "do_sample": False}
        text = target.generate(ids, attention_mask=torch.ones_like(ids), streamer=FirstToken(watch), **options)
        return [text[0, ids.shape[1] :].tolist()]

    return generate


if __name__ == "__main__":
    protocol.serve(["torch", "transformers", "optimum-intel", "openvino"], texts=load_texts)
