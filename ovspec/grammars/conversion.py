"""Converts what users write as a grammar, and tries it out, in a process of its own, because it may be untrusted."""

from __future__ import annotations

import functools
import json
import random
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.sandbox import LimitExceeded, SandboxPool, serve_requests
from ovspec.grammars import sources
from ovspec.grammars.tools import TOKEN_NAMES_KEY, write_tools_grammar
from ovspec.grammars.wording import word_llguidance_error, word_placed_error

CONVERSION_SECONDS = 5.0
TOOLS_SECONDS = 2.0  # for the schemas of all tools of a request
CONVERSION_BYTES = 1_000_000_000
MAX_SPECIAL = 50  # special tokens named in a grammar
MAX_NUMBER = 300_000  # empty tokens added for a grammar that refers to tokens by id
LONGEST_FORCED = 200_000  # bytes; llguidance finds them in one step that holds Python's lock, at 1.5 us each
WALKS, WALK_BYTES, WALK_SECONDS = 4, 100, 0.3
DEAD_END = "NoExtension"  # begins llguidance's error where no byte may follow

CHECKING = "ovspec.grammars.conversion", "checks grammars"
CONVERTER = SandboxPool(*CHECKING, CONVERSION_SECONDS, CONVERSION_BYTES)
TOOLS_CONVERTER = SandboxPool(*CHECKING, TOOLS_SECONDS, CONVERSION_BYTES)
TOOL_CONVERTER = SandboxPool(*CHECKING, TOOLS_SECONDS / 2, CONVERSION_BYTES)  # for the search for the slowest


