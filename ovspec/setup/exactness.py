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
    """The result of probing for a rule of exact arithmetic."""

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
    """The texts to probe with: one for each of ``contexts`` tokens, followed by pieces of ``widths`` tokens each."""

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    batches: tuple[int, ...] = (3,)


MakeDecoder = Callable[[FeedRule], Decoder]
# Beyond one block of a paged cache. A first load has no time for more.
SHORT_TRIAL = ExactnessTrial((40,), (1, 2, 1, 1, 3, 8, 1))
# Also shorter than one block, and, if possible, more blocks than there are threads to share them.
FULL_TRIAL = ExactnessTrial((20, 70, 600), tuple(range(1, 18)), (2, 9))
EXACTNESS_PROBE_VERSION = "9"  # a new version invalidates kept findings
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
    FeedRule(fewest=fewest, most=most_tokens, first_apart=True, fewest_logits=fewest, rounded=True)
    for fewest, most_tokens in ((2, 64), (8, 64), (16, 32), (16, 16))
)
GPU_TRIAL = ExactnessTrial((40, 600), SHORT_TRIAL.widths, (2, 9))


def find_exactness(
    make_decoder: MakeDecoder, engine: str, vocabulary: int, trial: ExactnessTrial = SHORT_TRIAL
) -> Exactness:
    """Find the rule that costs least and gives every token the same bits.

    ``make_decoder`` makes a decoder that keeps to a rule. Random ids are below ``vocabulary``.
    """
    strictest = STRICTEST_RULES[engine]
    text = draw_probe_text(make_decoder(strictest), vocabulary)
    most_tokens = find_widest_feed(make_decoder(strictest), text)
    if most_tokens == 0:
        return replace(probe_feed_rule(make_decoder(strictest), vocabulary, trial), rule=None)
    strictest = replace(strictest, most=most_tokens)
    tried: dict[str, int] = {}

    def probe(rule: FeedRule) -> Exactness:
        exactness = probe_feed_rule(make_decoder(rule), vocabulary, trial)
        tried[str(rule)] = exactness.differing
        return exactness

    rule = find_least_rule(make_decoder, strictest, text)
    exactness = probe(rule)
    if not exactness.is_exact and rule != strictest:
        exactness = probe(strictest)  # if it isn't exact, no lesser rule is
        if exactness.is_exact:
            rules = list_stricter_rules(rule, strictest)
            exactness = next((lesser for lesser in map(probe, rules) if lesser.is_exact), exactness)
    # More tokens are computed in any case where the rule says so; on the stateful engine nothing is proposed unasked.
    if engine == "paged" and exactness.rule and exactness.rule.fewest < 2:
        exactness = replace(exactness, guess=measure_proposal_cost(make_decoder(exactness.rule), text))
    return replace(exactness, tried=tried)


def find_exactness_on_gpu(make_decoder: MakeDecoder, vocabulary: int, trial: ExactnessTrial = GPU_TRIAL) -> Exactness:
    """Find the rule that gives every token the same bits on a GPU, where the paged engine runs; see ``GPU_RULES``."""
    tried: dict[str, int] = {}

    def probe(rule: FeedRule) -> Exactness:
        wait_for_gpu_kernels(make_decoder(rule), vocabulary)
        exactness = probe_feed_rule(make_decoder(rule), vocabulary, trial)
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
    """Return the exactness that an earlier run found, if any."""
    return read_cached(Exactness, find_exactness_file(folder, options, engine))


def find_exactness_file(folder: Path, options: DeviceOptions, engine: str) -> Path | None:
    properties = make_compile_properties(avoid_crash(folder, options))
    setting = sorted((name, value) for name, value in properties.items() if name != "CACHE_DIR")
    key = repr((engine, EXACTNESS_PROBE_VERSION, options.device, setting))
    return find_findings_file("exactness", folder, key, options.cache_folder, options.device)


# ---------------------------------------------------------------- finding the rule


def draw_probe_text(decoder: Decoder, vocabulary: int) -> np.ndarray:
    """Return random ids, as many as the widest inference that is tried has, or as the context holds."""
    most_tokens = min(RISING_WIDTHS[-1], decoder.context_length or RISING_WIDTHS[-1])
    return np.random.default_rng(0).integers(0, vocabulary, most_tokens)


