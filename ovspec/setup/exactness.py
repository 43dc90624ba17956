"""Find out by trial how tokens must be fed so that each has the same bits; no machine or device is trusted."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ovspec.base.files import read_cached
from ovspec.cache.decoder import Decoder, FeedRule
from ovspec.ir.crashes import avoid_crash
from ovspec.ir.device import DeviceOptions, make_compile_properties
from ovspec.ir.gpu import wait_for_compilation
from ovspec.setup.rollback_probing import find_findings_file


@dataclass(frozen=True)
class Exactness:
    """What probing found."""

    rule: FeedRule | None  # how tokens must be fed; None if no rule gives every token the same bits
    positions: int  # that were probed by the rule, or by the strictest one that was tried
    differing: int  # how many of them had other bits
    guess: float = 1.0  # how many times as long as a token's inference one takes in which another token is proposed
    tried: dict[str, int] = field(default_factory=dict)  # rules that were probed -> positions with other bits

    @property
    def is_exact(self) -> bool:
        return self.rule is not None

    @property
    def needs_paired_queries(self) -> bool:
        """Whether attention must compute a second query for a token."""
        return self.rule is not None and self.rule.queries > 1

    @property
    def invariance(self) -> float:
        """Share of the positions whose logits were the same, to the bit."""
        return 1 - self.differing / self.positions


@dataclass(frozen=True)
class ExactnessTrial:
    """What is tried: texts of each of ``contexts`` tokens, followed by pieces of each of ``widths`` tokens."""

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    batches: tuple[int, ...] = (3,)


MakeDecoder = Callable[[FeedRule], Decoder]
# Beyond one block of a paged cache. A first load has no time for more.
SHORT_TRIAL = ExactnessTrial((40,), (1, 2, 1, 1, 3, 8, 1))
# Also shorter than one block, and, if possible, more blocks than there are threads to share them.
FULL_TRIAL = ExactnessTrial((20, 70, 600), tuple(range(1, 18)), (2, 9))
EXACTNESS_PROBE_VERSION = "9"  # of probing; another one makes what was found before worthless
# Tokens and logits of the inferences that narrower and wider ones are compared with, and the strictest rule's fewest.
PIECE_TOKENS = 16
COUNTS_TO_TRY = (1, 2, 3, 4, 5, 6, 8, 10, 12, PIECE_TOKENS)  # fewest tokens and fewest logits to try
# Tokens that are fed alone before that counts as the same: 16 bits hide most differences until one is in the cache.
SINGLE_TOKENS = 64
SINGLE_TOKENS_FOR_LOGITS = 8  # the same when only the lm_head differs, whose differences no rounding hides
# Widths tried until one differs. If none does, there is no bound; a first load has no time for wider ones.
RISING_WIDTHS = (64, 96, 256)
FALLING_WIDTHS = (48, 32)  # tried if the first of these differs; smaller bounds would read prompts too slowly
# Rules without a bound. Attention computes a single query with a kernel of its own everywhere; where its bits seem the
# same, rounding to 16 bits has hidden that others come later.
STRICTEST_RULES = {
    "paged": FeedRule(queries=2, fewest=PIECE_TOKENS, fewest_logits=PIECE_TOKENS),
    "stateful": FeedRule(first_apart=True, rows_apart=True, fewest_logits=PIECE_TOKENS),
}
TIMED_INFERENCES = 5  # inferences of each width
# A GPU has attention kernels of their own for prompts without a past and for rows of a token each, and other ones for
# long inferences. Rules that avoid them, the cheapest first.
GPU_RULES = tuple(
    FeedRule(fewest=fewest, most=most, first_apart=True, fewest_logits=fewest, rounded=True)
    for fewest, most in ((2, 64), (8, 64), (16, 32), (16, 16))
)
GPU_TRIAL = ExactnessTrial((40, 600), SHORT_TRIAL.widths, (2, 9))


def find_exactness(make: MakeDecoder, engine: str, vocabulary: int, trial: ExactnessTrial = SHORT_TRIAL) -> Exactness:
    """Find the rule that costs least and gives every token the same bits.

    ``make`` makes a decoder that keeps to a rule. Random ids are below ``vocabulary``.
    """
    strictest = STRICTEST_RULES[engine]
    text = draw_probe_text(make(strictest), vocabulary)
    most = find_widest_feed(make(strictest), text)
    if most == 0:
        return replace(probe_feed_rule(make(strictest), vocabulary, trial), rule=None)
    strictest = replace(strictest, most=most)
    tried: dict[str, int] = {}

    def probe(rule: FeedRule) -> Exactness:
        exactness = probe_feed_rule(make(rule), vocabulary, trial)
        tried[str(rule)] = exactness.differing
        return exactness

    rule = find_least_rule(make, strictest, text)
    exactness = probe(rule)
    if not exactness.is_exact and rule != strictest:
        exactness = probe(strictest)  # if it isn't exact, no lesser rule is
        rules = list_stricter_rules(rule, strictest) if exactness.is_exact else ()
        exactness = next(filter(lambda lesser: lesser.is_exact, map(probe, rules)), exactness)
    # More tokens are computed in any case where the rule says so; on the stateful engine nothing is proposed unasked.
    if engine == "paged" and exactness.rule and exactness.rule.fewest < 2:
        exactness = replace(exactness, guess=measure_proposal_cost(make(exactness.rule), text))
    return replace(exactness, tried=tried)


def find_exactness_on_gpu(make: MakeDecoder, vocabulary: int, trial: ExactnessTrial = GPU_TRIAL) -> Exactness:
    """Find the rule that gives every token the same bits on a GPU, where the paged engine runs; see ``GPU_RULES``."""
    tried: dict[str, int] = {}

    def probe(rule: FeedRule) -> Exactness:
        wait_for_gpu_kernels(make(rule), vocabulary)
        exactness = probe_feed_rule(make(rule), vocabulary, trial)
        tried[str(rule)] = exactness.differing
        return exactness

    cheapest, *others = GPU_RULES
    exactness = probe(cheapest)
    while not exactness.is_exact and others:
        exactness = probe(others.pop(0))
    return replace(exactness, tried=tried)


def wait_for_gpu_kernels(decoder: Decoder, vocabulary: int) -> None:
    """Run an inference of every width that ``decoder``'s rule allows, and wait until a GPU has compiled for these.

    A GPU computes a width with a general kernel first, and replaces it once one for that width has been compiled in the
    background; the two round differently.
    """
    rule = decoder.rule
    text = draw_probe_text(decoder, vocabulary)[: rule.most]
    width = rule.fewest
    while width <= len(text):
        for _ in range(2):
            decoder.reset(1)
            decoder.feed([text[:1]], [1])
            decoder.feed([text[1:width]], [width - 1])
        width *= 2
    decoder.reset(1)
    wait_for_compilation()


def read_exactness(folder: Path, options: DeviceOptions, engine: str) -> Exactness | None:
    """Return what an earlier run found, if any."""
    return read_cached(Exactness, find_exactness_file(folder, options, engine))


def find_exactness_file(folder: Path, options: DeviceOptions, engine: str) -> Path | None:
    properties = make_compile_properties(avoid_crash(folder, options))
    setting = sorted((name, value) for name, value in properties.items() if name != "CACHE_DIR")
    told = repr((engine, EXACTNESS_PROBE_VERSION, options.device, setting))
    return find_findings_file("exactness", folder, told, options.cache_folder, options.device)


# ---------------------------------------------------------------- finding the rule


def draw_probe_text(decoder: Decoder, vocabulary: int) -> np.ndarray:
    """Return random ids, as many as the widest inference that is tried has, or as the context holds."""
    most = min(RISING_WIDTHS[-1], decoder.context_length or RISING_WIDTHS[-1])
    return np.random.default_rng(0).integers(0, vocabulary, most)


def find_widest_feed(decoder: Decoder, text: np.ndarray) -> int | None:
    """Return how many tokens of ``text`` an inference may have at most; None for all of them, 0 for too few."""
    narrow = decoder.fork()
    expected: list[bytes] = []

    def agrees(width: int) -> bool:
        decoder.reset(1)
        found = hash_logits_rows(decoder.feed([text[:width]], [width])[0])
        if found[: len(expected)] != expected[:width]:
            return False
        while len(expected) < width:
            piece = text[len(expected) : min(len(expected) + PIECE_TOKENS, width)]
            expected.extend(hash_logits_rows(narrow.feed([piece], [len(piece)])[0]))
        return found == expected[:width]

    last = 0
    for width in [width for width in RISING_WIDTHS if width < len(text)] + [len(text)]:
        if not agrees(width):
            break
        last = width
    else:
        return None
    narrow.reset(1)
    expected.clear()
    return last or next((width for width in FALLING_WIDTHS if width < len(text) and agrees(width)), 0)


def find_least_rule(make: MakeDecoder, strictest: FeedRule, text: np.ndarray) -> FeedRule:
    """Return the rule with the fewest tokens and logits whose bits seem to be the ``strictest``'s."""
    decoder, begin = make(strictest), min(PIECE_TOKENS, len(text))
    looked_at = text[: PIECE_TOKENS + SINGLE_TOKENS + sum(range(PIECE_TOKENS))]
    pieces = [looked_at[at : at + PIECE_TOKENS] for at in range(0, len(looked_at), PIECE_TOKENS)]
    expected = [row for piece in pieces for row in hash_logits_rows(decoder.feed([piece], [len(piece)])[0])]

    def least(rule: FeedRule, names: tuple[str, ...], alone: int) -> FeedRule:
        """Return ``rule`` with the least count under these names, all alike and less than before, that agrees."""
        most = min(getattr(rule, name) for name in names)
        for count in [count for count in COUNTS_TO_TRY if count < most]:
            lesser = replace(rule, **dict.fromkeys(names, count))
            # Tokens alone come first: they differ most often. Other widths may have kernels of their own, too.
            widths = [1] * alone + list(range(count + 1, PIECE_TOKENS))
            if has_expected_bits(make(lesser), looked_at, begin, widths, expected):
                return lesser
        return rule

    if strictest.fewest == 1:
        return least(strictest, ("fewest_logits",), SINGLE_TOKENS)
    both = least(strictest, ("fewest", "fewest_logits"), SINGLE_TOKENS)
    return least(least(both, ("fewest",), SINGLE_TOKENS), ("fewest_logits",), SINGLE_TOKENS_FOR_LOGITS)


