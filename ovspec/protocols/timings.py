"""Counts and times of a text, as llama.cpp's server reports them, and each token's source."""

from pydantic import Field

from ovspec.base.json_types import JsonObject
from ovspec.engine.results import Stats
from ovspec.protocols.reply import ReplyModel


class Timings(ReplyModel):
    cache_n: int = Field(description="Prompt tokens found in the KV cache.")
    prompt_n: int = Field(description="Prompt tokens prefilled.")
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int = Field(0, description="Proposed tokens, if any.")
    draft_n_accepted: int = 0


class TextTimings(Timings):
    """llama.cpp's, and the rounds and drafters of a text."""

    rounds: int = Field(description="Inferences of the model that chose tokens.")
    forced_n: int = Field(description="Tokens to which constraints left no alternative.")
    drafters: dict[str, dict[str, int]] = Field(description="Proposed and accepted tokens of each drafter.")


class TokenSource(ReplyModel):
    """A token of a text."""

    id: int
    text: str = Field(description="The token's text; a special token's name.")
    source: str = Field(description="The proposing drafter, target (the model itself), or forced (by a grammar).")


def make_llamacpp_timings(stats: Stats) -> Timings:
    """Return the counts and times of a text in llama.cpp's form."""
    # Without generated tokens, all time belongs to the prompt.
    total_ms = stats.target_ms + stats.draft_ms + stats.other_ms
    prompt_ms = stats.ttft_ms if stats.generated_tokens else total_ms
    timings: JsonObject = {"cache_n": stats.cached_tokens}
    timings |= make_phase_timings("prompt", stats.prompt_tokens - stats.cached_tokens, prompt_ms)
    predicted_ms = stats.tpot_ms * max(0, stats.generated_tokens - 1)
    timings |= make_phase_timings("predicted", stats.generated_tokens, predicted_ms)
    if stats.proposed:
        timings |= {"draft_n": stats.proposed, "draft_n_accepted": stats.accepted}
    return Timings(**timings)


def make_phase_timings(phase: str, token_count: int, duration_ms: float) -> JsonObject:
    """Return the fields for the tokens of a phase of ``duration_ms`` milliseconds."""
    return {
        f"{phase}_n": token_count,
        f"{phase}_ms": duration_ms,
        f"{phase}_per_token_ms": duration_ms / token_count if token_count else 0.0,
        f"{phase}_per_second": 1e3 * token_count / duration_ms if duration_ms else 0.0,
    }


def make_text_timings(stats: Stats) -> TextTimings:
    """Return the counts and times of a text with its rounds and drafters."""
    timings = make_llamacpp_timings(stats).model_dump(exclude_unset=True)
    return TextTimings(**timings, rounds=stats.rounds, forced_n=stats.forced, drafters=stats.drafters)
