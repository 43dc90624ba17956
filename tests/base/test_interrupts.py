from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS

import ovspec
from ovspec.base.interrupts import ACTIVE_DELAYS, DelayedInterrupts
from ovspec.cache.paged import MAX_INFERENCE_TOKENS, PagedDecoder


def test_ctrl_c_waits_while_held() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts = DelayedInterrupts()
    interrupts.delaying = True
    signal.raise_signal(signal.SIGINT)
    assert interrupts.ctrl_c_pressed
    interrupts.delaying = False
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.restore_handler()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_a_closed_console_ends_as_a_closed_terminal_does() -> None:
    """SIGUSR1 stands in for SIGBREAK, which only Windows has."""
    program = """
import os, signal, sys
signal.SIGBREAK = signal.SIGUSR1
from ovspec.base.interrupts import end_on_signals, exit_if_ended
ended = end_on_signals()
try:
    os.kill(os.getpid(), signal.SIGBREAK)
    signal.pause()
except KeyboardInterrupt:
    print("saved")
exit_if_ended(ended)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGUSR1, "saved\n"), done.stderr


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_the_handler_comes_back_in_any_order(order: tuple[int, ...]) -> None:
    before = signal.getsignal(signal.SIGINT)
    held = [DelayedInterrupts() for _ in range(3)]
    for place in order:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        held[place].restore_handler()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_set_meanwhile_is_kept() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts = DelayedInterrupts()

    def own(*_: object) -> None: ...

    signal.signal(signal.SIGINT, own)
    interrupts.restore_handler()
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, before)


def test_other_threads_do_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: DelayedInterrupts().restore_handler())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("draft", [False, True])
def test_a_long_prompt_is_read_no_further(
    load: Callable[..., ovspec.LanguageModel], draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load(draft=draft, cache_memory=0)
    tokens = (lm.encode("".join(PROMPTS)).tolist() * 10)[: 5 * MAX_INFERENCE_TOKENS]
    expected = lm.generate(tokens, max_tokens=8).token_ids
    append, calls = PagedDecoder._append_tokens, []

    def pressing(decoder: PagedDecoder, *arguments: Any, **named: Any) -> Any:
        calls.append(decoder)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return append(decoder, *arguments, **named)

    before = signal.getsignal(signal.SIGINT)
    with lm.session() as session:
        session.append(tokens)
        with monkeypatch.context() as patched:
            patched.setattr(PagedDecoder, "_append_tokens", pressing)
            pieces = []
            with pytest.raises(KeyboardInterrupt):
                for piece in session.stream(max_tokens=8):
                    pieces.append(piece)
        assert len(calls) == 2, "the third chunk is not read"
        assert [piece.finish_reason for piece in pieces] == ["cancelled"]
        assert signal.getsignal(signal.SIGINT) is before
        assert not ACTIVE_DELAYS
        assert session.tokens == tokens
        assert session.generate(max_tokens=8).token_ids == expected


def test_ctrl_c_in_a_users_function_ends_the_text(load: Callable[..., ovspec.LanguageModel]) -> None:
    calls: list[int] = []

    def pressing(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        calls.append(len(tokens))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return logits

    pieces = []
    with pytest.raises(KeyboardInterrupt):
        for piece in load().stream(PROMPTS[0], max_tokens=20, logits_processors=[pressing]):
            pieces.append(piece)
    assert len(calls) == 3
    assert pieces[-1].finish_reason == "cancelled"
    assert not ACTIVE_DELAYS