def find_widest_feed(decoder: Decoder, text: np.ndarray) -> int | None:
    """Return how many tokens of ``text`` an inference may have at most; None for all of them, 0 for too few."""
    narrow_decoder = decoder.fork()
    expected: list[bytes] = []

    def is_equal_when_fed_together(width: int) -> bool:
        decoder.reset(1)
        hashes = hash_logits_rows(decoder.feed([text[:width]], [width])[0])
        if hashes[: len(expected)] != expected[:width]:
            return False
        while len(expected) < width:
            piece = text[len(expected) : min(len(expected) + PIECE_TOKENS, width)]
            expected.extend(hash_logits_rows(narrow_decoder.feed([piece], [len(piece)])[0]))
        return hashes == expected[:width]

    widest = 0
    for width in [width for width in RISING_WIDTHS if width < len(text)] + [len(text)]:
        if not is_equal_when_fed_together(width):
            break
        widest = width
    else:
        return None
    narrow_decoder.reset(1)
    expected.clear()
    smaller = [width for width in FALLING_WIDTHS if width < len(text)]
    return widest or next(filter(is_equal_when_fed_together, smaller), 0)


def find_least_rule(make_decoder: MakeDecoder, strictest: FeedRule, text: np.ndarray) -> FeedRule:
    """Return the rule with the fewest tokens and logits whose bits seem to be the ``strictest``'s."""
    decoder = make_decoder(strictest)
    begin = min(PIECE_TOKENS, len(text))
    text = text[: PIECE_TOKENS + SINGLE_TOKENS + sum(range(PIECE_TOKENS))]
    pieces = [text[start : start + PIECE_TOKENS] for start in range(0, len(text), PIECE_TOKENS)]
    expected = [row for piece in pieces for row in hash_logits_rows(decoder.feed([piece], [len(piece)])[0])]

    def lower_counts(rule: FeedRule, fields: tuple[str, ...], single_tokens: int) -> FeedRule:
        """Return ``rule`` with the least count in these fields, the same for all, that keeps the bits."""
        most_tokens = min(getattr(rule, name) for name in fields)
        for count in [count for count in COUNTS_TO_TRY if count < most_tokens]:
            lesser = replace(rule, **dict.fromkeys(fields, count))
            # Single tokens come first: they differ most often. Other widths may have kernels of their own, too.
            widths = [1] * single_tokens + list(range(count + 1, PIECE_TOKENS))
            if has_expected_bits(make_decoder(lesser), text, begin, widths, expected):
                return lesser
        return rule

    if strictest.fewest == 1:
        return lower_counts(strictest, ("fewest_logits",), SINGLE_TOKENS)
    rule = lower_counts(strictest, ("fewest", "fewest_logits"), SINGLE_TOKENS)
    rule = lower_counts(rule, ("fewest",), SINGLE_TOKENS)
    return lower_counts(rule, ("fewest_logits",), SINGLE_TOKENS_FOR_LOGITS)


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
    """Return the time of an inference that is fed two tokens, relative to a single token."""
    least_seconds = {1: math.inf, 2: math.inf}  # an inference may take longer for many reasons
    context = min(RISING_WIDTHS[0], len(text) - 2)
    decoder.reset(1)
    decoder.feed([text[:context]], [0])
    for _ in range(TIMED_INFERENCES):
        for width in least_seconds:
            for _ in range(2):  # the first inference after one of another width takes longer
                decoder.truncate(0, context)
                start_time = time.perf_counter()
                decoder.feed([text[context : context + width]], [1])
                least_seconds[width] = min(least_seconds[width], time.perf_counter() - start_time)
    return least_seconds[2] / least_seconds[1]


def hash_probe_logits(decoder: Decoder, vocabulary: int) -> list[bytes]:
    """Return hashes of the logits after each token of a random text, fed in pieces of many widths."""
    text = draw_probe_text(decoder, vocabulary)
    widths = itertools.cycle((40, *SHORT_TRIAL.widths))
    hashes: list[bytes] = []
    while len(piece := text[len(hashes) : len(hashes) + next(widths)]):
        hashes += hash_logits_rows(decoder.feed([piece], [len(piece)])[0])
    return hashes


def hash_logits_rows(logits: np.ndarray) -> list[bytes]:
    return [hashlib.blake2b(row, digest_size=8).digest() for row in np.ascontiguousarray(logits)]


# ---------------------------------------------------------------- probing a rule


