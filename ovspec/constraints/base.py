"""Constraints: whatever changes or limits what may come next. They stack, and go along a text wherever it goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ovspec.constraints.masks import holds, masked


class Constraint:
    """Part of what decides which tokens may follow a text.

    Every call gives the tokens so far, (n,) int64, and the answer depends on them alone: a proposal that is rejected
    leaves no trace. What keeps state along the text finds out itself how far it must go back.
    """

    def process(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """(vocab,) float32 after ``tokens``: the same array or a changed copy."""
        return logits

    def mask(self, tokens: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
        """The tokens that may follow, as ``masks.pack`` makes them; None for all."""
        return None

    def allows(self, token: int, tokens: np.ndarray) -> bool:
        """Whether the mask has ``token``, which may be cheaper to tell than the whole mask."""
        mask = self.mask(tokens)
        return mask is None or holds(mask, token)

    def forced(self, tokens: np.ndarray) -> list[int]:  # noqa: ARG002
        """Ids that must follow, one after the other, as far as it is cheap to tell."""
        return []

    def likely(self, tokens: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
        """Ids (n,) that are worth a guess, for nothing; None where there are none."""
        return None

    def complete(self, tokens: np.ndarray) -> bool:  # noqa: ARG002
        """Whether the text has come to its end, because nothing could follow."""
        return False


class Constraints:
    """All constraints of a row, in the order in which they are applied; ``ends`` are ids that end the text.

    ``ask_always``: the model is asked even for a token that is forced, because its logits count or something else may
    exclude that token.
    """

    def __init__(
        self, parts: Iterable[Constraint] = (), ends: frozenset[int] = frozenset(), ask_always: bool = False
    ) -> None:
        self.ends = ends
        self._parts = list(parts)
        self._processing = [part for part in self._parts if type(part).process is not Constraint.process]
        self._masking = [part for part in self._parts if type(part).mask is not Constraint.mask]
        self._forcing = [part for part in self._parts if type(part).forced is not Constraint.forced]
        self._guessing = [part for part in self._parts if type(part).likely is not Constraint.likely]
        self.active = bool(self._parts)  # whether there are any
        self.guesses = bool(self._guessing)  # whether they know what is worth a guess
        self.may_complete = bool(self._forcing)  # whether it may leave nothing that follows
        self.forces = self.may_complete and not ask_always  # whether tokens may come without the model

    def process(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """(vocab,) after ``tokens`` without any mask; the argument is left as it is."""
        for part in self._processing:
            logits = part.process(logits, tokens)
        return logits

    def mask(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """``logits`` (vocab,) with -inf where a token must not follow ``tokens``; the argument is left as it is."""
        for part in self._masking:
            mask = part.mask(tokens)
            if mask is not None:
                logits = masked(logits, mask)
        return logits

    def __call__(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Processed and masked."""
        return self.mask(self.process(logits, tokens), tokens)

    def allow(self, token: int, tokens: np.ndarray) -> bool:
        """Whether every mask has ``token``."""
        return all(part.allows(token, tokens) for part in self._masking)

    def forced(self, tokens: np.ndarray) -> list[int]:
        """Ids that must follow ``tokens``."""
        return next((found for part in self._forcing if (found := part.forced(tokens))), [])

    def likely(self, tokens: np.ndarray) -> np.ndarray | None:
        """Ids (n,) that are worth a guess after ``tokens``."""
        return next((found for part in self._guessing if (found := part.likely(tokens)) is not None), None)

    def only(self, tokens: np.ndarray) -> int | None:
        """The id that must follow, where the model needn't be asked."""
        found = self.forced(tokens) if self.forces else []
        return found[0] if found else None

    def complete(self, tokens: np.ndarray) -> bool:
        """Whether nothing can follow ``tokens``."""
        return any(part.complete(tokens) for part in self._forcing)

    def ended(self, tokens: np.ndarray) -> bool:
        """Whether the last of ``tokens`` ends the text."""
        return int(tokens[-1]) in self.ends or self.complete(tokens)

    def permitted(self, tokens: np.ndarray, guesses: Sequence[int] | np.ndarray) -> int:
        """How many of ``guesses`` may follow ``tokens``: up to one that is masked, or that ends the text."""
        text = np.concatenate((tokens, np.asarray(guesses, dtype=np.int64)))
        for count in range(len(guesses)):
            before = len(tokens) + count
            if not self.allow(int(text[before]), text[:before]):
                return count
            if self.ended(text[: before + 1]):
                return count + 1
        return len(guesses)


UNCONSTRAINED = Constraints()
