"""A model's folder is deleted after it was loaded: what was read goes on, and an error names what wasn't."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from servers import StartHere

import ovspec
from ovspec.base.errors import UnavailableError

SMALL = ROOT / "models" / "demo" / "draft"
CHAT = [{"role": "user", "content": "a"}]
OPTIONS = {"max_tokens": 2, "temperature": 0}


def test_a_server_goes_on(start_here: StartHere, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SMALL, folder)
    server = start_here(folder, "--draft", "none", "--precision", "f32", "--arithmetic", "fast")
    before = server.get("/props").json(), server.get("/v1/models").json()
    shutil.rmtree(folder)
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/messages", {"messages": CHAT}),
        ("/v1/completions", {"prompt": "a", "return_record": True, "logprobs": 1, "heal": True}),
        ("/tokenize", {"content": "a", "with_pieces": True}),
    ):
        answer = server.post(path, body | ({} if path == "/tokenize" else OPTIONS))
        assert answer.status_code == 200, answer.text
    assert (server.get("/props").json(), server.get("/v1/models").json()) == before
    answer = server.post("/v1/completions", {"prompt": "a", "regex": "a+"})
    told = (
        "the model's folder/tokenizer.json: deleted since the model was loaded; restore the file, or load the model "
        "again."
    )
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, told)


def test_python_names_what_is_gone(tmp_path: Path, cache_dir: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SMALL, folder)
    lm = ovspec.load(folder, "none", precision="f32", arithmetic="fast", cache_dir=cache_dir)
    shutil.rmtree(folder)
    assert lm.generate("a", max_tokens=2).token_ids
    with pytest.raises(UnavailableError, match=r"tokenizer\.json: deleted since the model was loaded"):
        lm.generate("a", regex="a+")
    with pytest.raises(UnavailableError, match="model: deleted since the model was loaded"):
        lm.generate(CHAT)
    with lm.session() as session:
        session.append("a")
        with pytest.raises(UnavailableError, match=r"openvino_model\.bin: deleted since the model was loaded"):
            session.save(tmp_path / "s.ov")
        assert session.text == "a"
