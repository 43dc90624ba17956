"""The real model, SmolLM2-135M-Instruct, which ``dev.py`` prepares: what users get, on text that makes sense."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from conftest import ROOT, USERS_CACHE
from kept import PLACE, copy_kept, digest
from servers import Start

import ovspec
from ovspec.engine.results import Result

F32, INT8 = ROOT / ".cache" / "smollm2-f32", ROOT / "smollm2"
GGUF = USERS_CACHE / "downloads" / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = pytest.mark.skipif(
    not (F32.is_dir() and INT8.is_dir() and GGUF.is_file()), reason="the real model could not be fetched"
)
QUESTIONS = [
    "Why do we have seasons?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give me three tips for a good night's sleep.",
    (ROOT / "demos" / "correct.txt").read_text(encoding="utf-8"),
    "What is the capital of France, and what is it known for?",
    "Write a short email to my landlord about a broken window.",
    "Explain to a child what a volcano is.",
    "List the planets of the solar system in order.",
    "Write a SQL query that counts the orders of each customer.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a story about a fox and a lighthouse.",
    "Repeat this sentence five times: The train to Bern leaves at noon.",
]
PERSON = json.loads((ROOT / "demos" / "person.schema.json").read_text(encoding="utf-8"))
Loaded = Callable[..., ovspec.LanguageModel]
Greedy = Callable[[list[str], int], list[tuple[list[int], list[int]]]]


@pytest.fixture(scope="module")
def real(known_of_real: Path) -> Loaded:
    """Return a function that loads the real model: in int8 as users do, or in f32."""
    loaded: dict[str, ovspec.LanguageModel] = {}

    def load(folder: Path = INT8, draft: Any = "lookup", **options: Any) -> ovspec.LanguageModel:
        key = repr((folder, draft, options))
        if key not in loaded:
            loaded[key] = ovspec.load(folder, draft, cache_dir=known_of_real, **options)
        return loaded[key]

    return load


@functools.cache
def reference() -> Any:
    """Hugging Face's model with the weights of the GGUF file, which transformers reads itself, in half a minute."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": GGUF.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(GGUF.parent, **options).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 2  # <|im_end|>
    return model


def write_greedy(questions: list[str], tokens: int, folder: Path) -> None:
    import torch

    prompts = list(map(chat, questions))
    options = {"do_sample": False, "max_new_tokens": tokens}
    found = [reference().generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]
    texts = [(prompt, ids[len(prompt) :]) for prompt, ids in zip(prompts, found, strict=True)]
    folder.mkdir()
    (folder / "ids.json").write_text(json.dumps(texts), encoding="utf-8")


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Greedy:
    """Return a function that returns the ids of chats and of Hugging Face's answers, which are kept between runs."""

    def generated(questions: list[str], tokens: int) -> list[tuple[list[int], list[int]]]:
        makers = [inspect.getsource(maker) for maker in (reference, tokenizer, chat, write_greedy)]
        files = [GGUF, *INT8.glob("tokenizer*.json"), *INT8.glob("*.jinja")]
        key = digest(files, version("transformers"), version("torch"), json.dumps(questions), *makers)
        folder = tmp_path_factory.mktemp("greedy") / "kept"
        copy_kept(PLACE, f"greedy-{tokens}", key, functools.partial(write_greedy, questions, tokens), folder)
        return json.loads((folder / "ids.json").read_text(encoding="utf-8"))

    return generated


@functools.cache
def tokenizer() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(INT8)


def chat(question: str) -> list[int]:
    """Return a question in the model's chat template, as Hugging Face's tokenizer writes it."""
    messages = [{"role": "user", "content": question}]
    return tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def answer(lm: ovspec.LanguageModel, question: str, **options: Any) -> Result:
    with lm.session() as session:
        session.append({"role": "user", "content": question})
        return session.generate(**options)


