"""The interface of everything that holds a KV cache, and the implementation on a stateful request."""

from __future__ import annotations

import functools
import time
from typing import Protocol

import numpy as np
import openvino as ov

from ovspec.errors import OvspecError
from ovspec.ir import CompiledIR, last_line
from ovspec.kv import Rollback, Slots, gather_states
from ovspec.sequence import Sequence, common_prefix

# Dead slots cost attention time and memory, a compaction copies the whole cache: wait for this many.
COMPACT_AT = 256
INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx", "logits_idx")


class Decoder(Protocol):
    """A language model with its KV cache, for a batch of rows. Target and draft are both Decoders."""

    rows: list[Sequence]  # the tokens whose keys and values the cache holds, a row each
    seconds: float  # spent in inference so far
    inferences: int
    rollback: str
    context_length: int | None

    def reset(self, rows: int) -> None:
        """Empty the cache and start over with ``rows`` empty rows."""
        ...

    def feed(self, tokens: list[np.ndarray], wanted: list[int]) -> list[np.ndarray]:
        """Run one inference that appends ``tokens[row]`` (n,) int64 to each row.

        Returns for each row the logits after its last ``wanted[row]`` new tokens,
        (wanted[row], vocab) float32, valid until the next call. A row may get no token.
        """
        ...

    def truncate(self, row: int, length: int) -> None:
        """Roll ``row`` back to its first ``length`` tokens."""
        ...

    def reorder(self, rows: list[int]) -> None:
        """Make new row i a copy of old row ``rows[i]``: repeat an index to fork, leave it out to drop."""
        ...


