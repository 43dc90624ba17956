"""The results of generation: pieces of a stream, whole texts, and their statistics and records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ovspec.base.json_types import JsonObject
from ovspec.params import Params
from ovspec.sampling.logprobs import TokenLogprob
from ovspec.text.answer import ToolCall

CALLABLE_OPTIONS = ("sampler", "logits_processors")  # not repeatable from a record
FinishReason = Literal["stop", "length", "eos", "cancelled"]


@dataclass(slots=True)
class Piece:
    """The new text of a round. ``finish_reason`` is None until the last piece.

    ``logprobs`` has an entry per token, if requested. ``sources`` names the origin of each token: "target", the name of
    its drafter ("draft", "lookup" or a custom drafter's name), or "forced" if constraints left no other choice.
    ``thinking`` and ``tool_calls`` are the other parts of an answer in a chat; they aren't in ``text``.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    sources: list[str] = field(default_factory=list)
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether the piece has no text, thinking or tool calls."""
        return not (self.text or self.thinking or self.tool_calls)


@dataclass(kw_only=True)
class ProposalStats:
    """Counts of proposed and accepted tokens, and milliseconds of inference."""

    proposed: int = 0
    accepted: int = 0
    reached: int = 0  # proposed tokens compared with the target: all tokens before them were accepted
    accepted_by_position: list[int] = field(default_factory=list)
    drafters: dict[str, dict[str, int]] = field(default_factory=dict)
    target_ms: float = 0.0
    draft_ms: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Fraction of accepted tokens among proposed tokens; None if nothing was proposed."""
        return divide_or_none(self.accepted, self.proposed)

    @property
    def conditional_acceptance(self) -> float | None:
        """Acceptance probability of a proposed token, given acceptance of all earlier tokens in its proposal."""
        return divide_or_none(self.accepted, self.reached)

    def count_proposal(self, source: str, proposed: int, accepted: int) -> None:
        """Count a proposal of the drafter ``source``; its first ``accepted`` tokens were accepted."""
        self.proposed += proposed
        self.reached += min(1, proposed)
        self.drafters.setdefault(source, {"proposed": 0, "accepted": 0})["proposed"] += proposed
        self.count_accepted(source, range(accepted), proposed)

    def count_accepted(self, source: str, positions: range, proposed: int) -> None:
        """Count the tokens at ``positions`` of a proposal as accepted; its ``proposed`` tokens are already counted."""
        self.accepted += len(positions)
        self.reached += max(0, min(len(positions), proposed - positions.start - 1))
        self.drafters[source]["accepted"] += len(positions)
        self.accepted_by_position += [0] * (positions.stop - len(self.accepted_by_position))
        for position in positions:
            self.accepted_by_position[position] += 1


@dataclass(kw_only=True)
class Stats(ProposalStats):
    """Statistics of a text. Counts are tokens, times are milliseconds of wall clock.

    ``ttft_ms`` is the time to first token, without tokenisation; ``tpot_ms`` is the mean time per later token.
    ``target_ms`` and ``draft_ms`` are spent in inference; ``other_ms`` is everything else, including the caller's work
    between pieces of a stream. In a batch, these are the times of the whole batch while the row was in it.
    ``cached_tokens`` counts prompt tokens found in the KV cache. ``thinking_tokens`` counts generated tokens of
    thinking, in chats. ``reached`` counts proposed tokens up to the first rejected token of each proposal; later tokens
    aren't compared with the target's choice. ``accepted_by_position`` counts accepted tokens by their position in the
    proposal. ``forced`` counts tokens without a choice, because constraints left no other token. ``drafters`` has the
    proposed and accepted tokens of each drafter by its name. ``seed`` is None if the text is greedy. ``rollback`` is
    the method of removing rejected tokens from the KV cache, and ``rule`` the way of feeding tokens for exact
    arithmetic.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    thinking_tokens: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    rounds: int = 0
    forced: int = 0
    seed: int | None = None
    other_ms: float = 0.0
    rollback: str = ""
    device: str = ""
    draft_device: str | None = None
    engine: str = ""
    engine_reason: str = ""
    draft_engine: str | None = None
    profile: str | None = None  # the settings chosen for this machine
    arithmetic: str = ""  # "exact" or "fast", with the probe results if no rule makes it exact
    rule: str = ""  # exact arithmetic's rule for feeding tokens on this machine

    @property
    def tokens_per_round(self) -> float:
        """Generated tokens per round; a round has a single forward pass of the target."""
        return self.generated_tokens / max(self.rounds, 1)


@dataclass(frozen=True)
class Origin:
    """The start of a text, apart from its tokens."""

    chat: bool = False  # whether the text is the answer in a chat
    healable: int = 0  # position of the first token open to healing
    context_length: int | None = None  # maximum length of the text in tokens, if less than the model's context
    sample: int = 0  # index among the texts of the same prompt


@dataclass(frozen=True)
class Provenance:
    """The provenance of a text; ``verify`` uses it to check each token.

    prompt_ids: (n,) int64, before healing.
    params: complete, with the model's defaults, the seed and the token limit.
    model: returns the model's identity and settings.
    healed_ids: generated tokens within the prompt's text; they aren't among the result's ``token_ids``.
    """

    prompt_ids: np.ndarray
    params: Params
    origin: Origin
    model: Callable[[], JsonObject]
    healed_ids: list[int] = field(default_factory=list)

    def __getstate__(self) -> JsonObject:
        """Return the pickled state, with functions and classes, unknown to other processes, as in JSON records."""
        options: JsonObject = {name: repr(value) for name in CALLABLE_OPTIONS if (value := getattr(self.params, name))}
        if model_json_schema := getattr(self.params.json_schema, "model_json_schema", None):
            options["json_schema"] = model_json_schema()
        return {**vars(self), "params": replace(self.params, **options), "model": self.model()}

    def __setstate__(self, state: JsonObject) -> None:
        vars(self).update(state, model=lambda: state["model"])


@dataclass(frozen=True)
class Result:
    """A finished text.

    ``finish_reason`` is "eos" (the model ended the text), "stop" (a stop string or id, or a complete grammar),
    "length" (``max_tokens``, the context, ``min_indent`` or ``max_predict_ms``) or "cancelled". ``token_ids`` has every
    generated token, including a final EOS or stop id; ``text`` excludes the stop string. ``logprobs`` has an entry per
    token id, if requested. ``record`` is the text's provenance, for ``LanguageModel.verify``. ``schema_errors`` lists
    violations of the JSON schema in the mode checked; [] if there are none. In a chat, ``text`` excludes the model's
    ``thinking`` and ``tool_calls``; if ``finish_reason`` is "length", the last call may be truncated. ``stop_string``
    is the stop string at the end of the text, if any. ``sources``: the origin of each of ``token_ids``, as in
    ``Piece``.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats = field(default_factory=Stats)
    logprobs: list[TokenLogprob] | None = None
    record: Provenance | None = field(default=None, repr=False, compare=False)
    schema_errors: list[str] | None = None
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_string: str | None = None
    sources: list[str] = field(default_factory=list, repr=False, compare=False)

    @property
    def message(self) -> JsonObject:
        """The answer as a message to append to the chat."""
        message: JsonObject = {"role": "assistant", "content": self.text}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [tool_call_json(call) for call in self.tool_calls]
        return message


def divide_or_none(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def answer_extras_json(result: Result) -> JsonObject:
    """Return the fields of an answer's message other than its text: thinking and tool calls."""
    return {name: value for name, value in result.message.items() if name not in ("role", "content")}


def tool_call_json(call: ToolCall) -> JsonObject:
    """Return a call in the form of OpenAI's API."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
