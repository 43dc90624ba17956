"""The curl lines of the docs, and the OpenAPI document, against a real server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from servers import DEMO, Running, StartHere

from ovspec.protocols.apis import TokenCount
from ovspec.protocols.chat.reply import ChatCompletion, Completion
from ovspec.protocols.messages.reply import Message

PAGE, TOOLS_PAGE = (ROOT / "docs" / "how-to" / name for name in ("serve.md", "use-tools.md"))
# Each with the JSON that it sends, which the page shows before.
CURLS = re.findall(r"(?m)(?:^```json\n([^`]*)```\n+```sh\n)?^(curl .*)", PAGE.read_text(encoding="utf-8"))
KEY = "the-key"
CHAT = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [1]}}}}}
CHECKED = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer", "maximum": 99}}}
OUTPUT = {"type": "json_schema", "schema": {"type": "integer", "maximum": 99}}
NAMED = {"name": "f", "input_schema": {"properties": {"a": {"enum": [1]}}}}
LOOSE = {"json_schema_mode": "checked", "return_record": True}
UNCHECKED = (
    HealthCheck.too_slow,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
)


@pytest.fixture(scope="module")
def guarded(start_here: StartHere) -> Running:
    return start_here(DEMO, "--draft", "lookup", "--request-timeout", "60", OVSPEC_API_KEY=KEY)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl isn't installed")
@pytest.mark.parametrize(("sent", "line"), CURLS)
def test_lines_of_the_docs(server: Running, guarded: Running, sent: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(sent, encoding="utf-8")
    where = guarded if "KEY" in line else server
    words = [word.replace("http://127.0.0.1:8000", where.url).replace("KEY", KEY) for word in shlex.split(line)]
    done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, cwd=tmp_path, timeout=60, check=True)
    found = json.loads((tmp_path / words[-1]).read_bytes() if "-o" in words else done.stdout)
    assert found.get("choices") or found["data"]
    if "choice" in sent:
        assert found["choices"][0]["text"] in ("yes", "no")
    if "return_record" in sent:
        assert found["choices"][0]["record"]


def test_python_of_the_docs(server: Running) -> None:
    [code] = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8000", server.url).replace('"my-pair"', '"demo"'), names)
    assert names["answer"].choices[0].message.content


def test_tools_of_the_docs(server: Running) -> None:
    blocks = re.findall(r"(?s)```python\n(.*?)```", TOOLS_PAGE.read_text(encoding="utf-8"))
    [code] = [block for block in blocks if "openai" in block]
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8000", server.url), names)
    call = names["answer"].choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and call.function.arguments.lstrip().startswith("{")


def test_there_are_lines() -> None:
    assert len(CURLS) == 4


@pytest.fixture(scope="module")
def api(guarded: Running) -> Any:
    import schemathesis

    headers = {"Authorization": f"Bearer {KEY}"}
    return schemathesis.openapi.from_url(f"{guarded.url}/openapi.json", headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [50])
def test_no_request_is_a_server_error(api: Any, examples: int) -> None:
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    tried = set()
    for found in api.get_all_operations():
        operation = found.ok()
        tried.add(operation.path)

        @given(case=operation.as_strategy())
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=UNCHECKED)
        def check(case: Any) -> None:
            if isinstance(case.body, dict):  # short texts, so that the test doesn't take hours
                for name in ("max_tokens", "max_completion_tokens"):
                    if isinstance(case.body.get(name), int) and not isinstance(case.body[name], bool):
                        case.body[name] = min(case.body[name], 4)
                case.body.setdefault("max_tokens", 2)
            answer = case.call(headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
            assert answer.status_code < 500 or "fill-in-the-middle" in answer.text, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]
            case.validate_response(answer, checks=[response_schema_conformance, status_code_conformance])

        check()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/infill"} <= tried
    assert {"/v1/messages/count_tokens", "/props", "/tokenize", "/ready"} <= tried


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        (Completion, "/v1/completions", {"prompt": ["def f(", "x"], "logprobs": 2, "echo": True, "n": 1}),
        (Completion, "/v1/completions", {"prompt": "def f(", "logprobs": 0, "return_record": True}),
        (ChatCompletion, "/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 2}),
        (ChatCompletion, "/v1/chat/completions", {"messages": CHAT, "response_format": CHECKED, **LOOSE}),
        (ChatCompletion, "/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "tool_choice": "required"}),
        (Message, "/v1/messages", {"messages": CHAT, "output_format": OUTPUT, **LOOSE}),
        (Message, "/v1/messages", {"messages": CHAT, "tools": [NAMED], "tool_choice": {"type": "any"}}),
        (TokenCount, "/v1/messages/count_tokens", {"messages": CHAT, "system": "Hi"}),
    ],
)
def test_answers_have_the_shape_of_the_document(server: Running, model: Any, path: str, body: Any) -> None:
    answer = server.post(path, {**body, "max_tokens": 40 if "tools" in body else 4})
    assert answer.status_code == 200, answer.text
    found = model.model_validate_json(answer.text, strict=True)
    assert found.model_dump(exclude_unset=True) == answer.json()


# ---------------------------------------------------------------- what is told of the model


def test_properties_as_llama_cpp_has_them(guarded: Running) -> None:
    assert guarded.get("/props").status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    found = guarded.get("/props", headers=headers).json()
    assert guarded.get("/v1/props?model=demo&autoload=false", headers=headers).json() == found
    listed = guarded.get("/v1/models", headers=headers).json()
    context = listed["data"][0]["max_model_len"]
    assert found["default_generation_settings"]["n_ctx"] == context == listed["data"][0]["meta"]["n_ctx"] > 0
    sampling = found["default_generation_settings"]["params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["n_predict"]) == (0.0, 1.0, -1)
    assert found["total_slots"] == 16 and found["model_alias"] == listed["data"][0]["id"]
    assert found["modalities"] == {"vision": False, "audio": False} and found["model_path"] == DEMO.name
    assert found["chat_template"] == (DEMO / "chat_template.jinja").read_text(encoding="utf-8")
    assert found["build_info"].startswith("ovspec ") and str(DEMO.parent) not in json.dumps(found)


def test_models_for_llama_cpps_clients_and_codex(server: Running) -> None:
    listed = server.get("/v1/models").json()
    meta = listed["data"][0]["meta"]
    assert meta["n_vocab"] > 256 and meta["size"] == (DEMO / "openvino_model.bin").stat().st_size
    assert meta["n_ctx_train"] == listed["data"][0]["max_model_len"]
    [entry] = listed["models"]
    assert entry["name"] == entry["model"] == entry["slug"] == entry["display_name"] == listed["data"][0]["id"]
    assert entry["capabilities"] == ["completion"] and isinstance(entry["details"], dict)
    # What the struct ModelInfo of Codex has no default for.
    needed = {"supported_reasoning_levels", "shell_type", "visibility", "supported_in_api", "priority"}
    needed |= {"base_instructions", "support_verbosity", "truncation_policy", "experimental_supported_tools"}
    assert needed <= entry.keys() and entry["context_window"] == listed["data"][0]["max_model_len"]
