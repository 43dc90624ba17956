"""Constrained text equals that of plain masked decoding, with every drafter, sampler, engine and batch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import CHECKPOINTS, PROMPTS, ROOT, Reference
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

import ovspec
from ovspec.params import make_params
from ovspec.params.generation import GENERATE_OPTIONS, GRAMMAR_OPTIONS
from ovspec.sampling.constraint import Constraint, Constraints
from ovspec.sampling.grammar_constraint import GrammarCompiler, prepend_to_grammar
from ovspec.sampling.grammar_options import convert_requested_grammar
from ovspec.sampling.masks import apply_mask, mask_contains, pack_mask
from ovspec.text.tokenizer import make_byte_vocabulary
from ovspec.text.tokenizer_files import TokenizerFile

TOKENIZER = json.loads((CHECKPOINTS / "target" / "tokenizer.json").read_text(encoding="utf-8"))
VOCABULARY = make_byte_vocabulary(msgspec.convert(TOKENIZER, TokenizerFile))
assert VOCABULARY
SIZE = len(VOCABULARY)
EOS = frozenset({0})
SLOW = pytest.mark.slow
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = """
start: statement{2,4}
statement: "import " NAME ("." NAME)? ";\\n" | "return " expr ";\\n"
expr: NAME | "(" expr " + " expr ")"
NAME: /[a-z]{1,6}/
"""
GBNF = """
root ::= call ("." call)?
call ::= [a-z]{1,5} "(" args? ")"   # nested
args ::= ("self" | call) (", " [0-9]{1,2})?
"""
CASES: dict[str, dict[str, Any]] = {
    "json": {"json_schema": PERSON},
    "regex": {"regex": r"def test_[a-z]{1,8}\(self(, [a-z]{1,4}){0,2}\):"},
    "lark": {"grammar": LARK},
    "gbnf": {"gbnf": GBNF},
    "choice": {"choice": ["None", "self.assertEqual(", "self.assertRaises(", "True"]},
    "constrain_from": {"regex": r"import [a-z]{1,4}\.pa[a-z]{0,8};", "constrain_from": "import"},
}
HALF = "import sys\nimport os.pa"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=1": {"temperature": 1.0, "seed": 4},
    "top-k, min-p": {"temperature": 1.2, "top_k": 40, "min_p": 0.01, "seed": 5},
    "penalties": {"repetition_penalty": 1.2, "min_tokens": 6, "logit_bias": {50: -2.0}},
}


def prompt_of(case: str, index: int = 0) -> str:
    return HALF if "constrain_from" in CASES[case] else PROMPTS[index] + "\n# and then\n"


def check_text(case: str, result: ovspec.Result) -> None:
    """Check a finished text with code that has nothing to do with llguidance."""
    if result.finish_reason == "length":
        return
    assert result.finish_reason in ("stop", "eos")  # nothing could follow, or the model ended the text
    text = result.text
    if case == "json":
        found = json.loads(text)
        assert list(found) == ["name", "age", "tags"]
        assert 0 <= found["age"] <= 150
    elif case == "constrain_from":
        assert re.fullmatch(CASES[case]["regex"], "import os.pa" + text)
    elif case == "regex":
        assert re.fullmatch(CASES[case]["regex"], text)
    elif case == "choice":
        assert text in CASES[case]["choice"]
    elif case == "lark":
        lines = text.split("\n")
        assert 3 <= len(lines) <= 5
        assert all(re.fullmatch(r"(import [a-z]{1,6}(\.[a-z]{1,6})?|return [a-z()+ ]+);", line) for line in lines[:-1])
    else:
        assert text.count("(") == text.count(")") >= 1


# ---------------------------------------------------------------- the matrix

DRAFTS: dict[str, Any] = {"none": False, "lookup": "lookup", "model": True, "chain": "lookup,draft"}
QUICK = [("model", "T=1"), ("chain", "greedy")]


@pytest.mark.parametrize("engine", ["paged", pytest.param("stateful", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("draft", "sampling"),
    [
        pytest.param(draft, sampling, marks=() if (draft, sampling) in QUICK else pytest.mark.slow)
        for draft in DRAFTS
        for sampling in SAMPLINGS
    ],
)
def test_speculation_and_forcing_change_nothing(
    load: Callable[..., ovspec.LanguageModel], draft: str, sampling: str, engine: str
) -> None:
    plain_lm, lm = load(engine=engine), load(draft=DRAFTS[draft], engine=engine)
    forced = proposed = accepted = 0
    for case, constraint in CASES.items():
        options = {"max_tokens": 40, **constraint, **SAMPLINGS[sampling]}
        plain = plain_lm.generate(prompt_of(case), lookahead=0, **options)
        assert plain.stats.forced == plain.stats.proposed == 0
        assert plain.stats.rounds == len(plain.token_ids)
        check_text(case, plain)
        for lookahead in (4, "auto") if draft != "none" else ("auto",):
            result = lm.generate(prompt_of(case), lookahead=lookahead, **options)
            assert (result.token_ids, result.text, result.finish_reason) == (
                plain.token_ids,
                plain.text,
                plain.finish_reason,
            ), (case, lookahead)
            stats = result.stats
            assert stats.generated_tokens <= stats.rounds + stats.accepted + stats.forced
            assert stats.rounds <= stats.generated_tokens
            forced, proposed, accepted = forced + stats.forced, proposed + stats.proposed, accepted + stats.accepted
    assert forced > 0
    if draft != "none":
        assert 0 < accepted <= proposed


@pytest.mark.parametrize("accept", [pytest.param("compare", marks=pytest.mark.slow), "rejection"])
def test_rejection_stays_in_the_grammar(load: Callable[..., ovspec.LanguageModel], accept: Any) -> None:
    lm = load(draft="lookup,draft")
    for case, constraint in CASES.items():
        for seed in range(3):
            result = lm.generate(
                prompt_of(case), max_tokens=60, temperature=1.0, seed=seed, accept=accept, lookahead=4, **constraint
            )
            check_text(case, result)


def test_user_samplers_and_processors(load: Callable[..., ovspec.LanguageModel]) -> None:
    """A sampler sees the allowed tokens only; a processor alone changes the text, the same with and without a draft."""
    seen: list[int] = []

    def sampler(logits: np.ndarray, tokens: np.ndarray) -> int:
        seen.append(len(tokens))
        allowed = np.flatnonzero(np.isfinite(logits[0]))
        return int(allowed[len(tokens) % len(allowed)])

    def processor(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits[0, tokens[-5:]] -= 4.0  # discourage recent tokens
        return logits

    plain_lm, lm = load(), load(draft="lookup,draft")
    own: list[dict[str, Any]] = [{"sampler": sampler}, {"logits_processors": [processor, processor]}]
    for case, constraint in CASES.items():
        for options in own:
            seen.clear()
            plain = plain_lm.generate(prompt_of(case), max_tokens=30, lookahead=0, **constraint, **options)
            called = list(seen)
            check_text(case, plain)
            seen.clear()
            drafted = lm.generate(prompt_of(case), max_tokens=30, lookahead=4, **constraint, **options)
            assert drafted.token_ids == plain.token_ids
            assert seen[: len(called)] == called
    with_it = lm.generate(PROMPTS[1], max_tokens=30, logits_processors=[processor])
    assert with_it.token_ids == load().generate(PROMPTS[1], max_tokens=30, logits_processors=[processor]).token_ids
    assert with_it.token_ids != lm.generate(PROMPTS[1], max_tokens=30).token_ids


@pytest.mark.parametrize("engine", ["paged", pytest.param("stateful", marks=pytest.mark.slow)])
def test_rows_of_a_batch_have_their_own(load: Callable[..., ovspec.LanguageModel], engine: str) -> None:
    """Rows at different positions in a grammar, more prompts than fit into a batch, and several samples of a prompt."""
    lm = load(draft="lookup,draft", engine=engine)
    for case, sampling in (("json", {}), ("lark", {"temperature": 1.0, "seed": 3})):
        prompts = [prompt_of(case, index) for index in range(5)]
        options = {"max_tokens": 40, **CASES[case], **sampling}
        together = lm.generate(prompts, batch_size=3, lookahead=4, **options)
        for prompt, result in zip(prompts, together, strict=True):
            alone = lm.generate(prompt, lookahead=0, **options)
            assert result.token_ids == alone.token_ids
            check_text(case, result)
    texts = lm.samples(prompt_of("json"), n=4, temperature=1.2, seed=1, max_tokens=60, json_schema=PERSON)
    assert len({result.text for result in texts}) > 1
    for result in texts:
        check_text("json", result)


@pytest.mark.parametrize("case", CASES)
def test_hugging_face_with_the_same_masks(
    load: Callable[..., ovspec.LanguageModel], reference: Reference, case: str
) -> None:
    """The oracle is Hugging Face's ``generate``, with a new matcher per token that reads the text from the start."""
    import torch

    grammars = GrammarCompiler(TOKENIZER, list(VOCABULARY or []))
    source, _ = convert_requested_grammar(make_params(CASES[case]))  # type: ignore[arg-type]
    assert source
    tokens = reference.tokenizer(prompt_of(case), return_tensors="pt")
    start = tokens["input_ids"].shape[1]
    behind = b"import os.pa" if case == "constrain_from" else b""

    def process(ids: Any, scores: Any) -> Any:
        matcher = LLMatcher(grammars._tokenizer, source)
        assert matcher.consume_tokens(grammars._tokenizer.tokenize_bytes(behind))
        assert matcher.consume_tokens(ids[0, start:].tolist())
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[
            : scores.shape[1]
        ]
        return scores.masked_fill(torch.tensor(allowed == 0), -torch.inf)

    theirs = reference.model.generate(
        **tokens, max_new_tokens=40, do_sample=False, pad_token_id=0, logits_processor=[process]
    )[0, start:].tolist()
    ours = load(draft="lookup,draft").generate(prompt_of(case), max_tokens=40, **CASES[case])
    # Hugging Face also generates the end token where we stop because nothing else could follow.
    assert ours.token_ids == (theirs[:-1] if theirs[-1] == 0 else theirs)


