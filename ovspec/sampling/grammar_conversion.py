"""Converts users' grammars and tests them, in a separate process, because they may be untrusted."""

from __future__ import annotations

import functools
import json
import random
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.base.sandbox import SandboxLimitExceeded, SandboxPool, serve_requests
from ovspec.grammars import sources
from ovspec.grammars.wording import word_llguidance_error, word_placed_error
from ovspec.sampling.tool_grammar import TOKEN_NAMES_KEY, write_tools_grammar

MAX_CONVERSION_SECONDS = 5.0
MAX_TOOLS_SECONDS = 2.0  # for the schemas of all tools of a request
MAX_CONVERSION_BYTES = 1_000_000_000
MAX_SPECIAL_TOKENS = 50  # named in a grammar
NUMBERED_TOKEN_COUNT = 300_000  # empty tokens to add for a grammar with token ids
MAX_FORCED_BYTES = 200_000  # llguidance finds forced bytes in one step, holding Python's lock, at 1.5 us each
WALK_COUNT, MAX_WALK_BYTES, WALK_SECONDS = 4, 100, 0.3
DEAD_END_ERROR = "NoExtension"  # prefix of llguidance's error at a dead end

CONVERSION_PROCESS = "ovspec.sampling.grammar_conversion", "checks grammars"
GRAMMAR_CONVERTER = SandboxPool(*CONVERSION_PROCESS, MAX_CONVERSION_SECONDS, MAX_CONVERSION_BYTES)
TOOLS_CONVERTER = SandboxPool(*CONVERSION_PROCESS, MAX_TOOLS_SECONDS, MAX_CONVERSION_BYTES)
SLOWEST_TOOL_CONVERTER = SandboxPool(*CONVERSION_PROCESS, MAX_TOOLS_SECONDS / 2, MAX_CONVERSION_BYTES)


def convert_grammar(source_kind: str, source: JsonValue, label: str, **schema_options: bool | None) -> str:
    """Return a grammar in llguidance's own notation, checked to be valid and to have a finite text.

    Args:
        source_kind: json_schema, regex, choice, grammar (Lark), gbnf or tools.
        source: its text; the Path of a file; a schema as Python values; a list of choices; or for tools, the source of
            ``tool_grammar.write_tools_grammar``.
        label: the grammar's name in errors and warnings, such as "--grammar words.lark".
        schema_options: fields of ``json_schema.SchemaOptions``.

    Raises:
        OvspecError: it is invalid, or takes too much time or memory.
    """
    if isinstance(source, Path):
        source = read_text(source)
    request = {"kind": source_kind, "source": source, "label": label, "reading": schema_options}
    try:
        request_text = json.dumps(request, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OvspecError(f"{label} can't be written as JSON: {error}.") from None
    if len(request_text) > 8 * sources.MAX_GRAMMAR_CHARACTERS:  # longer than any allowed source with escapes
        raise OvspecError(f"{label} has more than {sources.MAX_GRAMMAR_CHARACTERS} characters; shorten it.")
    grammar, warning = request_conversion(request_text)
    if warning:
        warnings.warn(f"{label} {warning}", stacklevel=2)
    return grammar


@functools.lru_cache(maxsize=64)
def request_conversion(request_text: str) -> tuple[str, str]:
    """Return (grammar, warning) for a request to the worker; a refusal is an exception, so it isn't cached."""
    request: JsonObject = json.loads(request_text)
    converter = TOOLS_CONVERTER if request["kind"] == "tools" else GRAMMAR_CONVERTER
    label = request["label"]
    try:
        reply = converter.ask(request_text)
    except SandboxLimitExceeded as why:
        if converter is TOOLS_CONVERTER:
            label = find_slowest_tool(request)
        kind = "schema" if request["kind"] in ("tools", "json_schema") else "grammar"
        raise OvspecError(f"{label}: the check {why}; simplify the {kind}.") from None
    if "error" in reply:
        raise OvspecError(reply["error"])
    return reply["grammar"], reply["warning"]


def find_slowest_tool(request: JsonObject) -> str:
    """Return the tool with the slowest schema, named as in messages; all tools if each is fast alone."""
    deadline = time.monotonic() + MAX_TOOLS_SECONDS
    tool_requests = split_request_by_tool(request)
    if len(tool_requests) == 1:
        return next(iter(tool_requests))
    for label, tool_request in tool_requests.items():
        if time.monotonic() > deadline:
            break
        try:
            SLOWEST_TOOL_CONVERTER.ask(json.dumps(tool_request))
        except SandboxLimitExceeded:
            return label
    return f"{request['label']}, the schemas together"


def split_request_by_tool(request: JsonObject) -> dict[str, JsonObject]:
    """Return a request for each tool alone, keyed by its schema's name in messages."""
    source, label = request["source"], request["label"]
    return {
        f"{label}: the schema of {tool['name']}": {**request, "source": {**source, "tools": [tool], "other": None}}
        for tool in source["tools"]
    }


# ---------------------------------------------------------------- in the separate process


class ByteTokenizer:
    """A tokenizer of bytes, with an end token, the special tokens named in a grammar, and empty tokens."""

    eos_token_id, bos_token_id, is_tokenizer_wrapper = 256, None, True

    def __init__(self, special_tokens: list[str], empty_count: int) -> None:
        named_tokens = [token_text.encode() for token_text in ("<eos>", *special_tokens)]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *named_tokens] + [b""] * empty_count
        self.special_token_ids = list(range(256, 257 + len(special_tokens)))

    def __call__(self, token_text: str | bytes) -> list[int]:
        return list(token_text.encode() if isinstance(token_text, str) else token_text)


