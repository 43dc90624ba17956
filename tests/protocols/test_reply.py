"""Parts of OpenAI's answers that are made without a model."""

from __future__ import annotations

from ovspec.engine.results import Stats
from ovspec.protocols.chat.reply import make_openai_usage


def test_usage_counts_each_prompt_once_and_each_text() -> None:
    """Of two prompts with two texts each, the first of which was in the cache in part."""
    stats = [
        Stats(prompt_tokens=5, cached_tokens=3, generated_tokens=4, proposed=6, accepted=2, thinking_tokens=1),
        Stats(prompt_tokens=5, cached_tokens=3, generated_tokens=3),
        Stats(prompt_tokens=7, generated_tokens=2, proposed=3, accepted=3),
        Stats(prompt_tokens=7, generated_tokens=1),
    ]
    usage = make_openai_usage(stats, 2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 10, 22)
    assert usage.prompt_tokens_details.cached_tokens == 3
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (5, 4)
    assert details.reasoning_tokens == 1