# ---------------------------------------------------------------- the matcher


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, list(VOCABULARY or []))


@pytest.mark.parametrize("case", ["json", "gbnf", *[pytest.param(each, marks=SLOW) for each in ("lark", "choice")]])
@given(st.data())
@settings(deadline=None, max_examples=10)
def test_answers_depend_on_the_text_alone(grammars: GrammarCompiler, case: str, data: st.DataObject) -> None:
    """Whatever was asked before, the answers are those of a matcher that reads the text from the start."""
    source, _ = convert_requested_grammar(make_params(CASES[case]))  # type: ignore[arg-type]
    assert source
    constraint = grammars.make_constraint(source, 2, EOS)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    text = [7, 8]
    for _ in range(25):
        fresh = LLMatcher(grammars._tokenizer, source)
        assert fresh.consume_tokens(text[2:])
        expected = np.frombuffer(fresh.compute_bitmask(), np.uint8)[: SIZE // 8]
        tokens = np.array(text)
        for question in random.permutation(4):
            if question == 0:
                assert np.array_equal(constraint.token_mask(tokens), expected)
            elif question == 1:
                assert constraint.forced_tokens(tokens) == fresh.compute_ff_tokens()
            elif question == 2:
                assert constraint.is_complete(tokens) == fresh.is_stopped()
            else:
                some = [*random.integers(0, SIZE, 5).tolist(), *np.flatnonzero(bits(expected))[:5].tolist()]
                for token in some:
                    assert constraint.allows_token(token, tokens) == mask_contains(expected, token)
        allowed = [token for token in np.flatnonzero(bits(expected)).tolist() if token not in EOS]
        if not allowed or random.random() < 0.3:  # roll back, and grow again later
            text = text[: int(random.integers(2, len(text) + 1))]
        else:
            text.append(int(random.choice(allowed)))


def bits(mask: np.ndarray) -> np.ndarray:
    return np.unpackbits(mask, bitorder="little")[:SIZE]


@given(st.sets(st.integers(0, 99)), st.integers(1, 130))
def test_masks(ids: set[int], width: int) -> None:
    mask = pack_mask(ids, 100)
    logits = np.arange(width, dtype=np.float32)
    expected = [float(i) if i in ids else -np.inf for i in range(min(width, 104))]
    assert apply_mask(logits, mask).tolist() == expected
    assert logits.tolist() == list(range(width))
    assert [mask_contains(mask, i) for i in range(130)] == [i in ids for i in range(130)]


def test_special_tokens_that_a_grammar_spells(load: Callable[..., ovspec.LanguageModel]) -> None:
    """Such a spelling is text: it is generated as ordinary tokens, never as the special token."""
    spelt: list[dict[str, Any]] = [{"choice": ["<|im_end|>", "<|im_start|>x"]}, {"regex": r"<\|endoftext\|>[ab]"}]
    for options in spelt:
        result = load(draft=True).generate("A: ", max_tokens=20, **options)
        assert result.finish_reason == "stop"
        assert result.text.startswith("<|")
        assert not {0, 1, 2} & {*result.token_ids}


def test_special_tokens_that_a_grammar_names(load: Callable[..., ovspec.LanguageModel]) -> None:
    for lookahead in (0, "auto"):
        result = load(draft=True).generate(
            "A: ", grammar='start: "a" <|im_start|> /[bc]/ "<|im_start|>" // <|im_start|>', lookahead=lookahead
        )
        assert result.token_ids.count(1) == 1
        assert re.fullmatch(r"a[bc]<\|im_start\|>", result.text)
    with pytest.raises(ovspec.OvspecError, match=r'"<\|tool\|>" is not a special token of the model'):
        load().generate("A: ", grammar='start: "a" <|tool|>')


def test_sentencepiece_tokenizers() -> None:
    """A tokenizer like Llama's, trained here: a sign stands for the space, and rare bytes have tokens of their own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])  # type: ignore[assignment]
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(PROMPTS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False))
    tokenizer = json.loads(made.to_str())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < 3]
    vocabulary = make_byte_vocabulary(msgspec.convert(tokenizer, TokenizerFile))
    assert vocabulary
    grammars = GrammarCompiler(tokenizer, vocabulary)
    for i, token in enumerate(vocabulary):
        if token and token != b"\xff":  # a byte that no text has
            assert grammars._tokenizer.decode_bytes([i]) == token
    start = np.array([], dtype=np.int64)
    source, _ = convert_requested_grammar(make_params({"regex": " self[0-9] \u00e9"}))
    assert source
    constraint = grammars.make_constraint(source, 0, frozenset({2}))
    forced = constraint.forced_tokens(start)
    assert b" self".startswith(b"".join(vocabulary[token] or b"" for token in forced))
    assert forced
    source, _ = convert_requested_grammar(make_params({"regex": "(\u00e9|ab)+"}))
    assert source
    found = np.flatnonzero(
        np.unpackbits(grammars.make_constraint(source, 0, frozenset()).token_mask(start), bitorder="little")
    )
    assert {vocabulary[token] for token in found} >= {b"a", b"\xc3"}


def test_prefixes_of_grammars(grammars: GrammarCompiler) -> None:
    """``prepend_to_grammar`` puts a text before a grammar of any kind, and the grammar's own masks stay the same."""
    for case, options in CASES.items():
        source, _ = convert_requested_grammar(make_params(options))  # type: ignore[arg-type]
        assert source
        for said in (b" ", b"x = ", "\u00e9".encode(), b'"\\\n'):
            plain = grammars.make_constraint(source, 0, EOS)
            longer = grammars.make_constraint(prepend_to_grammar(source, said), 0, EOS)
            spelt = np.array(grammars._tokenizer.tokenize_bytes(said))
            assert np.array_equal(longer.token_mask(spelt), plain.token_mask(np.array([], dtype=np.int64))), (
                case,
                said,
            )


# ---------------------------------------------------------------- ends


def test_nothing_is_counted_behind_the_end(load: Callable[..., ovspec.LanguageModel]) -> None:
    """Tokens proposed after an end-of-sequence token or a stop count neither as proposed nor as accepted."""

    class Oracle(ovspec.Drafter):
        text: np.ndarray = np.empty(0, dtype=np.int64)

        def guess(self, tokens: np.ndarray, budget: int) -> Any:
            return [*self.text[len(tokens) : len(tokens) + budget].tolist(), *[9] * budget][:budget]

    oracle = Oracle()
    lm = load(draft=oracle)  # type: ignore[arg-type]
    prompt = lm.tokenizer.encode(PROMPTS[0])
    plain = lm.generate(prompt, max_tokens=12, lookahead=0)
    stops: list[dict[str, Any]] = [
        {"stop_ids": [plain.token_ids[5]]},
        {"stop": lm.tokenizer.decode(plain.token_ids[3:7])},
    ]
    for options in stops:
        expected = lm.generate(prompt, max_tokens=12, lookahead=0, **options)
        oracle.text = np.array([*prompt, *plain.token_ids])
        result = lm.generate(prompt, max_tokens=12, lookahead=8, **options)
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert result.finish_reason == "stop"
        stats = result.stats
        assert stats.accepted == stats.proposed == len(result.token_ids) - 1, "every proposed token was accepted"
        assert sum(stats.accepted_by_position) == stats.accepted


def test_a_text_of_one_possibility_needs_no_inference(load: Callable[..., ovspec.LanguageModel]) -> None:
    lm = load(draft=True)
    with lm.session() as session:
        session.append("Say it: ")
        assert session._decoders
        before = session._decoders.target.inferences
        result = session.generate(choice=["self.assertEqual(first, second)"], heal=False)
        assert result.text == "self.assertEqual(first, second)"
        assert session._decoders.target.inferences == before
        assert result.stats.rounds == 0
        assert result.stats.forced == len(result.token_ids)
        assert result.stats.cached_tokens == 0, "nothing was read, from a cache neither"
        assert session.text == "Say it: self.assertEqual(first, second)"
        more = session.generate(max_tokens=5)
    ids: Any = [*lm.tokenizer.encode("Say it: ").tolist(), *result.token_ids]
    assert more.token_ids == load().generate(ids, max_tokens=5, lookahead=0).token_ids
    asked = lm.generate("Say it: ", choice=["self.assertEqual(first, second)"], logprobs=1)
    assert asked.token_ids == result.token_ids
    assert asked.stats.forced == 0
    assert asked.logprobs
    assert len(asked.logprobs) == len(asked.token_ids), "with logprobs, the model runs for every token"
    cut = lm.generate("Say it: ", choice=["self.assertEqual(first, second)"], max_tokens=2)
    assert (cut.token_ids, cut.finish_reason) == (result.token_ids[:2], "length")


def test_stop_strings_within_a_grammar(load: Callable[..., ovspec.LanguageModel]) -> None:
    for lookahead in (0, 4, "auto"):
        result = load(draft="lookup,draft").generate(
            prompt_of("json"), max_tokens=60, json_schema=PERSON, stop='"age"', lookahead=lookahead
        )
        assert result.finish_reason == "stop"
        assert result.text.replace(" ", "").startswith('{"name"')
        assert "age" not in result.text


# ---------------------------------------------------------------- wrong options


def test_processors_of_transformers(load: Callable[..., ovspec.LanguageModel], reference: Reference) -> None:
    """Alone, in their list, and beside a function of arrays; the texts are those of Hugging Face."""
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

    theirs = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.3)])
    ids = reference.tokenizer(PROMPTS[1], return_tensors="pt")
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    expected = reference.model.generate(**ids, **options, logits_processor=theirs)[0, ids["input_ids"].shape[1] :]
    plain = load().generate(PROMPTS[1], max_tokens=40)
    for processors in (theirs, [*theirs], [theirs, lambda _, logits: logits]):
        options = {"max_tokens": 40, "lookahead": 4, "logits_processors": processors}
        found = load(draft="lookup,draft").generate(PROMPTS[1], **options)
        assert found.token_ids == expected.tolist() != plain.token_ids


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two grammars": ({"regex": "a", "choice": ["b"]}, "`regex` and `choice` can't be combined"),
    "ignore_eos": ({"regex": "a", "ignore_eos": True}, "`regex` can't be combined with `ignore_eos`"),
    "nothing to constrain": ({"constrain_from": 3}, "add a grammar"),
    "marker not there": ({"regex": "a", "constrain_from": "SELECT"}, "'SELECT'; it must be a part of the prompt"),
    "beyond the prompt": ({"regex": "a", "constrain_from": 10**6}, "characters"),
    "the prompt doesn't fit": (
        {"regex": "xyz", "constrain_from": -3},
        "but the grammar doesn't allow this; change the prompt",
    ),
    "the prompt is all": ({"regex": "abc", "constrain_from": "abc"}, "nothing can follow"),
    "choice of letters": ({"choice": "yes"}, "list of strings"),
    "a number": ({"regex": 3}, "must be a string"),
    "no function": ({"logits_processors": [3]}, "must be a function"),
    "a number of processors": ({"logits_processors": 3}, "list of functions"),
    "a number of choices": ({"choice": 3}, "list of strings"),
    "one processor": ({"logits_processors": len}, "list of functions"),
    "a processor that returns nan": ({"logits_processors": [lambda _, logits: logits * np.nan]}, "nan or inf"),
    "a processor that returns inf": ({"regex": "a", "logits_processors": [lambda _, logits: logits + np.inf]}, "nan"),
    "complex logits": ({"logits_processors": [lambda _, logits: logits * 1j]}, "must return logits"),
    "half a character of prompt": ({"regex": "a", "constrain_from": 1.5}, "must be a part of the prompt, or a number"),
    "a file's name": ({"grammar": "words.lark"}, "give the grammar's text, or a Path"),
    "a schema's name": ({"json_schema": "person.json"}, "give the schema's text, or a Path"),
    "GBNF as Lark": ({"grammar": 'root ::= "a"'}, "use `gbnf` instead of `grammar`"),
    "a folder": ({"grammar": ROOT}, "is a folder"),
    "no choice": ({"choice": iter([])}, "must be a non-empty list"),
    "a processor that returns nothing": ({"logits_processors": [lambda *_: None]}, "must return logits"),
}


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": (without(TOKENIZER, "model"), "doesn't map tokens to ids"),
    "an empty model": ({**TOKENIZER, "model": {}}, "doesn't map tokens to ids"),
    "a model that is text": ({**TOKENIZER, "model": "x"}, "doesn't map tokens to ids"),
    "pieces with scores": ({**TOKENIZER, "model": {"vocab": [["a", 0.0]]}}, "doesn't map tokens to ids"),
    "no tokens": ({**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {}}}, "out of vocabulary"),
    "no merges": ({**TOKENIZER, "model": without(TOKENIZER["model"], "merges")}, "error loading tokenizer"),
    "no special tokens": (without(TOKENIZER, "added_tokens"), "no special token"),
    "a prefix within a character": (
        {**TOKENIZER, "model": {**TOKENIZER["model"], "continuing_subword_prefix": "x"}},
        "not a char boundary",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_tokenizers_are_refused_in_a_sentence(damage: str) -> None:
    tokenizer, message = DAMAGED[damage]
    with pytest.raises(ovspec.OvspecError, match=rf"^The model's tokenizer .*{message}.*\.$"):
        GrammarCompiler(tokenizer, VOCABULARY or [])


@pytest.mark.parametrize("wrong", WRONG)
def test_options_that_are_wrong(load: Callable[..., ovspec.LanguageModel], wrong: str) -> None:
    options, message = WRONG[wrong]
    lm = load(draft=True)
    with lm.session() as session:
        session.append("import abc")
        held = session.sequence.tokens.tolist()
        with pytest.raises(ovspec.OvspecError, match=re.escape(message)) as caught:
            session.generate(max_tokens=5, **options)
        assert "\n" not in str(caught.value)
        assert session.sequence.tokens.tolist()[: len(held) - 1] == held[:-1]
        assert session.generate(max_tokens=3, regex="[a-z]{3}").text


def test_other_ways_to_give_a_schema(load: Callable[..., ovspec.LanguageModel], tmp_path: Any) -> None:
    class Pydantic:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return PERSON

    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON), encoding="utf-8")
    texts = [load().generate("A: ", max_tokens=60, json_schema=s).text for s in (PERSON, json.dumps(PERSON), file)]
    assert texts == [load().generate("A: ", max_tokens=60, json_schema=Pydantic).text] * 3