def list_stricter_rules(rule: FeedRule, strictest: FeedRule) -> Iterator[FeedRule]:
    """Yield rules stricter than ``rule`` with rising counts of tokens and logits, all less than the ``strictest``."""
    for count in COUNTS_TO_TRY:
        fewest = min(max(rule.fewest, count), strictest.fewest)
        stricter = replace(rule, fewest=fewest, fewest_logits=max(rule.fewest_logits, count))
        if stricter not in (rule, strictest):
            yield stricter


def has_expected_bits(decoder: Decoder, text: np.ndarray, begin: int, widths: list[int], expected: list[bytes]) -> bool:
    """Return whether ``text`` has the ``expected`` bits from ``begin`` on if it is fed in pieces of these widths."""
    decoder.reset(1)
    decoder.feed([text[:begin]], [0])
    for width in widths:
        piece = text[begin : begin + width]
        if len(piece) and hash_logits_rows(decoder.feed([piece], [len(piece)])[0]) != expected[begin : begin + width]:
            return False
        begin += width
    return True


def measure_proposal_cost(decoder: Decoder, text: np.ndarray) -> float:
    """Return how many times as long an inference takes that is fed two tokens as one that is fed a single token."""
    least = {1: math.inf, 2: math.inf}  # an inference may take longer for many reasons
    context = min(RISING_WIDTHS[0], len(text) - 2)
    decoder.reset(1)
    decoder.feed([text[:context]], [0])
    for _ in range(TIMED_INFERENCES):
        for width in least:
            for _ in range(2):  # the first inference after one of another width takes longer
                decoder.truncate(0, context)
                began = time.perf_counter()
                decoder.feed([text[context : context + width]], [1])
                least[width] = min(least[width], time.perf_counter() - began)
    return least[2] / least[1]


