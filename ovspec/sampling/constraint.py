"""Constraints change logits or limit the next tokens. They stack, and follow a text as it grows and is rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ovspec.sampling.masks import apply_mask, mask_contains
from ovspec.text.answer import ToolCall


class Constraint:
    """Changes the logits after a text, or limits the next token.

    Every method gets the tokens so far, (n,) int64, and its result depends on them alone, so a rejected proposal leaves
    no trace. A constraint with state along the text keeps the common prefix, and rolls itself back.
    """

    def process_logits(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """Return the logits, (vocab,) float32, after ``tokens``: the same array or a changed copy."""
        return logits

    def token_mask(self, tokens: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
        """Return the allowed next tokens as a mask made by ``masks.pack_mask``; None for all."""
        return None

    def allows_token(self, token: int, tokens: np.ndarray) -> bool:
        """Return whether the mask has ``token``; may be cheaper than computing the whole mask."""
        mask = self.token_mask(tokens)
        return mask is None or mask_contains(mask, token)

    def forced_tokens(self, tokens: np.ndarray) -> list[int]:  # noqa: ARG002
        """Return the forced ids, in order, as far as they are cheap to find."""
        return []

    def likely_tokens(self, tokens: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
        """Return ids, (n,), worth proposing and free to find; None if there are none."""
        return None

    def is_complete(self, tokens: np.ndarray) -> bool:  # noqa: ARG002
        """Return whether the text has ended, because no token is allowed."""
        return False


class Constraints:
    """All constraints of a row, in the order of application.

    Args:
        end_ids: ids to end the text.
        always_run_model: run the model even for a forced token, because its logits are needed or another constraint may
            exclude the token.
    """

    def __init__(
        self,
        constraints: Iterable[Constraint] = (),
        end_ids: frozenset[int] = frozenset(),
        always_run_model: bool = False,
    ) -> None:
        constraints = list(constraints)
        self.end_ids = end_ids
        self._processing_constraints = [
            c for c in constraints if type(c).process_logits is not Constraint.process_logits
        ]
        self._masking_constraints = [c for c in constraints if type(c).token_mask is not Constraint.token_mask]
        self._forcing_constraints = [c for c in constraints if type(c).forced_tokens is not Constraint.forced_tokens]
        self._suggesting_constraints = [c for c in constraints if type(c).likely_tokens is not Constraint.likely_tokens]
        self.has_constraints = bool(constraints)  # whether there are any
        self.suggests = bool(self._suggesting_constraints)  # whether any of them can propose tokens
        self.may_complete = bool(self._forcing_constraints)  # whether they may end the text
        self.commits_forced = (
            self.may_complete and not always_run_model
        )  # whether forced tokens may be committed without the model
        # Returns the schema errors of a finished text and its tool calls.
        self.find_errors: Callable[[str, Sequence[ToolCall]], list[str]] | None = None

    def process_logits(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return ``logits``, (vocab,), changed by all constraints but not masked; the argument is unchanged."""
        for constraint in self._processing_constraints:
            logits = constraint.process_logits(logits, tokens)
        return logits

    def mask_logits(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return a copy of ``logits``, (vocab,), with -inf for masked tokens."""
        for constraint in self._masking_constraints:
            mask = constraint.token_mask(tokens)
            if mask is not None:
                logits = apply_mask(logits, mask)
        return logits

    def __call__(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return ``logits`` processed and masked."""
        return self.mask_logits(self.process_logits(logits, tokens), tokens)

    def allows_token(self, token: int, tokens: np.ndarray) -> bool:
        """Return whether every mask has ``token``."""
        return all(constraint.allows_token(token, tokens) for constraint in self._masking_constraints)

    def forced_tokens(self, tokens: np.ndarray) -> list[int]:
        """Return the ids forced after ``tokens``."""
        for constraint in self._forcing_constraints:
            if forced_ids := constraint.forced_tokens(tokens):
                return forced_ids
        return []

    def likely_tokens(self, tokens: np.ndarray) -> np.ndarray | None:
        """Return ids, (n,), worth proposing after ``tokens``; None if there are none."""
        for constraint in self._suggesting_constraints:
            suggested_ids = constraint.likely_tokens(tokens)
            if suggested_ids is not None:
                return suggested_ids
        return None

    def forced_token(self, tokens: np.ndarray) -> int | None:
        """Return the forced id if the model needn't be run for it, else None."""
        if self.commits_forced and (forced_ids := self.forced_tokens(tokens)):
            return forced_ids[0]
        return None

    def is_complete(self, tokens: np.ndarray) -> bool:
        """Return whether no token is allowed after ``tokens``."""
        return any(constraint.is_complete(tokens) for constraint in self._forcing_constraints)

    def has_ended(self, tokens: np.ndarray) -> bool:
        """Return whether the last of ``tokens`` ends the text."""
        return int(tokens[-1]) in self.end_ids or self.is_complete(tokens)

    def count_allowed(self, tokens: np.ndarray, proposed_ids: Sequence[int] | np.ndarray) -> int:
        """Return how many of ``proposed_ids`` are allowed after ``tokens``, up to a masked token or the text's end."""
        extended_ids = np.concatenate((tokens, np.asarray(proposed_ids, dtype=np.int64)))
        for allowed_count in range(len(proposed_ids)):
            judged_position = len(tokens) + allowed_count
            if not self.allows_token(int(extended_ids[judged_position]), extended_ids[:judged_position]):
                return allowed_count
            if self.has_ended(extended_ids[: judged_position + 1]):
                return allowed_count + 1
        return len(proposed_ids)


UNCONSTRAINED = Constraints()