def equals_reference(lm: ovspec.LanguageModel, greedy: Greedy, questions: list[str], tokens: int) -> None:
    proposed = accepted = 0
    for question, (prompt, ids) in zip(questions, greedy(questions, tokens), strict=True):
        with lm.session() as session:
            session.append({"role": "user", "content": question})
            assert session.tokens == prompt
            result = session.generate(max_tokens=tokens)
        assert result.token_ids == ids[: len(result.token_ids)]
        assert ids[len(result.token_ids) :] in ([], [2]) and result.finish_reason in ("length", "eos")
        proposed, accepted = proposed + result.stats.proposed, accepted + result.stats.accepted
    assert proposed and accepted


@pytest.mark.limit(300)  # the first run of a checkout reads the GGUF, with transformers
def test_greedy_equals_hugging_face(real: Loaded, greedy: Greedy) -> None:
    # In f32, no arithmetic changes what is most likely; exact one takes a third of a minute to find.
    lm = real(F32, precision="f32", arithmetic="fast", tune=False, lookahead=4)
    equals_reference(lm, greedy, QUESTIONS[2:4], 20)


@pytest.mark.slow
def test_long_greedy_equals_hugging_face(real: Loaded, greedy: Greedy) -> None:
    equals_reference(real(F32, precision="f32", tune=False, lookahead=4), greedy, QUESTIONS, 128)


def exact_with(lm: ovspec.LanguageModel, plain: ovspec.LanguageModel, questions: list[str], tokens: int) -> None:
    accepted = 0
    for number, question in enumerate(questions):
        options: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {}
        result = answer(lm, question, max_tokens=tokens, **options)
        assert result.token_ids == answer(plain, question, max_tokens=tokens, lookahead=0, **options).token_ids
        found = lm.verify(result)
        assert found.ok and found.exact == found.tokens == len(result.token_ids), str(found)
        accepted += result.stats.accepted
    assert accepted


def test_lookup_in_int8_changes_no_token(real: Loaded) -> None:
    exact_with(real(lookahead=4), real(lookahead=4).with_drafters(None), QUESTIONS[3:5], 16)


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [2, 8, "auto"])
def test_lookup_in_int8_changes_no_long_text(real: Loaded, lookahead: Any) -> None:
    exact_with(real(lookahead=lookahead), real(draft="none"), QUESTIONS, 128)


def test_schema_holds_and_the_answer_is_right(real: Loaded) -> None:
    question = "Extract name, city and age as JSON: Maria Keller, 34, has lived in Vienna since 2019."
    result = answer(real(lookahead=4), question, json_schema=PERSON, max_tokens=80, lookahead="auto")
    jsonschema.validate(json.loads(result.text), PERSON)
    assert json.loads(result.text) == {"name": "Maria Keller", "city": "Vienna", "age": 34}


@pytest.mark.slow
def test_three_turns_are_exact_and_answer_like_new_chats(real: Loaded) -> None:
    lm, messages, compared = real(lookahead=4), [], 0
    with lm.session() as session:
        for question in QUESTIONS[4:7]:
            session.append({"role": "user", "content": question})
            messages.append({"role": "user", "content": question})
            result = session.generate(max_tokens=40)
            assert lm.verify(result).ok
            with lm.session() as new:
                for message in messages:
                    new.append(message)
                if new.tokens == session.tokens[: -len(result.token_ids)]:  # its text is encoded as it was generated
                    assert new.generate(max_tokens=40).text == result.text
                    compared += 1
            messages.append({"role": "assistant", "content": result.text})
    assert compared > 1


@pytest.mark.slow
def test_two_clients_get_what_each_gets_alone(real: Loaded, start: Start) -> None:
    from openai import OpenAI

    server = start(INT8, "--draft", "lookup", "--lookahead", "4", "--model-name", "smollm2")
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

    def ask(question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        answered = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=48, temperature=0)
        return str(answered.choices[0].message.content)

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(ask, QUESTIONS[2:4]))
    assert together == [answer(real(draft="none"), question, max_tokens=48).text for question in QUESTIONS[2:4]]