CONVERTERS: dict[str, Callable[..., str]] = {
    "regex": sources.convert_regex,
    "choice": sources.convert_choices,
    "grammar": sources.convert_lark,
    "gbnf": sources.convert_gbnf,
}


def answer_conversion_request(request: JsonObject) -> dict[str, str]:
    """Return {"grammar": llguidance's notation, "warning"} or {"error": a sentence}; see ``request_conversion``."""
    source_kind, source, label = request["kind"], request["source"], request["label"]
    warning = ""
    try:
        if source_kind == "json_schema":
            grammar, warning = sources.convert_json_schema(source, label, **request["reading"])
        elif source_kind == "tools":
            grammar, warning = write_tools_grammar(source, label)
        else:
            grammar = CONVERTERS[source_kind](source, label)
    except OvspecError as error:
        return {"error": str(error)}
    if problem := find_grammar_problem(grammar):
        if source_kind == "tools":
            return {"error": find_faulty_tool(request, problem)}
        return {"error": label + problem}
    return {"grammar": grammar, "warning": warning}


def find_faulty_tool(request: JsonObject, problem: str) -> str:
    """Return a tool with the error in its schema, if one is at fault; otherwise all tools with ``problem``."""
    for label, tool_request in split_request_by_tool(request).items():
        if tool_problem := find_grammar_problem(write_tools_grammar(tool_request["source"], tool_request["label"])[0]):
            return label + tool_problem
    return f"{request['label']}, the schemas together{problem}"


def find_grammar_problem(grammar: str) -> str:
    """Return the problem of a refused grammar, to follow its name in the message; "" for a good grammar."""
    special_tokens = [*json.loads(grammar).get(TOKEN_NAMES_KEY, ())]
    while True:
        tokenizer = ByteTokenizer(special_tokens, NUMBERED_TOKEN_COUNT if "<[" in grammar else 0)
        ll_tokenizer = LLTokenizer(tokenizer)  # type: ignore[arg-type]
        matcher = LLMatcher(ll_tokenizer, grammar, log_level=0, limits=sources.PARSER_LIMITS)
        unknown_token = re.search(r'unknown special token: "(<[^"]*>)"', matcher.get_error())
        if not unknown_token or unknown_token[1] in special_tokens or len(special_tokens) >= MAX_SPECIAL_TOKENS:
            break
        special_tokens.append(unknown_token[1])
    if matcher.is_error():
        grammar_kind = json.loads(grammar)["grammars"][0]["name"]
        return word_placed_error(matcher.get_error(), grammar_kind)
    if len(matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
        return (
            f": every text begins with the same {MAX_FORCED_BYTES} bytes or more; put this beginning into the prompt."
        )
    problem = find_random_walk_problem(matcher, len(tokenizer.tokens))
    return problem and f": {word_llguidance_error(problem)}"


def find_random_walk_problem(matcher: LLMatcher, vocabulary_size: int) -> str:
    """Follow a few random texts byte by byte; return why the grammar is unusable, or "".

    It is unusable if it allows no text, has a dead end, or exceeds the limits.
    """
    if matcher.is_accepting() and not list_allowed_tokens(matcher, vocabulary_size):
        return "it matches only the empty text; add an alternative with characters"
    if vocabulary_size > NUMBERED_TOKEN_COUNT:
        return ""  # the bytes of the model's numbered tokens are unknown here
    generator = random.Random(0)
    deadline = time.monotonic() + WALK_SECONDS
    for walk_number in range(WALK_COUNT):
        walking_matcher = matcher.deep_copy()
        for byte_count in range(MAX_WALK_BYTES):
            allowed_ids = list_allowed_tokens(walking_matcher, vocabulary_size)
            if walking_matcher.is_error() and DEAD_END_ERROR not in walking_matcher.get_error():
                return f"{walking_matcher.get_error().splitlines()[0]} (after {byte_count} bytes of text)"
            if not allowed_ids:
                if walking_matcher.is_accepting():
                    break
                return (
                    "it has a dead end, where nothing can follow; add an alternative"
                    if byte_count
                    else "it matches no text at all"
                )
            if time.monotonic() > deadline and walk_number + byte_count:
                return ""
            walking_matcher.consume_token(generator.choice(allowed_ids))
    return ""


def list_allowed_tokens(matcher: LLMatcher, vocabulary_size: int) -> list[int]:
    """Return the allowed next tokens, except the end token."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [token for token in range(vocabulary_size) if mask >> token & 1 and token != ByteTokenizer.eos_token_id]


if __name__ == "__main__":
    serve_requests(answer_conversion_request)
