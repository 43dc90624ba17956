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

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.cache.sequence import Sequence
from ovspec.grammars.sources import LARK_TOKEN, PARSER_LIMITS, UNIQUE_ITEMS_KEY
from ovspec.grammars.wording import word_llguidance_error
from ovspec.sampling.constraint import Constraint
from ovspec.sampling.masks import mask_contains, pack_mask
from ovspec.sampling.tool_grammar import TEXT_PARAMETERS_KEY, TOKEN_NAMES_KEY
from ovspec.sampling.unique_items import Following, JsonCursor, Tracks, UniqueItems
from ovspec.text.tokenizer_files import TOKENIZER_FILE

UNUSABLE = "This model's tokenizer can't be used with grammars"
CACHED_GRAMMARS = 32
# The number of last positions whose matchers are cached; a proposal is rarely longer.
CACHED_POSITIONS = 32


@dataclass(slots=True)
class PositionCache:
    """Cached facts about a position in the text; ``matcher`` has consumed all tokens before it."""

    matcher: LLMatcher | None = None
    mask: np.ndarray | None = None
    forced: list[int] | None = None
    cursor: JsonCursor | None = None  # kept for all positions, if items must differ


class GrammarConstraint(Constraint):
    """Keeps the text after the prompt within a grammar.

    Matchers are copied, which takes a few microseconds, and never rolled back: after a ``rollback``, llguidance 1.9.1
    may use cached facts about the removed tokens, and then allow tokens that the grammar doesn't.

    Args:
        matcher: a matcher in the state in which the generated text begins, after ``start`` tokens of prompt.
        end_ids: ids that end the text when the grammar is satisfied; the matcher's own end id is ``matcher_end_id``.
        size: size of the vocabulary.
        unique_items: keeps items of arrays different, where they must be.
        cursor: the position in the JSON text, if ``unique_items`` is given.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        start: int,
        end_ids: frozenset[int],
        matcher_end_id: int,
        size: int,
        unique_items: UniqueItems | None = None,
        cursor: JsonCursor | None = None,
    ) -> None:
        self._start = start
        self._end_ids = end_ids
        self._size = size
        self._unique_items = unique_items
        self._without_matcher_end = ~pack_mask([matcher_end_id], size)
        self._end_mask = pack_mask([token for token in end_ids if token < size], size)
        self._followed = Sequence()  # tokens that the grammar is known to allow
        self._positions = [PositionCache(matcher, cursor=cursor)]  # one more than there are tokens

    def token_mask(self, tokens: np.ndarray) -> np.ndarray:
        index = self._follow_tokens(tokens)
        position = self._positions[index]
        if position.mask is None:
            if forced := self._forced_at(index):
                position.mask = pack_mask(forced[:1], self._size)
            else:
                position.mask = self._compute_mask(self._matcher_at(index), position)
        return position.mask

    def allows_token(self, token: int, tokens: np.ndarray) -> bool:
        index = self._follow_tokens(tokens)
        if index < len(self._followed) and token == self._followed.tokens[index]:
            return True
        if self._leads_to_repeat(index, token):
            return False
        if self._positions[index].mask is None:
            if forced := self._forced_at(index):
                return token == forced[0]
            matcher = self._matcher_at(index)
            if token in self._end_ids:
                return matcher.is_accepting()
            # If bytes are forced but their spelling in tokens isn't, the mask is stricter than this.
            if not matcher.compute_ff_bytes():
                return matcher.validate_tokens([token]) == 1
        return mask_contains(self.token_mask(tokens), token)

    def forced_tokens(self, tokens: np.ndarray) -> list[int]:
        return self._forced_at(self._follow_tokens(tokens))

    def is_complete(self, tokens: np.ndarray) -> bool:
        return self._matcher_at(self._follow_tokens(tokens)).is_stopped()

    def _forced_at(self, index: int) -> list[int]:
        """Return the ids that must follow at a position."""
        position = self._positions[index]
        if position.forced is None:
            position.forced = self._matcher_at(index).compute_ff_tokens()
            if position.forced:
                position.forced = self._cut_before_repeat(index, position.forced)
        return position.forced

    def _leads_to_repeat(self, index: int, token: int) -> bool:
        """Return whether ``token`` can only lead to an item that an array has already and must not have again."""
        cursor = self._positions[index].cursor
        if not (self._unique_items and cursor) or not has_items(cursor):
            return False
        return bool(self._unique_items.forbidden(cursor, [token], self._allowed_after(self._matcher_at(index))))

    def _allowed_after(self, matcher: LLMatcher) -> Following:
        """Return a function of a token that returns the tokens allowed after it, and this function for that place."""

        def allowed_after(token: int) -> tuple[list[int], Following]:
            after = matcher.deep_copy()
            if not after.consume_token(token):
                return [], allowed_after
            bits = np.unpackbits(self._allowed_mask(after), bitorder="little")
            return np.flatnonzero(bits).tolist(), self._allowed_after(after)

        return allowed_after

    def _cut_before_repeat(self, index: int, tokens: list[int]) -> list[int]:
        """Return ``tokens`` up to the first that would write an item again."""
        if not self._unique_items:
            return tokens
        cursor = self._positions[index].cursor
        for count, token in enumerate(tokens):
            cursor = cursor and self._unique_items.after(cursor, token)
            if not cursor:
                return tokens[:count]
        return tokens

    def _compute_mask(self, matcher: LLMatcher, position: PositionCache) -> np.ndarray:
        mask = self._allowed_mask(matcher)
        if self._unique_items and position.cursor and has_items(position.cursor):
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            suspects = self._unique_items.suspects(position.cursor, allowed)
            forbidden = self._unique_items.forbidden(position.cursor, suspects, self._allowed_after(matcher))
            mask = mask & ~pack_mask(forbidden, self._size)
        if not mask.any() and not matcher.is_stopped():
            raise OvspecError("No token of this model can continue the text within the grammar.")
        return mask

    def _allowed_mask(self, matcher: LLMatcher) -> np.ndarray:
        """Return the mask of a matcher, with the end ids in place of its own."""
        words = np.empty(-(-self._size // 32), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        raise_if_failed(matcher)
        mask = words.view(np.uint8)[: len(self._end_mask)] & self._without_matcher_end
        if matcher.is_accepting():
            mask |= self._end_mask
        return mask

    def _follow_tokens(self, tokens: np.ndarray) -> int:
        """Follow ``tokens``; return the index of the position after them, which is their number after the prompt."""
        text = tokens[self._start :]
        shared_length = self._followed.common_prefix_length(text)
        if shared_length < len(text):
            self._followed.rewind(shared_length)
            self._followed.commit(text[shared_length:])
            del self._positions[shared_length + 1 :]
            self._positions += [PositionCache() for _ in text[shared_length:]]
            self._matcher_at(len(text))  # raises if the grammar doesn't allow the text
            if self._unique_items:
                self._move_cursors(self._unique_items, text, shared_length)
        return len(text)

    def _move_cursors(self, unique_items: UniqueItems, text: np.ndarray, begin: int) -> None:
        """Set the cursors of the positions after ``begin``."""
        for index in range(begin, len(text)):
            cursor = self._positions[index].cursor
            if cursor:
                next_cursor = unique_items.after(cursor, int(text[index]))
                if not next_cursor:
                    raise OvspecError("The text repeats an item of an array whose items must differ.")
                self._positions[index + 1].cursor = next_cursor

    def _matcher_at(self, index: int) -> LLMatcher:
        """Return the matcher at a position, copied from the nearest one before it; the first and last are cached."""
        position = self._positions[index]
        if position.matcher is None:
            nearest = next(i for i in range(index - 1, -1, -1) if self._positions[i].matcher)
            nearest_matcher = self._positions[nearest].matcher
            assert nearest_matcher
            matcher = nearest_matcher.deep_copy()
            if not matcher.consume_tokens(self._followed.tokens[nearest:index].tolist()):
                raise_if_failed(matcher)
            position.matcher = matcher
            oldest_cached = index - CACHED_POSITIONS
            for old in self._positions[max(1, oldest_cached - CACHED_POSITIONS) : max(1, oldest_cached)]:
                old.matcher = None
                old.mask = None
        return position.matcher


def has_items(cursor: JsonCursor) -> bool:
    """Return whether an array whose items must differ is open and has items already."""
    return any(container.seen for container in cursor.opened)


def raise_if_failed(matcher: LLMatcher) -> None:
    """Raise OvspecError if the matcher has failed; it never recovers from that."""
    if matcher.is_error():
        raise OvspecError(f"The grammar can't be followed any further: {word_llguidance_error(matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for a model's ``tokenizer.json``; ``vocabulary`` has the bytes that each id adds to a text."""

    def __init__(self, tokenizer_json: JsonObject, vocabulary: list[bytes | None]) -> None:
        self._size = len(vocabulary)
        self._added_ids = {token["content"]: token["id"] for token in tokenizer_json.get("added_tokens", [])}
        # As Lark writes them, such as <|im_end|>. <[INST]> can't be written, because brackets hold token ids.
        self._ids_by_lark_name = {
            f"<{token['content'].removeprefix('<').removesuffix('>')}>": token["id"]
            for token in find_textless_tokens(tokenizer_json)
        }
        self._matcher_end_id, self._tokenizer = make_grammar_tokenizer(tokenizer_json, self._size)
        self._vocabulary = vocabulary
        # Threads share the compiled matchers, so a matcher is copied before it moves.
        self._compile_cached = functools.lru_cache(CACHED_GRAMMARS)(self._compile)

    def make_constraint(
        self,
        grammar: str,
        start: int,
        end_ids: frozenset[int],
        prompt_part: bytes = b"",
        healed: bytes = b"",
        name: str = "grammar",
        generated: abc.Sequence[bytes | int] = (),
    ) -> GrammarConstraint:
        """Return the constraint that keeps the text after ``start`` tokens of prompt within ``grammar``.

        Args:
            grammar: a grammar made by ``grammar_conversion``.
            end_ids: ids that end the text.
            prompt_part: bytes of the prompt that belong to the grammar's text.
            healed: bytes of the tokens that were taken back from the prompt. They are the end of ``prompt_part`` unless
                that is empty; then the text begins with them, and the grammar's text follows.
            name: the grammar's name in errors.
            generated: the part of the grammar's text that was generated before ``start``: bytes, and ids of tokens.
        """
        matcher, unique_items = self._compile_cached(grammar, name)
        cursor: JsonCursor | None = JsonCursor()
        if generated:
            matcher = matcher.deep_copy()
            for part in generated:
                tokens = self._tokenizer.tokenize_bytes(part) if isinstance(part, bytes) else [part]
                if matcher.try_consume_tokens(tokens) < len(tokens):
                    raise OvspecError(f"The {name} doesn't allow what was generated.")
                if unique_items and cursor and isinstance(part, bytes):
                    cursor = unique_items.follow(cursor, part)
        if prompt_part:
            self._follow_prompt(matcher.deep_copy(), prompt_part)  # all of it must fit
            matcher = matcher.deep_copy()
            unhealed = prompt_part[: len(prompt_part) - len(healed)]
            self._follow_prompt(matcher, unhealed)
            cursor = unique_items and unique_items.follow(JsonCursor(), unhealed)
        elif healed:
            matcher, _ = self._compile_cached(prefix_grammar(grammar, healed), name)
            cursor = JsonCursor(skip=len(healed))
        if unique_items and not cursor:
            raise OvspecError("The prompt repeats an item of an array whose items must differ.")
        return GrammarConstraint(
            matcher.deep_copy(), start, end_ids, self._matcher_end_id, self._size, unique_items, cursor
        )

    def _compile(self, grammar: str, name: str) -> tuple[LLMatcher, UniqueItems | None]:
        text, tracks = replace_names_by_ids(grammar, self._ids_by_lark_name, self._added_ids)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=PARSER_LIMITS)
        if matcher.is_error():
            raise OvspecError(f"{name}: {word_llguidance_error(matcher.get_error())}")
        return matcher, UniqueItems(tracks, self._vocabulary) if tracks else None

    def _follow_prompt(self, matcher: LLMatcher, text: bytes) -> None:
        """Consume the grammar's text that is in the prompt; raise OvspecError if the grammar doesn't allow it."""
        tokens = self._tokenizer.tokenize_bytes(text)
        count = matcher.try_consume_tokens(tokens)
        if count < len(tokens):
            allowed = self._tokenizer.decode_str(tokens[:count])
            wrong = self._tokenizer.decode_str(tokens[count:])
            place = f"after {allowed[-40:]!r}" if allowed else "where the grammar begins"
            raise OvspecError(f"The grammar doesn't allow this part of the prompt: {wrong[:20]!r} {place}.")
        if matcher.is_stopped():
            raise OvspecError("The prompt already contains the grammar's whole text, so nothing can follow it.")