@pytest.mark.slow
def test_batches_seeds_and_logprobs_are_those_of_one_row(real: Loaded) -> None:
    lm, prompts = real(lookahead=4), [chat(question) for question in QUESTIONS]
    for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}):
        together = lm.generate(prompts, max_tokens=64, logprobs=2, **options)
        for row, (prompt, result) in enumerate(zip(prompts, together, strict=True)):
            assert lm.verify(result).ok
            if not options:  # a row's noise depends on its number
                alone = real(draft="none").generate(prompt, max_tokens=64, logprobs=2)
                assert alone.token_ids == result.token_ids and alone.logprobs == result.logprobs, row


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}])
def test_calls_of_asyncio_get_what_each_gets_alone(real: Loaded, options: dict[str, Any]) -> None:
    lm, chats = real(draft="lookup,head", lookahead=4), [[{"role": "user", "content": each}] for each in QUESTIONS[:4]]
    limited: Any = {"max_tokens": 48, **options}

    async def together() -> list[Result]:
        return await asyncio.gather(*(lm.agenerate(each, **limited) for each in chats))

    results = asyncio.run(together())
    for other in (lm, real(draft="none")):
        assert [each.token_ids for each in results] == [other.generate(each, **limited).token_ids for each in chats]
    assert sum(each.stats.accepted for each in results) > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_begun_answer_goes_on_alike_from_a_kept_cache(real: Loaded, options: dict[str, Any]) -> None:
    lm, without = real(lookahead=4), real(lookahead=4, cache_memory=0)
    asked = [{"role": "user", "content": QUESTIONS[4]}]
    begun, limited = [*asked, {"role": "assistant", "content": "Paris. It is known"}], {"max_tokens": 32, **options}
    lm.generate(asked, max_tokens=1)
    expected = without.generate(begun, **limited)
    with lm.session() as session:
        session.append(asked[0])
        session.generate(max_tokens=0)
        session.append(begun[1])
        in_session = session.generate(**limited)
    for found in (lm.generate(begun, **limited), in_session):
        assert found.token_ids == expected.token_ids and lm.verify(found).ok
        assert found.stats.cached_tokens > 0 == expected.stats.cached_tokens


@pytest.mark.slow
def test_healing_continues_a_word(real: Loaded) -> None:
    lm = real()
    result = lm.generate("The capital of Austria is Vien", heal=True, max_tokens=8)
    assert result.text.startswith("na")
    assert lm.verify(result).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "prompt"),
    [
        ("c11.lark", "int larger(int first, int second)\n{\n    if (first > second)\n        return "),
        ("sql_fence.lark", "Customers by number of orders:\n\n```sql\nSELECT "),
    ],
)
def test_grammars_hold_and_lookup_changes_nothing(real: Loaded, file: str, prompt: str) -> None:
    grammar = (ROOT / "demos" / "grammars" / file).read_text(encoding="utf-8")
    options: dict[str, Any] = {"grammar": grammar, "constrain_from": 0, "max_tokens": 48}
    for more in ({}, {"temperature": 0.7, "seed": 3}):
        result = real(lookahead=4).generate(prompt, **options, **more)
        assert result.token_ids == real(draft="none").generate(prompt, **options, **more).token_ids
        assert real().verify(result).ok


@pytest.mark.slow
def test_perplexity_equals_torch(real: Loaded) -> None:
    import torch

    text = (ROOT / "docs" / "explanation" / "lossless.md").read_text(encoding="utf-8")[:3000]
    lm = real(F32, precision="f32")
    tokens = torch.tensor([lm.encode(text).tolist()])
    with torch.no_grad():
        loss = reference()(input_ids=tokens, labels=tokens).loss
    assert np.isclose(lm.perplexity(text).perplexity, float(loss.exp()), rtol=1e-4)
