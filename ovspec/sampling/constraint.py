"""Constraints change logits or limit the next tokens. They stack, and follow a text as it grows and is rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ovspec.sampling.masks import holds, masked
from ovspec.text.answer import ToolCall


class Constraint:
    """Changes the logits after a text, or limits the tokens that may follow it.

    Every method gets the tokens so far, (n,) int64, and its result depends on them alone, so a rejected proposal leaves
    no trace. A constraint that keeps state along the text works out itself how far to roll back.
    """

    def process(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """Return the logits, (vocab,) float32, after ``tokens``: the same array or a changed copy."""
        return logits

    def mask(self, tokens: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
        """Return the tokens that may follow as a mask made by ``masks.pack``; None for all."""
        return None

    def allows(self, token: int, tokens: np.ndarray) -> bool:
        """Return whether the mask has ``token``, which may be cheaper than computing the whole mask."""
        mask = self.mask(tokens)
        return mask is None or holds(mask, token)

    def forced(self, tokens: np.ndarray) -> list[int]:  # noqa: ARG002
        """Return the ids that must follow, in order, as far as they are cheap to find."""
        return []

    def likely(self, tokens: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
        """Return ids, (n,), that are worth proposing and cost nothing to find; None if there are none."""
        return None

    def complete(self, tokens: np.ndarray) -> bool:  # noqa: ARG002
        """Return whether the text has ended, because nothing may follow."""
        return False


class Constraints:
    """All constraints of a row, in the order in which they are applied.

    Args:
        ends: ids that end the text.
        ask_always: run the model even for a forced token, because its logits are needed or another constraint may
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
        self.guesses = bool(self._guessing)  # whether any of them can propose tokens
        self.may_complete = bool(self._forcing)  # whether they may end the text
        self.forces = self.may_complete and not ask_always  # whether tokens may be committed without the model
        # Says what is wrong with the finished text and its calls of tools.
        self.judge: Callable[[str, Sequence[ToolCall]], list[str]] | None = None

    def process(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return ``logits``, (vocab,), changed by all constraints but not masked; the argument is left as it is."""
        for part in self._processing:
            logits = part.process(logits, tokens)
        return logits

    def mask(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return ``logits``, (vocab,), with -inf for tokens that must not follow; the argument is left as it is."""
        for part in self._masking:
            mask = part.mask(tokens)
            if mask is not None:
                logits = masked(logits, mask)
        return logits

    def __call__(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return ``logits`` processed and masked."""
        return self.mask(self.process(logits, tokens), tokens)

    def allow(self, token: int, tokens: np.ndarray) -> bool:
        """Return whether every mask has ``token``."""
        return all(part.allows(token, tokens) for part in self._masking)

    def forced(self, tokens: np.ndarray) -> list[int]:
        """Return the ids that must follow ``tokens``."""
        return next((found for part in self._forcing if (found := part.forced(tokens))), [])

    def likely(self, tokens: np.ndarray) -> np.ndarray | None:
        """Return ids, (n,), that are worth proposing after ``tokens``; None if there are none."""
        return next((found for part in self._guessing if (found := part.likely(tokens)) is not None), None)

    def only(self, tokens: np.ndarray) -> int | None:
        """Return the id that must follow if the model needn't be run for it, else None."""
        found = self.forced(tokens) if self.forces else []
        return found[0] if found else None

    def complete(self, tokens: np.ndarray) -> bool:
        """Return whether nothing may follow ``tokens``."""
        return any(part.complete(tokens) for part in self._forcing)

    def ended(self, tokens: np.ndarray) -> bool:
        """Return whether the last of ``tokens`` ends the text."""
        return int(tokens[-1]) in self.ends or self.complete(tokens)

    def permitted(self, tokens: np.ndarray, guesses: Sequence[int] | np.ndarray) -> int:
        """Return how many of ``guesses`` may follow ``tokens``: those before a masked one or up to the text's end."""
        text = np.concatenate((tokens, np.asarray(guesses, dtype=np.int64)))
        for count in range(len(guesses)):
            before = len(tokens) + count
            if not self.allow(int(text[before]), text[:before]):
                return count
            if self.ended(text[: before + 1]):
                return count + 1
        return len(guesses)


UNCONSTRAINED = Constraints()
