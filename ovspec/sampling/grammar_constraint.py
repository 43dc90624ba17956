"""Constrains a text to a grammar, with llguidance (https://github.com/guidance-ai/llguidance).

If only one text can follow, the mask has a single token, from the tokenizer's own spelling of that text, which can be
committed without running a model.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ovspec.base.errors import OvspecError
from ovspec.cache.sequence import Sequence
from ovspec.grammars.sources import LARK_TOKEN, PARSER_LIMITS, UNIQUE_ITEMS_KEY
from ovspec.grammars.tools import TEXT_PARAMETERS_KEY, TOKEN_NAMES_KEY
from ovspec.grammars.wording import word_llguidance_error
from ovspec.sampling.constraint import Constraint
from ovspec.sampling.masks import holds, pack
from ovspec.sampling.unique_items import Following, JsonCursor, Tracks, UniqueItems
from ovspec.text.tokenizer_files import TOKENIZER_FILE

UNUSABLE = "This model's tokenizer can't be used with grammars"
CACHED_GRAMMARS = 32
# The number of last positions whose matchers are cached; a proposal is rarely longer.
CACHED_POSITIONS = 32


@dataclass(slots=True)
class Position:
    """What is known about a position in the text; ``matcher`` has consumed all tokens before it."""

    matcher: LLMatcher | None = None
    mask: np.ndarray | None = None
    forced: list[int] | None = None
    cursor: JsonCursor | None = None  # kept for all positions, if items must differ


class Grammar(Constraint):
    """Keeps the text after the prompt within a grammar.

    Matchers are copied, which takes a few microseconds, and never rolled back: after a ``rollback``, llguidance 1.9.1
    may use what it cached for the removed tokens, and then allow what the grammar doesn't.

    Args:
        matcher: a matcher in the state in which the generated text begins, after ``start`` tokens of prompt.
        ends: ids that end the text when the grammar is satisfied; the matcher's own end id is ``own_end``.
        size: size of the vocabulary.
        unique: keeps items of arrays different, where they must be, from the given place on.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        start: int,
        ends: frozenset[int],
        own_end: int,
        size: int,
        unique: tuple[UniqueItems, JsonCursor] | None = None,
    ) -> None:
        self._start, self._ends, self._size = start, ends, size
        self._unique = unique[0] if unique else None
        self._no_end = ~pack([own_end], size)
        self._end = pack([token for token in ends if token < size], size)
        self._path = Sequence()  # tokens that the grammar is known to allow
        first = Position(matcher, cursor=unique[1] if unique else None)
        self._positions = [first]  # one more than there are tokens

    def mask(self, tokens: np.ndarray) -> np.ndarray:
        at = self._seek(tokens)
        position = self._positions[at]
        if position.mask is None:
            forced = self._forced(at)
            position.mask = pack(forced[:1], self._size) if forced else self._computed(self._matcher(at), position)
        return position.mask

    def allows(self, token: int, tokens: np.ndarray) -> bool:
        at = self._seek(tokens)
        if at < len(self._path) and token == self._path.tokens[at]:
            return True
        if self._repeats(at, token):
            return False
        if self._positions[at].mask is None:
            if forced := self._forced(at):
                return token == forced[0]
            matcher = self._matcher(at)
            if token in self._ends:
                return matcher.is_accepting()
            # If bytes are forced but their spelling in tokens isn't, the mask is stricter than this.
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
            if self._unique and position.forced:
                position.forced = self._different(at, position.forced)
        return position.forced

    def _repeats(self, at: int, token: int) -> bool:
        """Return whether ``token`` leads to nothing but an item again that must differ."""
        cursor = self._positions[at].cursor
        if not (self._unique and cursor) or not any(each.seen for each in cursor.opened):
            return False
        return bool(self._unique.forbidden(cursor, [token], self._following(self._matcher(at))))

    def _following(self, matcher: LLMatcher) -> Following:
        def following(token: int) -> tuple[list[int], Following]:
            after = matcher.deep_copy()
            if not after.consume_token(token):
                return [], following
            bits = np.unpackbits(self._allowed(after), bitorder="little")
            return np.flatnonzero(bits).tolist(), self._following(after)

        return following

    def _different(self, at: int, tokens: list[int]) -> list[int]:
        """Return ``tokens`` up to the first that would write an item again."""
        assert self._unique
        cursor = self._positions[at].cursor
        for count, token in enumerate(tokens):
            cursor = self._unique.after(cursor, token) if cursor else None
            if not cursor:
                return tokens[:count]
        return tokens

    def _computed(self, matcher: LLMatcher, position: Position) -> np.ndarray:
        mask = self._allowed(matcher)
        if self._unique and position.cursor and any(each.seen for each in position.cursor.opened):
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            suspects = self._unique.suspects(position.cursor, allowed)
            forbidden = self._unique.forbidden(position.cursor, suspects, self._following(matcher))
            mask = mask & ~pack(forbidden, self._size)
        if not mask.any() and not matcher.is_stopped():
            raise OvspecError("No token of this model can continue the text within the grammar.")
        return mask

    def _allowed(self, matcher: LLMatcher) -> np.ndarray:
        words = np.empty(-(-self._size // 32), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        check_state(matcher)
        mask = words.view(np.uint8)[: len(self._end)] & self._no_end
        if matcher.is_accepting():
            mask |= self._end
        return mask

    def _seek(self, tokens: np.ndarray) -> int:
        """Follow ``tokens``; return how many of them come after the prompt."""
        text = tokens[self._start :]
        shared = self._path.common_prefix_length(text)
        if shared < len(text):
            self._path.rewind(shared)
            self._path.commit(text[shared:])
            del self._positions[shared + 1 :]
            self._positions += [Position() for _ in text[shared:]]
            self._matcher(len(text))  # raises if the grammar doesn't allow them
            for at in range(shared, len(text) if self._unique else 0):
                cursor = self._positions[at].cursor
                after = self._unique.after(cursor, int(text[at])) if self._unique and cursor else None
                if cursor and not after:
                    raise OvspecError("The text repeats an item of an array whose items must differ.")
                self._positions[at + 1].cursor = after
        return len(text)

    def _matcher(self, at: int) -> LLMatcher:
        """Return the matcher at a position, copied from the nearest one before it; the first and last are cached."""
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
    """Raise OvspecError if the matcher has failed; it never recovers from that."""
    if matcher.is_error():
        raise OvspecError(f"The grammar can't be followed any further: {word_llguidance_error(matcher.get_error())}")


class Grammars:
    """Compiles grammars for a model's ``tokenizer.json``; ``vocabulary`` has the bytes that each id adds to a text."""

    def __init__(self, tokenizer_json: dict[str, Any], vocabulary: list[bytes | None]) -> None:
        self._size = len(vocabulary)
        # As Lark writes them, such as <|im_end|>. <[INST]> can't be written, because brackets hold token ids.
        names = ((token["content"], token["id"]) for token in special_tokens(tokenizer_json))
        self._added = {token["content"]: token["id"] for token in tokenizer_json.get("added_tokens", [])}
        self._special = {f"<{name.removeprefix('<').removesuffix('>')}>": number for name, number in names}
        self._own_end, self._tokens = grammar_tokenizer(tokenizer_json, self._size)
        self._vocabulary = vocabulary
        # Threads share what it returns, so a matcher is copied before it moves.
        self._compiled = functools.lru_cache(CACHED_GRAMMARS)(self._compile)

    def constraint(
        self,
        grammar: str,
        start: int,
        ends: frozenset[int],
        inside: bytes = b"",
        healed: bytes = b"",
        what: str = "grammar",
        begun: abc.Sequence[bytes | int] = (),
    ) -> Grammar:
        """Return the constraint that keeps the text after ``start`` tokens of prompt within ``grammar``.

        Args:
            grammar: a grammar made by ``grammars.conversion``.
            ends: ids that end the text.
            inside: bytes of the prompt that belong to the grammar's text.
            healed: bytes of the tokens that were taken back from the prompt. They are the end of ``inside`` if that is
                given; otherwise the text begins with them, and the grammar's text follows.
            what: the grammar's name in errors.
            begun: what of the grammar's text was generated before ``start``: bytes, and ids of tokens.
        """
        matcher, unique = self._compiled(grammar, what)
        cursor: JsonCursor | None = JsonCursor()
        if begun:
            matcher = matcher.deep_copy()
            for part in begun:
                tokens = self._tokens.tokenize_bytes(part) if isinstance(part, bytes) else [part]
                if matcher.try_consume_tokens(tokens) < len(tokens):
                    raise OvspecError(f"The {what} doesn't allow what was generated.")
                if unique and cursor and isinstance(part, bytes):
                    cursor = unique.follow(cursor, part)
        if inside:
            self._follow(matcher.deep_copy(), inside)  # all of it must fit
            matcher, before = matcher.deep_copy(), inside[: len(inside) - len(healed)]
            self._follow(matcher, before)
            cursor = unique.follow(JsonCursor(), before) if unique else None
        elif healed:
            matcher, _ = self._compiled(prefixed(grammar, healed), what)
            cursor = JsonCursor(skip=len(healed))
        if unique and not cursor:
            raise OvspecError("The prompt repeats an item of an array whose items must differ.")
        pair = (unique, cursor) if unique and cursor else None
        return Grammar(matcher.deep_copy(), start, ends, self._own_end, self._size, pair)

    def _compile(self, grammar: str, what: str) -> tuple[LLMatcher, UniqueItems | None]:
        text, tracks = with_numbers(grammar, self._special, self._added)
        matcher = LLMatcher(self._tokens, text, log_level=0, limits=PARSER_LIMITS)
        if matcher.is_error():
            raise OvspecError(f"{what}: {word_llguidance_error(matcher.get_error())}")
        return matcher, UniqueItems(tracks, self._vocabulary) if tracks else None

    def _follow(self, matcher: LLMatcher, text: bytes) -> None:
        """Consume the grammar's text that is in the prompt; raise OvspecError if the grammar doesn't allow it."""
        tokens = self._tokens.tokenize_bytes(text)
        count = matcher.try_consume_tokens(tokens)
        if count < len(tokens):
            before, rest = (self._tokens.decode_str(part) for part in (tokens[:count], tokens[count:]))
            where = f"after {before[-40:]!r}" if before else "where the grammar begins"
            raise OvspecError(f"The grammar doesn't allow this part of the prompt: {rest[:20]!r} {where}.")
        if matcher.is_stopped():
            raise OvspecError("The prompt already contains the grammar's whole text, so nothing can follow it.")


def prefixed(grammar: str, prefix: bytes) -> str:
    """Return the grammar of ``prefix``, which must be UTF-8, followed by a text of ``grammar``."""
    whole = json.loads(grammar)
    first, *others = whole["grammars"]
    outer = {"lark_grammar": f"start: PREFIX @after_prefix\nPREFIX: {json.dumps(prefix.decode())}"}
    return json.dumps({**whole, "grammars": [outer, {**first, "name": "after_prefix"}, *others]})


def grammar_tokenizer(tokenizer_json: dict[str, Any], size: int) -> tuple[int, LLTokenizer]:
    """Return (the matcher's end id, llguidance's tokenizer) for a model's ``tokenizer.json``.

    Special tokens get names that no grammar can spell, so a text that looks like one is spelt in ordinary tokens.
    """
    mark = secrets.token_hex(8)
    names = {token["content"]: f"\0{mark} {token['id']}\0" for token in special_tokens(tokenizer_json)}
    added: list[dict[str, Any]] = tokenizer_json.get("added_tokens", [])
    own_end = next((token["id"] for token in added if token.get("special")), None)
    if own_end is None:
        raise OvspecError("This model's tokenizer has no special token that could end a text, which a grammar needs.")
    model: Any = tokenizer_json.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        raise OvspecError(f"{UNUSABLE}: its {TOKENIZER_FILE} doesn't map tokens to ids; export the model again.")
    renamed = {
        **tokenizer_json,
        "added_tokens": [renamed_token(token, names) for token in added],
        "model": {**model, "vocab": {names.get(piece, piece): index for piece, index in vocab.items()}},
        "post_processor": None,
    }
    try:
        return own_end, LLTokenizer(json.dumps(renamed), n_vocab=size, eos_token=own_end)
    except BaseException as error:
        # A panic in Rust isn't an Exception, and its type can't be imported.
        if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            raise OvspecError(f"{UNUSABLE}: {str(error)[:300]}.") from None
        raise


def renamed_token(token: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    name = names.get(token["content"])
    return {**token, "content": name, "special": True} if name else token


def special_tokens(tokenizer_json: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that are no text to llguidance: the special ones, and added ones that look like <tags>."""
    added = tokenizer_json.get("added_tokens", [])
    return [token for token in added if token.get("special") or re.fullmatch("(?s)<.*>", token["content"])]


def with_numbers(grammar: str, special: dict[str, int], added: dict[str, int]) -> tuple[str, Tracks | None]:
    """Return a grammar that refers to special tokens by id, because ``grammar_tokenizer`` has renamed them.

    What it says of different items comes apart from it.

    Args:
        special, added: ids of special tokens by their names in Lark, and of all added tokens by their texts.
    """

    def numbered(found: re.Match[str]) -> str:
        return f"<[{special[found[0]]}]>" if found[0] in special else found[0]

    whole = json.loads(grammar)
    tracks = whole.pop(UNIQUE_ITEMS_KEY, None)
    special = special | {name: added[text] for name, text in whole.pop(TOKEN_NAMES_KEY, {}).items()}
    whole.pop(TEXT_PARAMETERS_KEY, None)
    for part in whole["grammars"]:
        if part.get("lark_grammar"):
            part["lark_grammar"] = LARK_TOKEN.sub(numbered, part["lark_grammar"])
    return json.dumps(whole), tracks
