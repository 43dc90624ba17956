"""Find out by trial whether a token has the same bits however it is computed; no machine or device is trusted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ovspec.decoders.base import SessionDecoder
from ovspec.files import remember, remembered
from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import core, native_precisions
from ovspec.setup.probing import memory_file, setting_of


@dataclass(frozen=True)
class Exactness:
    """The probed positions, how many of them had other bits than in one pass over their text, and seconds spent."""

    positions: int
    differing: int
    seconds: float

    @property
    def exact(self) -> bool:
        return not self.differing

    @property
    def share(self) -> float:
        """Share of the positions whose logits were the same, to the bit."""
        return 1 - self.differing / self.positions


@dataclass(frozen=True)
class Trial:
    """What is tried: texts of each of ``contexts`` tokens, followed by pieces of each of ``widths`` tokens."""

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    batches: tuple[int, ...] = (3,)


# Beyond one block of a paged cache. A first load has no time for more.
SHORT = Trial((70,), (1, 2, 1, 1, 3, 8, 1))
# Also shorter than one block, and, if possible, more blocks than there are threads to share them.
FULL = Trial((20, 70, 600), tuple(range(1, 18)), (2, 9))
CHUNKS = (32, 1, 2, 17, 64, 3)
WAY = "2"  # of feeding tokens; another one makes what was found before worthless


def probe_exactness(decoder: SessionDecoder, vocabulary: int, trial: Trial = SHORT) -> Exactness:
    """Feed random texts in many ways and compare the logits with those of one pass over each text, bit by bit.

    Args:
        vocabulary: the ids to draw from are 0 to ``vocabulary - 1``.
    """
    began = time.perf_counter()
    random, most = np.random.default_rng(0), decoder.context_length
    positions = differing = 0
    tail = sum(trial.widths)
    contexts = [context for context in trial.contexts if not most or context + tail <= most]
    for context in contexts or [max(2, (most or 0) - tail)]:
        text = random.integers(0, vocabulary, min(context + tail, most or context + tail))
        tail = min(tail, len(text) - 1)
        decoder.reset(1)
        expected = decoder.feed([text], [tail])[0].copy()
        prober = Prober(decoder, text, tail, random)
        ways = [prober.in_pieces(trial.widths), prober.after_rollbacks(trial.widths)]
        ways += [prober.beside_others(rows) for rows in trial.batches]
        for way in ways:
            for first, logits in way:
                same = (logits == expected[first : first + len(logits)]).all(1)
                positions, differing = positions + len(same), differing + int((~same).sum())
        decoder.reset(1)
    return Exactness(positions, differing, time.perf_counter() - began)


def find_exactness(
    ir: CompiledIR, make: Callable[[], SessionDecoder], engine: str, cache_dir: Path | None
) -> Exactness:
    """Return what an earlier run found for this model, engine and setting on this machine, else probe it.

    Args:
        make: makes a decoder of the model with exact arithmetic.
    """
    machine = [core().get_property("CPU", "FULL_DEVICE_NAME"), *native_precisions()]
    ours = ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "INFERENCE_NUM_THREADS")
    known = set(ir.compiled.get_property("SUPPORTED_PROPERTIES"))
    properties = [f"{name}={ir.compiled.get_property(name)}" for name in ours if name in known]
    setting = " ".join([engine, WAY, setting_of(ir.device, ir.properties), *properties, *machine])
    file = memory_file("exactness", ir.folder, setting, cache_dir)
    found = remembered(Exactness, file)
    if not found:
        found = probe_exactness(make(), ir.logits_width)
        remember(file, found)
    return found


class Prober:
    """Feeds ``text`` (n,) to ``decoder`` in several ways, and yields the logits of its last ``tail`` positions.

    Each way yields (index of the first position within the tail, logits (positions, vocab)).
    """

    def __init__(self, decoder: SessionDecoder, text: np.ndarray, tail: int, random: np.random.Generator) -> None:
        self.decoder, self.text, self.begin, self.random = decoder, text, len(text) - tail, random

    def in_pieces(self, widths: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """Read the context in chunks and the tail in pieces of ``widths`` tokens."""
        self.read()
        yield from self.feed(widths)

    def after_rollbacks(self, widths: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """The same with rejected tokens before each piece, in a fork that rewinds into the context first."""
        self.read()
        fork = self.decoder.fork()
        fork.truncate(0, min(max(1, self.begin - 40), len(fork.rows[0])))  # a fork may be empty
        unread = self.text[len(fork.rows[0]) : self.begin]
        if len(unread):
            fork.feed([unread], [0])
        prober = Prober(fork, self.text, len(self.text) - self.begin, self.random)
        yield from prober.feed(tuple(reversed(widths)), rejected=True)
        fork.reset(0)

    def beside_others(self, rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Read the text in random pieces as the first of ``rows`` rows, which hold other texts of other lengths."""
        self.read()
        self.decoder.reorder([0] * rows)
        for row in range(1, rows):
            self.decoder.truncate(row, int(self.random.integers(0, self.begin)))
        position = len(self.decoder.rows[0])
        while position < len(self.text):
            room = [len(self.text) - len(row) for row in self.decoder.rows]  # the text may fill the context
            pieces = [self.junk(min(left, int(self.random.integers(0, 6)))) for left in room]
            pieces[0] = self.text[position : position + int(self.random.integers(1, 6))]
            logits = self.decoder.feed(pieces, [len(piece) for piece in pieces])[0]
            yield position - self.begin, logits
            position += len(pieces[0])

    def read(self) -> None:
        """Read the context, cut into ``CHUNKS``."""
        self.decoder.reset(1)
        chunk = position = 0
        while position < self.begin:
            end = min(self.begin, position + CHUNKS[chunk % len(CHUNKS)])
            self.decoder.feed([self.text[position:end]], [0])
            chunk, position = chunk + 1, end

    def feed(self, widths: tuple[int, ...], rejected: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        position = self.begin
        for width in widths:
            if position >= len(self.text):
                return
            if rejected:
                junk = self.junk(min(3, len(self.text) - position))
                self.decoder.feed([junk], [len(junk)])
                self.decoder.truncate(0, position)
                missing = self.text[len(self.decoder.rows[0]) : position]
                if len(missing):  # recurrent states are restored from an earlier snapshot
                    self.decoder.feed([missing], [0])
            piece = self.text[position : position + width]
            yield position - self.begin, self.decoder.feed([piece], [len(piece)])[0]
            position += width

    def junk(self, count: int) -> np.ndarray:
        return self.random.integers(0, int(self.text.max()) + 1, count)
