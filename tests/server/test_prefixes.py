"""The prefix cache behind the server: chats, keys, metrics, and texts that stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import DEMO, StartHere

import ovspec

SMALL = DEMO / "draft"  # which is loaded sooner
PROMPT = [100 + number % 50 for number in range(200)]


def test_prompts_start_from_what_was_read(start_here: StartHere, cache_dir: Path) -> None:
    server = start_here(SMALL, "--draft", "lookup", "--precision", "f32")
    lm = ovspec.load(SMALL, "none", precision="f32", cache_dir=cache_dir, cache_memory=0)

    def ask(prompt: list[int], **more: Any) -> tuple[list[int], int]:
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 20, "return_record": True, **more})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return body["choices"][0]["record"]["token_ids"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    text, cached = ask(PROMPT)
    assert cached == 0
    assert ask(PROMPT) == (text, len(PROMPT) - 1)
    more = [*PROMPT, *text, 7, 8, 9]
    found, cached = ask(more)
    assert cached >= len(PROMPT) + len(text) - 1
    assert found == lm.generate(more, max_tokens=20).token_ids
    assert ask([9, *PROMPT])[1] == 0, "a change at the very beginning can't be helped"
    assert server.metric("ovspec_cached_tokens_total") >= 2 * len(PROMPT)
    assert server.metric("ovspec_new_prompts_total") == 2
    assert server.metric("ovspec_cache_blocks_kept") > 5
    assert server.metric("ovspec_cache_blocks_used") == server.metric("ovspec_cache_blocks_evicted") == 0


@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_keys_share_only_if_asked_to(shares: bool, start_here: StartHere, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key\nsecond-key\n", encoding="utf-8")
    server = start_here(
        SMALL, "--api-key-file", tmp_path / "keys", "--draft", "none", *(["--share-prefixes"] if shares else [])
    )

    def cached(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": PROMPT, "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("first-key") == 0
    assert cached("second-key") == (len(PROMPT) - 1 if shares else 0)
    assert cached("first-key") == cached("second-key") == len(PROMPT) - 1


@pytest.mark.slow  # tests/cache/test_prefix_cache.py bounds what is kept
def test_a_small_cache_gives_way(start_here: StartHere) -> None:
    server = start_here(SMALL, "--draft", "none", "--cache-memory", "0.0005")
    for first in range(12):
        answer = server.post("/v1/completions", {"prompt": [300 + first, *PROMPT], "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    assert server.metric("ovspec_cache_blocks_evicted") > 0
