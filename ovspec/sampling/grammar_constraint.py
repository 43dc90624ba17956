"""Constrains a text to a grammar, with llguidance (https://github.com/guidance-ai/llguidance).

If only one text can follow, the mask has a single token, from the tokenizer's own encoding of the text, and the token
can be committed without running a model.
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
from ovspec.grammars.json_schema.item_tracks import ItemTracks
from ovspec.grammars.sources import LARK_TOKEN_PATTERN, PARSER_LIMITS, UNIQUE_ITEMS_KEY
from ovspec.grammars.wording import word_llguidance_error
from ovspec.sampling.constraint import Constraint
from ovspec.sampling.masks import mask_contains, pack_mask
from ovspec.sampling.tool_grammar import TEXT_PARAMETERS_KEY, TOKEN_NAMES_KEY
from ovspec.sampling.unique_items import FollowingIds, JsonCursor, UniqueItems
from ovspec.text.tokenizer_files import TOKENIZER_FILE

UNUSABLE_TOKENIZER = "The model's tokenizer can't be used with grammars"
MAX_CACHED_GRAMMARS = 32
# The number of last positions with a cached matcher; a proposal is rarely longer.
MAX_CACHED_POSITIONS = 32


@dataclass(slots=True)
class PositionCache:
    """Cached facts about a position in the text; ``matcher`` has consumed all tokens before it."""

    matcher: LLMatcher | None = None
    mask: np.ndarray | None = None
    forced_ids: list[int] | None = None
    cursor: JsonCursor | None = None  # kept for all positions, if items must be unique


class GrammarConstraint(Constraint):
    """Keeps the text after the prompt within a grammar.

    Matchers are copied, which takes a few microseconds, and never rolled back: after a ``rollback``, llguidance 1.9.1
    may use cached facts about the removed tokens, and then allow invalid tokens.

    Args:
        matcher: a matcher in its state at the start of the generated text, after ``prompt_length`` tokens of prompt.
        end_ids: ids to end the text when the grammar is satisfied; the matcher's own end id is ``matcher_end_id``.
        vocab_size: size of the vocabulary.
        unique_items: prevents equal items in arrays with unique items.
        cursor: the position in the JSON text; needed with ``unique_items``.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        prompt_length: int,
        end_ids: frozenset[int],
        matcher_end_id: int,
        vocab_size: int,
        unique_items: UniqueItems | None = None,
        cursor: JsonCursor | None = None,
    ) -> None:
        self._prompt_length = prompt_length
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._unique_items = unique_items
        self._mask_without_matcher_end = ~pack_mask([matcher_end_id], vocab_size)
        self._end_mask = pack_mask([token for token in end_ids if token < vocab_size], vocab_size)
        self._followed_sequence = Sequence()  # tokens known to be allowed
        self._positions = [PositionCache(matcher, cursor=cursor)]  # the start, then after each token

    def token_mask(self, tokens: np.ndarray) -> np.ndarray:
        answer_length = self._follow_tokens(tokens)
        position_cache = self._positions[answer_length]
        if position_cache.mask is None:
            if forced_ids := self._forced_ids_at(answer_length):
                position_cache.mask = pack_mask(forced_ids[:1], self._vocab_size)
            else:
                position_cache.mask = self._compute_mask(self._matcher_at(answer_length), position_cache)
        return position_cache.mask

    def allows_token(self, token: int, tokens: np.ndarray) -> bool:
        answer_length = self._follow_tokens(tokens)
        if answer_length < len(self._followed_sequence) and token == self._followed_sequence.tokens[answer_length]:
            return True
        if self._leads_to_repeat(answer_length, token):
            return False
        if self._positions[answer_length].mask is None:
            if forced_ids := self._forced_ids_at(answer_length):
                return token == forced_ids[0]
            matcher = self._matcher_at(answer_length)
            if token in self._end_ids:
                return matcher.is_accepting()
            # With forced bytes, the mask is stricter: it has only the next token of the tokenizer's own encoding.
            if not matcher.compute_ff_bytes():
                return matcher.validate_tokens([token]) == 1
        return mask_contains(self.token_mask(tokens), token)

    def forced_tokens(self, tokens: np.ndarray) -> list[int]:
        return self._forced_ids_at(self._follow_tokens(tokens))

    def is_complete(self, tokens: np.ndarray) -> bool:
        return self._matcher_at(self._follow_tokens(tokens)).is_stopped()

    def _forced_ids_at(self, answer_length: int) -> list[int]:
        """Return the ids forced at a position."""
        position_cache = self._positions[answer_length]
        if position_cache.forced_ids is None:
            position_cache.forced_ids = self._matcher_at(answer_length).compute_ff_tokens()
            if position_cache.forced_ids:
                position_cache.forced_ids = self._cut_before_repeat(answer_length, position_cache.forced_ids)
        return position_cache.forced_ids

    def _leads_to_repeat(self, answer_length: int, token: int) -> bool:
        """Return whether ``token`` can only lead to a duplicate item in an array with unique items."""
        cursor = self._positions[answer_length].cursor
        if not (self._unique_items and cursor) or not has_earlier_items(cursor):
            return False
        find_following_ids = self._following_finder(self._matcher_at(answer_length))
        return bool(self._unique_items.find_forbidden_ids(cursor, [token], find_following_ids))

    def _following_finder(self, matcher: LLMatcher) -> FollowingIds:
        """Return a function from a token to the tokens allowed after it and the same function for that position."""

        def find_following_ids(token: int) -> tuple[list[int], FollowingIds]:
            next_matcher = matcher.deep_copy()
            if not next_matcher.consume_token(token):
                return [], find_following_ids
            allowed_bits = np.unpackbits(self._allowed_mask(next_matcher), bitorder="little")
            return np.flatnonzero(allowed_bits).tolist(), self._following_finder(next_matcher)

        return find_following_ids

    def _cut_before_repeat(self, answer_length: int, tokens: list[int]) -> list[int]:
        """Return ``tokens`` before the first duplicate item."""
        if not self._unique_items:
            return tokens
        cursor = self._positions[answer_length].cursor
        for kept_count, token in enumerate(tokens):
            cursor = cursor and self._unique_items.advance_cursor(cursor, token)
            if not cursor:
                return tokens[:kept_count]
        return tokens

    def _compute_mask(self, matcher: LLMatcher, position_cache: PositionCache) -> np.ndarray:
        mask = self._allowed_mask(matcher)
        if self._unique_items and position_cache.cursor and has_earlier_items(position_cache.cursor):
            allowed_ids = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            suspect_ids = self._unique_items.find_suspect_ids(position_cache.cursor, allowed_ids)
            find_following_ids = self._following_finder(matcher)
            forbidden_ids = self._unique_items.find_forbidden_ids(
                position_cache.cursor, suspect_ids, find_following_ids
            )
            mask = mask & ~pack_mask(forbidden_ids, self._vocab_size)
        if not mask.any() and not matcher.is_stopped():
            raise OvspecError("No token of the model can continue the text within the grammar; change the grammar.")
        return mask

    def _allowed_mask(self, matcher: LLMatcher) -> np.ndarray:
        """Return the mask of a matcher, with the end ids in place of the matcher's."""
        mask_words = np.empty(-(-self._vocab_size // 32), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(mask_words.ctypes.data, mask_words.nbytes)
        raise_if_failed(matcher)
        mask = mask_words.view(np.uint8)[: len(self._end_mask)] & self._mask_without_matcher_end
        if matcher.is_accepting():
            mask |= self._end_mask
        return mask

    def _follow_tokens(self, tokens: np.ndarray) -> int:
        """Follow ``tokens``; return the index of the position after them: their number after the prompt."""
        answer_ids = tokens[self._prompt_length :]
        shared_length = self._followed_sequence.common_prefix_length(answer_ids)
        if shared_length < len(answer_ids):
            self._followed_sequence.rewind(shared_length)
            self._followed_sequence.commit(answer_ids[shared_length:])
            del self._positions[shared_length + 1 :]
            self._positions += [PositionCache() for _ in answer_ids[shared_length:]]
            self._matcher_at(len(answer_ids))  # raises if the grammar doesn't allow the text
            if self._unique_items:
                self._move_cursors(self._unique_items, answer_ids, shared_length)
        return len(answer_ids)

    def _move_cursors(self, unique_items: UniqueItems, answer_ids: np.ndarray, shared_length: int) -> None:
        """Set the cursors of the positions after ``shared_length``."""
        for answer_length in range(shared_length, len(answer_ids)):
            cursor = self._positions[answer_length].cursor
            if cursor:
                next_cursor = unique_items.advance_cursor(cursor, int(answer_ids[answer_length]))
                if not next_cursor:
                    raise OvspecError("The text repeats an item of an array, but the schema sets uniqueItems.")
                self._positions[answer_length + 1].cursor = next_cursor

    def _matcher_at(self, answer_length: int) -> LLMatcher:
        """Return the matcher at a position, from the nearest earlier matcher; the first and the last are cached."""
        position_cache = self._positions[answer_length]
        if position_cache.matcher is None:
            nearest_length = next(
                earlier_length
                for earlier_length in range(answer_length - 1, -1, -1)
                if self._positions[earlier_length].matcher
            )
            nearest_matcher = self._positions[nearest_length].matcher
            assert nearest_matcher
            matcher = nearest_matcher.deep_copy()
            if not matcher.consume_tokens(self._followed_sequence.tokens[nearest_length:answer_length].tolist()):
                raise_if_failed(matcher)
            position_cache.matcher = matcher
            oldest_cached_length = answer_length - MAX_CACHED_POSITIONS
            for old_position in self._positions[
                max(1, oldest_cached_length - MAX_CACHED_POSITIONS) : max(1, oldest_cached_length)
            ]:
                old_position.matcher = None
                old_position.mask = None
        return position_cache.matcher


def has_earlier_items(cursor: JsonCursor) -> bool:
    """Return whether an array with unique items is open and has items already."""
    return any(container.earlier_items for container in cursor.containers)


def raise_if_failed(matcher: LLMatcher) -> None:
    """Raise OvspecError if the matcher has failed; a failure is permanent."""
    if matcher.is_error():
        raise OvspecError(f"The grammar failed during generation: {word_llguidance_error(matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for a model's ``tokenizer.json``; ``vocabulary`` has the bytes added to a text by each id."""

    def __init__(self, tokenizer_json: JsonObject, vocabulary: list[bytes | None]) -> None:
        self._vocab_size = len(vocabulary)
        self._added_ids = {token["content"]: token["id"] for token in tokenizer_json.get("added_tokens", [])}
        # In Lark's notation, such as <|im_end|>. <[INST]> is impossible, because brackets hold token ids.
        self._ids_by_lark_name = {
            f"<{token['content'].removeprefix('<').removesuffix('>')}>": token["id"]
            for token in find_textless_tokens(tokenizer_json)
        }
        self._matcher_end_id, self._tokenizer = make_grammar_tokenizer(tokenizer_json, self._vocab_size)
        self._vocabulary = vocabulary
        # Threads share the compiled matchers, so a matcher is copied before it moves.
        self._compile_cached = functools.lru_cache(MAX_CACHED_GRAMMARS)(self._compile)

    def make_constraint(
        self,
        grammar: str,
        prompt_length: int,
        end_ids: frozenset[int],
        prompt_bytes: bytes = b"",
        healed_bytes: bytes = b"",
        grammar_name: str = "grammar",
        generated_parts: abc.Sequence[bytes | int] = (),
    ) -> GrammarConstraint:
        """Return the constraint to keep the text after ``prompt_length`` tokens of prompt within ``grammar``.

        Args:
            grammar: a grammar made by ``grammar_conversion``.
            end_ids: ids to end the text.
            prompt_bytes: the bytes of the prompt inside the grammar's text.
            healed_bytes: bytes of the tokens removed from the prompt by healing. They are the end of ``prompt_bytes``
                unless it is empty; then the text begins with them, and the grammar's text follows.
            grammar_name: the grammar's name in errors.
            generated_parts: the part of the grammar's text generated before ``prompt_length``: bytes, and ids of
                tokens.
        """
        matcher, unique_items = self._compile_cached(grammar, grammar_name)
        cursor: JsonCursor | None = JsonCursor()
        if generated_parts:
            matcher = matcher.deep_copy()
            for generated_part in generated_parts:
                tokens = (
                    self._tokenizer.tokenize_bytes(generated_part)
                    if isinstance(generated_part, bytes)
                    else [generated_part]
                )
                if matcher.try_consume_tokens(tokens) < len(tokens):
                    raise OvspecError(f"The {grammar_name} doesn't allow the generated text.")
                if unique_items and cursor and isinstance(generated_part, bytes):
                    cursor = unique_items.advance_by_bytes(cursor, generated_part)
        if prompt_bytes:
            self._follow_prompt(matcher.deep_copy(), prompt_bytes)  # the whole prompt must fit
            matcher = matcher.deep_copy()
            unhealed_bytes = prompt_bytes[: len(prompt_bytes) - len(healed_bytes)]
            self._follow_prompt(matcher, unhealed_bytes)
            cursor = unique_items and unique_items.advance_by_bytes(JsonCursor(), unhealed_bytes)
        elif healed_bytes:
            matcher, _ = self._compile_cached(prepend_to_grammar(grammar, healed_bytes), grammar_name)
            cursor = JsonCursor(skipped_bytes=len(healed_bytes))
        if unique_items and not cursor:
            raise OvspecError(
                "The prompt repeats an item of an array, but the schema sets uniqueItems; change the prompt."
            )
        return GrammarConstraint(
            matcher.deep_copy(), prompt_length, end_ids, self._matcher_end_id, self._vocab_size, unique_items, cursor
        )

    def _compile(self, grammar: str, grammar_name: str) -> tuple[LLMatcher, UniqueItems | None]:
        matcher_grammar, tracks = replace_names_by_ids(grammar, self._ids_by_lark_name, self._added_ids)
        matcher = LLMatcher(self._tokenizer, matcher_grammar, log_level=0, limits=PARSER_LIMITS)
        if matcher.is_error():
            raise OvspecError(f"{grammar_name}: {word_llguidance_error(matcher.get_error())}")
        return matcher, UniqueItems(tracks, self._vocabulary) if tracks else None

    def _follow_prompt(self, matcher: LLMatcher, prompt_bytes: bytes) -> None:
        """Consume the prompt's part of the grammar's text; raise OvspecError if the grammar doesn't allow it."""
        tokens = self._tokenizer.tokenize_bytes(prompt_bytes)
        allowed_count = matcher.try_consume_tokens(tokens)
        if allowed_count < len(tokens):
            allowed_text = self._tokenizer.decode_str(tokens[:allowed_count])
            refused_text = self._tokenizer.decode_str(tokens[allowed_count:])
            place_text = "From `constrain_from` on, the prompt begins with"
            if allowed_text:
                place_text = f"The prompt continues {allowed_text[-40:]!r} with"
            raise OvspecError(
                f"{place_text} {refused_text[:20]!r}, but the grammar doesn't allow this; change the "
                "prompt or the grammar."
            )
        if matcher.is_stopped():
            raise OvspecError("The prompt already completes the grammar, so nothing can follow; shorten the prompt.")


def prepend_to_grammar(grammar: str, prefix_bytes: bytes) -> str:
    """Return the grammar of ``prefix_bytes`` (valid UTF-8) followed by a text of ``grammar``."""
    combined_grammar = json.loads(grammar)
    first_grammar, *other_grammars = combined_grammar["grammars"]
    prefix_part = {"lark_grammar": f"start: PREFIX @after_prefix\nPREFIX: {json.dumps(prefix_bytes.decode())}"}
    return json.dumps(
        {**combined_grammar, "grammars": [prefix_part, {**first_grammar, "name": "after_prefix"}, *other_grammars]}
    )


def make_grammar_tokenizer(tokenizer_json: JsonObject, vocab_size: int) -> tuple[int, LLTokenizer]:
    """Return (the matcher's end id, llguidance's tokenizer) for a model's ``tokenizer.json``.

    Special tokens get names beyond the reach of a grammar, so text like a special token is encoded in ordinary tokens.
    """
    random_mark = secrets.token_hex(8)
    unspellable_names = {
        token["content"]: f"\0{random_mark} {token['id']}\0" for token in find_textless_tokens(tokenizer_json)
    }
    added_tokens: list[JsonObject] = tokenizer_json.get("added_tokens", [])
    matcher_end_id = next((token["id"] for token in added_tokens if token.get("special")), None)
    if matcher_end_id is None:
        raise OvspecError(
            "The model's tokenizer has no special token to end a text, so grammars aren't possible; leave the grammar "
            "out."
        )
    model_json: JsonValue = tokenizer_json.get("model")
    ids_by_token = model_json.get("vocab") if isinstance(model_json, dict) else None
    if not isinstance(ids_by_token, dict):
        raise OvspecError(
            f"{UNUSABLE_TOKENIZER}: its {TOKENIZER_FILE} doesn't map tokens to ids; export the model again."
        )
    renamed_json = {
        **tokenizer_json,
        "added_tokens": [rename_token(token, unspellable_names) for token in added_tokens],
        "model": {
            **model_json,
            "vocab": {
                unspellable_names.get(token_text, token_text): token_id for token_text, token_id in ids_by_token.items()
            },
        },
        "post_processor": None,
    }
    try:
        return matcher_end_id, LLTokenizer(json.dumps(renamed_json), n_vocab=vocab_size, eos_token=matcher_end_id)
    except BaseException as error:
        # A panic in Rust isn't an Exception, and its type can't be imported.
        if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            raise OvspecError(f"{UNUSABLE_TOKENIZER}: {str(error)[:300]}.") from None
        raise


def rename_token(token: JsonObject, unspellable_names: dict[str, str]) -> JsonObject:
    """Return an added token under its name in ``unspellable_names``, as a special token; unchanged without a name."""
    unspellable_name = unspellable_names.get(token["content"])
    return {**token, "content": unspellable_name, "special": True} if unspellable_name else token


def find_textless_tokens(tokenizer_json: JsonObject) -> list[JsonObject]:
    """Return the tokens without text in llguidance: special tokens, and added tokens written like <tags>."""
    added_tokens = tokenizer_json.get("added_tokens", [])
    return [token for token in added_tokens if token.get("special") or re.fullmatch("(?s)<.*>", token["content"])]


def replace_names_by_ids(
    grammar: str, ids_by_lark_name: dict[str, int], added_ids: dict[str, int]
) -> tuple[str, ItemTracks | None]:
    """Return a grammar with special tokens by id instead of name: ``make_grammar_tokenizer`` has renamed them.

    Also returns the tracks of arrays with unique items, a part of the grammar missing in llguidance's notation.

    Args:
        ids_by_lark_name: ids of special tokens by their names in Lark.
        added_ids: ids of all added tokens by their texts.
    """
    combined_grammar = json.loads(grammar)
    tracks = combined_grammar.pop(UNIQUE_ITEMS_KEY, None)
    ids_by_name = ids_by_lark_name | {
        name: added_ids[token_text] for name, token_text in combined_grammar.pop(TOKEN_NAMES_KEY, {}).items()
    }
    combined_grammar.pop(TEXT_PARAMETERS_KEY, None)

    def id_reference(name: re.Match[str]) -> str:
        return f"<[{ids_by_name[name[0]]}]>" if name[0] in ids_by_name else name[0]

    for part_grammar in combined_grammar["grammars"]:
        if part_grammar.get("lark_grammar"):
            part_grammar["lark_grammar"] = LARK_TOKEN_PATTERN.sub(id_reference, part_grammar["lark_grammar"])
    return json.dumps(combined_grammar), tracks
