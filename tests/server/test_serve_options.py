"""Every option of ``ovspec serve`` reaches what it is for; what each does is tested beside this file."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from serving_options import LOADING, SERVING

from ovspec.cli import cli
from ovspec.cli import serve as command_module
from ovspec.params.loading import LOAD_OPTIONS, make_load_params
from ovspec.params.serving import SERVE_OPTIONS
from ovspec.setup import exporting


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the command up to where the model would be loaded and served."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OVSPEC_API_KEY", raising=False)
    (tmp_path / "keys").write_text("a", encoding="utf-8")
    seen: dict[str, Any] = {}

    def load(folder: Any, draft: Any, **options: Any) -> Any:
        seen.update({"loaded": options}, **options, draft=draft)
        return SimpleNamespace(folder=Path(folder))

    def serve(
        lm: Any, names: list[str], keys: list[str], opened: socket.socket, options: Any, on_start: Callable[[], Any]
    ) -> None:
        seen.update(vars(options), lm=lm, names=names, keys=keys, opened=opened.getsockname())
        on_start()
        opened.close()

    def prepare(model: str, draft: Any, weight_format: Any) -> tuple[Path, Any]:
        seen["weight_format"] = weight_format
        return Path(model), draft

    monkeypatch.setattr(exporting, "find_exported_model", lambda *_: ())
    monkeypatch.setattr(exporting, "find_or_export_model", prepare)
    monkeypatch.setattr(command_module, "load_model", load)
    monkeypatch.setattr("ovspec.server.server.serve", serve)

    def run(*arguments: str, command: str = "serve") -> dict[str, Any]:
        port = [] if "--port" in arguments or command == "chat" else ["--port", "0"]
        done = CliRunner().invoke(cli, [command, "my-pair", *arguments, *port], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return seen

    return run


@pytest.mark.parametrize("name", [*SERVING, *LOADING])
def test_option(run: Callable[..., dict[str, Any]], name: str) -> None:
    arguments, value = (SERVING | LOADING)[name]
    seen = run(*arguments)
    assert seen[name] == value
    if name == "model_name":
        assert seen["names"] == ["its", "alias"]
    if name == "api_key_file":
        assert seen["keys"] == ["a"]


def test_defaults(run: Callable[..., dict[str, Any]]) -> None:
    seen = run()
    assert seen["names"] == ["my-pair"] and seen["keys"] == [] and seen["draft"] is None
    assert make_load_params(seen["loaded"]).lookahead == "auto" and run("--lookahead", "0")["loaded"]["lookahead"] == 0
    assert (seen["host"], seen["batch_size"], seen["queue_size"]) == ("127.0.0.1", 16, 256)


def test_a_key_of_the_environment(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVSPEC_API_KEY", " b ")
    assert run()["keys"] == ["b"]


def test_no_option_is_left_out() -> None:
    assert SERVING.keys() == SERVE_OPTIONS.keys()
    assert LOADING.keys() - {"draft"} == {name for name, option in LOAD_OPTIONS.items() if option.flags != ()}


def test_a_chat_in_a_browser(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """'chat --web' serves this machine alone on a free port, with options of loading, and opens the page."""
    visited = list[str]()
    monkeypatch.setattr("webbrowser.open", visited.append)
    arguments, draft = LOADING["draft"]
    seen = run("--web", *arguments, "--precision", "f32", command="chat")
    host, port = seen["opened"]
    assert host == seen["host"] == "127.0.0.1" and visited == [f"http://127.0.0.1:{port}/"]
    assert seen["draft"] == draft and seen["precision"] == "f32" and seen["keys"] == []


def test_what_a_chat_in_a_browser_sets_on_its_page() -> None:
    for option in (["--temperature", "1"], ["--system", "Be brief."], ["--stats"], ["--session", "file"]):
        done = CliRunner().invoke(cli, ["chat", "my-pair", "--web", *option])
        assert done.exit_code == 2 and f"leave {option[0]} out" in done.output