def convert_grammar(kind: str, given: Any, what: str, **reading: bool) -> str:
    """Return a grammar in llguidance's own notation, which is known to be valid and to have a finite text.

    Args:
        kind: json_schema, regex, choice, grammar (Lark), gbnf or tools.
        given: its text; a Path to a file with it; a schema as Python's values; a list of choices; or for tools, what
            ``tools.write_tools_grammar`` takes.
        what: the grammar's name in errors and warnings, such as "--grammar words.lark".
        reading: fields of ``json_schema.SchemaReading``.

    Raises:
        OvspecError: it is invalid, or takes too much time or memory.
    """
    if isinstance(given, Path):
        given = read_text(given)
    try:
        request = json.dumps({"kind": kind, "given": given, "what": what, "reading": reading}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OvspecError(f"{what} can't be written as JSON: {error}.") from None
    if len(request) > 8 * sources.MAX_CHARACTERS:  # more than any escapes could make of what is allowed
        raise OvspecError(f"{what} has more than {sources.MAX_CHARACTERS} characters, the most that are allowed.")
    grammar, warning = request_conversion(request)
    if warning:
        warnings.warn(f"{what} {warning}", stacklevel=2)
    return grammar


@functools.lru_cache(maxsize=64)
def request_conversion(request: str) -> tuple[str, str]:
    """Return (grammar, warning) for a request to the worker; a refusal is an exception, so it isn't remembered."""
    asked = json.loads(request)
    what, of_tools = asked["what"], asked["kind"] == "tools"
    try:
        found = (TOOLS_CONVERTER if of_tools else CONVERTER).ask(request)
    except LimitExceeded as why:
        raise OvspecError(f"{slowest(asked) if of_tools else what}: the check {why}; simplify it.") from None
    if "error" in found:
        raise OvspecError(found["error"])
    return found["grammar"], found["warning"]


def slowest(asked: dict[str, Any]) -> str:
    """Return the tool whose schema takes too long, as messages name it; all of them if none does alone."""
    until = time.monotonic() + TOOLS_SECONDS
    each_alone = alone(asked)
    if len(each_alone) == 1:
        return next(iter(each_alone))
    for name, request in each_alone.items():
        if time.monotonic() > until:
            break
        try:
            TOOL_CONVERTER.ask(json.dumps(request))
        except LimitExceeded:
            return name
    return f"{asked['what']}: the schemas together"


def alone(asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a request for each tool alone, by the name that messages give to its schema."""
    given = asked["given"]
    return {
        f"{asked['what']}: the schema of {tool['name']}": {**asked, "given": {**given, "tools": [tool], "other": None}}
        for tool in given["tools"]
    }


# ---------------------------------------------------------------- in that process


class ByteTokenizer:
    """A vocabulary of all bytes, an end token, the special tokens that a grammar names, and ``more`` empty tokens."""

    eos_token_id, bos_token_id, is_tokenizer_wrapper = 256, None, True

    def __init__(self, special: list[str], more: int) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [text.encode() for text in ("<eos>", *special)] + [b""] * more
        self.special_token_ids = list(range(256, 257 + len(special)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


# How each kind of grammar is read.
READERS: dict[str, Callable[..., str]] = {
    "regex": sources.convert_regex,
    "choice": sources.convert_choices,
    "grammar": sources.convert_lark,
    "gbnf": sources.convert_gbnf,
}


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return {"grammar": llguidance's notation, "warning"} or {"error": a sentence}; see ``request_conversion``."""
    kind, given, what = request["kind"], request["given"], request["what"]
    try:
        if kind == "json_schema":
            grammar, warning = sources.convert_json_schema(given, what, **request["reading"])
        elif kind == "tools":
            grammar, warning = write_tools_grammar(given, what)
        else:
            grammar, warning = READERS[kind](given, what), ""
    except OvspecError as error:
        return {"error": str(error)}
    if why := problem_with(grammar):
        return {"error": culprit(request, why) if kind == "tools" else what + why}
    return {"grammar": grammar, "warning": warning}


def culprit(request: dict[str, Any], why: str) -> str:
    """Return what is wrong with the schema of a tool, if there is one; otherwise ``why``, which is wrong with all."""
    for name, one in alone(request).items():
        if found := problem_with(write_tools_grammar(one["given"], one["what"])[0]):
            return name + found
    return f"{request['what']}: the schemas together{why}"


def problem_with(grammar: str) -> str:
    """Return what follows a refused grammar's name in the error message; "" for a good grammar."""
    special = [*json.loads(grammar).get(TOKEN_NAMES_KEY, ())]
    while True:
        vocabulary = ByteTokenizer(special, MAX_NUMBER if "<[" in grammar else 0)
        matcher = LLMatcher(LLTokenizer(vocabulary), grammar, log_level=0, limits=sources.PARSER_LIMITS)  # type: ignore
        unknown = re.search(r'unknown special token: "(<[^"]*>)"', matcher.get_error())
        if not unknown or unknown[1] in special or len(special) >= MAX_SPECIAL:
            break
        special.append(unknown[1])
    if matcher.is_error():
        kind = json.loads(grammar)["grammars"][0]["name"]
        return word_placed_error(matcher.get_error(), kind)
    if len(matcher.compute_ff_bytes()) > LONGEST_FORCED:
        return f": every text begins with the same {LONGEST_FORCED} bytes or more; put them into the prompt."
    why = stuck(matcher, len(vocabulary.tokens))
    return why and f": {word_llguidance_error(why)}"


def stuck(matcher: LLMatcher, size: int) -> str:
    """Follow a few random texts byte by byte; return why the grammar is unusable, or "".

    It is unusable if it allows no text, has a dead end, or exceeds the limits.
    """
    if matcher.is_accepting() and not allowed(matcher, size):
        return "it matches only the empty text; add another option"
    if size > MAX_NUMBER:
        return ""  # the bytes of the model's numbered tokens aren't known here
    numbers, until = random.Random(0), time.monotonic() + WALK_SECONDS
    for walk in range(WALKS):
        each = matcher.deep_copy()
        for step in range(WALK_BYTES):
            tokens = allowed(each, size)
            if each.is_error() and DEAD_END not in each.get_error():
                return f"{each.get_error().splitlines()[0]} (after {step} bytes)"
            if not tokens:
                if not each.is_accepting():
                    return "it has a dead end, where nothing may follow" if step else "it matches no text at all"
                break
            if time.monotonic() > until and walk + step:
                return ""
            each.consume_token(numbers.choice(tokens))
    return ""


def allowed(matcher: LLMatcher, size: int) -> list[int]:
    """Return the tokens that may come next, except the end token."""
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return [i for i in range(size) if bits >> i & 1 and i != ByteTokenizer.eos_token_id]


if __name__ == "__main__":
    serve_requests(answer)
