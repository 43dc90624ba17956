"""What heads propose, noted, and compared with torch, which knows nothing of caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ovspec.cache.paged import PagedDecoder
from ovspec.drafting.drafter import RowToDraft
from ovspec.drafting.head import HeadDrafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.ir.heads import FEATURES_OUTPUT

CLEAR = 1e-3  # logits that are nearer than this may come in another order


@dataclass
class Proposed:
    """What a head proposed after ``text``, of which the target had read the first ``known`` tokens."""

    text: np.ndarray
    known: int
    tokens: np.ndarray


def note_proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposed]:
    """Return a list to which each proposal of a head is added."""
    found: list[Proposed] = []
    propose = HeadDrafter.propose

    def noted(self: HeadDrafter, rows: list[RowToDraft], lookahead: Lookahead) -> Any:
        made = propose(self, rows, lookahead)
        for index, (row, proposal) in enumerate(zip(rows, made, strict=True)):
            if len(proposal.tokens):
                known = self._head_decoder.count_known_features(index, row.sequence)
                found.append(Proposed(row.sequence.tokens.copy(), known, proposal.tokens))
        return made

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    return found


class TorchHead:
    """Proposes as a checkpoint does, reading each text from its beginning.

    features: makes them of the target's hidden states. guesses: of each layer, makes logits and the next features of
    embeddings and features. ids: the target's ids of the logits.
    """

    def __init__(
        self,
        target: Any,
        features: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        guesses: list[Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]],
        ids: np.ndarray,
    ) -> None:
        self.target, self.make_features, self.guesses, self.ids = target, features, guesses, ids
        self.fused: list[tuple[np.ndarray, torch.Tensor]] = []  # texts that the target has read, with their features

    def agree(self, proposals: list[Proposed]) -> bool:
        """Return whether all agree; the target reads the longest texts first, and so no beginning of one again."""
        return all(map(self.agrees, sorted(proposals, key=lambda proposed: -proposed.known)))

    def features(self, text: np.ndarray) -> torch.Tensor:
        """Return what the head reads of the target, for each token of a text."""
        for known, features in self.fused:
            if np.array_equal(known[: len(text)], text):
                return features[:, : len(text)]
        states = self.target(torch.from_numpy(text[None]), output_hidden_states=True).hidden_states
        self.fused.append((text, self.make_features(states)))
        return self.fused[-1][1]

    @torch.no_grad()
    def agrees(self, proposed: Proposed) -> bool:
        """Return whether each proposed token is the head's most likely one, but for rounding.

        The first unknown token is the first layer's, the next one the second's, of the first one's output, and so on.
        The last layer goes on from its own output.
        """
        text, begin = np.concatenate((proposed.text, proposed.tokens)), len(proposed.text)
        features = hidden = self.features(text[: proposed.known])
        embedded = self.target.get_input_embeddings()(torch.from_numpy(text[None]))
        for at in range(proposed.known + 1, len(text)):
            depth = at - proposed.known
            if depth <= len(self.guesses):
                features = hidden
            depth = min(depth, len(self.guesses))
            logits, hidden = self.guesses[depth - 1](embedded[:, depth:at], features)
            features = torch.cat((features, hidden[:, -1:]), 1)
            likely = self.ids[(logits[0, -1] >= logits[0, -1].max() - CLEAR).numpy()]
            if at >= begin and text[at] not in likely:
                return False
        return True


def read_earlier_features(monkeypatch: pytest.MonkeyPatch) -> None:
    features = PagedDecoder.features

    def earlier(self: PagedDecoder, row: int, begin: int, end: int) -> np.ndarray:
        return features(self, row, max(0, begin - 1), end)[: end - begin]

    monkeypatch.setattr(PagedDecoder, "features", earlier)


def keep_rejected_features(monkeypatch: pytest.MonkeyPatch) -> None:
    features, truncate, rejected = PagedDecoder.features, PagedDecoder.truncate, dict[int, np.ndarray]()

    def noting(self: PagedDecoder, row: int, length: int) -> None:
        if FEATURES_OUTPUT in self._tensors.arrays:
            rejected.update({at: features(self, row, at, at + 1)[0] for at in range(length, len(self.rows[row]))})
        truncate(self, row, length)

    def stale(self: PagedDecoder, row: int, begin: int, end: int) -> np.ndarray:
        found = features(self, row, begin, end)
        return np.array([rejected.get(begin + at, values) for at, values in enumerate(found)]).reshape(found.shape)

    monkeypatch.setattr(PagedDecoder, "truncate", noting)
    monkeypatch.setattr(PagedDecoder, "features", stale)


FEATURE_BUGS = {"off by one": read_earlier_features, "rejected token": keep_rejected_features}