def prefix_grammar(grammar: str, prefix: bytes) -> str:
    """Return the grammar of ``prefix``, which must be UTF-8, followed by a text of ``grammar``."""
    combined = json.loads(grammar)
    first, *others = combined["grammars"]
    prefixed = {"lark_grammar": f"start: PREFIX @after_prefix\nPREFIX: {json.dumps(prefix.decode())}"}
    return json.dumps({**combined, "grammars": [prefixed, {**first, "name": "after_prefix"}, *others]})


def make_grammar_tokenizer(tokenizer_json: JsonObject, size: int) -> tuple[int, LLTokenizer]:
    """Return (the matcher's end id, llguidance's tokenizer) for a model's ``tokenizer.json``.

    Special tokens get names that no grammar can spell, so a text that looks like one is spelt in ordinary tokens.
    """
    mark = secrets.token_hex(8)
    names = {token["content"]: f"\0{mark} {token['id']}\0" for token in find_textless_tokens(tokenizer_json)}
    added: list[JsonObject] = tokenizer_json.get("added_tokens", [])
    end_id = next((token["id"] for token in added if token.get("special")), None)
    if end_id is None:
        raise OvspecError("This model's tokenizer has no special token that could end a text, which a grammar needs.")
    model: JsonValue = tokenizer_json.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        raise OvspecError(f"{UNUSABLE}: its {TOKENIZER_FILE} doesn't map tokens to ids; export the model again.")
    renamed = {
        **tokenizer_json,
        "added_tokens": [rename_token(token, names) for token in added],
        "model": {**model, "vocab": {names.get(piece, piece): token_id for piece, token_id in vocab.items()}},
        "post_processor": None,
    }
    try:
        return end_id, LLTokenizer(json.dumps(renamed), n_vocab=size, eos_token=end_id)
    except BaseException as error:
        # A panic in Rust isn't an Exception, and its type can't be imported.
        if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            raise OvspecError(f"{UNUSABLE}: {str(error)[:300]}.") from None
        raise


