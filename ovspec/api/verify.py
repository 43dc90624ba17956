"""Certificates: check a finished text against one forward pass of the model over it.

The whole text is verified as if it were one long proposal: each of its tokens must be the model's own choice, greedy
or by the seed, with constraints and penalties. This checks everything that may have sped the text up.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_json, read_text
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.cache.decoder import Decoder
from ovspec.cache.sequence import Sequence
from ovspec.engine.engine_thread import run_steps
from ovspec.engine.results import CALLABLE_OPTIONS, Origin, Provenance, Result
from ovspec.engine.round import RowOutcome
from ovspec.engine.row import Row
from ovspec.engine.runtime import Runtime
from ovspec.params import Params, make_params
from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.option import OptionValue

CHUNK_POSITIONS = 128  # whose logits are in memory at a time


@dataclass(frozen=True)
class FirstWrongToken:
    """The first token that isn't the model's choice.

    index: among the generated tokens.
    found, chosen: the token in the text and the one that the model chooses; None where the text must end.
    top: the two most likely tokens there, and their logits after constraints.
    """

    index: int
    found: int
    chosen: int | None
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Verification:
    """How many of a text's ``tokens`` are exactly those that the model chooses, up to the first that isn't.

    problem: anything else that is wrong: the text isn't what its tokens spell, or ends where the model would go on.
    """

    tokens: int
    exact: int
    difference: FirstWrongToken | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.exact == self.tokens and not self.problem

    def __str__(self) -> str:
        return "; ".join(filter(None, (f"exact: {self.exact} of {self.tokens}", self.problem)))


def verify_result(runtime: Runtime, result: Result) -> Verification:
    """Check each token of ``result`` by one forward pass over its prompt and text; raises as ``verify_in_steps``."""
    return run_steps(verify_in_steps(runtime, result, None))


def verify_in_steps(
    runtime: Runtime, result: Result, prompt_chunk: int | None = CHUNK_POSITIONS
) -> Generator[None, None, Verification]:
    """Check a result as ``verify_result`` does, an inference at a time; the first step comes before them.

    Args:
        prompt_chunk: tokens of the prompt that an inference reads; None for all.

    Raises:
        OvspecError: the text was made by another model, or in a way that can't be checked (``accept="rejection"``,
            functions of one's own).
    """
    if not isinstance(result, Result):
        raise OvspecError(f"`result` is {result!r:.80}; give what `generate` returns, or `result_from_json` reads.")
    record = result.record
    if not record:
        raise OvspecError("This result has no record of how it was made, so it can't be checked.")
    identity = record.model().get("identity")
    if identity != runtime.identity["identity"]:
        raise OvspecError(f"The text was made by another model than {runtime.folder}; load that one.")
    if record.params.accept == "rejection":
        raise OvspecError("A text made with `accept='rejection'` can't be checked: it depends on what was proposed.")
    for option in CALLABLE_OPTIONS:
        if getattr(record.params, option):
            raise OvspecError(f"A text made with `{option}` can't be checked: your own functions aren't part of it.")
    params = runtime.row_maker.complete_params(record.params)
    tokens = np.array([*record.healed_ids, *result.token_ids], dtype=np.int64)
    for token_ids in (record.prompt_ids, tokens):
        runtime.prompt_encoder.encode(np.array(token_ids, dtype=np.int64), at_start=False)  # refuses unknown ids
    runtime.models.check_context_length(len(record.prompt_ids) + len(tokens))
    row = runtime.row_maker.make_row(Sequence(record.prompt_ids), params, record.origin)
    yield
    decoders = runtime.decoder_pool.acquire()
    try:
        decoders.reset(1)
        difference = yield from find_first_difference(decoders.target, row, tokens, prompt_chunk)
    finally:
        runtime.decoder_pool.release(decoders)
    token_count = len(result.token_ids)
    if difference:
        exact_count = max(0, difference.index - len(record.healed_ids))
        return Verification(token_count, exact_count, difference)
    return Verification(token_count, token_count, None, find_mistake_besides_tokens(row, result))


def find_first_difference(
    target: Decoder, row: Row, tokens: np.ndarray, prompt_chunk: int | None
) -> Generator[None, None, FirstWrongToken | None]:
    """Feed ``row``'s text and ``tokens`` (n,), and yield after each inference but the last.

    Returns the first of the tokens that the model wouldn't choose.

    ``row`` takes the tokens before it, as if they had just been generated.
    """
    prompt_length = len(row.sequence)
    all_tokens = np.concatenate((row.sequence.tokens, tokens))
    prompt_chunk = prompt_chunk or max(prompt_length - 1, 1)
    for chunk_start in range(0, prompt_length - 1, prompt_chunk):
        target.feed([all_tokens[chunk_start : min(chunk_start + prompt_chunk, prompt_length - 1)]], [0])
        yield
    for chunk_start in range(prompt_length, len(all_tokens), CHUNK_POSITIONS):
        chunk = all_tokens[chunk_start : chunk_start + CHUNK_POSITIONS]
        logits = target.feed([all_tokens[chunk_start - 1 : chunk_start - 1 + len(chunk)]], [len(chunk)])[0]
        chosen_ids = row.sampler.verify_proposal(logits, row.sequence, chunk[:-1])
        is_wrong = chosen_ids != chunk[: len(chosen_ids)]
        right_count = int(is_wrong.argmax()) if is_wrong.any() else len(chosen_ids)
        if right_count:
            row.sequence.commit(chosen_ids[:right_count])
            # takes tokens after the end of the text back
            row.add_outcome(RowOutcome(chosen_ids[:right_count], logits=logits[:right_count]))
        text_length = len(row.sequence)
        if row.finish_reason and text_length < len(all_tokens):
            return FirstWrongToken(text_length - prompt_length, int(all_tokens[text_length]), None, [])
        if text_length < chunk_start + len(chunk):
            chunk_position = text_length - chunk_start
            constrained_logits = row.sampler.constraints(logits[chunk_position], all_tokens[:text_length])
            best_tokens = np.argsort(-constrained_logits, kind="stable")[:2]
            top_tokens = [(int(token), float(constrained_logits[token])) for token in best_tokens]
            chosen_id = int(chosen_ids[chunk_position]) if chunk_position < len(chosen_ids) else None
            return FirstWrongToken(text_length - prompt_length, int(all_tokens[text_length]), chosen_id, top_tokens)
        yield
    return None


def find_mistake_besides_tokens(row: Row, result: Result) -> str | None:
    """Return the mistake in a result whose tokens are all right; None if there is none."""
    if result.finish_reason == "cancelled":
        row.cancel()
    if row.prefill_only:
        row.finish_reason = "length"
    if row.finish_reason is None:
        return f"the text ends with {result.finish_reason!r}, but the model goes on here"
    if row.finish_reason != result.finish_reason:
        return f"the text ends with {row.finish_reason!r}, not {result.finish_reason!r}"
    return None if row.text == result.text else "the text isn't what its tokens spell"


# ---------------------------------------------------------------- as JSON


def record_as_json(result: Result) -> JsonObject | None:
    """Return the record of ``result`` as JSON values, for ``result_from_json``."""
    record = result.record
    if not record:
        return None
    return {
        "prompt_token_ids": [int(token) for token in record.prompt_ids],
        "healed_token_ids": list(record.healed_ids),
        "options": {name: option_as_json(name, value) for name, value in record.params.recorded_options().items()},
        "chat": record.origin.chat,
        "healable": record.origin.healable,
        "context": record.origin.context_length,
        "sample": record.origin.sample,
        "n": record.params.n,
        "model": record.model(),
    }


def option_as_json(name: str, value: OptionValue) -> JsonValue:
    """Return an option's value as JSON. Files are replaced by their contents, and functions by their names."""
    if name == "json_schema" and isinstance(value, Path):
        return read_json(value)
    if name == "json_schema" and hasattr(value, "model_json_schema"):  # a pydantic model
        return value.model_json_schema()
    if name == "json_schema":
        return value
    if isinstance(value, Path):
        return read_text(value)
    if name == "logit_bias":
        return {str(token): "-inf" if bias == -math.inf else float(bias) for token, bias in value.items()}
    if name in CALLABLE_OPTIONS:
        return repr(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (str, int, float)) or not hasattr(value, "__iter__"):
        return value
    return [element.item() if isinstance(element, np.generic) else element for element in value]