def probe_feed_rule(decoder: Decoder, vocabulary: int, trial: ExactnessTrial = SHORT_TRIAL) -> Exactness:
    """Feed random texts in many ways by the decoder's rule, and compare the bits with one pass over each."""
    generator = np.random.default_rng(0)
    most_tokens = decoder.context_length
    positions = 0
    differing = 0
    tail_tokens = sum(trial.widths)
    contexts = [context for context in trial.contexts if not most_tokens or context + tail_tokens <= most_tokens]
    for context in contexts or [max(2, (most_tokens or 0) - tail_tokens)]:
        text = generator.integers(0, vocabulary, min(context + tail_tokens, most_tokens or context + tail_tokens))
        begin = max(1, len(text) - tail_tokens)
        decoder.reset(1)
        expected = hash_logits_rows(decoder.feed([text], [len(text)])[0])
        prober = FeedRuleProber(decoder, text, begin, generator)
        readings = [prober.read_in_pieces(trial.widths), prober.read_after_rollbacks(trial.widths)]
        readings += [prober.read_in_batch(rows) for rows in trial.batches]
        for first, logits in itertools.chain.from_iterable(readings):
            hashes = hash_logits_rows(logits)
            positions += len(hashes)
            differing += sum(a != b for a, b in zip(hashes, expected[first:], strict=False))
        decoder.reset(1)
    rule = None if differing else decoder.rule
    return Exactness(rule, positions, differing)


class FeedRuleProber:
    """Feeds ``text`` (n,) to ``decoder`` in several ways, in pieces from position ``begin`` on.

    Each way yields (position of the first token, logits (positions, vocab)).
    """

    def __init__(self, decoder: Decoder, text: np.ndarray, begin: int, generator: np.random.Generator) -> None:
        self.decoder = decoder
        self.text = text
        self.begin = begin
        self.generator = generator

    def read_in_pieces(self, widths: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """Read the context in random pieces, with a random number of logits for each, then go on."""
        self.decoder.reset(1)
        position = 0
        while position < self.begin:
            width = int(self.generator.integers(1, self.generator.choice((2, 4, *RISING_WIDTHS)) + 1))
            piece = self.text[position : min(self.begin, position + width)]
            logits_rows = int(self.generator.integers(0, len(piece) + 1))
            position += len(piece)
            logits = self.decoder.feed([piece], [logits_rows])[0]
            if logits_rows:
                yield position - logits_rows, logits
        yield from self.feed_pieces(widths)

    def read_after_rollbacks(self, widths: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """The same with rejected tokens before each piece, in a fork that rewinds into the context first."""
        self.read_context()
        fork = self.decoder.fork()
        fork.truncate(0, min(max(1, self.begin - 8), len(fork.rows[0])))  # a fork may be empty
        unread = self.text[len(fork.rows[0]) : self.begin]
        if len(unread):
            fork.feed([unread], [0])
        prober = FeedRuleProber(fork, self.text, self.begin, self.generator)
        yield from prober.feed_pieces(tuple(reversed(widths)), with_rejections=True)
        fork.reset(0)

    def read_in_batch(self, rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Read the text in pieces as the first of ``rows`` rows, which hold other texts of other lengths."""
        self.read_context()
        self.decoder.reorder([0] * rows)
        for row in range(1, rows):
            self.decoder.truncate(row, int(self.generator.integers(0, self.begin)))
        widths = itertools.cycle((1, 3, 1, 1, 2, 5))
        position = len(self.decoder.rows[0])
        while position < len(self.text):
            room = [len(self.text) - len(row) for row in self.decoder.rows]  # the text may fill the context
            pieces = [self.draw_junk(min(tokens, int(self.generator.integers(0, 6)))) for tokens in room]
            pieces[0] = self.text[position : position + next(widths)]
            logits = self.decoder.feed(pieces, [len(piece) for piece in pieces])[0]
            yield position, logits
            position += len(pieces[0])
        self.decoder.reorder([0])

    def read_context(self) -> None:
        self.decoder.truncate(0, min(self.begin, len(self.decoder.rows[0])))
        if len(unread := self.text[len(self.decoder.rows[0]) : self.begin]):
            self.decoder.feed([unread], [0])

    def feed_pieces(self, widths: tuple[int, ...], with_rejections: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        position = self.begin
        for width in widths:
            if position >= len(self.text):
                return
            if with_rejections:
                junk = self.draw_junk(min(3, len(self.text) - position))
                self.decoder.feed([junk], [len(junk)])
                self.decoder.truncate(0, position)
                missing = self.text[len(self.decoder.rows[0]) : position]
                if len(missing):  # recurrent states are restored from an earlier snapshot
                    self.decoder.feed([missing], [0])
            piece = self.text[position : position + width]
            yield position, self.decoder.feed([piece], [len(piece)])[0]
            position += width

    def draw_junk(self, count: int) -> np.ndarray:
        return self.generator.integers(0, int(self.text.max()) + 1, count)
