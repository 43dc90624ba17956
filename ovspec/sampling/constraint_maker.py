"""Makes the constraints of a row from the params of its call."""

from __future__ import annotations

import functools
import json
import math
from typing import TYPE_CHECKING

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_json, require_model_path
from ovspec.params import Params
from ovspec.sampling.constraint import Constraint, Constraints
from ovspec.sampling.grammar_options import convert_answer_grammar, convert_requested_grammar, find_answer_schema_errors
from ovspec.sampling.healing import Healing, count_healable_tokens
from ovspec.sampling.processors import PromptTokenCounter, make_processors
from ovspec.sampling.vocabulary_index import VocabularyIndex
from ovspec.text.answer import AnswerFormat
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import TOKENIZER_FILE

if TYPE_CHECKING:
    from ovspec.sampling.answer_constraint import AnswerConstraint
    from ovspec.sampling.grammar_constraint import GrammarCompiler, GrammarConstraint


class ConstraintMaker:
    """Makes constraints for a model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @functools.cached_property
    def vocabulary_index(self) -> VocabularyIndex:
        """The tokens by their bytes; raises OvspecError if the vocabulary doesn't map tokens to bytes."""
        if not self._tokenizer.vocabulary:
            reason = (
                "the tokenizer can't map each token to bytes, so grammars and token healing aren't possible; "
                "leave the grammar and `heal` out"
            )
            raise OvspecError(f"{self._tokenizer.folder}: {reason}.")
        return VocabularyIndex(self._tokenizer.vocabulary)

    @functools.cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        from ovspec.sampling.grammar_constraint import GrammarCompiler  # deferred, because it imports llguidance

        tokenizer_json = read_json(require_model_path(self._tokenizer.folder / TOKENIZER_FILE))
        return GrammarCompiler(tokenizer_json, list(self.vocabulary_index.vocabulary))

    def make_constraints(
        self,
        prompt: np.ndarray,
        params: Params,
        eos_ids: frozenset[int],
        bos_ids: np.ndarray,
        healable_from: int = 0,
        answer_format: AnswerFormat | None = None,
    ) -> tuple[Constraints, Healing | None]:
        """Return the constraints of the text after a prompt, and the healing of the prompt's end, if any.

        Args:
            prompt: token ids, (n,) int64.
            eos_ids: ids to end the text, besides ``params.stop_ids``.
            bos_ids: (n,) int64, replaces a prompt healed away entirely; empty if impossible.
            healable_from: position of the first token open to healing.
            answer_format: the model's answer format, if the prompt is a chat and the model has thinking or tools.

        Raises:
            OvspecError: the grammar is wrong, or doesn't allow the prompt.
        """
        grammar, grammar_name = convert_requested_grammar(params)
        grammar_prompt = b""  # the part of the prompt inside the grammar's text
        if params.constrain_from is not None:
            grammar_prompt = self._find_grammar_prompt(prompt, params.constrain_from)
        masking_constraints: list[Constraint] = []
        healing = None
        healed_bytes = b""
        prompt_length = len(prompt)
        if params.heal:
            first_healable = max(healable_from, int(not len(bos_ids)))  # at least one token must be left
            whole_characters = grammar is not None and not grammar_prompt  # a grammar begins with a whole character
            max_bytes = len(grammar_prompt) or math.inf
            if healable_count := count_healable_tokens(
                prompt, first_healable, self.vocabulary_index, max_bytes, whole_characters
            ):
                healing = Healing(prompt, healable_count, self.vocabulary_index, bos_ids)
                masking_constraints.append(healing)
                healed_bytes = healing.removed_bytes
                prompt_length = healing.kept_length
        answer_constraint = None
        if answer_format and not grammar_prompt:
            answer_constraint = self._make_answer_constraint(prompt_length, params, eos_ids, answer_format)
        if answer_constraint:
            masking_constraints.append(answer_constraint)
        elif grammar is not None:
            end_ids = self._grammar_end_ids(params, eos_ids)
            compiler = self.grammar_compiler
            masking_constraints.append(
                compiler.make_constraint(grammar, prompt_length, end_ids, grammar_prompt, healed_bytes, grammar_name)
            )
        count_prompt_tokens: PromptTokenCounter = healing.count_prompt_tokens if healing else lambda _: prompt_length
        end_ids = eos_ids | frozenset(params.stop_ids)
        processors = make_processors(params, count_prompt_tokens, end_ids, params.logits_processors)
        options_may_exclude_tokens = bool(params.logits_processors) or -math.inf in params.logit_bias.values()
        always_run_model = options_may_exclude_tokens or params.logprobs is not None
        constraints = Constraints([*processors, *masking_constraints], end_ids, always_run_model)
        if params.json_schema_mode == "checked":
            constraints.find_errors = functools.partial(find_answer_schema_errors, params, grammar_prompt.decode())
        return constraints, healing

    def _grammar_end_ids(self, params: Params, eos_ids: frozenset[int]) -> frozenset[int]:
        """Return the ids to end a grammar's text. A stop id with a text is an ordinary token to the grammar."""
        return eos_ids | {token for token in params.stop_ids if not self.vocabulary_index.added_bytes(token)}

    def _make_answer_constraint(
        self, prompt_length: int, params: Params, eos_ids: frozenset[int], answer_format: AnswerFormat
    ) -> AnswerConstraint | None:
        """Return the constraint of an answer after ``prompt_length`` tokens; None if nothing is constrained."""
        from ovspec.sampling.answer_constraint import AnswerConstraint  # deferred, because it imports llguidance

        grammar = convert_answer_grammar(params, answer_format)
        end_ids = self._grammar_end_ids(params, eos_ids)
        thinking = answer_format.thinking_format
        thinking_budget = params.thinking_budget if thinking else None
        make_grammar_constraint = None
        if grammar is not None:
            make_grammar_constraint = functools.partial(self._make_grammar_constraint, grammar, end_ids)
        elif params.grammar_option or (thinking_budget is None and not params.tools):
            return None
        return AnswerConstraint(
            prompt_length,
            answer_format,
            self.vocabulary_index,
            make_grammar_constraint,
            covers_text=grammar is not None and not answer_format.calls_after_text,
            end_ids=end_ids,
            thinking_budget=thinking_budget,
            thinking_end_ids=self._tokenizer.encode_continuation(thinking.close_tag).tolist() if thinking else (),
        )

    def _make_grammar_constraint(
        self, grammar: str, end_ids: frozenset[int], prompt_length: int, generated_parts: list[bytes | int]
    ) -> GrammarConstraint:
        return self.grammar_compiler.make_constraint(
            grammar, prompt_length, end_ids, generated_parts=generated_parts, grammar_name="grammar of the tools"
        )

    def unquoted_arguments(self, params: Params, answer_format: AnswerFormat) -> dict[str, list[str]]:
        """Return for each tool the arguments written without quotes."""
        if not (answer_format.tool_format and answer_format.tool_format.parameters):
            return {}
        from ovspec.sampling.tool_grammar import TEXT_PARAMETERS_KEY  # deferred, because it imports llguidance

        return json.loads(convert_answer_grammar(params, answer_format) or "{}").get(TEXT_PARAMETERS_KEY, {})

    def check_requested_grammar(self, params: Params) -> None:
        """Raise OvspecError if the grammar in ``params`` is invalid."""
        grammar, grammar_name = convert_requested_grammar(params)
        if grammar is not None:
            self.grammar_compiler.make_constraint(grammar, 0, frozenset(), grammar_name=grammar_name)

    def _find_grammar_prompt(self, prompt: np.ndarray, constrain_from: int | str) -> bytes:
        """Return the bytes of the prompt from ``constrain_from`` on, the part inside the grammar's text."""
        prompt_bytes = self.vocabulary_index.join_bytes(prompt)
        prompt_text = prompt_bytes.decode("utf-8", "replace")
        match constrain_from:
            case str():
                if not constrain_from or constrain_from not in prompt_text:
                    raise OvspecError(f"`constrain_from` is {constrain_from!r}; it must be a part of the prompt.")
                character_index = prompt_text.rfind(constrain_from)
            case int():
                character_index = constrain_from if constrain_from >= 0 else len(prompt_text) + constrain_from
                if not 0 <= character_index <= len(prompt_text):
                    raise OvspecError(
                        f"`constrain_from` is {constrain_from}, but the prompt has only {len(prompt_text)} characters; "
                        f"choose a number from {-len(prompt_text)} to {len(prompt_text)}."
                    )
            case _:
                raise OvspecError(
                    f"`constrain_from` is {constrain_from!r}; it must be a part of the prompt, or a number of "
                    "characters."
                )
        return prompt_bytes[len(prompt_text[:character_index].encode()) :]