def params_from_json(options: JsonObject) -> Params:
    """Return the params in a record's ``options``; those of later versions are left out."""
    function_names = {
        name: options[name] for name in CALLABLE_OPTIONS if options.get(name)
    }  # their names, which nobody calls
    known_options = {
        name: value for name, value in options.items() if name in GENERATE_OPTIONS and name not in CALLABLE_OPTIONS
    }
    if "logit_bias" in known_options:
        known_options["logit_bias"] = {int(token): float(bias) for token, bias in known_options["logit_bias"].items()}
    return replace(make_params(known_options), **function_names)


def text_from_json(entry: JsonObject) -> str:
    """Return the text of a result, a choice, a response or a message."""
    if "output" in entry:  # whose field text is its format
        return "".join(text_from_json(item) for item in entry["output"] if item["type"] == "message")
    if "text" in entry:
        return entry["text"]
    content = entry.get("message", entry)["content"]
    if isinstance(content, list):
        return "".join(block.get("text", "") for block in content)
    return content or ""


def result_from_json(data: JsonObject) -> Result:
    """Return the result that ``ovspec generate --json`` printed, or that an answer of the server has.

    That is a choice of OpenAI's older APIs, a response, or a message of Anthropic's API.

    Raises:
        OvspecError: it has no record, or isn't such a result.
    """
    try:
        record = data["record"]
        text = text_from_json(data)[record.get("echo", 0) :]
        model = dict(record["model"])
        provenance = Provenance(
            prompt_ids=np.array([int(token) for token in record["prompt_token_ids"]], dtype=np.int64),
            params=params_from_json(dict(record["options"])),
            origin=Origin(
                bool(record.get("chat")),
                int(record["healable"]),
                record["context"] and int(record["context"]),
                int(record["sample"]),
            ),
            model=lambda: model,
            healed_ids=[int(token) for token in record["healed_token_ids"]],
        )
        token_ids = [int(token) for token in record.get("token_ids", data.get("token_ids"))]
        finish_reason = record.get("finish_reason", data.get("finish_reason"))
        np.array([*provenance.healed_ids, *token_ids], dtype=np.int64)  # refuses numbers that no id can be
        if int(record["n"]) != provenance.params.n:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise OvspecError("not a result with a record, as 'ovspec generate --json' writes it.") from None
    return Result(text, token_ids, finish_reason, record=provenance)