def test_a_constraint_that_leaves_nothing(load: Callable[..., ovspec.LanguageModel]) -> None:
    lm = load(draft=True)
    banned = {i: -np.inf for i, token in enumerate(VOCABULARY or []) if token and b"q" in token}
    with pytest.raises(ovspec.OvspecError, match="No token can be chosen"):
        lm.generate("a", regex="[a-z]?q", logit_bias=banned, temperature=1.0)
    with pytest.raises(ovspec.OvspecError, match="No token can be chosen"):
        lm.generate("a", regex="[a-z]?q", logit_bias=banned)


def test_the_stack() -> None:
    """Masks combine; a proposal is cut after a token that ends the text, and before a masked token."""

    class Only(Constraint):
        def __init__(self, *ids: int) -> None:
            self._mask = pack_mask(ids, 8)

        def token_mask(self, tokens: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
            return self._mask

    stack = Constraints([Only(1, 2, 3), Only(2, 3, 4)], frozenset({3}))
    tokens, logits = np.array([0]), np.zeros(8, dtype=np.float32)
    assert np.flatnonzero(np.isfinite(stack(logits, tokens))).tolist() == [2, 3]
    assert [stack.allows_token(token, tokens) for token in range(5)] == [False, False, True, True, False]
    assert stack.count_allowed(tokens, [2, 2, 3, 2]) == 3, "up to and including the end token"
    assert stack.count_allowed(tokens, [2, 4, 2]) == 1, "up to the first masked token"
    assert not logits.any()
    assert set(GRAMMAR_OPTIONS) <= GENERATE_OPTIONS.keys()
