"""The paged decoder of hybrid models, with recurrent states besides keys and values.

The decoder owns the states, like the blocks. A forward pass reads them from a set of tensors and writes them to
another set; while needed, a written set is never changed. So a rollback to the tokens before a forward pass is free,
rows with a common prefix share its states, and the prefix cache keeps a prefix's states beside its blocks. A rollback
to a token inside the last forward pass runs the model for advancing states (``ir/recurrent_states.py``).
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import openvino as ov

from ovspec.cache.blocks import BlockTensors
from ovspec.cache.decoder import FAST_RULE, JOINING_CHUNK_TOKENS, Features, FeedRule, RollbackMethod
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.prefill import MIN_SHARED_TOKENS, PREFILL_THRESHOLD
from ovspec.cache.sequence import EMPTY_ROW, Sequence, measure_common_prefix
from ovspec.ir.compile import CompiledIR
from ovspec.ir.recurrent_states import STATE_INPUT, STATE_OUTPUT, UPDATE, UPDATE_COUNT_INPUT
from ovspec.text.vocabulary import ALL_IDS, KnownTokenIds

MAX_UPDATES = 32  # a forward pass over up to this many tokens can be rolled back to any of them
MAX_SNAPSHOTS = 8  # per row, for rollbacks further back
SPARE_SETS = 3  # sets of tensors to reuse in later forward passes


@dataclass(eq=False)
class StateSnapshot:
    """The recurrent states after the first ``length`` tokens of a text; read-only."""

    length: int
    tensors: list[ov.Tensor]
    spare_tensors: list[list[ov.Tensor]] = field(repr=False)  # gets the tensors when the snapshot is deleted

    def __del__(self) -> None:
        if len(self.spare_tensors) < SPARE_SETS:
            self.spare_tensors.append(self.tensors)


@dataclass
class RowStates:
    """The known states of a row, from which it can continue.

    before: the states before the last forward pass.
    updates: how each token of the last forward pass changes the states; [] if the pass had too many tokens.
    update_count: number of tokens in the updates.
    after: the states after the last forward pass; None if they include filling or rejected tokens.
    snapshots: earlier states, by increasing length.
    """

    before: StateSnapshot
    after: StateSnapshot | None
    updates: list[np.ndarray] = field(default_factory=list)
    update_count: int = 0
    snapshots: list[StateSnapshot] = field(default_factory=list)

    def copy(self) -> RowStates:
        other = copy.copy(self)
        other.snapshots = list(self.snapshots)
        return other

    def find_restorable_length(self, length: int) -> int:
        """Return the greatest length up to ``length`` with known or computable states, in tokens."""
        if self.after and self.after.length <= length:
            return self.after.length
        if self.before.length <= length:
            return min(length, self.before.length + self.update_count)
        index = bisect.bisect_right(self.snapshots, length, key=lambda snapshot: snapshot.length)
        return self.snapshots[index - 1].length if index else 0

    def truncate(self, length: int) -> None:
        """Forget all states of more than ``length`` tokens; ``length`` must be restorable."""
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.length <= length]
        if self.after and self.after.length > length:
            self.after = None
        if self.before.length > length:
            self.before = self.after = self.snapshots[-1]
            self.updates = []
            self.update_count = 0
        elif not self.after:
            self.update_count = min(self.update_count, length - self.before.length)

    def add_snapshot(self, snapshot: StateSnapshot, min_distance: float) -> None:
        """Add ``snapshot``; drop the last earlier snapshot if it is within ``min_distance`` tokens of its predecessor.

        Above ``MAX_SNAPSHOTS``, the snapshot with the closest neighbours is dropped, closeness being the ratio of the
        neighbours' distances from the end. So snapshots are dense near the end.
        """
        if len(self.snapshots) > 1 and self.snapshots[-1].length - self.snapshots[-2].length < min_distance:
            self.snapshots.pop()
        self.snapshots.append(snapshot)
        if len(self.snapshots) > MAX_SNAPSHOTS:
            end = snapshot.length + 1
            distances = [end - kept.length for kept in self.snapshots]
            # The first (of length 0) and the last snapshot are never dropped.
            ratios = [distances[i - 1] / distances[i + 1] for i in range(1, len(distances) - 1)]
            del self.snapshots[1 + int(np.argmin(ratios))]


class HybridDecoder(PagedDecoder):
    """A ``PagedDecoder`` for a model with recurrent states; each row has its own forward pass.

    If the rule demands more tokens than are fed, the row's last tokens are computed again from earlier states, if
    known. The last token is repeated for the rest, and the states after the copies are unused.
    """

    rollback = RollbackMethod("blocks", advances=True)
    fills_width = False

    def __init__(
        self,
        ir: CompiledIR,
        vocabulary: KnownTokenIds = ALL_IDS,
        rule: FeedRule = FAST_RULE,
        tensors: BlockTensors | None = None,
    ) -> None:
        assert ir.state_advance
        self._advance = ir.state_advance
        self._advance_request = self._advance.compiled_model.create_infer_request()
        self._state_indices = range(len(self._advance.shapes))
        self._update_indices = range(len(self._advance.token_axes))
        self._state_inputs = [ir.inputs[STATE_INPUT.format(index)] for index in self._state_indices]
        self._state_outputs = [ir.outputs[STATE_OUTPUT.format(index)] for index in self._state_indices]
        self._update_outputs = [ir.outputs[UPDATE.format(index)] for index in self._update_indices]
        self._count_input = ir.inputs[UPDATE_COUNT_INPUT]
        self._spare_tensors: list[list[ov.Tensor]] = []
        self._initial_snapshot = StateSnapshot(0, self._take_tensors(), [])
        for tensor in self._initial_snapshot.tensors:
            tensor.data[...] = 0
        self._states: list[RowStates] = []
        self._updates_row: int | None = None  # the row with its updates still in the request's memory
        self._start_snapshot: StateSnapshot | None = None  # states at the start of the forward pass in preparation
        super().__init__(ir, vocabulary, rule, tensors)

    # ------------------------------------------------------------ rows

    def _reset_rows(self, rows: int) -> None:
        super()._reset_rows(rows)
        self._states = [self._make_row_states_from(self._initial_snapshot) for _ in range(rows)]
        self._updates_row = None

    def _make_row_states_from(self, snapshot: StateSnapshot) -> RowStates:
        snapshots = (
            [self._initial_snapshot] if snapshot is self._initial_snapshot else [self._initial_snapshot, snapshot]
        )
        return RowStates(snapshot, snapshot, snapshots=snapshots)

    def truncate(self, row: int, length: int) -> None:
        length = self._states[row].find_restorable_length(length)
        super().truncate(row, length)
        self._states[row].truncate(length)

    def reorder(self, rows: list[int]) -> None:
        self._keep_updates()
        super().reorder(rows)
        self._states = [
            self._make_row_states_from(self._initial_snapshot) if row == EMPTY_ROW else self._states[row].copy()
            for row in rows
        ]

    def fork(self) -> HybridDecoder:
        with self._tensors.lock:
            self._keep_updates()
            other = HybridDecoder(self._ir, self._vocabulary, self.rule, self._tensors)
            other.rows = [row.copy() for row in self.rows]
            other._tables = self._tables.fork()
            other._states = [states.copy() for states in self._states]
        return other

    def dump(self) -> dict[str, np.ndarray]:
        with self._tensors.lock:
            snapshot = self._compute_states(0, len(self.rows[0]))
            return super().dump() | {
                STATE_INPUT.format(index): tensor.data.copy() for index, tensor in enumerate(snapshot.tensors)
            }

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        block_arrays = dict(arrays)
        states = [block_arrays.pop(STATE_INPUT.format(index), None) for index in self._state_indices]
        for state, shape in zip(states, self._advance.shapes, strict=True):
            if state is None or state.shape != shape or state.dtype != np.float32:
                raise ValueError("The saved recurrent states don't fit this model; prefill the text again.")
        super().restore(tokens, block_arrays)
        own_states = [ov.Tensor(np.array(state)) for state in states if state is not None]
        self._states[0] = self._make_row_states_from(StateSnapshot(len(tokens), own_states, self._spare_tensors))

    def joining_chunk_tokens(self, counts: list[int]) -> int:  # noqa: ARG002
        return JOINING_CHUNK_TOKENS

    # ------------------------------------------------------------ the prefix cache

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        with self._tensors.lock:
            pool = self._tensors.pool
            for cached, sequence in zip(self.rows, sequences, strict=True):
                cached.owner = sequence.owner
            is_single_row = len(self.rows) == 1
            has_kept_prefixes = False
            for row, (cached, sequence) in enumerate(zip(self.rows, sequences, strict=True)):
                shared_length = self._states[row].find_restorable_length(measure_common_prefix(cached, sequence))
                is_reading_prompt = shared_length and shared_length == len(cached) and not is_single_row
                if len(sequence) - shared_length <= MIN_SHARED_TOKENS or is_reading_prompt:
                    continue
                if not is_single_row and not has_kept_prefixes:
                    self._keep_prefixes(range(len(self.rows)), temporarily=True)
                    has_kept_prefixes = True
                blocks, length = pool.find_prefix(sequence.tokens[:-1], sequence.owner)
                snapshot = pool.find_snapshot(blocks, length)
                if isinstance(snapshot, StateSnapshot) and snapshot.length >= shared_length + MIN_SHARED_TOKENS:
                    self._tables.replace_blocks(row, blocks[: -(-snapshot.length // self.block_size)])
                    self.rows[row] = Sequence(sequence.tokens[: snapshot.length])
                    self.rows[row].owner = sequence.owner
                    self._states[row] = self._make_row_states_from(snapshot)

    def _keep_prefixes(self, rows: Iterable[int], temporarily: bool = False) -> None:
        rows = list(rows)
        super()._keep_prefixes(rows, temporarily)
        if not (temporarily or self._tensors.pool.used_limit):
            return
        for row in rows:
            states = self._states[row]
            for snapshot in (*states.snapshots, states.before, states.after):
                if snapshot and 0 < snapshot.length <= len(self.rows[row]):
                    block = self._tables.tables[row][(snapshot.length - 1) // self.block_size]
                    self._tensors.pool.keep_snapshot(block, snapshot.length, snapshot)

    # ------------------------------------------------------------ forward passes

    def _append_tokens(
        self,
        tokens: list[np.ndarray],
        logits_counts: list[int],
        width: int = 0,  # noqa: ARG002
        features: Features = None,  # noqa: ARG002
    ) -> list[np.ndarray]:
        logits = [np.empty((0, self._ir.logits_width), dtype=np.float32)] * len(tokens)
        fed_rows = [row for row, row_tokens in enumerate(tokens) if len(row_tokens)]
        for row in fed_rows:
            row_logits = self._append_to_row(row, tokens[row], logits_counts[row])
            logits[row] = row_logits if len(fed_rows) == 1 else row_logits.copy()
        return logits

    def _append_to_row(self, row: int, tokens: np.ndarray, logits_count: int) -> np.ndarray:
        """Append ``tokens`` to ``row``; return its last ``logits_count`` logits, valid until the next call."""
        # Tokens with logits may be rolled back, so they get a narrow forward pass with updates. With a prefix cache a
        # single one does, too: the same text again only needs its last token.
        min_kept_count = 1 if self._tensors.pool.used_limit else 2
        if len(tokens) > MAX_UPDATES and min_kept_count <= logits_count <= MAX_UPDATES:
            self._append_to_row(row, tokens[:-logits_count], 0)
            tokens = tokens[-logits_count:]
        if self._updates_row != row:
            self._keep_updates()
        rows = range(len(self.rows))
        row_tokens = [tokens if index == row else tokens[:0] for index in rows]
        row_counts = [logits_count if index == row else 0 for index in rows]
        logits = super()._append_tokens(row_tokens, row_counts)[row]
        self._finish_inference(row, len(tokens))
        return logits

    def _fill_up_inference(self, row_inputs: list[tuple[int, np.ndarray]], width: int) -> list[tuple[int, np.ndarray]]:
        """Prepare the forward pass of the only row with tokens: choose its starting states, and bind them."""
        row = next(row for row, (_, new_tokens) in enumerate(row_inputs) if len(new_tokens))
        position, new_tokens = row_inputs[row]
        before = self._states[row].before
        padded_count = self._padded_token_counts[max(width, len(new_tokens))]
        if not 0 < position - before.length <= padded_count - len(new_tokens):
            before = self._compute_states(row, position)
        tokens = np.concatenate((self.rows[row].tokens[before.length :], new_tokens))
        tokens = np.concatenate((tokens, np.repeat(new_tokens[-1:], max(0, padded_count - len(tokens)))))
        row_inputs[row] = before.length, tokens
        self._start_snapshot = before
        self._next_tensors = self._take_tensors()
        self._computed_count = len(tokens)
        self._update_count = np.array([len(tokens) if len(tokens) <= MAX_UPDATES else 0], dtype=np.int64)
        request = self._request.openvino_request
        for index in self._state_indices:
            request.set_input_tensor(self._state_inputs[index], before.tensors[index])
            request.set_output_tensor(self._state_outputs[index], self._next_tensors[index])
        request.set_input_tensor(self._count_input, ov.Tensor(self._update_count, shared_memory=True))
        return row_inputs

    def _finish_inference(self, row: int, token_count: int) -> None:
        """Take over the states after the forward pass prepared by ``_fill_up_inference``."""
        assert self._start_snapshot
        states = self._states[row]
        length = len(self.rows[row])
        states.before = self._start_snapshot
        states.after = None
        is_filled_up = self._start_snapshot.length + self._computed_count > length
        if is_filled_up:
            self._spare_tensors.append(self._next_tensors)
        else:
            states.after = StateSnapshot(length, self._next_tensors, self._spare_tensors)
            if token_count > PREFILL_THRESHOLD:
                states.add_snapshot(states.after, self._tensors.min_snapshot_distance)
        states.updates = []
        states.update_count = 0
        self._updates_row = None
        if self._computed_count <= MAX_UPDATES:
            request = self._request.openvino_request
            states.updates = [request.get_output_tensor(output).data for output in self._update_outputs]
            states.update_count = length - self._start_snapshot.length
            self._updates_row = row
        self._start_snapshot = None

    def _keep_updates(self) -> None:
        """Copy the last updates, before the next forward pass overwrites them."""
        if self._updates_row is not None:
            states = self._states[self._updates_row]
            states.updates = [update.copy() for update in states.updates]
            self._updates_row = None

    def _compute_states(self, row: int, length: int) -> StateSnapshot:
        """Return the states of ``row`` after its first ``length`` tokens; ``length`` must be restorable."""
        states = self._states[row]
        if states.after and states.after.length == length:
            return states.after
        count = length - states.before.length
        if not count:
            return states.before
        assert 0 < count <= states.update_count
        tensors = self._take_tensors()
        request = self._advance_request
        for index in self._state_indices:
            request.set_input_tensor(index, states.before.tensors[index])
            request.set_output_tensor(index, tensors[index])
        update_parts: list[np.ndarray] = []  # keeps the arrays alive until the forward pass is over
        for index in self._update_indices:
            part = (slice(None),) * self._advance.token_axes[index] + (slice(count),)
            update_parts.append(np.ascontiguousarray(states.updates[index][part]))
            update = ov.Tensor(update_parts[-1], shared_memory=True)
            request.set_input_tensor(len(self._state_indices) + index, update)
        request.infer()
        return StateSnapshot(length, tensors, self._spare_tensors)

    def _take_tensors(self) -> list[ov.Tensor]:
        """Return unused tensors for a set of states."""
        if self._spare_tensors:
            return self._spare_tensors.pop()
        return [ov.Tensor(ov.Type.f32, ov.Shape(shape)) for shape in self._advance.shapes]


def paged_decoder_class(ir: CompiledIR) -> type[PagedDecoder]:
    """Return the paged decoder's class for the model: hybrid if it has recurrent states."""
    return HybridDecoder if ir.state_advance else PagedDecoder
