"""Requests that arrive over time: when each is sent, and how fast its tokens come; the same for every server.

Closed loop: each client sends its next request when the last one has been answered. Open loop: requests are sent at
given times, whatever has been answered.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Timeline:
    """When a request was sent, and when the pieces of its text came, in seconds since the load began.

    A piece has the tokens of one inference.
    """

    sent: float
    pieces: list[float] = field(default_factory=list)


@dataclass
class Load:
    """Requests, all for greedy texts that end at no token.

    Args:
        prompts: token ids of each request, in order.
        tokens: the number of tokens that each asks for.
        clients: in a closed loop, the number of requests that are sent at a time.
        starts: in an open loop, the seconds after which each request is sent.
    """

    prompts: list[list[int]]
    tokens: list[int]
    clients: int = 1
    starts: list[float] | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin now."""
        self.began = time.perf_counter()
        self._next = self._running = 0

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    @property
    def sent_all(self) -> bool:
        return self._next == len(self.prompts)

    def due(self) -> list[int]:
        """Return the numbers of the requests that are to be sent now."""
        found: list[int] = []
        while not self.sent_all and (
            self._running < self.clients if self.starts is None else self.starts[self._next] <= self.now
        ):
            found.append(self._next)
            self._next += 1
            self._running += 1
        return found

    def wait(self) -> float | None:
        """Return the seconds until the next request is to be sent; None if that depends on an answer."""
        return None if self.starts is None or self.sent_all else max(0.0, self.starts[self._next] - self.now)

    def answered(self) -> None:
        """Note that a request has been answered."""
        self._running -= 1

    def sent(self, number: int) -> Timeline:
        """Return the timeline of a request that is being sent; in an open loop, waiting counts from when it was due."""
        return Timeline(self.now if self.starts is None else self.starts[number])

    def as_json(self) -> dict[str, Any]:
        return {"prompts": self.prompts, "tokens": self.tokens, "clients": self.clients, "starts": self.starts}


def told(lines: list[Timeline]) -> dict[str, Any]:
    """Return timelines as a worker's answer."""
    return {"timelines": [asdict(line) for line in lines]}
