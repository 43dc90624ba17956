"""The decoder that keeps its KV cache in blocks of its own, on the same IR after OpenVINO's paged-attention rewrite.

Tokens of all rows follow one another, without padding; each inference is told how much of each row's blocks
counts, so rolling back is passing a smaller length. Attention over a long cache costs much less for several new
tokens than on the stateful path (docs/benchmarks.md).
"""

from __future__ import annotations

import numpy as np
import openvino as ov

from ovspec.decoders.base import (
    JOINING_CHUNK,
    Rollback,
    TokenArrays,
    feed_error,
    logit_positions,
    reordered,
    split_by_row,
)
from ovspec.decoders.block_tensors import FIRST_BLOCKS, BlockTensors
from ovspec.decoders.blocks import Blocks
from ovspec.decoders.sequence import EMPTY, Sequence
from ovspec.ir.compile import CompiledIR
from ovspec.ir.memory import WORTH_TRIMMING, trim_heap
from ovspec.ir.paged_attention import CACHE, INPUTS
from ovspec.ir.request import Request
from ovspec.text.vocabulary import ALL_IDS, KnownIds

# Tokens of a prompt that are fed in one inference: bounds the memory of activations; smaller chunks cost time.
PREFILL_CHUNK = 1024
# Tokens of a row that are fed apart at most; whoever wants more logits at once is measuring, not verifying.
MOST_APART = 64


