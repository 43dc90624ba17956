"""The decoder of the paged engine: it owns its KV cache, in blocks, and runs the IR rewritten for paged attention.

The tokens of all rows follow each other without padding. Each row's cache length is an input of the forward pass, so a
rollback is just a smaller length.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import numpy as np

from ovspec.base.interrupts import raise_if_interrupted
from ovspec.cache.blocks import BlockTables, BlockTensors
from ovspec.cache.decoder import (
    FAST_RULE,
    JOINING_CHUNK_TOKENS,
    MAX_REUSED_WIDTH,
    Features,
    FeedRule,
    RollbackMethod,
    TokenArrayCache,
    compute_logits_indices,
    convert_feed_error,
    reorder_sequences,
    split_into_inferences,
    split_logits_by_row,
)
from ovspec.cache.prefill import MIN_SHARED_TOKENS
from ovspec.cache.sequence import EMPTY_ROW, Sequence, measure_common_prefix
from ovspec.ir.compile import CompiledIR
from ovspec.ir.heads import FEATURES_OUTPUT, HIDDEN_OUTPUT
from ovspec.ir.memory import LEAST_TRIMMED_BYTES, trim_heap
from ovspec.ir.paged_attention import PAGED_INPUTS, QUERY_INPUTS
from ovspec.ir.request import InferenceRequest
from ovspec.text.vocabulary import ALL_IDS, KnownTokenIds

# Maximum tokens in a forward pass: it bounds the memory of activations, and the delay of Ctrl-C.
MAX_INFERENCE_TOKENS = 256
NO_FEATURES = np.empty((0, 1, 0), dtype=np.float32)


class PagedDecoder:
    """A ``Decoder`` with copy-on-write blocks shared by its rows.

    Blocks of ended rows are kept for texts with the same prefix, up to the limit of ``tensors``.

    OpenVINO rounds differently in attention over a single new token and over several. If the rule demands two queries,
    attention gets query, key and value of a row's only new token twice. The second copy's cache entry is overwritten
    by the next token.

    Args:
        ir: the model, compiled with the rewrites ``rewrite_to_paged`` and, for a rule with two queries,
            ``allow_several_queries_per_token``.
        vocabulary: the allowed token ids.
        rule: how tokens are fed.
        tensors: the blocks, shared with other decoders of the model; new tensors by default.

    Raises ValueError if the rule needs two queries, but the model was compiled without the inputs for them.
    """

    rollback = RollbackMethod("blocks")
    fills_width = True

    def __init__(
        self,
        ir: CompiledIR,
        vocabulary: KnownTokenIds = ALL_IDS,
        rule: FeedRule = FAST_RULE,
        tensors: BlockTensors | None = None,
    ) -> None:
        if rule.queries > 1 and QUERY_INPUTS[0] not in ir.inputs:
            raise ValueError("The model has no inputs for two queries per token; report this bug to ovspec.")
        self.context_length = ir.context_length
        self.rule = rule
        self._padded_token_counts = [rule.padded_token_count(count) for count in range(MAX_INFERENCE_TOKENS + 1)]
        self._computed_logits = [rule.padded_logits_count(count) for count in range(MAX_INFERENCE_TOKENS + 1)]
        self._ir = ir
        self._vocabulary = vocabulary
        self._request = InferenceRequest(ir, (*PAGED_INPUTS, *QUERY_INPUTS))
        self._restricts_ids = vocabulary.restricts_width(ir.logits_width)
        self._tensors = tensors or BlockTensors(ir)
        self.block_size = self._tensors.block_size  # in tokens
        self._bound_version = -1  # version of the tensors that the request is bound to
        self._tables = BlockTables(0, self._tensors.pool)
        self._token_arrays = TokenArrayCache()
        self._reused_length_arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._longest_context = np.zeros((), dtype=np.int32)
        self._feature_arrays: dict[int, np.ndarray] = {}
        self._head_width = ir.output_width(HIDDEN_OUTPUT)
        self._has_features = FEATURES_OUTPUT in ir.outputs
        self.hidden: list[np.ndarray] = []
        self._reset_rows(1)

    @property
    def seconds(self) -> float:
        return self._request.seconds

    @property
    def inferences(self) -> int:
        return self._request.inferences

    @property
    def blocks_used(self) -> int:
        if self._tensors.pool.dropped_tables:
            with self._tensors.lock:
                self._tensors.pool.release_dropped_tables()
        return self._tensors.pool.used_count - self._tensors.pool.idle_count

    def reset(self, rows: int) -> None:
        self._keep_prefixes(range(len(self.rows)))
        self._reset_rows(rows)

    def _reset_rows(self, rows: int) -> None:
        self.rows = [Sequence() for _ in range(rows)]
        self._flattened_version: tuple[list[int], int] | None = None  # rows and block version of the current lists
        with self._tensors.lock:
            self._tables.reorder([EMPTY_ROW] * rows)
            freed_bytes = self._tensors.shrink_if_unused()
            self._bind_cache_arrays()  # to the small arrays: a bound request would keep the large ones alive
        if freed_bytes > LEAST_TRIMMED_BYTES:
            trim_heap()

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        with self._tensors.lock:
            for cached_row, sequence in zip(self.rows, sequences, strict=True):
                cached_row.owner = sequence.owner
            is_single_row = len(self.rows) == 1
            unread_rows = [
                (row, shared_length)
                for row, (cached_row, sequence) in enumerate(zip(self.rows, sequences, strict=True))
                if len(sequence) - (shared_length := measure_common_prefix(cached_row, sequence)) > MIN_SHARED_TOKENS
                and (
                    is_single_row or shared_length < len(cached_row) or not shared_length
                )  # a row of a batch in the middle of its prompt keeps its own blocks
            ]
            if not unread_rows:
                return
            if not is_single_row:
                self._keep_prefixes(range(len(self.rows)), temporarily=True)
            for row, shared_length in unread_rows:
                sequence = sequences[row]
                blocks, length = self._tensors.pool.find_prefix(sequence.tokens[:-1], sequence.owner)
                if length >= shared_length + MIN_SHARED_TOKENS:
                    self._tables.replace_blocks(row, blocks)
                    self.rows[row] = Sequence(sequence.tokens[:length])

    def feed(
        self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0, features: Features = None
    ) -> list[np.ndarray]:
        try:
            has_too_many_tokens = sum(map(len, tokens)) > self._max_tokens
            if has_too_many_tokens or (self.rule.first_apart and self._begins_with_several_tokens(tokens)):
                return self._feed_in_parts(tokens, logits_counts, features)
            with self._tensors.lock:
                return self._append_tokens(tokens, logits_counts, min(width, self._max_tokens), features)
        except BaseException as error:
            self._reset_rows(len(self.rows))  # the blocks' contents are unknown now; an empty cache fits any text
            raise convert_feed_error(error, self._ir.device) from None

    def features(self, row: int, begin: int, end: int) -> np.ndarray:
        with self._tensors.lock:
            blocks, offsets = self._locate_positions(row, begin, end)
            return self._tensors.feature_blocks[blocks, offsets]

    def truncate(self, row: int, length: int) -> None:
        with self._tensors.lock:
            if len(self.rows[row]) - length >= MIN_SHARED_TOKENS:  # more than a rejected proposal
                self._keep_prefixes([row])
            self.rows[row].rewind(length)
            self._tables.truncate(row, length)

    def reorder(self, rows: list[int]) -> None:
        with self._tensors.lock:
            self._keep_prefixes({*range(len(self.rows))}.difference(rows))
            self.rows = reorder_sequences(self.rows, rows)
            self._tables.reorder(rows)

    def fork(self) -> PagedDecoder:
        with self._tensors.lock:
            forked_decoder = PagedDecoder(self._ir, self._vocabulary, self.rule, self._tensors)
            forked_decoder.rows = [row.copy() for row in self.rows]
            forked_decoder._tables = self._tables.fork()
        return forked_decoder

    def dump(self) -> dict[str, np.ndarray]:
        with self._tensors.lock:
            return {name: array.read_bits(self._tables.tables[0]) for name, array in self._tensors.arrays.items()}

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self.reset(1)
        with self._tensors.lock:
            self._tables.extend(0, 0, len(tokens))
            self._tensors.grow()
            self._bind_cache_arrays()
            table = self._tables.tables[0]
            own_arrays = self._tensors.arrays
            expected_layouts = {name: ((len(table), *array.shape), array.dtype) for name, array in own_arrays.items()}
            if {name: (array.shape, array.dtype) for name, array in arrays.items()} != expected_layouts:
                self.reset(1)
                raise ValueError(
                    "The saved KV cache doesn't fit this model and `kv_precision`; prefill the text again."
                )
            for name, array in arrays.items():
                own_arrays[name].write_bits(table, array)
        self.rows[0].commit(tokens)

    def joining_chunk_tokens(self, counts: list[int]) -> int:
        return self.rule.choose_token_count_to_add(sum(counts), max(JOINING_CHUNK_TOKENS, sum(counts)))

    def _keep_prefixes(self, rows: Iterable[int], temporarily: bool = False) -> None:
        """Let other texts find the blocks of ``rows``; ``temporarily``: even if the prefix cache is off."""
        if not (temporarily or self._tensors.pool.used_limit):
            return
        with self._tensors.lock:
            for row in rows:
                if len(self.rows[row]):
                    self._tables.keep_prefix(row, self.rows[row].tokens, self.rows[row].owner)

    @property
    def _max_tokens(self) -> int:
        max_tokens = min(MAX_INFERENCE_TOKENS, self.rule.most or MAX_INFERENCE_TOKENS)
        return max_tokens - self.rule.first_apart  # room for an extra token: a pass has more tokens than rows

    def _locate_positions(self, row: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the block and the offset in it of each position from ``begin`` to ``end``: two arrays (n,)."""
        first_table_index = begin // self.block_size
        positions = np.arange(begin, end)
        table = np.array(self._tables.tables[row][first_table_index : -(-end // self.block_size)], dtype=np.int64)
        return table[positions // self.block_size - first_table_index], positions % self.block_size

    def _begins_with_several_tokens(self, tokens: list[np.ndarray]) -> bool:
        """Return whether ``tokens`` has several tokens for an empty row."""
        return any(
            len(new_tokens) > 1 and not len(cached_row)
            for cached_row, new_tokens in zip(self.rows, tokens, strict=True)
        )

    def _feed_in_parts(
        self, tokens: list[np.ndarray], logits_counts: list[int], features: Features
    ) -> list[np.ndarray]:
        """Feed tokens in several forward passes, row after row, to respect the rule's ``most`` and ``first_apart``."""
        logits: list[list[np.ndarray]] = [[] for _ in tokens]
        hidden: list[list[np.ndarray]] = [[] for _ in tokens]
        logits_begins = [len(new_tokens) - count for new_tokens, count in zip(tokens, logits_counts, strict=True)]
        first_apart = self.rule.first_apart
        # By row: 1 if its first token is fed apart, before the rest, else 0.
        apart_counts = [
            int(first_apart and len(new_tokens) > 0 and not len(cached_row))
            for cached_row, new_tokens in zip(self.rows, tokens, strict=True)
        ]
        rest_counts = [
            len(new_tokens) - apart_count for new_tokens, apart_count in zip(tokens, apart_counts, strict=True)
        ]
        apart_spans = split_into_inferences(apart_counts, self._max_tokens)
        rest_spans = (
            [
                (begin + apart_count, end + apart_count)
                for (begin, end), apart_count in zip(spans, apart_counts, strict=True)
            ]
            for spans in split_into_inferences(rest_counts, self._max_tokens)
        )
        for spans in itertools.chain(apart_spans, rest_spans):
            raise_if_interrupted()
            part_tokens = [new_tokens[begin:end] for new_tokens, (begin, end) in zip(tokens, spans, strict=True)]
            part_features = features and [
                row_features[begin:end] for row_features, (begin, end) in zip(features, spans, strict=True)
            ]
            part_logits_counts = [
                max(0, end - max(begin, logits_begin))
                for logits_begin, (begin, end) in zip(logits_begins, spans, strict=True)
            ]
            with self._tensors.lock:
                part_logits = self._append_tokens(part_tokens, part_logits_counts, features=part_features)
            for row, count in enumerate(part_logits_counts):
                if count:
                    logits[row].append(part_logits[row].copy())
                    if self._head_width:
                        hidden[row].append(self.hidden[row].copy())
        self.hidden = join_row_parts(hidden, self._head_width)
        return join_row_parts(logits, self._ir.logits_width)

    def _append_tokens(
        self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0, features: Features = None
    ) -> list[np.ndarray]:
        """Append ``tokens`` to the rows in a single forward pass; arguments and result as in ``feed``."""
        row_inputs = self._fill_up_inference(
            [(len(cached_row), new_tokens) for cached_row, new_tokens in zip(self.rows, tokens, strict=True)], width
        )
        fed_rows = [row for row, (_, new_tokens) in enumerate(row_inputs) if len(new_tokens)]
        token_counts = tuple([len(row_inputs[row][1]) for row in fed_rows])
        query_counts = tuple([max(self.rule.queries, token_count) for token_count in token_counts])
        token_ids, positions = self._token_arrays[(sum(token_counts),)]
        past_lengths, query_begins = self._reuse_length_arrays(len(fed_rows))
        copies: list[tuple[int, int]] = []
        token_begin = longest_context = 0
        for i, row in enumerate(fed_rows):
            position, new_tokens = row_inputs[row]
            token_end = token_begin + len(new_tokens)
            token_ids[token_begin:token_end] = new_tokens
            positions[token_begin:token_end] = np.arange(position, position + len(new_tokens))
            past_lengths[i] = position
            query_begins[i + 1] = query_begins[i] + query_counts[i]
            copies += self._tables.extend(row, position, query_counts[i])
            token_begin = token_end
            longest_context = max(longest_context, position + query_counts[i])
            self.rows[row].commit(tokens[row])
            # Filling tokens get the position of the last real one, because the context may end here.
            if (filling_count := position + len(new_tokens) - len(self.rows[row])) > 0:
                positions[token_end - filling_count : token_end] = len(self.rows[row]) - 1
        self._longest_context[...] = longest_context
        if self._tensors.pool.needed_capacity > self._tensors.capacity:
            self._tensors.grow()
        self._bind_cache_arrays()
        self._tensors.copy_blocks(copies)
        # Filling tokens after a row's new tokens get logits, too, which are left out of the result.
        filling_counts = [
            position + len(new_tokens) - len(cached_row)
            for cached_row, (position, new_tokens) in zip(self.rows, row_inputs, strict=True)
        ]
        filled_counts = [sum(counts) for counts in zip(logits_counts, filling_counts, strict=True)]
        lengths = tuple([len(new_tokens) for _, new_tokens in row_inputs])
        min_positions = self._computed_logits[sum(filled_counts)]
        logits_idx = compute_logits_indices(lengths, tuple(filled_counts), min_positions, packed=True)
        blocks, block_begins = self._flatten_tables(fed_rows)
        query_inputs = map_queries_to_tokens(token_counts, query_counts)
        head_input = self._make_head_input(features, token_begin)
        cache_inputs = (past_lengths, query_begins, blocks, block_begins, self._longest_context)
        logits = self._request.infer(
            (token_ids, positions, *cache_inputs, logits_idx, head_input, *query_inputs), logits_idx
        )
        if self._has_features:
            fed_features = np.split(self._request.read_output(FEATURES_OUTPUT), np.cumsum(token_counts)[:-1])
            for row, row_features in zip(fed_rows, fed_features, strict=True):
                position = row_inputs[row][0]
                blocks_offsets = self._locate_positions(row, position, position + len(row_features))
                self._tensors.feature_blocks[blocks_offsets] = row_features
        if self._head_width:
            hidden = split_logits_by_row(self._request.read_output(HIDDEN_OUTPUT), filled_counts)
            self.hidden = [row_hidden[:count] for row_hidden, count in zip(hidden, logits_counts, strict=True)]
        for row in fed_rows:  # a second query may have begun a block without a token of the text
            self._tables.truncate(row, len(self.rows[row]))
        if self._restricts_ids:
            logits = self._vocabulary.restrict_logits(logits)
        if len(logits_counts) == 1:
            return [logits[: logits_counts[0]]]
        row_logits = split_logits_by_row(logits, filled_counts)
        return [logits_rows[:count] for logits_rows, count in zip(row_logits, logits_counts, strict=True)]

    def _make_head_input(self, features: Features, token_count: int) -> np.ndarray:
        """Return a head's input: the features of each token, (tokens, 1, width) float32."""
        if features is None:
            return NO_FEATURES
        feature_array = self._feature_arrays.get(token_count)
        if feature_array is None:
            feature_array = np.zeros((token_count, 1, self._head_width), dtype=np.float32)
            if token_count <= MAX_REUSED_WIDTH:
                self._feature_arrays[token_count] = feature_array
        token_features = np.concatenate(features)
        feature_array[: len(token_features), 0] = token_features
        feature_array[len(token_features) :, 0] = token_features[-1]  # for the filling tokens
        return feature_array

    def _fill_up_inference(self, row_inputs: list[tuple[int, np.ndarray]], width: int) -> list[tuple[int, np.ndarray]]:
        """Fill a forward pass up to ``width`` tokens, or to the rule's minimum.

        ``row_inputs`` and the result: each row's position and new tokens (n,). Rows compute the last tokens of their
        cache again. If there are too few for the rule, the last new token is repeated; later tokens overwrite the
        copies. A head always repeats it, because the features of earlier tokens aren't kept.
        """
        fed_rows = [row for row, (_, new_tokens) in enumerate(row_inputs) if len(new_tokens)]
        token_count = sum([len(row_inputs[row][1]) for row in fed_rows])
        first_recomputable = int(self.rule.first_apart)  # with ``first_apart``, position 0 is never computed again
        min_width = token_count + first_recomputable * (token_count == len(fed_rows))
        missing_count = self._padded_token_counts[max(width, min_width)] - token_count
        if missing_count <= 0 or not fed_rows:
            return row_inputs
        recomputable_count = 0
        if not self._head_width:
            recomputable_count = sum([max(0, row_inputs[row][0] - first_recomputable) for row in fed_rows])
        if recomputable_count < missing_count:  # too few for the width
            missing_count = self._padded_token_counts[min_width] - token_count
        for row in fed_rows if recomputable_count else ():
            if missing_count > 0:
                position, new_tokens = row_inputs[row]
                recomputed_count = min(max(0, position - first_recomputable), missing_count)
                first_position = position - recomputed_count
                row_inputs[row] = first_position, np.concatenate((self.rows[row].tokens[first_position:], new_tokens))
                missing_count -= recomputed_count
        if missing_count > 0:
            position, new_tokens = row_inputs[fed_rows[-1]]
            row_inputs[fed_rows[-1]] = position, np.concatenate((new_tokens, np.repeat(new_tokens[-1:], missing_count)))
        return row_inputs

    def _reuse_length_arrays(self, row_count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 arrays to fill in: cached tokens by row (row_count,), first query by row (row_count + 1,)."""
        if row_count not in self._reused_length_arrays:
            self._reused_length_arrays[row_count] = (
                np.zeros(row_count, dtype=np.int32),
                np.zeros(row_count + 1, dtype=np.int32),
            )
        return self._reused_length_arrays[row_count]

    def _flatten_tables(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks of ``rows``, one row after another, and each row's first index (rows + 1,); both int32."""
        if self._flattened_version != (rows, self._tables.version):
            tables = [self._tables.tables[row] for row in rows]
            self._flat_blocks = np.array([block for table in tables for block in table], dtype=np.int32)
            self._flat_block_begins = np.cumsum([0, *map(len, tables)], dtype=np.int32)
            self._flattened_version = rows, self._tables.version
        return self._flat_blocks, self._flat_block_begins

    def _bind_cache_arrays(self) -> None:
        if self._bound_version != self._tensors.version:
            for name in self._tensors.cache_inputs if self._tensors.arrays else ():
                self._request.openvino_request.set_tensor(name, self._tensors.arrays[name].tensor)
            self._bound_version = self._tensors.version


def join_row_parts(parts: list[list[np.ndarray]], width: int) -> list[np.ndarray]:
    """Join each row's parts to an array (n, width) float32."""
    empty_array = np.empty((0, width), dtype=np.float32)
    return [np.concatenate(row_parts) if row_parts else empty_array for row_parts in parts]


@functools.lru_cache(maxsize=256)
def map_queries_to_tokens(
    token_counts: tuple[int, ...], query_counts: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs added by ``allow_several_queries_per_token``, int32 arrays.

    The first maps queries to tokens (queries,), the second tokens to their first query (tokens,). A row with
    ``token_counts[row]`` tokens has the same number of queries, or several for its only token.
    """
    queries_per_token = np.concatenate(
        [np.full(count, query_count // count) for count, query_count in zip(token_counts, query_counts, strict=True)]
    )
    token_indices = np.arange(len(queries_per_token), dtype=np.int32)
    return np.repeat(token_indices, queries_per_token), (np.cumsum(queries_per_token) - queries_per_token).astype(
        np.int32
    )
