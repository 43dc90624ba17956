"""The turns measured by ``chats.py``: their file, and the figures for its tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from figures import median, median_interval
from harness import Prompt, prompt_named

from ovspec.base.errors import OvspecError

PLAIN = "plain"  # the baseline of all other ways
# Heading -> numerator, denominator, and format of the ratio.
RATES = {
    "Tokens a round": ("tokens", "rounds", ".2f"),
    "Accepted a round": ("accepted", "rounds", ".2f"),
    "Conditional acceptance": ("accepted", "reached", ".2f"),
    "Forced tokens": ("forced", "tokens", ".0%"),
}


@dataclass(frozen=True)
class Case:
    """The prompts of a turn: a prompt, or a ``batch`` of its kind beginning with it; and the options of the answers.

    context: a shorter prompt gets other text in front, up to this length in tokens.
    accept: the rule for sampled tokens.
    """

    prompt: str  # its name
    context: int
    batch: int
    temperature: float
    accept: str
    turn: int

    @property
    def group(self) -> tuple[int, int, float, str]:
        """The fields equal in all cases of a table."""
        return self.batch, self.context, self.temperature, self.accept


@dataclass(frozen=True)
class Text:
    """Texts generated together in the same way.

    tpot_ms: milliseconds per token after each text's first; None without such tokens, and for peers' batches.
    seconds: including prefill. Peers count no rounds.
    """

    tokens: list[list[int]]
    seconds: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    reached: int = 0  # proposed tokens compared with the model's choice
    forced: int = 0  # tokens without a choice


@dataclass(frozen=True)
class Turn:
    """The texts of a case, by way of generating them. ``prompt_tokens``: sum over all prompts."""

    case: Case
    prompt_tokens: int
    texts: dict[str, Text]


@dataclass
class Log:
    """The measured turns, and their file. Its first line is ``about``: the model, options and machine."""

    file: Path
    about: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)  # several per case, if ways were added later

    def __post_init__(self) -> None:
        written = self.file.read_bytes() if self.file.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        if whole != written:  # the bench was killed while writing
            self.file.write_bytes(whole)
        if not whole:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.about)
        about, *turns = [json.loads(line) for line in whole.splitlines()] or [self.about]
        for name, value in self.about.items():
            if about.get(name) != value:
                raise OvspecError(f"{self.file}: its {name} is {about.get(name)}, not {value}; give another --out.")
        for line in turns:
            texts = {way: Text(**text) for way, text in line["texts"].items()}
            self.turns.append(Turn(Case(**line["case"]), line["prompt_tokens"], texts))

    def add(self, turn: Turn) -> None:
        self._append(asdict(turn))
        self.turns.append(turn)

    def has(self, case: Case) -> set[str]:
        """Return the measured ways of a case."""
        return {way for turn in self.turns if turn.case == case for way in turn.texts}

    def _append(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Figures:
    """The figures of some turns, formatted for tables."""

    turns: list[Turn]

    def of(self, chosen: Callable[[Prompt], bool]) -> Figures:
        return Figures([turn for turn in self.turns if chosen(prompt_named(turn.case.prompt))])

    def texts(self, way: str) -> list[Text]:
        return [turn.texts[way] for turn in self.turns if way in turn.texts]

    def ms(self, way: str) -> str | None:
        times = [text.tpot_ms for text in self.texts(way) if text.tpot_ms is not None]
        return median(times) if times else None

    def prompt_tokens(self) -> str:
        return median((turn.prompt_tokens for turn in self.turns if PLAIN in turn.texts), 0)

    def prompt_ms(self, way: str) -> str | None:
        """Return the milliseconds per token of the prompt."""
        turns = [turn for turn in self.turns if way in turn.texts]
        times = [text.ttft_ms / turn.prompt_tokens for turn in turns if (text := turn.texts[way]).ttft_ms]
        return median(times, 2) if times else None

    def speeds(self, way: str) -> list[float]:
        """Return the speed of ``way`` relative to plain decoding in each turn; for batches, prefill is included."""
        speeds = []
        for turn in (turn for turn in self.turns if way in turn.texts):
            text = turn.texts[way]
            plain = turn.texts[PLAIN]
            if turn.case.batch > 1:
                speeds.append(plain.seconds / text.seconds)
            elif text.tpot_ms and plain.tpot_ms:
                speeds.append(plain.tpot_ms / text.tpot_ms)
        return speeds

    def speed(self, way: str) -> str | None:
        """Return the median of ``speeds`` with its interval."""
        speeds = self.speeds(way)
        if not speeds:
            return None
        return "{} ({:.2f} to {:.2f})".format(median(speeds, 2), *median_interval(speeds))

    def count(self, way: str, name: str) -> int:
        if name == "tokens":
            return sum(len(ids) for text in self.texts(way) for ids in text.tokens)
        return sum(getattr(text, name) for text in self.texts(way))

    def rate(self, way: str, heading: str) -> str | None:
        """Return the rate ``heading`` of ``RATES``; None for peers, because they don't count tokens or rounds."""
        over, under, form = RATES[heading]
        if not (self.count(way, under) and self.count(way, over)):
            return None
        return format(self.count(way, over) / self.count(way, under), form)

    def accepted(self, way: str) -> str | None:
        """Return "accepted of proposed" tokens; None for peers."""
        proposed = self.count(way, "proposed")
        return f"{self.count(way, 'accepted')} of {proposed}" if proposed else None

    def equal(self, way: str) -> str:
        """Return how many texts are equal to plain decoding's."""
        turns = [turn.texts for turn in self.turns if way in turn.texts]
        pairs = [pair for texts in turns for pair in zip(texts[way].tokens, texts[PLAIN].tokens, strict=True)]
        return f"{sum(text == plain for text, plain in pairs)} of {len(pairs)}"
