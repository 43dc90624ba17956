"""``lm.stream`` under the loads of ``serve.py``: one client, in its own process and without HTTP.

Modes: as those of ``worker_ovspec.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import protocol
import worker_ovspec
from arrivals import Load, told


def load(setup: dict[str, Any]) -> protocol.Answer:
    lm = worker_ovspec.load_model(protocol.Setup(**setup))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        work = Load(**asked)
        if work.clients != 1 or work.starts is not None:
            raise protocol.Refusal("it has one client, in a closed loop")
        lines = []
        while numbers := work.due():
            number = numbers[0]
            lines.append(work.sent(number))
            for piece in lm.stream(np.array(work.prompts[number]), max_tokens=work.tokens[number], ignore_eos=True):
                if piece.token_ids:
                    lines[-1].pieces.append(work.now)
            work.answered()
        return told(lines)

    return answer


if __name__ == "__main__":
    protocol.serve(load, ["openvino"])
