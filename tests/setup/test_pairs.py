"""The known pairs: what their file must say of each."""

from __future__ import annotations

import datetime
import re

from ovspec.setup.pairs import known_pairs


def test_each_pair_names_hub_ids_and_a_dated_source() -> None:
    pairs = known_pairs()
    assert len(pairs) > 20
    for pair in pairs.values():
        assert pair.draft or pair.eagle3, pair
        for model in filter(None, (pair.target, pair.draft, pair.eagle3)):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", model), model
        for source in pair.source.split("; "):
            assert re.match(r"https://\S+$|[\w.-]+/[\w.-]+: \S", source), source
        assert datetime.date(2022, 1, 1) < datetime.date.fromisoformat(pair.date) < datetime.date.today()


def test_a_pair_is_listed_in_a_line() -> None:
    pairs = known_pairs()
    assert str(pairs["qwen3-8b"]).startswith("qwen3-8b             Qwen/Qwen3-8B  +  Qwen/Qwen3-0.6B  (EAGLE-3 head ")
    assert "  +  " not in str(pairs["qwen3-14b"])
