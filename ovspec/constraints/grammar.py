"""A grammar that the text must follow, by llguidance (https://github.com/guidance-ai/llguidance).

Where only one text can follow, the mask has a single token, the tokenizer's own spelling, which can be committed
without asking any model.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ovspec.constraints.base import Constraint
from ovspec.constraints.masks import holds, pack
from ovspec.decoders.sequence import Sequence
from ovspec.errors import OvspecError
from ovspec.grammars.check import LIMITS, check, plain
from ovspec.grammars.sources import LARK

CACHED_GRAMMARS = 32
# The last positions of a text whose matchers are cached; a proposal is hardly longer.
CACHED_POSITIONS = 32


@dataclass(slots=True)
class Position:
    """What is known of a position in the text; ``matcher`` has consumed all before it."""

    matcher: LLMatcher | None = None
    mask: np.ndarray | None = None
    forced: list[int] | None = None


class Grammar(Constraint):
    """Follows the text after the prompt.

    Matchers only go forward and are copied, which takes a few microseconds: after a ``rollback``, llguidance 1.9.1 may
    use what it cached for the tokens that were taken back, and then allows what the grammar doesn't.

    Args:
        matcher: where the text goes on, behind ``start`` tokens of prompt.
        ends: ids that end the text where the grammar is satisfied; ``own_end`` does so for the matcher.
        size: of the vocabulary.
    """

    def __init__(self, matcher: LLMatcher, start: int, ends: frozenset[int], own_end: int, size: int) -> None:
        self._start, self._ends, self._size = start, ends, size
        self._no_end = ~pack([own_end], size)
        self._end = pack([token for token in ends if token < size], size)
        self._path = Sequence()  # tokens that the grammar is known to allow
        self._positions = [Position(matcher)]  # one more than tokens

    def mask(self, tokens: np.ndarray) -> np.ndarray:
        at = self._seek(tokens)
        position = self._positions[at]
        if position.mask is None:
            forced = self._forced(at)
            position.mask = pack(forced[:1], self._size) if forced else self._computed(self._matcher(at))
        return position.mask

    def allows(self, token: int, tokens: np.ndarray) -> bool:
        at = self._seek(tokens)
        if at < len(self._path) and token == self._path.tokens[at]:
            return True
        if self._positions[at].mask is None:
            if forced := self._forced(at):
                return token == forced[0]
            matcher = self._matcher(at)
            if token in self._ends:
                return matcher.is_accepting()
            # Where bytes are forced but not how they are spelt, the mask is the stricter one.
            if not matcher.compute_ff_bytes():
                return matcher.validate_tokens([token]) == 1
        return holds(self.mask(tokens), token)

    def forced(self, tokens: np.ndarray) -> list[int]:
        return self._forced(self._seek(tokens))

    def complete(self, tokens: np.ndarray) -> bool:
        return self._matcher(self._seek(tokens)).is_stopped()

    def _forced(self, at: int) -> list[int]:
        position = self._positions[at]
        if position.forced is None:
            position.forced = self._matcher(at).compute_ff_tokens()
        return position.forced

    def _computed(self, matcher: LLMatcher) -> np.ndarray:
        words = np.empty(-(-self._size // 32), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        check_state(matcher)
        mask = words.view(np.uint8)[: len(self._end)] & self._no_end
        if matcher.is_accepting():
            mask |= self._end
        if not mask.any() and not matcher.is_stopped():
            raise OvspecError("No token of this model can go on in the grammar here.")
        return mask

    def _seek(self, tokens: np.ndarray) -> int:
        """Follow ``tokens``; returns how many of them come after the prompt."""
        text, path = tokens[self._start :], self._path.tokens
        shared = min(len(text), len(path))
        differ = text[:shared] != path[:shared]
        if differ.any():
            shared = int(differ.argmax())
        if shared < len(text):
            self._path.rewind(shared)
            self._path.commit(text[shared:])
            del self._positions[shared + 1 :]
            self._positions += [Position() for _ in text[shared:]]
            self._matcher(len(text))  # raises where the grammar doesn't allow it
        return len(text)

    def _matcher(self, at: int) -> LLMatcher:
        """The matcher at a position, copied from the nearest one before it; the first and the last ones are cached."""
        position = self._positions[at]
        if position.matcher is None:
            before = next(i for i in range(at - 1, -1, -1) if self._positions[i].matcher)
            known = self._positions[before].matcher
            assert known
            matcher = known.deep_copy()
            if not matcher.consume_tokens(self._path.tokens[before:at].tolist()):
                check_state(matcher)
            position.matcher = matcher
            for old in self._positions[max(1, at - 2 * CACHED_POSITIONS) : max(1, at - CACHED_POSITIONS)]:
                old.matcher = old.mask = None
        return position.matcher


def check_state(matcher: LLMatcher) -> None:
    """Raises OvspecError where it has given up, which it never recovers from."""
    if matcher.is_error():
        raise OvspecError(f"The grammar can't be followed any further: {plain(matcher.get_error())}")


class Grammars:
    """Compiles grammars for a model's ``tokenizer.json``; ``vocabulary`` is what each id adds to a text."""

    def __init__(self, tokenizer_json: dict[str, Any], vocabulary: list[bytes | None]) -> None:
        self._size = len(vocabulary)
        # As Lark writes them: <|im_end|>. <[INST]> can't be written, because brackets hold numbers.
        names = ((token["content"], token["id"]) for token in special_tokens(tokenizer_json))
        self._special = {f"<{name.removeprefix('<').removesuffix('>')}>": number for name, number in names}
        self._own_end, self._tokens = grammar_tokenizer(tokenizer_json, self._size)
        self._compiled: dict[str, LLMatcher] = {}

    def constraint(
        self,
        grammar: str,
        start: int,
        ends: frozenset[int],
        inside: bytes = b"",
        healed: bytes = b"",
        what: str = "grammar",
    ) -> Grammar:
        """What keeps the text after ``start`` tokens of prompt in ``grammar``.

        Args:
            grammar: as ``sources`` makes it.
            ends: ids that end the text.
            inside: bytes of the prompt that belong to the grammar's text.
            healed: bytes of the tokens that were taken back from the prompt, the end of ``inside`` if there is any;
                else the text begins with them, and then the grammar's.
            what: names the grammar in errors.
        """
        matcher = self._compile(grammar, what)
        if inside:
            self._follow(matcher.deep_copy(), inside)  # all of it must fit
            matcher = matcher.deep_copy()
            self._follow(matcher, inside[: len(inside) - len(healed)])
        elif healed:
            matcher = self._compile(prefixed(grammar, healed), what, checked=True)
        return Grammar(matcher.deep_copy(), start, ends, self._own_end, self._size)

    def _compile(self, grammar: str, what: str, checked: bool = False) -> LLMatcher:
        if grammar not in self._compiled:
            if not checked:
                check(grammar, what)
            matcher = LLMatcher(self._tokens, with_numbers(grammar, self._special), log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise OvspecError(f"{what}: {plain(matcher.get_error())}")
            self._compiled[grammar] = matcher
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.pop(next(iter(self._compiled)))
        return self._compiled[grammar]

    def _follow(self, matcher: LLMatcher, text: bytes) -> None:
        """Consume what the prompt has of the text; raises OvspecError where the grammar doesn't allow it."""
        tokens = self._tokens.tokenize_bytes(text)
        count = matcher.try_consume_tokens(tokens)
        if count < len(tokens):
            before, rest = (self._tokens.decode_str(part) for part in (tokens[:count], tokens[count:]))
            where = f"behind {before[-40:]!r}" if before else "where the grammar begins"
            raise OvspecError(f"The grammar doesn't allow what the prompt has: {rest[:20]!r} {where}.")
        if matcher.is_stopped():
            raise OvspecError("The prompt has the grammar's whole text already: nothing can follow it.")


def prefixed(grammar: str, prefix: bytes) -> str:
    """The grammar of ``prefix``, which must be UTF-8, and then a text of ``grammar``."""
    whole = json.loads(grammar)
    first, *others = whole["grammars"]
    outer = {"lark_grammar": f"start: PREFIX @after_prefix\nPREFIX: {json.dumps(prefix.decode())}"}
    return json.dumps({**whole, "grammars": [outer, {**first, "name": "after_prefix"}, *others]})


def grammar_tokenizer(tokenizer_json: dict[str, Any], size: int) -> tuple[int, LLTokenizer]:
    """(the id that stands for the end, llguidance's tokenizer) for a model's ``tokenizer.json``.

    Special tokens get names that no grammar can spell: a text that looks like one is spelt out in ordinary tokens.
    """
    mark = secrets.token_hex(8)
    added, special = tokenizer_json.get("added_tokens", []), special_tokens(tokenizer_json)
    names = {token["content"]: f"\0{mark} {token['id']}\0" for token in special}
    if not names:
        raise OvspecError("This model's tokenizer has no special token that could end a text, which a grammar needs.")
    model = tokenizer_json["model"]
    renamed = {
        **tokenizer_json,
        "added_tokens": [{**token, "content": names.get(token["content"], token["content"])} for token in added],
        "model": {**model, "vocab": {names.get(piece, piece): index for piece, index in model["vocab"].items()}},
        "post_processor": None,
    }
    own_end = special[0]["id"]
    try:
        return own_end, LLTokenizer(json.dumps(renamed), n_vocab=size, eos_token=own_end)
    except ValueError as error:
        raise OvspecError(f"This model's tokenizer can't be used with grammars: {error}.") from None


def special_tokens(tokenizer_json: dict[str, Any]) -> list[dict[str, Any]]:
    return [token for token in tokenizer_json.get("added_tokens", []) if token.get("special")]


def with_numbers(grammar: str, special: dict[str, int]) -> str:
    """A grammar that refers to special tokens by number, because they have lost their names."""

    def numbered(found: re.Match[str]) -> str:
        return f"<[{special[found[0]]}]>" if found[0] in special else found[0]

    whole = json.loads(grammar)
    for part in whole["grammars"]:
        if part.get("lark_grammar"):
            part["lark_grammar"] = LARK.sub(numbered, part["lark_grammar"])
    return json.dumps(whole)
