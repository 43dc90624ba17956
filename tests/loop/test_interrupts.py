from __future__ import annotations

import signal
import threading

import pytest

from ovspec.loop.scheduler import HeldInterrupts


def test_ctrl_c_waits_while_held() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts = HeldInterrupts()
    interrupts.holding = True
    signal.raise_signal(signal.SIGINT)
    assert interrupts.pressed
    interrupts.holding = False
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.stop()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_the_handler_comes_back_in_any_order(order: tuple[int, ...]) -> None:
    before = signal.getsignal(signal.SIGINT)
    held = [HeldInterrupts() for _ in range(3)]
    for place in order:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        held[place].stop()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_set_meanwhile_is_kept() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts = HeldInterrupts()

    def own(*_: object) -> None: ...

    signal.signal(signal.SIGINT, own)
    interrupts.stop()
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, before)


def test_other_threads_do_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: HeldInterrupts().stop())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
