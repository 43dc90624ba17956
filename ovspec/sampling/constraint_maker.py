"""Makes the constraints of a row from the params of its call."""

from __future__ import annotations

import functools
import json
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import present, read_json
from ovspec.params import Params
from ovspec.sampling.byte_vocabulary import ByteVocabulary
from ovspec.sampling.constraint import Constraint, Constraints
from ovspec.sampling.grammar_options import errors_of, grammar_of, grammar_of_answer
from ovspec.sampling.healing import Healing, healable
from ovspec.sampling.processors import PromptLength, processing
from ovspec.text.answer import AnswerFormat
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import TOKENIZER_FILE

if TYPE_CHECKING:
    from ovspec.sampling.answer_constraint import AnswerConstraint
    from ovspec.sampling.grammar_constraint import Grammar, Grammars


class ConstraintMaker:
    """Makes constraints for one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @functools.cached_property
    def tokens(self) -> ByteVocabulary:
        """The tokens by their bytes; raises OvspecError if the vocabulary doesn't map tokens to bytes."""
        if not self._tokenizer.vocabulary:
            why = "its tokenizer does not map tokens to bytes one by one, which grammars and token healing need"
            raise OvspecError(f"{self._tokenizer.folder}: {why}.")
        return ByteVocabulary(self._tokenizer.vocabulary)

    @functools.cached_property
    def grammars(self) -> Grammars:
        from ovspec.sampling.grammar_constraint import Grammars  # deferred, because it imports llguidance

        return Grammars(read_json(present(self._tokenizer.folder / TOKENIZER_FILE)), list(self.tokens.vocabulary))

    def make(
        self,
        tokens: np.ndarray,
        params: Params,
        eos: frozenset[int],
        bos: np.ndarray,
        healable_from: int = 0,
        answer: AnswerFormat | None = None,
    ) -> tuple[Constraints, Healing | None]:
        """Return the constraints of the text after a prompt, and the healing of the prompt's end, if there is any.

        Args:
            tokens: (n,) int64, the prompt's.
            eos: ids that end the text, besides ``params.stop_ids``.
            bos: (n,) int64, replaces a prompt that is taken back entirely; empty if that isn't possible.
            healable_from: position of the first token that healing may take back.
            answer: how the model writes the answer, if the prompt is a chat and it has thinking or tools.

        Raises:
            OvspecError: the grammar is wrong, or doesn't allow the prompt.
        """
        grammar, name = grammar_of(params)
        ends = eos | frozenset(params.stop_ids)
        tail = b"" if params.constrain_from is None else self._tail(tokens, params.constrain_from)
        masks: list[Constraint] = []
        healing, healed, start = None, b"", len(tokens)
        if params.heal:
            first = max(healable_from, 0 if len(bos) else 1)
            whole = grammar is not None and not tail  # a grammar begins with a whole character
            if count := healable(tokens, first, self.tokens, len(tail) or math.inf, whole):
                healing = Healing(tokens, count, self.tokens, bos)
                masks.append(healing)
                healed, start = healing.text, healing.start
        if answer and not tail and (limits := self._answer_grammar(start, params, eos, answer)):
            masks.append(limits)
        elif grammar is not None:
            masks.append(self.grammars.constraint(grammar, start, self._ends(params, eos), tail, healed, name))
        prompt_length: PromptLength = healing.prompt_length if healing else lambda _: start
        processors = processing(params, prompt_length, ends, params.logits_processors)
        excludes = bool(params.logits_processors) or -math.inf in params.logit_bias.values()
        made = Constraints([*processors, *masks], ends, params.logprobs is not None or excludes)
        if params.json_schema_mode == "checked":
            made.judge = functools.partial(errors_of, params, tail.decode())
        return made, healing

    def _ends(self, params: Params, eos: frozenset[int]) -> frozenset[int]:
        """Return the ids that end a grammar's text. A stop id that spells text is an ordinary token to the grammar."""
        spelt = self.tokens.vocabulary
        return eos | {token for token in params.stop_ids if not (token < len(spelt) and spelt[token])}

    def _answer_grammar(
        self, start: int, params: Params, eos: frozenset[int], answer: AnswerFormat
    ) -> AnswerConstraint | None:
        """Return the constraint of an answer after ``start`` tokens of prompt; None if nothing is constrained."""
        from ovspec.sampling.answer_constraint import AnswerConstraint  # deferred, because it imports llguidance

        grammar, ends, make = grammar_of_answer(params, answer), self._ends(params, eos), None
        budget = params.thinking_budget if answer.thinking else None
        if grammar is not None:
            make = partial(self._grammar_of_answer, grammar, ends)
        elif params.grammar_option or (budget is None and not params.tools):
            return None
        closing = self._tokenizer.encode_more(answer.thinking.close).tolist() if answer.thinking else ()
        whole = grammar is not None and not answer.anywhere
        return AnswerConstraint(start, answer, self.tokens, make, whole, ends, budget, closing)

    def _grammar_of_answer(self, grammar: str, ends: frozenset[int], start: int, begun: list[bytes | int]) -> Grammar:
        return self.grammars.constraint(grammar, start, ends, begun=begun, what="grammar of the tools")

    def strings(self, params: Params, answer: AnswerFormat) -> dict[str, list[str]]:
        """Return for each tool the arguments that are written without quotes."""
        if not (answer.tools and answer.tools.parameters):
            return {}
        from ovspec.grammars.tools import TEXT_PARAMETERS_KEY  # deferred, because it imports llguidance

        return json.loads(grammar_of_answer(params, answer) or "{}").get(TEXT_PARAMETERS_KEY, {})

    def check(self, params: Params) -> None:
        """Raise OvspecError if the grammar in ``params`` is invalid."""
        grammar, name = grammar_of(params)
        if grammar is not None:
            self.grammars.constraint(grammar, 0, frozenset(), what=name)

    def _tail(self, tokens: np.ndarray, where: int | str) -> bytes:
        """Return the bytes of the prompt that belong to the grammar's text."""
        spelt = self.tokens.spell(tokens)
        text = spelt.decode("utf-8", "replace")
        if not isinstance(where, (int, str)):
            raise OvspecError(f"`constrain_from` is {where!r}; it must be a string, or a number of characters.")
        if isinstance(where, str):
            at = text.rfind(where) if where else -1
            if at < 0:
                raise OvspecError(f"`constrain_from`: {where!r} is not in the prompt.")
        else:
            at = where if where >= 0 else len(text) + where
            if not 0 <= at <= len(text):
                raise OvspecError(f"`constrain_from` is {where}, but the prompt has {len(text)} characters.")
        return spelt[len(text[:at].encode()) :]