class PagedDecoder:
    """See ``SessionDecoder``. Rows that were forked share blocks until one of them is fed.

    OpenVINO has one attention kernel for a single new token and another for several, which round differently. So
    where arithmetic is coarse, tokens whose logits are all wanted, as in verifying guesses, are fed *apart*: each as
    a sequence of its own over the row's blocks, for the bits that feeding them one after the other gives.

    Args:
        ir: compiled with the rewrite ``to_paged``.
        vocabulary: the ids that may be chosen.
        prefill_chunk: tokens fed in one inference at most, besides those whose logits are wanted.
        tensors: those of a decoder of the same model, to share blocks with it; by default its own.
    """

    rollback = Rollback("blocks")

    def __init__(
        self,
        ir: CompiledIR,
        vocabulary: KnownIds = ALL_IDS,
        prefill_chunk: int = PREFILL_CHUNK,
        tensors: BlockTensors | None = None,
    ) -> None:
        self.context_length = ir.context_length
        self._ir, self._vocabulary, self._prefill_chunk = ir, vocabulary, prefill_chunk
        self._request, self._restricts = Request(ir, INPUTS), vocabulary.restricts(ir.logits_width)
        self._apart = ir.compiled.get_property("INFERENCE_PRECISION_HINT") != ov.Type.f32
        self._tensors = tensors or BlockTensors(ir, [name for name in ir.inputs if CACHE.fullmatch(name)])
        self._bound = -1  # version of the tensors that the request reads
        self._blocks = Blocks(0, self._tensors.block_size, self._tensors.pool)
        self._token_arrays = TokenArrays()
        self._kept_lengths: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._longest = np.zeros((), dtype=np.int32)
        self.reset(1)

    @property
    def seconds(self) -> float:
        return self._request.seconds

    @property
    def inferences(self) -> int:
        return self._request.inferences

    @property
    def blocks_used(self) -> int:
        """Blocks that hold tokens now, those of decoders that share them too; shared ones count once."""
        return self._tensors.pool.used

    def reset(self, rows: int) -> None:
        self.rows = [Sequence() for _ in range(rows)]
        self._listed: tuple[list[int], int] | None = None  # rows and version of what block_indices shows
        with self._tensors.lock:
            self._blocks.reorder([EMPTY] * rows)
            freed = self._tensors.free() if self._tensors.capacity > FIRST_BLOCKS else 0
            self._bind()  # to the small ones that are there now: the request holds what it is bound to
        if freed > WORTH_TRIMMING:
            trim_heap()

    def feed(self, tokens: list[np.ndarray], wanted: list[int]) -> list[np.ndarray]:
        counts = [len(new) for new in tokens]
        logits_idx = logit_positions(tuple(counts), tuple(wanted), packed=True)
        try:
            if sum(counts) - sum(wanted) > self._prefill_chunk:
                tokens = self._feed_in_chunks(tokens, wanted)
                logits_idx = logit_positions(tuple(map(len, tokens)), tuple(wanted), packed=True)
            with self._tensors.lock:
                logits = self._append(tokens, wanted, logits_idx)
        except BaseException as error:
            self.reset(len(self.rows))  # what the cache holds is unknown; an empty one agrees with any text
            raise feed_error(error, self._ir.device) from None
        return [logits[: wanted[0]]] if len(wanted) == 1 else split_by_row(logits, wanted)

    def truncate(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)
        with self._tensors.lock:
            self._blocks.truncate(row, length)

    def reorder(self, rows: list[int]) -> None:
        self.rows = reordered(self.rows, rows)
        with self._tensors.lock:
            self._blocks.reorder(rows)

    def fork(self) -> PagedDecoder:
        with self._tensors.lock:
            other = PagedDecoder(self._ir, self._vocabulary, self._prefill_chunk, self._tensors)
            other.rows, other._blocks = [row.copy() for row in self.rows], self._blocks.fork()
        return other

    def dump(self) -> dict[str, np.ndarray]:
        with self._tensors.lock:
            return {name: array[self._blocks.tables[0]] for name, array in self._tensors.arrays.items()}

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self.reset(1)
        with self._tensors.lock:
            self._blocks.extend(0, 0, len(tokens))
            self._tensors.make_room()
            self._bind()
            table, ours = self._blocks.tables[0], self._tensors.arrays
            expected = {name: ((len(table), *array.shape[1:]), array.dtype) for name, array in ours.items()}
            if {name: (array.shape, array.dtype) for name, array in arrays.items()} != expected:
                self.reset(1)
                raise ValueError("another model's or another type of cache")
            for name, array in arrays.items():
                ours[name][table] = array
        self.rows[0].commit(tokens)

    def joining_chunk(self, counts: list[int]) -> int:
        return max(JOINING_CHUNK, sum(counts))

    def _feed_in_chunks(self, tokens: list[np.ndarray], wanted: list[int]) -> list[np.ndarray]:
        """Feed all but at most a chunk and what is wanted, row after row; returns what is left to feed."""
        while True:
            loose = [max(0, len(new) - max(want, 1)) for new, want in zip(tokens, wanted, strict=True)]
            if sum(loose) <= self._prefill_chunk:
                return tokens
            ends = np.minimum(np.cumsum([0, *loose]), self._prefill_chunk)
            cuts = np.diff(ends).tolist()
            fed = [new[:cut] for new, cut in zip(tokens, cuts, strict=True)]
            with self._tensors.lock:
                self._append(fed, [0] * len(fed), np.zeros(1, dtype=np.int64))
            tokens = [new[cut:] for new, cut in zip(tokens, cuts, strict=True)]

    def _append(self, tokens: list[np.ndarray], wanted: list[int], logits_idx: np.ndarray) -> np.ndarray:
        apart = [self._apart and want == len(new) <= MOST_APART for new, want in zip(tokens, wanted, strict=True)]
        # The row of each sequence that the inference sees: one for a row, or one for each token that is fed apart.
        fed = [row for row, new in enumerate(tokens) if len(new) for _ in range(len(new) if apart[row] else 1)]
        ids, positions = self._token_arrays[(sum(map(len, tokens)),)]
        past, begins = self._length_arrays(len(fed))
        copies: list[tuple[int, int]] = []
        start = i = longest = 0
        for row, new in enumerate(tokens):
            if not len(new):
                continue
            held, end = len(self.rows[row]), start + len(new)
            copies += self._blocks.extend(row, held, len(new))
            ids[start:end] = new
            positions[start:end] = np.arange(held, held + len(new))
            if apart[row]:
                past[i : i + len(new)] = positions[start:end]
                begins[i + 1 : i + len(new) + 1] = np.arange(start + 1, end + 1)
                i += len(new)
            else:
                past[i], begins[i + 1] = held, end
                i += 1
            start, longest = end, max(longest, held + len(new))
            self.rows[row].commit(new)
        self._longest[...] = longest
        if self._tensors.pool.needed > self._tensors.capacity:
            self._tensors.make_room()
        self._bind()
        if copies:
            self._tensors.copy(copies)
        indices, index_begins = self._block_lists(fed)
        arrays = (ids, positions, past, begins, indices, index_begins, self._longest, logits_idx)
        logits = self._request.infer(arrays, logits_idx)
        return self._vocabulary.restrict(logits) if self._restricts else logits

    def _length_arrays(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens before each sequence (count,) and the index where each begins (count + 1,), int32."""
        if count not in self._kept_lengths:
            self._kept_lengths[count] = np.zeros(count, dtype=np.int32), np.zeros(count + 1, dtype=np.int32)
        return self._kept_lengths[count]

    def _block_lists(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of ``rows`` (a row may come twice), and the index where each row begins (rows + 1,), int32."""
        if self._listed != (rows, self._blocks.version):
            tables = [self._blocks.tables[row] for row in rows]
            self._indices = np.array([block for table in tables for block in table], dtype=np.int32)
            self._index_begins = np.cumsum([0, *map(len, tables)], dtype=np.int32)
            self._listed = rows, self._blocks.version
        return self._indices, self._index_begins

    def _bind(self) -> None:
        """Have the request read the tensors as they are now."""
        if self._bound != self._tensors.version:
            for name in self._tensors.arrays:
                self._request.raw.set_tensor(self._tensors.ports[name], self._tensors.tensor(name))
            self._bound = self._tensors.version