class StatefulDecoder:
    """Drives the stateful IR that optimum exports, on every device.

    Args:
        ir: the compiled model.
        rollback: what its states allow, from the manifest or ``probe_rollback``.
        vocab_size: ids that the tokenizer knows; wider logits are cut to it.
        compact_at: dead slots at which the cache is compacted.

    Raises:
        OvspecError: a state has no sequence axis to cut.
    """

    def __init__(
        self, ir: CompiledIR, rollback: Rollback, vocab_size: int | None = None, compact_at: int = COMPACT_AT
    ) -> None:
        for state in ir.states:
            if state.sequence_axis is None:
                raise OvspecError(f"{ir.folder}: its state {state.name} cannot be rolled back; not supported yet.")
        self.rollback = rollback
        self.context_length = ir.context_length
        self.seconds, self.inferences, self.compactions = 0.0, 0, 0
        self._ir, self._vocab_size, self._compact_at = ir, vocab_size, compact_at
        # Past its window, or its table of positions, attention by slot index can't skip dead slots any more.
        bounds = [bound for bound in (ir.attention_window, ir.context_length) if bound]
        self._mask_until = min(bounds, default=None) if rollback == "mask" else 0
        self._request = ir.compiled.create_infer_request()
        self._kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._inputs = [ir.inputs.get(name) for name in INPUTS]
        self._bound: dict[int, np.ndarray] = {}  # what the request reads each input from
        self.reset(1)

    def reset(self, rows: int) -> None:
        self.rows = [Sequence() for _ in range(rows)]
        self._slots = Slots(rows)
        self._in_order = np.arange(rows, dtype=np.int32)
        self._beam = self._in_order  # rows of the physical cache that the next inference gathers
        self._request.reset_state()

    def feed(self, tokens: list[np.ndarray], wanted: list[int]) -> list[np.ndarray]:
        counts = [len(new) for new in tokens]
        places = places_of(tuple(counts), tuple(wanted))
        try:
            logits = self._append(tokens, counts, places)
        except BaseException as error:
            self.reset(len(self.rows))  # what the cache holds is unknown; an empty one agrees with any text
            if isinstance(error, RuntimeError):
                raise OvspecError(f"{self._ir.device}: the inference failed ({last_line(error)}).") from None
            raise
        if len(tokens) == 1:
            return [logits[: wanted[0]]]
        ends = np.cumsum(wanted)
        return [logits[end - want : end] for end, want in zip(ends, wanted, strict=True)]

    def truncate(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)
        self._slots.truncate(row, length)

    def reorder(self, rows: list[int]) -> None:
        if not self._slots.used:
            self.reset(len(rows))  # an empty state has no rows that could be gathered
            return
        self.rows = [self.rows[row].copy() for row in rows]
        self._slots.reorder(rows)
        self._beam = self._beam[rows]
        self._in_order = np.arange(len(rows), dtype=np.int32)

    def compact(self) -> None:
        """Gather the live slots, so that every row is contiguous."""
        if not any(self._slots.lengths):
            self.reset(len(self.rows))
            return
        gather_states(self._request, self._ir.states, self._beam, self._slots.compact())
        self._beam = self._in_order
        self.compactions += 1

    def _append(self, tokens: list[np.ndarray], counts: list[int], places: np.ndarray) -> np.ndarray:
        width = max(counts)
        self._make_room(width)
        ids, positions = self._buffers(len(tokens), width)
        for row, new in enumerate(tokens):
            n, held = counts[row], self.rows[row]
            start = len(held)
            ids[row, :n] = new
            positions[row, :n] = np.arange(start, start + n)
            held.commit(new)
        self._slots.extend(counts)
        return self._infer(ids, positions, places)[:, : self._vocab_size]

    def _make_room(self, width: int) -> None:
        slots = self._slots
        by_index = self._mask_until is not None and slots.used + width > self._mask_until
        if slots.dead >= self._compact_at or (by_index and not slots.contiguous):
            self.compact()

    def _buffers(self, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and positions (rows, width); those of a round are used again, because binding costs."""
        shape = (rows, width)
        if width > 16:
            return np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        if shape not in self._kept:
            self._kept[shape] = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        return self._kept[shape]

    def _infer(self, ids: np.ndarray, positions: np.ndarray, places: np.ndarray) -> np.ndarray:
        """(len(places), vocab): the logits at the flat places (row * width + column)."""
        request, bound = self._request, self._bound
        arrays = (ids, self._slots.mask, positions, self._beam, places)
        for index, array in zip(self._inputs, arrays, strict=True):
            if index is not None and bound.get(index) is not array:
                request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
                bound[index] = array
        began = time.perf_counter()
        request.start_async()
        request.wait()
        self.seconds += time.perf_counter() - began
        self.inferences += 1
        self._beam = self._in_order  # the inference has gathered them
        logits = request.get_output_tensor(0).data
        if self._ir.picks_logits:
            return logits[0]
        return logits.reshape(-1, logits.shape[-1])[places]


@functools.lru_cache(maxsize=256)
def places_of(counts: tuple[int, ...], wanted: tuple[int, ...]) -> np.ndarray:
    """Flat places (row * width + column) of each row's last ``wanted`` of ``counts`` tokens.

    At least one place: not every device runs a kernel on an empty list.
    """
    if not any(counts):
        raise ValueError("feed needs at least one token")
    if any(want > count for want, count in zip(wanted, counts, strict=True)):
        raise ValueError("logits can be wanted for new tokens only")
    width = max(counts)
    ends = [row * width + count for row, count in enumerate(counts)]
    places = [np.arange(end - want, end) for end, want in zip(ends, wanted, strict=True)]
    return np.concatenate(places) if any(wanted) else np.zeros(1, dtype=np.int64)


def catch_up(decoder: Decoder, row: int, sequence: Sequence) -> np.ndarray:
    """Roll ``row`` back to what it shares with ``sequence``; returns the tokens it has not seen yet.

    The one rule after a rejection, a fully accepted round, a rewind or an edited text.
    """
    shared = common_prefix(decoder.rows[row], sequence)
    # The last token is fed again where the cache already holds all: its logits are what is asked for.
    shared = min(shared, len(sequence) - 1)
    if shared < len(decoder.rows[row]):
        decoder.truncate(row, shared)
    return sequence.tokens[shared:]


def probe_rollback(ir: CompiledIR) -> Rollback:
    """Find by trial how ``ir`` can be rolled back: prefill, feed junk, drop it, feed on, compare with a clean run.

    Raises:
        OvspecError: neither masking nor cutting gives back the clean run's logits.
    """
    vocab = ir.compiled.output(0).get_partial_shape()[-1].get_length()
    text, junk = np.arange(5, 17) % vocab, np.arange(31, 37) % vocab
    kinds: tuple[Rollback, ...] = ("mask", "trim")
    for kind in kinds:
        decoder = StatefulDecoder(ir, kind)
        decoder.feed([text[:8]], [0])
        decoder.feed([junk], [0])
        decoder.truncate(0, 8)
        after = decoder.feed([text[8:]], [1])[0].copy()
        decoder.reset(1)
        decoder.feed([text[:8]], [0])
        clean = decoder.feed([text[8:]], [1])[0]
        # Wrong rollbacks move logits by about their spread, rounding by a hundredth of it.
        if np.abs(after - clean).max() <= 0.1 * clean.std():
            return kind
    raise OvspecError(f"{ir.folder}: its KV cache can be rolled back neither by mask nor by cutting it.")
