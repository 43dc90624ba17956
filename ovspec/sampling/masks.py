"""Sets of token ids, packed as one bit each, and the masking of logits with them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# For each byte of a mask, the numbers its eight bits add to eight logits.
_BITS_BY_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDENDS_BY_BYTE = np.where(_BITS_BY_BYTE, np.float32(0), np.float32(-np.inf))


def pack_mask(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return the mask of ``token_ids``, (ceil(vocab_size / 8),) uint8; bit i of byte j is for id 8 j + i."""
    bits = np.zeros(vocab_size, dtype=np.uint8)
    bits[np.fromiter(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little")


def mask_contains(mask: np.ndarray, token: int) -> bool:
    """Return whether a packed mask has ``token``."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def apply_mask(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return a copy of ``logits``, (vocab,) float32, with -inf where ``mask`` has no bit, cut to its length."""
    logits = logits[: 8 * len(mask)]
    logits_count = len(logits)
    # 'clip' saves a buffer; every byte is a valid row anyway.
    addends = np.take(_ADDENDS_BY_BYTE, mask[: -(-logits_count // 8)], axis=0, mode="clip").reshape(-1)[:logits_count]
    return np.add(logits, addends, out=addends)
