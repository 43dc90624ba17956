"""The speculative loop of OpenVINO's published samples as a worker that generates texts.

It has two stateful requests, proposes a fixed number of tokens and is greedy. After each round it cuts off the keys and
values of rejected tokens by reading every state, slicing it and writing it back. Modes: plain, draft.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import protocol


class Model:
    """A stateful request and how many tokens its states hold."""

    def __init__(self, folder: str, properties: dict[str, str]) -> None:
        compiled = ov.Core().compile_model(f"{folder}/openvino_model.xml", "CPU", properties)
        self.request = compiled.create_infer_request()
        self.inputs = {name for port in compiled.inputs for name in port.names}
        self.length = 0

    def reset(self) -> None:
        self.request.reset_state()
        self.length = 0

    def choices(self, tokens: list[int]) -> list[int]:
        """Feed ``tokens`` and return the greedy choice after each."""
        end = self.length + len(tokens)
        feed: dict[str, Any] = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "attention_mask": np.ones((1, end), dtype=np.int64),
            "position_ids": np.arange(self.length, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self.request.infer({name: value for name, value in feed.items() if name in self.inputs}, share_inputs=True)
        self.length = end
        return self.request.get_tensor("logits").data[0].argmax(-1).tolist()

    def trim(self, length: int) -> None:
        """Forget all tokens after the first ``length``."""
        if length < self.length:
            for state in self.request.query_state():
                state.state = ov.Tensor(np.ascontiguousarray(state.state.data[:, :, :length]))
            self.length = length


def load(setup: protocol.Setup) -> protocol.Generate:
    target = Model(setup.target, setup.properties)
    draft = Model(setup.draft_folder, setup.draft_properties) if setup.mode == "draft" else None

    def generate(request: protocol.Request, watch: protocol.Watch) -> protocol.Texts:
        if request.temperature > 0:
            raise protocol.Refusal("it is greedy only")
        if draft and request.k is None:
            raise protocol.Refusal("it needs a fixed number of tokens to propose")
        tokens, end = list(request.prompt), len(request.prompt) + request.max_tokens
        reached = accepted = 0
        target.reset()
        if draft:
            draft.reset()
        tokens.append(target.choices(tokens)[-1])
        watch.tokens()
        while len(tokens) < end:
            guesses = propose(draft, tokens, min(request.k or 0, end - len(tokens) - 1)) if draft else []
            chosen = target.choices([tokens[-1], *guesses])
            right = next((i for i, guess in enumerate(guesses) if guess != chosen[i]), len(guesses))
            tokens += chosen[: right + 1]
            reached, accepted = reached + min(right + 1, len(guesses)), accepted + right
            target.trim(len(tokens) - 1)
            if draft:
                draft.trim(len(tokens) - 1)
            watch.tokens(right + 1)
        return protocol.Texts([tokens[len(request.prompt) :]], accepted / reached if reached else None)

    return generate


def propose(draft: Model, tokens: list[int], count: int) -> list[int]:
    """Return ``count`` greedy tokens of the draft, which first reads the tokens that it has not seen."""
    guesses: list[int] = []
    for _ in range(count):
        unread = [*tokens, *guesses][draft.length :]
        guesses.append(draft.choices(unread)[-1])
    return guesses


if __name__ == "__main__":
    protocol.serve_texts(load, ["openvino"])
