"""What users give as tools, and what is wrong with it."""

from __future__ import annotations

import functools
import time
from typing import Annotated, Any, Literal

import pydantic
import pytest

from ovspec.base.errors import OvspecError
from ovspec.params.tools import parse_tool_choice, parse_tools


class Place:
    pass


def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
    """Tell the weather.

    Args:
        city: The city,
            in English.
        unit (str): Of the temperature.

    Returns:
        A sentence.
    """
    return city + unit


class Weather(pydantic.BaseModel):
    """Tell the weather."""

    city: Annotated[str, pydantic.Field(max_length=9)]


def untyped(city):  # type: ignore[no-untyped-def]
    return city


def of_a_class(place: Place) -> Place:
    return place


def of_nothing(place: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_functions_are_described_by_their_hints_and_docstrings() -> None:
    assert [tool["function"] for tool in parse_tools([weather, Weather])] == [
        {
            "name": "weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city, in English."},
                    "unit": {
                        "type": "string",
                        "enum": ["C", "F"],
                        "default": "C",
                        "description": "Of the temperature.",
                    },
                },
                "required": ["city"],
            },
        },
        {
            "name": "Weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 9}},
                "required": ["city"],
            },
        },
    ]


def test_tools_may_be_given_without_what_is_around_them() -> None:
    function = {"name": "f", "parameters": SCHEMA}
    whole = {"type": "function", "function": function}
    for given in (whole, function, {"type": "function", **function}):
        assert parse_tools([given]) == [whole]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (untyped, "the parameter city of untyped has no type hint; add a type, as in city: str.$"),
        (
            of_a_class,
            "hints of of_a_class can't be turned into a JSON schema .*Place.*; use types such as str, float or .*$",
        ),
        (of_nothing, "parameters of <function of_nothing .* can't be read .*Nowhere"),
        ("f", " has 'f'; each tool must be .*\"parameters\": ….. or a Python function.$"),
        ({"type": "web_search"}, 'a tool of the type web_search; each tool must be .*"parameters": …..[.]$'),
        ({"name": "get weather"}, "the name 'get weather' is invalid; use 1 to 128 letters"),
        (
            {"name": "f", "parameters": "{}"},
            "the parameters of f must be a JSON schema: an object such as .*properties.*",
        ),
        (
            {"name": "f", "input_schema": SCHEMA},
            "f has its schema in the field input_schema; move the schema to the field parameters.$",
        ),
        (
            {"name": "f", "inputSchema": SCHEMA},
            "f has its schema in the field inputSchema; move the schema to the field parameters.$",
        ),
        ({"name": "f", "description": 5}, "the description of f must be a string.$"),
    ],
)
def test_what_is_no_tool(tool: Any, message: str) -> None:
    with pytest.raises(OvspecError, match=f"^`tools`.*{message}") as found:
        parse_tools([tool])
    assert "\n" not in str(found.value) and len(str(found.value)) < 300


def test_names_of_functions_and_of_their_parameters() -> None:
    def copy(schema: int, model_config: str = "a") -> None:
        """Copy.

        Args:
          schema (int): first,
            and more
        """

    [made] = parse_tools([copy])
    properties = made["function"]["parameters"]["properties"]
    assert [*properties] == ["schema", "model_config"] and properties["schema"]["description"] == "first, and more"

    def prüfe(a: int) -> None: ...

    for function, told in ((prüfe, "the name 'prüfe'"), (lambda: 1, "the name '<lambda>' is invalid")):
        with pytest.raises(OvspecError, match=told):
            parse_tools([function])
    with pytest.raises(OvspecError, match="a function without a name; define the function with def"):
        parse_tools([functools.partial(copy, 1)])


def test_many_tools_and_many_names_take_no_time() -> None:
    began = time.perf_counter()
    with pytest.raises(OvspecError, match="`tools` has 100000 tools; at most 1000 are allowed"):
        parse_tools([{"name": f"f{number}"} for number in range(100_000)])
    tools = parse_tools([{"name": "f"}, {"name": "g"}])
    names = [{"name": "f"}] * 100_000
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": names}}
    assert parse_tool_choice(tools, allowed).tool_names == ("f",)
    assert time.perf_counter() - began < 1
    with pytest.raises(OvspecError, match="the list of allowed tools is empty"):
        parse_tool_choice(tools, {"type": "allowed_tools", "mode": "required", "tools": []})
    with pytest.raises(OvspecError, match="strict of f must be true or false"):
        parse_tools([{"name": "f", "strict": "yes"}])
