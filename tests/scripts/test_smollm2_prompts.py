"""scripts/train/smollm2_prompts.py writes chats that a model can answer, and none that benchmarks judge by."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import smollm2_prompts
from conftest import ROOT


def test_prompts_of_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "prompts.jsonl"
    monkeypatch.setattr(sys, "argv", ["smollm2_prompts.py", str(output), "--count", "60"])
    monkeypatch.setattr(smollm2_prompts, "folders", lambda: [ROOT / "ovspec", ROOT / "docs"])
    monkeypatch.setattr(smollm2_prompts, "metadata", lambda _: iter(["Name: x\nVersion: 1"] * 99))
    smollm2_prompts.main()
    chats = [json.loads(line)["messages"] for line in output.read_text("utf-8").splitlines()]
    assert len(chats) == 60
    assert all(chat[-1]["role"] == "user" and chat[-1]["content"].strip() for chat in chats)
    roles = Counter(message["role"] for chat in chats for message in chat)
    assert roles["system"] and roles["assistant"], "some have a system message or an answer"
    code = [chat for chat in chats if "```python" in chat[-1]["content"]]
    assert 10 < len(code) < 60
    judged = {
        message["content"]
        for each in json.loads((ROOT / "scripts/bench/chats.json").read_text("utf-8"))
        for message in each["messages"]
    }
    assert not judged & {message["content"] for chat in chats for message in chat}