def rename_token(token: JsonObject, names: dict[str, str]) -> JsonObject:
    """Return an added token under its name in ``names``, as a special token; unchanged if it has none."""
    name = names.get(token["content"])
    return {**token, "content": name, "special": True} if name else token


def find_textless_tokens(tokenizer_json: JsonObject) -> list[JsonObject]:
    """Return the tokens that are no text to llguidance: special tokens, and added ones that look like <tags>."""
    added = tokenizer_json.get("added_tokens", [])
    return [token for token in added if token.get("special") or re.fullmatch("(?s)<.*>", token["content"])]


def replace_names_by_ids(
    grammar: str, ids_by_lark_name: dict[str, int], added_ids: dict[str, int]
) -> tuple[str, Tracks | None]:
    """Return a grammar that refers to special tokens by id, because ``make_grammar_tokenizer`` has renamed them.

    Also returns the tracks of arrays with different items, which aren't part of llguidance's notation.

    Args:
        ids_by_lark_name: ids of special tokens by their names in Lark.
        added_ids: ids of all added tokens by their texts.
    """
    combined = json.loads(grammar)
    tracks = combined.pop(UNIQUE_ITEMS_KEY, None)
    ids = ids_by_lark_name | {name: added_ids[text] for name, text in combined.pop(TOKEN_NAMES_KEY, {}).items()}
    combined.pop(TEXT_PARAMETERS_KEY, None)

    def id_reference(name: re.Match[str]) -> str:
        return f"<[{ids[name[0]]}]>" if name[0] in ids else name[0]

    for part in combined["grammars"]:
        if part.get("lark_grammar"):
            part["lark_grammar"] = LARK_TOKEN.sub(id_reference, part["lark_grammar"])
    return json.dumps(combined), tracks
