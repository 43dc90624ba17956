"""Makes the constraints of a row from the params of its call."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_json
from ovspec.params import Params
from ovspec.sampling.constraint import Constraint, Constraints
from ovspec.sampling.healing import ByteTokens, Healing, healable
from ovspec.sampling.judging import schema_errors
from ovspec.sampling.processors import PromptLength, processing
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import TOKENIZER_FILE

if TYPE_CHECKING:
    from ovspec.sampling.grammar_constraint import Grammars


class ConstraintMaker:
    """Makes constraints for one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @functools.cached_property
    def tokens(self) -> ByteTokens:
        """The tokens by their bytes; raises OvspecError if the vocabulary doesn't map tokens to bytes."""
        if not self._tokenizer.vocabulary:
            why = "its tokenizer does not map tokens to bytes one by one, which grammars and token healing need"
            raise OvspecError(f"{self._tokenizer.folder}: {why}.")
        return ByteTokens(self._tokenizer.vocabulary)

    @functools.cached_property
    def grammars(self) -> Grammars:
        from ovspec.sampling.grammar_constraint import Grammars  # deferred, because it imports llguidance

        return Grammars(read_json(self._tokenizer.folder / TOKENIZER_FILE), list(self.tokens.vocabulary))

    def make(
        self, tokens: np.ndarray, params: Params, eos: frozenset[int], bos: np.ndarray, healable_from: int = 0
    ) -> tuple[Constraints, Healing | None]:
        """Return the constraints of the text after a prompt, and the healing of the prompt's end, if there is any.

        Args:
            tokens: (n,) int64, the prompt's.
            eos: ids that end the text, besides ``params.stop_ids``.
            bos: (n,) int64, replaces a prompt that is taken back entirely; empty if that isn't possible.
            healable_from: position of the first token that healing may take back.

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
        if grammar is not None:
            # A stop id that spells text is an ordinary token to the grammar, and doesn't end it.
            spelt = self.tokens.vocabulary
            stops = {token for token in params.stop_ids if not (token < len(spelt) and spelt[token])}
            masks.append(self.grammars.constraint(grammar, start, eos | stops, tail, healed, name))
        prompt_length: PromptLength = healing.prompt_length if healing else lambda _: start
        processors = processing(params, prompt_length, ends, params.logits_processors)
        excludes = bool(params.logits_processors) or -math.inf in params.logit_bias.values()
        made = Constraints([*processors, *masks], ends, params.logprobs is not None or excludes)
        if params.json_schema_mode == "checked":
            made.judge = functools.partial(schema_errors, readable("json_schema", params.json_schema), tail.decode())
        return made, healing

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


def grammar_of(params: Params) -> tuple[str | None, str]:
    """Return (the requested grammar in llguidance's notation, its name in messages), or (None, "").

    Raises:
        OvspecError: it is wrong.
    """
    if not (name := params.grammar_option):
        return None, ""
    from ovspec.grammars.conversion import converted

    given = getattr(params, name)
    value = readable(name, given)
    what = f"`{name}` {value}" if isinstance(value, Path) else f"`{name}`"
    if name != "json_schema":
        return converted(name, value, what), what
    more = params.additional_properties
    if more is None and not isinstance(given, (dict, bool, str, Path)):
        more = False  # a Python type has the fields it has
    reading = {
        "lenient": params.json_schema_mode == "checked",
        "close": None if more is None else not more,
        "compact": bool(params.compact_json),
    }
    return converted(name, value, what, **reading), what


def readable(name: str, value: Any) -> Any:
    """Return the value of a grammar option as ``converted`` takes it; raises OvspecError if it is of another kind."""
    if isinstance(value, Path):
        if value.is_dir():
            raise OvspecError(f"{value} is a folder; name a file.")
        if name in ("json_schema", "grammar", "gbnf"):
            return value
    if name == "json_schema":
        if value is not None and not isinstance(value, (dict, bool, str)):
            return schema_of_type(value)
        if isinstance(value, str) and not value.lstrip().startswith(("{", "[", '"', "true", "false")):
            raise OvspecError(f"`{name}` {value[:80]!r} isn't JSON; give the schema's text, or a Path for a file.")
        return value
    if name == "choice":
        listed: Any = value if isinstance(value, Iterable) and not isinstance(value, str) else ()
        texts = list(listed)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise OvspecError("`choice` must be a list of texts with at least one entry.")
        return texts
    if name == "regex" and isinstance(value, Path):
        return str(value)
    if not isinstance(value, str):
        raise OvspecError(f"`{name}` must be a string or a Path, not {type(value).__name__}.")
    if name != "regex" and ":" not in value:
        raise OvspecError(f"`{name}` {value[:80]!r} isn't a grammar; give its text, or a Path for a file.")
    return value


def schema_of_type(value: Any) -> Any:
    """Return the JSON schema of a pydantic model or of another type that pydantic knows, such as list[str]."""
    from pydantic import PydanticUserError, TypeAdapter  # deferred, because few need it

    try:
        made = getattr(value, "model_json_schema", None)
        return made() if made else TypeAdapter(value).json_schema()
    except PydanticUserError as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise OvspecError(f"`json_schema` {value!r:.80} has no JSON schema: {why}.") from None
