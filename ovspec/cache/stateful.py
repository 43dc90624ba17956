"""The decoder of the stateful engine: the KV cache is the state of OpenVINO's infer request.

Slots are indices into the physical cache, positions are indices into the text. A rejected token's slot is marked dead
in its row's attention mask. Compaction gathers the live slots once many are dead; for a model unable to skip slots
(``trim``), it runs before every forward pass over a cache with a gap.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import numpy as np

from ovspec.cache.decoder import (
    FAST_RULE,
    JOINING_CHUNK_TOKENS,
    Features,
    FeedRule,
    RollbackMethod,
    TokenArrayCache,
    compute_logits_indices,
    convert_feed_error,
    reorder_sequences,
    split_logits_by_row,
)
from ovspec.cache.kept_caches import KeptCaches
from ovspec.cache.prefill import MIN_SHARED_TOKENS, PREFILL_THRESHOLD, copy_shared_prefixes
from ovspec.cache.sequence import EMPTY_ROW, UNSHARED, GrowingArray, Sequence, measure_common_prefix
from ovspec.cache.slots import SlotTables
from ovspec.cache.state_copies import gather_states, read_states, write_states
from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import EXACT_KV_PRECISIONS, may_use_gpu
from ovspec.ir.heads import FEATURES_OUTPUT, HIDDEN_OUTPUT
from ovspec.ir.memory import trim_heap
from ovspec.ir.request import InferenceRequest
from ovspec.text.vocabulary import ALL_IDS, KnownTokenIds

COMPACTION_THRESHOLD = 256  # dead slots; they cost attention time and memory, but a compaction copies the cache
MAX_REPLAY_TOKENS = 8  # maximum tokens to feed again after a rollback; for more, the snapshot is renewed first
MAX_KEPT_SLOTS = 256  # a decoder without rows keeps the memory of up to this many slots for its next text
SNAPSHOT_INTERVAL = 64  # tokens of plain decoding between snapshots
STATEFUL_INPUTS = (
    "input_ids", "attention_mask", "position_ids", "beam_idx", "logits_idx", "cache_position", "hidden_states",
)  # fmt: skip


class StatefulDecoder:
    """A ``Decoder`` for optimum's stateful IR, on every device.

    With recurrent states (``rollback.replay``) it has a single row; ``RowByRowDecoder`` combines several into a batch.

    Args:
        ir: the compiled model.
        rollback: how its states can be rolled back, from ``load_or_probe_rollback``.
        vocabulary: the allowed token ids.
        compaction_threshold: number of dead slots for a compaction.
        rule: how tokens are fed. With ``first_apart``, a text's first token has its own forward pass, because OpenVINO
            computes a prompt without a past in another attention kernel with other rounding.
        kept_caches: the prefix cache, for the caches of ended texts in a decoder with a single row.
    """

    fills_width = False
    block_size = 1

    def __init__(
        self,
        ir: CompiledIR,
        rollback: RollbackMethod,
        vocabulary: KnownTokenIds = ALL_IDS,
        compaction_threshold: int = COMPACTION_THRESHOLD,
        rule: FeedRule = FAST_RULE,
        kept_caches: KeptCaches | None = None,
    ) -> None:
        self.rollback = rollback
        self.rule = rule
        self.context_length = ir.context_length
        self.on_gpu = may_use_gpu(ir.device)
        self.compactions = 0
        self._ir = ir
        self._vocabulary = vocabulary
        self._compaction_threshold = compaction_threshold
        self._kept_caches = kept_caches
        # Attention by slot index can't skip dead slots beyond the sliding window or the position table.
        slot_bounds = [slot_bound for slot_bound in (rollback.mask_until, ir.context_length) if slot_bound]
        self._mask_until = min(slot_bounds, default=None) if rollback.kv == "mask" else 0
        # optimum's Mamba takes a whole text or a single token, and distinguishes them by the length of cache_position.
        self._conv_width = ir.config.convolution_width if "cache_position" in ir.inputs else 0
        self._rope_switch = ir.config.rope_switch_length or sys.maxsize
        self._request = InferenceRequest(ir, STATEFUL_INPUTS)
        self._scratch_request: InferenceRequest | None = None
        self._head_width = ir.output_width(HIDDEN_OUTPUT)
        self._feature_width = ir.output_width(FEATURES_OUTPUT)
        self._no_features = np.empty((0, self._feature_width), dtype=np.float32)
        self.hidden: list[np.ndarray] = []
        self._token_arrays = TokenArrayCache()
        self._slot_tables = SlotTables(1)
        self.rows: list[Sequence] = []
        self._reset_rows(1)
        if kept_caches:
            kept_caches.add_user(self)

    @property
    def seconds(self) -> float:
        return self._request.seconds

    @property
    def inferences(self) -> int:
        return self._request.inferences

    @property
    def blocks_used(self) -> int:
        return sum(map(len, self.rows))

    def reset(self, rows: int) -> None:
        self.keep_cache()
        self._reset_rows(rows)

    def _reset_rows(self, rows: int) -> None:
        if not rows and self._slot_tables.slot_count > MAX_KEPT_SLOTS and self._ir.open_model:
            self._release_memory()
        # With a u8 cache (also on AUTO and HETERO), OpenVINO 2026.4 computes wrong logits after the number of rows
        # has changed.
        if rows not in (0, len(self.rows)) and not self.copies_are_exact:
            self._request.replace_openvino_request()
        self.rows = [Sequence() for _ in range(rows)]
        self._features = [GrowingArray(self._no_features) for _ in range(rows)]  # by row, (tokens, width)
        self._slot_tables = SlotTables(rows)
        self._row_order = np.arange(rows, dtype=np.int32)
        self._beam_rows = self._row_order  # rows of the physical cache to gather in the next forward pass
        self._snapshot: dict[str, np.ndarray] = {}  # of the recurrent states; {} for their initial values
        self._snapshot_length = 0
        self._expects_rollback = False  # whether a rollback to the end of the last feed is likely
        self._inference_slots = (0, 0)  # number of slots before and after the last forward pass
        self._request.reset_states()

    def feed(
        self,
        tokens: list[np.ndarray],
        logits_counts: list[int],
        width: int = 0,  # noqa: ARG002
        features: Features = None,
    ) -> list[np.ndarray]:
        count = len(tokens[0])
        if self._kept_caches:
            self._kept_caches.make_room_for_rows()
        if self._keeps_prompt_end(count) and logits_counts == [1]:
            self.feed([tokens[0][:-1]], [0])
            self.keep_cache()
            return self.feed([tokens[0][-1:]], [1])
        if len(self.rows) == 1 and count > self._next_part_length(count):
            return [self._feed_in_parts(tokens[0], logits_counts[0])]
        try:
            if len(self.rows[0]) <= self._rope_switch < len(self.rows[0]) + count:
                return [self._feed_across_rope_switch(tokens[0], logits_counts[0])]
            if self.rollback.replay:
                tokens = [self._prepare_replay(tokens[0], logits_counts[0])]
            return split_logits_by_row(self._append_tokens(tokens, logits_counts, features), logits_counts)
        except BaseException as error:
            self._reset_rows(len(self.rows))  # the cache's contents are now unknown; an empty cache fits any text
            raise convert_feed_error(error, self._ir.device) from None

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        copy_shared_prefixes(self, sequences)
        if not self._kept_caches or len(sequences) > 1:
            return
        [cached_row] = self.rows
        [sequence] = sequences
        cached_row.owner = sequence.owner
        shared_length = measure_common_prefix(cached_row, sequence)
        if self.rollback.replay and shared_length < len(cached_row):
            shared_length = 0  # the snapshot may be of a longer text
        min_length = shared_length + MIN_SHARED_TOKENS
        prefix = self._kept_caches.find_prefix(sequence.tokens[:-1], sequence.owner, min_length)
        if prefix:
            self.restore(prefix.text.tokens, prefix.arrays)
            self.rows[0].owner = sequence.owner

    def keep_cache(self) -> None:
        """Keep a copy of a single row's cache in the prefix cache."""
        if self._kept_caches and len(self.rows) == 1 and len(self.rows[0]) >= MIN_SHARED_TOKENS:
            self._kept_caches.keep(self.rows[0], self.dump)

    def _keeps_prompt_end(self, count: int) -> bool:
        """Return whether to keep the cache at a prompt's end: recurrent states can't be cut back to it later."""
        if not self._kept_caches or not self.rollback.replay or len(self.rows) > 1:
            return False
        return count > PREFILL_THRESHOLD and self.rows[0].owner is not UNSHARED

    def truncate(self, row: int, length: int) -> None:
        if len(self.rows[row]) - length >= MIN_SHARED_TOKENS:  # more than a rejected proposal
            self.keep_cache()
        if length <= self._rope_switch < len(self.rows[row]):
            self._reset_rows(1)  # the row's keys were rotated for a longer text
            return
        if self.rollback.replay:
            length = self._restore_snapshot(length)
        self.rows[row].rewind(length)
        if self._feature_width:
            self._features[row].rewind(length)
        self._slot_tables.truncate(row, length)

    def reorder(self, rows: list[int]) -> None:
        if not self._slot_tables.slot_count or all(row == EMPTY_ROW for row in rows):
            self._reset_rows(len(rows))  # an empty state has no rows to gather
            return
        self.rows = reorder_sequences(self.rows, rows)
        features = [self._no_features if row == EMPTY_ROW else self._features[row].values for row in rows]
        self._features = [GrowingArray(row_features) for row_features in features]
        self._slot_tables.reorder(rows)
        self._beam_rows = self._beam_rows[rows]  # an empty row may gather any row, because all its slots are dead
        self._row_order = np.arange(len(rows), dtype=np.int32)

    def joining_chunk_tokens(self, counts: list[int]) -> int:
        return 2 * max(counts)  # all rows are padded to the width of the widest

    def compact(self) -> None:
        if not any(self._slot_tables.row_lengths):
            self._reset_rows(len(self.rows))
            return
        gather_states(self._request.openvino_request, self._ir.kv_states, self._beam_rows, self._slot_tables.compact())
        self._beam_rows = self._row_order
        self.compactions += 1

    def fork(self) -> StatefulDecoder:
        forked_decoder = StatefulDecoder(
            self._ir, self.rollback, self._vocabulary, self._compaction_threshold, self.rule, self._kept_caches
        )
        if self.copies_are_exact:
            self.copy_into(forked_decoder)
        return forked_decoder

    def dump(self) -> dict[str, np.ndarray]:
        if not self.copies_are_exact or not len(self.rows[0]):
            return {}
        if self.rollback.kv:
            self.compact()
        arrays = read_states(self._request.openvino_request, self._ir.states)
        if self._feature_width:
            arrays[FEATURES_OUTPUT] = self._features[0].values.copy()
        return arrays

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self.reset(1)
        length = len(tokens)
        if self._feature_width:
            arrays = dict(arrays)
            features = arrays.pop(FEATURES_OUTPUT, self._features[0].values)
            if features.shape != (length, self._feature_width) or features.dtype != np.float32:
                raise ValueError("The saved hidden states don't fit this model; prefill the text again.")
            self._features[0].commit(features)
        state_lengths = {state.name: 1 if state.sequence_axis is None else length for state in self._ir.states}
        state_sizes = {state.name: state.width * state_lengths[state.name] for state in self._ir.states}
        if {name: array.size for name, array in arrays.items()} != state_sizes:
            raise ValueError("The saved KV cache doesn't fit this model; prefill the text again.")
        for state in self._ir.states:
            array = arrays[state.name]
            axis_sizes = {state.batch_axis: 1}
            if state.sequence_axis is not None:
                axis_sizes[state.sequence_axis] = length
            if array.dtype.kind != "f" or any(array.shape[axis : axis + 1] != (n,) for axis, n in axis_sizes.items()):
                raise ValueError("The saved KV cache has another shape than this model's; prefill the text again.")
        self.set_states(arrays)
        self.rows[0].commit(tokens)
        self._slot_tables.extend([length])

    def copy_into(self, other_decoder: StatefulDecoder) -> None:
        """Copy rows and states to ``other_decoder``, a decoder of the same model; exact if ``copies_are_exact``."""
        other_decoder.rows = [row.copy() for row in self.rows]
        other_decoder._features = [GrowingArray(row.values) for row in self._features]
        other_decoder._slot_tables = copy.deepcopy(self._slot_tables)
        other_decoder._row_order = self._row_order
        other_decoder._beam_rows = self._beam_rows
        other_decoder._snapshot = self._snapshot
        other_decoder._snapshot_length = self._snapshot_length
        other_decoder._expects_rollback = self._expects_rollback
        if self._slot_tables.slot_count:
            other_decoder.set_states(read_states(self._request.openvino_request, self._ir.states))
        else:
            other_decoder._request.reset_states()

    def set_states(self, state_values: dict[str, np.ndarray]) -> None:
        """Set the states named in ``state_values``, even if the request hasn't run since its reset."""
        self._request.apply_pending_reset()
        if self.rollback.copies == "run" and not self._request.has_run:
            self._avoid_other_requests_states(1)
            self._run_dummy_inference(self._request)
        write_states(self._request.openvino_request, state_values)

    def _run_dummy_inference(self, request: InferenceRequest, width: int = 1) -> None:
        """Run a forward pass over ``width`` meaningless tokens, for its shapes alone; the states are invalid then."""
        cached_slots = self._inference_slots[1] if request is self._request else 0
        tokens = np.zeros((len(self.rows), width), dtype=np.int64)
        logits_idx = np.zeros(1, dtype=np.int64)
        mask = np.ones((len(self.rows), cached_slots + width), dtype=np.int64)
        cache_position = np.arange(self._conv_width or width)
        head_input = self._make_head_input(None, width)
        request.infer((tokens, mask, tokens, self._row_order, logits_idx, cache_position, head_input), logits_idx)

    def _avoid_other_requests_states(self, width: int) -> None:
        """On a GPU, run a dummy pass if another request ran last, and over the same number of tokens.

        Without it, OpenVINO's plugin (2026.4.1) computes with the other request's states, or crashes.
        """
        if self.on_gpu:
            request, last_width = self._ir.last_run
            if request is not self._request and width == last_width:
                self._scratch_request = self._scratch_request or InferenceRequest(self._ir, STATEFUL_INPUTS)
                self._scratch_request.reset_states()
                self._run_dummy_inference(self._scratch_request, 2 if width == 1 else 1)
            self._ir.last_run = self._request, width

    def _avoid_repeated_shapes(self, width: int) -> None:
        """Before a compaction, run a dummy pass if the next pass, over ``width`` tokens, would have the same shapes.

        Without it, OpenVINO's GPU plugin (2026.4.1) computes with the states before the compaction, if the model only
        concatenates its states.
        """
        slots = max(self._slot_tables.row_lengths)
        if self.rollback.replay and self.rollback.copies == "run" and self._inference_slots == (slots, slots + width):
            recurrent_states = read_states(self._request.openvino_request, self._ir.recurrent_states)
            self._run_dummy_inference(self._request)
            write_states(self._request.openvino_request, recurrent_states)

    def _release_memory(self) -> None:
        """Release the cache's memory; OpenVINO frees it only after another request has run."""
        self._request.replace_openvino_request()
        self._reset_rows(1)
        self.feed([np.zeros(1, dtype=np.int64)], [1])
        trim_heap()

    @property
    def copies_are_exact(self) -> bool:
        """Whether copies of the states keep every bit."""
        exact_type = not self._ir.kv_states or self._ir.kv_precision in EXACT_KV_PRECISIONS
        return exact_type and self.rollback.copies is not None

    def _next_part_length(self, count: int) -> int:
        """Return the maximum number of tokens in the next forward pass, of ``count`` tokens."""
        if self.rule.first_apart and not len(self.rows[0]):
            return 1
        return min(count, self.rule.most or count)

    def _feed_in_parts(self, tokens: np.ndarray, logits_count: int) -> np.ndarray:
        """Feed a single row in several forward passes; return the logits after the last ``logits_count`` tokens."""
        part_logits = [np.empty((0, self._ir.logits_width), dtype=np.float32)]
        while len(tokens):
            part_length = self._next_part_length(len(tokens))
            part_tokens = tokens[:part_length]
            tokens = tokens[part_length:]
            part_logits_count = max(0, logits_count - len(tokens))
            part_logits.append(self.feed([part_tokens], [part_logits_count])[0].copy())
            logits_count = min(logits_count, len(tokens))
        return np.concatenate(part_logits)

    def _feed_across_rope_switch(self, tokens: np.ndarray, logits_count: int) -> np.ndarray:
        """Feed tokens beyond ``_rope_switch``, and compute the whole text again with the other frequencies.

        As in transformers, the model chooses the RoPE frequencies of all tokens by the last position of a forward pass.
        """
        text_ids = np.concatenate((self.rows[0].tokens, tokens))
        count_before_switch = self._rope_switch - len(self.rows[0])
        count_beyond_switch = len(text_ids) - self._rope_switch
        part_logits = [np.empty((0, self._ir.logits_width), dtype=np.float32)]
        if logits_count > count_beyond_switch:
            part_logits.append(
                self.feed([tokens[:count_before_switch]], [logits_count - count_beyond_switch])[0].copy()
            )
        self._reset_rows(1)
        text_begin = int(self.rule.first_apart)  # position 0 is not rotated at all
        if text_begin:
            self._append_tokens([text_ids[:1]], [0])
        logits_count_beyond = min(logits_count, count_beyond_switch)
        part_logits.append(self._append_tokens([text_ids[text_begin:]], [logits_count_beyond])[:logits_count_beyond])
        return np.concatenate(part_logits)

    def _prepare_replay(self, tokens: np.ndarray, logits_count: int) -> np.ndarray:
        """Take a snapshot if the new tokens may be rolled back; return the tokens still to feed.

        Tokens without logits are never rolled back; more than ``MAX_REPLAY_TOKENS`` of them are fed before the
        snapshot.
        """
        is_restored = len(self.rows[0]) == self._snapshot_length
        has_several_tokens = len(tokens) > 1
        if is_restored and logits_count > 1 and len(tokens) - logits_count > MAX_REPLAY_TOKENS:
            self._append_tokens([tokens[:-logits_count]], [0])
            tokens = tokens[-logits_count:]
        length = len(self.rows[0])
        unsaved_tokens = length - self._snapshot_length
        if unsaved_tokens and (logits_count > 1 or self._expects_rollback or unsaved_tokens >= SNAPSHOT_INTERVAL):
            self._snapshot = read_states(self._request.openvino_request, self._ir.recurrent_states)
            self._snapshot_length = length
        # A draft first feeds committed tokens, after a rejection or several at once, then its proposed tokens singly.
        self._expects_rollback = is_restored or has_several_tokens
        return tokens

    def _restore_snapshot(self, length: int) -> int:
        """Restore the latest recurrent states at or before ``length``; return their position."""
        if length >= len(self.rows[0]):
            return length
        if self._snapshot_length > length or not self._snapshot:
            self._reset_rows(1)
            return 0
        write_states(self._request.openvino_request, self._snapshot)
        return self._snapshot_length

    def features(self, row: int, begin: int, end: int) -> np.ndarray:
        return self._features[row].values[begin:end]

    def _append_tokens(
        self, tokens: list[np.ndarray], logits_counts: list[int], features: Features = None
    ) -> np.ndarray:
        """Append ``tokens`` in a single forward pass; return at least the requested logits, all rows in one array."""
        counts = [len(new_tokens) for new_tokens in tokens]
        logits_idx = compute_logits_indices(tuple(counts), tuple(logits_counts), self.rule.fewest_logits)
        if self._conv_width and len(self.rows[0]) and counts[0] > 1:
            token_logits = [self._append_tokens([token], [1])[:1].copy() for token in np.split(tokens[0], counts[0])]
            return np.concatenate(token_logits)[logits_idx]
        width = max(counts)
        slot_tables = self._slot_tables
        attends_by_index = self._mask_until is not None and slot_tables.slot_count + width > self._mask_until
        if slot_tables.dead_count >= self._compaction_threshold or (attends_by_index and not slot_tables.is_contiguous):
            if not self.rollback.copies and not self._head_width:  # a head's features aren't kept
                texts = [
                    np.concatenate((cached_row.tokens, new_tokens))
                    for cached_row, new_tokens in zip(self.rows, tokens, strict=True)
                ]
                self._reset_rows(len(self.rows))
                return self._append_tokens(texts, logits_counts)
            self._avoid_repeated_shapes(width)
            self.compact()
        ids, positions = self._token_arrays[len(tokens), width]
        for row, (new_tokens, cached_row) in enumerate(zip(tokens, self.rows, strict=True)):
            ids[row, : len(new_tokens)] = new_tokens
            positions[row, : len(new_tokens)] = np.arange(len(cached_row), len(cached_row) + len(new_tokens))
            cached_row.commit(new_tokens)
        slot_tables = self._slot_tables  # other slots if empty rows were compacted
        slot_tables.extend(counts)
        self._inference_slots = slot_tables.slot_count - width, slot_tables.slot_count
        mask = slot_tables.attention_mask
        cache_position = positions[0]
        if self._conv_width:
            mask = np.ones_like(ids)
            # The model writes a single token's input at its position in the window: wrong for the first positions.
            cache_position = np.maximum(positions[0], self._conv_width - 1)
            if not positions[0, 0]:
                cache_position = np.arange(self._conv_width)
        self._avoid_other_requests_states(width)
        head_input = self._make_head_input(features, width)
        arrays = (ids, mask, positions, self._beam_rows, logits_idx, cache_position, head_input)
        logits = self._request.infer(arrays, logits_idx)
        self._beam_rows = self._row_order  # the forward pass has gathered the rows
        if self._feature_width:
            new_features = self._request.read_output(FEATURES_OUTPUT).reshape(len(tokens), width, -1)
            for row, (row_features, count) in enumerate(zip(self._features, counts, strict=True)):
                row_features.commit(new_features[row, :count])
        if self._head_width:
            self.hidden = split_logits_by_row(self._request.read_output(HIDDEN_OUTPUT), logits_counts)
        return self._vocabulary.restrict_logits(logits)

    def _make_head_input(self, features: Features, width: int) -> np.ndarray:
        """Return a head's input: the features of each token, (rows, width, values) float32."""
        row_count = len(self.rows) if self._head_width else 0
        head_input = np.zeros((row_count, width, self._head_width), dtype=np.float32)
        for row, row_features in enumerate(features or ()):
            head_input[row, : len(row_features)] = row_features
        return head_input


