"""Functions that parse option values from the command line; each raises ValueError with a sentence for the user."""

import json
import re
from pathlib import Path
from typing import Any


def auto_or_number(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"{text!r} is neither auto nor a number of tokens.")
    return text if text == "auto" else int(text)


def count_or_all(text: str) -> int:
    if text == "-1" or (text.isdecimal() and int(text)):
        return int(text)
    raise ValueError(f"{text!r} is not a number of tokens: give at least 1, or -1 for as many as the context holds.")


def token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"{text!r} is not ID=VALUE, as in --logit-bias 50=-2.5.") from None


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{text!r} is not KEY=VALUE, as in --property NUM_STREAMS=1.")
    return key.strip(), value.strip()


def folder(text: str) -> Path:
    if Path(text).is_file():
        raise ValueError(f"{text!r} is a file; name a folder.")
    return Path(text)


def schema_or_file(text: str) -> str | Path:
    return text if not text.strip() or text.lstrip().startswith(("{", "[", '"', "true", "false")) else Path(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is not a JSON object, as '{{\"enable_thinking\": false}}' is.")
    return found


def place_or_text(text: str) -> int | str:
    return int(text[1:]) if re.fullmatch(r"@-?[0-9]+", text) else text