def hash_probe_logits(decoder: Decoder, vocabulary: int) -> list[bytes]:
    """Return the bits of the logits after each token of a random text, fed in pieces of many widths."""
    text, found, widths = (
        draw_probe_text(decoder, vocabulary),
        list[bytes](),
        itertools.cycle((40, *SHORT_TRIAL.widths)),
    )
    while len(piece := text[len(found) : len(found) + next(widths)]):
        found += hash_logits_rows(decoder.feed([piece], [len(piece)])[0])
    return found


def hash_logits_rows(logits: np.ndarray) -> list[bytes]:
    return [hashlib.blake2b(row, digest_size=8).digest() for row in np.ascontiguousarray(logits)]


# ---------------------------------------------------------------- probing a rule


def probe_feed_rule(decoder: Decoder, vocabulary: int, trial: ExactnessTrial = SHORT_TRIAL) -> Exactness:
    """Feed random texts in many ways by the decoder's rule, and compare the bits with those of one pass over each."""
    random, most = np.random.default_rng(0), decoder.context_length
    positions = differing = 0
    tail = sum(trial.widths)
    contexts = [context for context in trial.contexts if not most or context + tail <= most]
    for context in contexts or [max(2, (most or 0) - tail)]:
        text = random.integers(0, vocabulary, min(context + tail, most or context + tail))
        begin = max(1, len(text) - tail)
        decoder.reset(1)
        expected = hash_logits_rows(decoder.feed([text], [len(text)])[0])
        prober = FeedRuleProber(decoder, text, begin, random)
        ways = [prober.in_pieces(trial.widths), prober.after_rollbacks(trial.widths)]
        ways += [prober.beside_others(rows) for rows in trial.batches]
        for way in ways:
            for first, logits in way:
                found = hash_logits_rows(logits)
                positions += len(found)
                differing += sum(a != b for a, b in zip(found, expected[first:], strict=False))
        decoder.reset(1)
    return Exactness(None if differing else decoder.rule, positions, differing)