class RowByRowDecoder:
    """A ``Decoder`` with an infer request for each row.

    In a shared forward pass, rows are padded. Padding changes the last bits of attention, and a convolution or an SSM
    would process it like tokens.
    """

    fills_width = False
    block_size = 1

    def __init__(self, make_decoder: Callable[[], StatefulDecoder]) -> None:
        self._make_decoder = make_decoder
        self._decoders = [make_decoder()]
        self._unused_decoders: list[StatefulDecoder] = []
        first_decoder = self._decoders[0]
        self.rule = first_decoder.rule
        self.rollback = first_decoder.rollback
        self.context_length = first_decoder.context_length
        self.hidden: list[np.ndarray] = []
        self._shares_outputs = first_decoder.on_gpu  # a forward pass then overwrites the other rows' logits

    @property
    def rows(self) -> list[Sequence]:
        return [decoder.rows[0] for decoder in self._decoders]

    @property
    def seconds(self) -> float:
        return sum(decoder.seconds for decoder in self._decoders + self._unused_decoders)

    @property
    def inferences(self) -> int:
        return sum(decoder.inferences for decoder in self._decoders + self._unused_decoders)

    @property
    def blocks_used(self) -> int:
        return sum(map(len, self.rows))

    def reset(self, rows: int) -> None:
        decoders = self._decoders + self._unused_decoders
        decoders += [self._make_decoder() for _ in range(rows - len(decoders))]
        self._decoders = decoders[:rows]
        self._unused_decoders = decoders[rows:]
        for decoder in self._decoders:
            decoder.reset(1)
        for decoder in self._unused_decoders:
            decoder.reset(0)

    def feed(
        self,
        tokens: list[np.ndarray],
        logits_counts: list[int],
        width: int = 0,  # noqa: ARG002
        features: Features = None,
    ) -> list[np.ndarray]:
        logits = [np.empty((0, 0), dtype=np.float32)] * len(tokens)
        self.hidden = [np.empty((0, 0), dtype=np.float32)] * len(tokens)
        for row, (decoder, row_tokens, logits_count) in enumerate(
            zip(self._decoders, tokens, logits_counts, strict=True)
        ):
            if len(row_tokens):
                row_logits = decoder.feed([row_tokens], [logits_count], 0, features and [features[row]])[0]
                logits[row] = row_logits.copy() if self._shares_outputs else row_logits
                if decoder.hidden:
                    self.hidden[row] = decoder.hidden[0].copy()
        return logits

    def features(self, row: int, begin: int, end: int) -> np.ndarray:
        return self._decoders[row].features(0, begin, end)

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        copy_shared_prefixes(self, sequences)
        for decoder, sequence in zip(self._decoders, sequences, strict=True):
            decoder.reuse_prefixes([sequence])

    def truncate(self, row: int, length: int) -> None:
        # Without copies of states, ``reorder`` has made an empty row instead of a copy.
        self._decoders[row].truncate(0, min(length, len(self.rows[row])))

    def reorder(self, rows: list[int]) -> None:
        old_decoders = self._decoders
        moved_decoders: dict[int, StatefulDecoder] = {}
        for row in {*range(len(old_decoders))}.difference(rows):
            old_decoders[row].reset(0)  # keeps the row's cache in the prefix cache, and frees its memory
            self._unused_decoders.append(old_decoders[row])
        self._decoders = []
        for row in rows:
            if row != EMPTY_ROW and row not in moved_decoders:
                moved_decoders[row] = old_decoders[row]
                self._decoders.append(old_decoders[row])
                continue
            decoder = self._unused_decoders.pop() if self._unused_decoders else self._make_decoder()
            if row == EMPTY_ROW or not decoder.rollback.copies:
                decoder.reset(1)
            else:
                moved_decoders[row].copy_into(decoder)
            self._decoders.append(decoder)

    def joining_chunk_tokens(self, counts: list[int]) -> int:  # noqa: ARG002
        return JOINING_CHUNK_TOKENS

    def fork(self) -> RowByRowDecoder:
        forked_decoder = RowByRowDecoder(self._make_decoder)
        forked_decoder._decoders = [decoder.fork() for decoder in self._decoders]
        return forked_decoder

    def dump(self) -> dict[str, np.ndarray]:
        return self._decoders[0].dump()

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self.reset(1)
        self._decoders[0].restore(tokens, arrays)
