"""openvino-genai's continuous batching pipeline under the loads of ``serve.py``, in its own process and without HTTP.

Modes: plain, draft, lookup. Its scheduler has the defaults of the class, which reads prompts in chunks of at most 256
tokens a step; prefix caching is off, as in the other benchmarks.
"""

from __future__ import annotations

import time
from typing import Any

import openvino_genai as genai  # type: ignore[import-not-found]
import protocol
from arrivals import Load, Timeline, told
from worker_genai import config_of, drafting, tensor


def load(given: dict[str, Any]) -> protocol.Answer:
    setup = protocol.Setup(**given)
    pipeline = genai.ContinuousBatchingPipeline(setup.target, genai.SchedulerConfig(), "CPU", drafting(setup))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        work = Load(**asked)
        k = None if setup.mode != "lookup" else setup.options.get("k", 5)
        running: dict[int, Any] = {}
        lines: dict[int, Timeline] = {}
        while running or not work.sent_all:
            for number in work.due():
                lines[number] = work.sent(number)
                config = config_of(setup, protocol.Request([], 0, k=k), work.tokens[number])
                running[number] = pipeline.add_request(number, tensor(work.prompts[number]), config)
            if not running:
                time.sleep(work.wait() or 0.0)
                continue
            pipeline.step()
            for number, handle in list(running.items()):
                if handle.can_read():
                    handle.read()
                    lines[number].pieces.append(work.now)
                if handle.get_status() != genai.GenerationStatus.RUNNING and not handle.can_read():
                    del running[number]
                    work.answered()
        return told([lines[number] for number in sorted(lines)])

    return answer


if __name__ == "__main__":
    protocol.serve(load, ["openvino-genai", "openvino"])
