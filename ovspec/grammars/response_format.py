"""OpenAI's response formats, with a JSON schema inside."""

from __future__ import annotations

from ovspec.base.json_types import JsonValue

WRAPPER_KEYS = {"name", "description", "strict", "schema"}


def is_response_format(schema: JsonValue) -> bool:
    """Return whether ``schema`` is {"name", "schema", ...} or {"type": "json_schema", "json_schema": ...}.

    Or {"type": "json_schema", "schema": ...}: llama.cpp's form, and OpenAI's in the Responses API.
    """
    if not isinstance(schema, dict):
        return False
    if schema.get("type") == "json_schema":
        return isinstance(schema.get("json_schema", schema.get("schema")), dict)
    return isinstance(schema.get("schema"), dict) and "name" in schema and schema.keys() <= WRAPPER_KEYS


def unwrap_response_format(schema: JsonValue) -> JsonValue:
    """Return the schema within a response format; any other schema unchanged."""
    while is_response_format(schema):
        is_wrapped_twice = schema.get("type") == "json_schema" and "json_schema" in schema
        schema = schema["json_schema" if is_wrapped_twice else "schema"]
    if schema == {"type": "json_object"}:
        return {"type": "object"}
    return schema
