"""``verify`` finds one forged token anywhere, and finds nothing in what ovspec has generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import PROMPTS, ROOT

import ovspec
from ovspec.api.verify import record_as_json, result_from_json
from ovspec.engine.results import Result

Load = Callable[..., ovspec.LanguageModel]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "warped": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "seed": 6},
    "biased": {"logit_bias": {34: 2.0, 35: -np.inf}, "frequency_penalty": 0.1, "min_tokens": 10},
    "stopped": {"stop": ("\n", "return"), "stop_ids": np.array([9, 10])},
    "healed": {"heal": True},
    "schema": {"json_schema": SCHEMA, "temperature": 1.0, "seed": 2},
    "regex": {"regex": "[a-z ]{5,30}"},
}


def on_paper(result: Result) -> Result:
    """Return ``result`` after it has been written as JSON and read again."""
    written = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
    return result_from_json(json.loads(json.dumps(written | {"record": record_as_json(result)})))


@pytest.mark.parametrize("prompts", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_what_was_generated_is_exact_and_a_forged_token_is_found(load: Load, way: str, prompts: int) -> None:
    lm = load(draft="lookup,draft", engine="paged")
    for prompt in PROMPTS[:prompts]:
        result = lm.generate(prompt[: len(prompt) // 2], max_tokens=24, **WAYS[way])
        for made in (result, on_paper(result)):
            found = lm.verify(made)
            assert found.ok and found.exact == found.tokens == len(result.token_ids), str(found)
        for index, token in enumerate(result.token_ids):
            forged = list(result.token_ids)
            forged[index] = (token + 1) % 4000 + 3
            if forged[index] == token:
                continue
            found = lm.verify(replace(result, token_ids=forged))
            assert not found.ok and found.difference, (way, index)
            assert (found.exact, found.difference.found) == (index, forged[index])
            assert found.difference.chosen in (token, None)


def test_the_text_and_its_end_are_checked(load: Load) -> None:
    lm = load(draft="lookup", engine="paged")
    result = lm.generate(PROMPTS[1], max_tokens=20, ignore_eos=True)
    assert "isn't what its tokens spell" in str(lm.verify(replace(result, text=result.text + "!")))
    assert "goes on here" in str(lm.verify(replace(result, token_ids=result.token_ids[:-3])))
    longer = lm.verify(replace(result, token_ids=[*result.token_ids, 5]))
    assert longer.difference and longer.difference.chosen is None, "the text has ended before"
    assert "not 'eos'" in str(lm.verify(replace(result, finish_reason="eos")))
    cut = lm.stream(PROMPTS[1], max_tokens=20)
    next(iter(cut))
    cut.cancel()
    assert lm.verify(cut.result()).ok
    with pytest.raises(ovspec.OvspecError, match="pass a result of `generate`"):
        lm.verify(cast(Any, result.text))


def test_several_samples_sessions_and_chats(load: Load) -> None:
    lm = load(draft="lookup,draft", engine="paged")
    samples = lm.samples(PROMPTS[0], n=3, temperature=1.0, max_tokens=16)
    assert all(lm.verify(on_paper(result)).ok for result in samples)
    swapped = replace(samples[0], record=samples[1].record)
    assert not lm.verify(swapped).ok, "each sample has noise of its own"
    with lm.session() as session:
        session.append(PROMPTS[2])
        for _ in range(3):
            assert lm.verify(on_paper(session.generate(max_tokens=9, ignore_eos=True))).ok
            session.append("\n    self.ass")  # healed by default
        with session.fork() as fork:
            assert lm.verify(fork.generate(max_tokens=9, temperature=0.9)).ok
    found = lm.generate([{"role": "user", "content": "def f("}], max_tokens=12)
    assert lm.verify(on_paper(found)).ok


def test_long_texts_are_checked_in_pieces(load: Load) -> None:
    lm = load(draft="lookup,draft", engine="paged")
    result = lm.generate(PROMPTS[3], max_tokens=300, ignore_eos=True)
    assert lm.verify(result).ok
    for index in (127, 128, 129, 299):
        forged = [*result.token_ids[:index], 77, *result.token_ids[index + 1 :]]
        assert lm.verify(replace(result, token_ids=forged)).exact == index


def test_what_cannot_be_checked_is_refused(load: Load, cache_dir: Path) -> None:
    lm = load(draft=True, engine="paged")
    rejected = lm.generate(PROMPTS[0], max_tokens=4, temperature=1.0, accept="rejection")
    own = lm.generate(PROMPTS[0], max_tokens=4, sampler=lambda logits, _: int(logits.argmax()))
    processed = lm.generate(PROMPTS[0], max_tokens=4, logits_processors=[lambda _, logits: logits])
    for result, sentence in ((rejected, "rejection"), (own, "sampler"), (processed, "logits_processors")):
        for made in (result, on_paper(result)):
            with pytest.raises(ovspec.OvspecError, match=f"{sentence}.* can't be verified"):
                lm.verify(made)
    with pytest.raises(ovspec.OvspecError, match="no record"):
        lm.verify(replace(own, record=None))
    with pytest.raises(ovspec.OvspecError, match="generated by another model"):
        ovspec.load(ROOT / "models" / "demo" / "draft", precision="f32", cache_dir=cache_dir).verify(rejected)
    plain = lm.generate(PROMPTS[0], max_tokens=4)
    with pytest.raises(ovspec.OvspecError, match="not in the vocabulary"):
        lm.verify(replace(plain, token_ids=[10**9]))


@pytest.mark.parametrize(
    "data", [None, 3, {}, {"text": "a"}, {"text": "a", "record": {}}, {"text": "a", "record": {"options": 5}}]
)
def test_what_is_no_result_is_refused(data: Any) -> None:
    with pytest.raises(ovspec.OvspecError, match="not a result with a record"):
        result_from_json(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_token_ids", [[1, 2], [3, 4]]),
        ("prompt_token_ids", [10**30]),
        ("token_ids", [10**30]),
        ("token_ids", ["a"]),
        ("healed_token_ids", None),
        ("options", {"temperature": "hot"}),
        ("options", {"max_tokens": 10**9}),
        ("options", {"json_schema": "/etc/passwd"}),
        ("prompt_token_ids", [5] * 10**4),
        ("token_ids", [5] * 10**4),
        ("n", 7),
        ("context", 0.5),
    ],
)
def test_damaged_records_end_in_a_sentence(load: Load, name: str, value: Any) -> None:
    lm = load(draft="lookup", engine="paged")
    result = lm.generate("a", max_tokens=4)
    record = record_as_json(result)
    assert record
    data = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
    data |= {"record": record | {name: value}}
    try:
        assert not lm.verify(result_from_json(data)).ok or name == "context"
    except ovspec.OvspecError as error:
        assert str(error)


def test_grammars_from_files_are_written_out(load: Load, tmp_path: Path) -> None:
    lm = load(engine="paged")
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "yes" | "no"\n', encoding="utf-8")
    gbnf = tmp_path / "grammar.gbnf"
    gbnf.write_text('root ::= "yes" | "no"\n', encoding="utf-8")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    results = [lm.generate("a", grammar=grammar), lm.generate("a", gbnf=gbnf), lm.generate("a", json_schema=schema)]
    made = [on_paper(result) for result in results]
    for file in (grammar, gbnf, schema):
        file.unlink()
    assert all(lm.verify(result).ok for result in made)
