"""The reply of /compare: two choices of a chat, and the comparison of their times and texts."""

from pydantic import Field

from ovspec.api.comparison import Comparison, ResultPair
from ovspec.engine.results import Result
from ovspec.protocols.chat.reply import ChatCompletion, ChatReplyMaker, Chunk
from ovspec.protocols.reply import ReplyModel


class ComparisonReport(ReplyModel):
    """The comparison of plain decoding and speculation, as in 'ovspec generate --compare'."""

    turns: int = Field(description="Timed turns so far.")
    equal: bool | None = Field(default=None, description="Whether all texts have the same tokens.")
    equality_sentence: str = ""
    speedup: float | None = Field(
        default=None, description="Of the median turn; null if speculation can't be the cause."
    )
    speedup_sentence: str = ""
    plain_per_second: float = Field(
        default=0.0,
        description="Tokens after the first: of the last turn during the comparison, of the median turn at the end.",
    )
    speculative_per_second: float = 0.0


class ComparedChat(ChatCompletion):
    """Two choices: the text without and with speculation."""

    comparison: ComparisonReport


class ComparedChunk(Chunk):
    """A chunk of the stream of both texts; after the texts, chunks have a comparison and no choices."""

    comparison: ComparisonReport | None = None


class ComparingReplyMaker(ChatReplyMaker):
    """Makes the reply of /compare: a chat with two choices, and ``report``, the comparison over all turns."""

    report = ComparisonReport(turns=0)

    def comparison_event(self, report: ComparisonReport) -> ComparedChunk:
        return ComparedChunk.model_construct(**self._identity, choices=[], comparison=report)

    def whole_reply(self, results: list[Result]) -> ComparedChat:
        chat = super().whole_reply(results)
        fields = {name: getattr(chat, name) for name in chat.model_fields_set}
        return ComparedChat(**fields, comparison=self.report)


def tokens_per_second(ms_per_token: float) -> float:
    return 1e3 / ms_per_token if ms_per_token else 0.0


def report_turn(turns: list[ResultPair]) -> ComparisonReport:
    """Return the speeds of the last turn."""
    plain_speed, speculative_speed = (tokens_per_second(result.stats.tpot_ms) for result in turns[-1])
    return ComparisonReport(turns=len(turns), plain_per_second=plain_speed, speculative_per_second=speculative_speed)


def report_comparison(comparison: Comparison, turn_count: int) -> ComparisonReport:
    speedup = comparison.speedup
    return ComparisonReport(
        turns=turn_count,
        equal=comparison.divergence is None,
        equality_sentence=comparison.equality_sentence,
        speedup=speedup.claimed_ratio,
        speedup_sentence=comparison.speedup_sentence,
        plain_per_second=tokens_per_second(speedup.plain_ms),
        speculative_per_second=tokens_per_second(speedup.speculative_ms),
    )