class FeedRuleProber:
    """Feeds ``text`` (n,) to ``decoder`` in several ways, with pieces of given widths from position ``begin`` on.

    Each way yields (position of the first token, logits (positions, vocab)).
    """

    def __init__(self, decoder: Decoder, text: np.ndarray, begin: int, random: np.random.Generator) -> None:
        self.decoder, self.text, self.begin, self.random = decoder, text, begin, random

    def in_pieces(self, widths: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """Read the context in random pieces, of which a random number of logits is wanted, then go on."""
        self.decoder.reset(1)
        position = 0
        while position < self.begin:
            width = int(self.random.integers(1, self.random.choice((2, 4, *RISING_WIDTHS)) + 1))
            piece = self.text[position : min(self.begin, position + width)]
            wanted = int(self.random.integers(0, len(piece) + 1))
            position += len(piece)
            logits = self.decoder.feed([piece], [wanted])[0]
            if wanted:
                yield position - wanted, logits
        yield from self.feed(widths)

    def after_rollbacks(self, widths: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """The same with rejected tokens before each piece, in a fork that rewinds into the context first."""
        self.read()
        fork = self.decoder.fork()
        fork.truncate(0, min(max(1, self.begin - 8), len(fork.rows[0])))  # a fork may be empty
        unread = self.text[len(fork.rows[0]) : self.begin]
        if len(unread):
            fork.feed([unread], [0])
        prober = FeedRuleProber(fork, self.text, self.begin, self.random)
        yield from prober.feed(tuple(reversed(widths)), rejected=True)
        fork.reset(0)

    def beside_others(self, rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Read the text in pieces as the first of ``rows`` rows, which hold other texts of other lengths."""
        self.read()
        self.decoder.reorder([0] * rows)
        for row in range(1, rows):
            self.decoder.truncate(row, int(self.random.integers(0, self.begin)))
        position, widths = len(self.decoder.rows[0]), itertools.cycle((1, 3, 1, 1, 2, 5))
        while position < len(self.text):
            room = [len(self.text) - len(row) for row in self.decoder.rows]  # the text may fill the context
            pieces = [self.junk(min(left, int(self.random.integers(0, 6)))) for left in room]
            pieces[0] = self.text[position : position + next(widths)]
            logits = self.decoder.feed(pieces, [len(piece) for piece in pieces])[0]
            yield position, logits
            position += len(pieces[0])
        self.decoder.reorder([0])

    def read(self) -> None:
        """Let the decoder hold the context."""
        self.decoder.truncate(0, min(self.begin, len(self.decoder.rows[0])))
        if len(unread := self.text[len(self.decoder.rows[0]) : self.begin]):
            self.decoder.feed([unread], [0])

    def feed(self, widths: tuple[int, ...], rejected: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        position = self.begin
        for width in widths:
            if position >= len(self.text):
                return
            if rejected:
                junk = self.junk(min(3, len(self.text) - position))
                self.decoder.feed([junk], [len(junk)])
                self.decoder.truncate(0, position)
                missing = self.text[len(self.decoder.rows[0]) : position]
                if len(missing):  # recurrent states are restored from an earlier snapshot
                    self.decoder.feed([missing], [0])
            piece = self.text[position : position + width]
            yield position, self.decoder.feed([piece], [len(piece)])[0]
            position += width

    def junk(self, count: int) -> np.ndarray:
        return self.random.integers(0, int(self.text.max()) + 1, count)
