"""A model's chat template, rendered here and nowhere else: sandboxed, bounded in time and in output."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from ovspec.errors import OvspecError
from ovspec.ir import read_json

Message = dict[str, Any]  # {"role": ..., "content": ...}

MAX_SECONDS = 2.0
MAX_CHARACTERS = 50_000_000
# What an operation could make at worst; most make far less, so this is wider.
MAX_GROWTH = 10 * MAX_CHARACTERS
# Filters that make nothing larger than what they are given, and are used on the whole chat for every message.
HARMLESS = (
    "abs attr count d default dictsort first float groupby int items last length list map max min reject rejectattr "
    "reverse round select selectattr sort unique"
)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template with the variables and functions that Hugging Face gives it."""

    source: str
    special_tokens: dict[str, str]

    def render(self, messages: list[Message]) -> str:
        """The prompt for ``messages``, open for the assistant's answer.

        A template comes from the internet: it runs in Jinja's immutable sandbox, for at most two seconds, and
        its output may not grow beyond 50 million characters, nor what it makes on the way beyond ten times that.

        Raises:
            OvspecError: the template fails, refuses these messages, or takes too much.
        """
        import jinja2

        try:
            template = self._template
            with deadline(MAX_SECONDS):
                parts, size = [], 0
                for part in template.generate(
                    messages=messages, add_generation_prompt=True, tools=None, documents=None, **self.special_tokens
                ):
                    size += len(part)
                    check_size(size)
                    parts.append(part)
                return "".join(parts)
        except TooMuch as error:
            raise OvspecError(f"The model's chat template {error}; give a raw prompt without --chat.") from None
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise OvspecError(f"The model's chat template refuses these messages: {error}.") from None
        except (RecursionError, MemoryError):
            raise OvspecError("The model's chat template takes too much memory; give a raw prompt.") from None

    @functools.cached_property
    def _template(self) -> Any:
        import jinja2

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        def tojson(value: Any, indent: int | None = None) -> str:
            # Jinja's own would escape for HTML.
            return json.dumps(value, ensure_ascii=False, indent=indent)

        environment = bounded_sandbox()
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = bounded(tojson)
        return environment.from_string(self.source)


def bounded_sandbox() -> Any:
    """Jinja's immutable sandbox, which refuses operations whose result could be huge before they run."""
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import loopcontrols
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedCode(CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:
            """``a ~ b`` is not among the operators that a sandbox can intercept."""
            self.write("environment.bounded_concat((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

    class BoundedSandbox(ImmutableSandboxedEnvironment):
        code_generator_class = BoundedCode
        intercepted_binops = frozenset(("*", "**", "%", "+"))

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                check_size(left.bit_length() * abs(right))
            elif operator == "+" and not isinstance(left, (int, float)):
                check_size(extent(left) + extent(right))
            elif operator == "%" and isinstance(left, str):
                check_format(left, right)
            elif not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
                check_growth(left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
            check_growth(getattr(obj, "__self__", None), *args, *kwargs.values())
            return super().call(context, obj, *args, **kwargs)

        def bounded_concat(self, parts: tuple[Any, ...]) -> str:
            check_size(extent(parts))
            return "".join(map(str, parts))

        def wrap_str_format(self, value: Any) -> Any:
            formatting = super().wrap_str_format(value)
            if formatting is None:
                return None

            def checked(*args: Any, **kwargs: Any) -> str:
                check_format(value.__self__, args, kwargs)
                return formatting(*args, **kwargs)

            return checked

    def shown(value: Any) -> Any:
        check_size(extent(value))
        return value

    environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=shown)
    for name in environment.filters.keys() - set(HARMLESS.split()):
        environment.filters[name] = bounded(environment.filters[name])
    return environment


def bounded(function: Any) -> Any:
    """``function``, which refuses arguments that could make its result huge."""

    @functools.wraps(function)  # also Jinja's own marks: whether it wants the context
    def checked(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str) and function.__name__ == "do_format":
            check_format(args[0], args[1:], kwargs)
        check_growth(*args, *kwargs.values())
        return function(*args, **kwargs)

    return checked


class TooMuch(Exception):
    """A template wants more time or memory than it may have."""


def extent(value: Any) -> int:
    """Characters and elements in ``value``, however deeply nested; a list may hold itself many times over."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple, dict)):
        total, parts = 1, [*value, *value.values()] if isinstance(value, dict) else value
        for part in parts:
            total += extent(part)
            check_size(total)
        return total
    return 1


def check_growth(*values: Any) -> None:
    """The two largest of ``values`` bound what a repetition, a replacement or a padding of them can become."""
    sizes = sorted(abs(value) if type(value) is int else extent(value) for value in values)
    if len(sizes) > 1:
        check_size(sizes[-1] * max(sizes[-2], 1), MAX_GROWTH)


def check_format(form: str, *values: Any) -> None:
    """Widths in a format string, or handed to it, are how long its result becomes."""
    check_size(sum(int(number) for number in re.findall(r"\d{1,12}", form)))
    for value in values:
        if isinstance(value, (list, tuple, dict)):
            check_format("", *(value.values() if isinstance(value, dict) else value))
        check_growth(form, value)
    check_size(sum(value for value in values if isinstance(value, int)))


def check_size(characters: int, most: int = MAX_CHARACTERS) -> None:
    if characters > most:
        raise TooMuch(f"makes more than {most // 1_000_000} million characters")


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TooMuch in this thread when Python code in the block runs longer than that.

    A signal would need the main thread and POSIX; tracing works everywhere, and a template has few lines.
    """
    until, previous = time.monotonic() + seconds, sys.gettrace()

    def trace(frame: FrameType, *_: Any) -> Any:
        if time.monotonic() > until:
            raise TooMuch(f"ran longer than {seconds:g} seconds")
        # Line by line only in the template itself; what it calls is seen at every call and every item.
        return trace if frame.f_code.co_filename == "<template>" else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


def chat_template(folder: Path) -> ChatTemplate:
    """The chat template in an exported folder.

    Raises:
        OvspecError: the model has none.
    """
    config = read_json(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not source:
        raise OvspecError(f"{folder}: this model has no chat template; leave --chat out and give a raw prompt.")
    special = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in special.items()}
    return ChatTemplate(source, {name: value for name, value in texts.items() if value})
