"""Find the ``FeedRule`` of exact arithmetic by trial; no machine or device is trusted."""

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
from ovspec.ir.crashes import choose_crash_free_options
from ovspec.ir.device import DeviceOptions, make_compile_properties
from ovspec.ir.gpu import wait_for_compilation
from ovspec.setup.rollback_probing import find_findings_file


@dataclass(frozen=True)
class Exactness:
    """The result of probing for a rule of exact arithmetic."""

    rule: FeedRule | None  # how to feed tokens; None if no rule is exact
    positions: int  # number of positions probed with the rule, or else with the strictest rule tried
    differing: int  # number of positions with other bits
    guess: float = 1.0  # time of a forward pass with a proposed token, relative to a pass without
    tried: dict[str, int] = field(default_factory=dict)  # probed rules -> positions with other bits

    @property
    def is_exact(self) -> bool:
        return self.rule is not None

    @property
    def needs_two_queries(self) -> bool:
        """Whether attention must compute a second query for a token."""
        return self.rule is not None and self.rule.queries > 1

    @property
    def invariance(self) -> float:
        """Share of the positions with the same logits, to the bit."""
        return 1 - self.differing / self.positions


@dataclass(frozen=True)
class ExactnessTrial:
    """The texts for probing: for each of ``context_lengths``, a context, then pieces of ``widths`` tokens."""

    context_lengths: tuple[int, ...]
    widths: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (3,)


MakeDecoder = Callable[[FeedRule], Decoder]
# Longer than a block of a paged cache. A first load has no time for more.
SHORT_TRIAL = ExactnessTrial((40,), (1, 2, 1, 1, 3, 8, 1))
# Also shorter than a block, and, if possible, with more blocks than threads.
FULL_TRIAL = ExactnessTrial((20, 70, 600), tuple(range(1, 18)), (2, 9))
EXACTNESS_PROBE_VERSION = "9"  # a new version invalidates cached findings
# Tokens and logits of the reference passes, to compare narrower and wider passes with; also the strictest minimum.
PIECE_LENGTH = 16
MIN_COUNTS_TO_TRY = (1, 2, 3, 4, 5, 6, 8, 10, 12, PIECE_LENGTH)  # minimum tokens and minimum logits to try
# Single tokens to feed before their bits count as equal: 16 bits hide most differences until the cache has one.
SINGLE_TOKEN_COUNT = 64
SINGLE_TOKEN_COUNT_FOR_LOGITS = 8  # enough if only the lm_head differs: no rounding hides its differences
# Widths to try up to the first difference. Without a difference there is no bound; a first load has no time for more.
RISING_WIDTHS = (64, 96, 256)
FALLING_WIDTHS = (48, 32)  # tried if the first rising width differs; smaller bounds would make prefill too slow
# Rules without a bound. On all machines attention has a separate kernel for a single query; if its bits seem the same,
# rounding to 16 bits has hidden later differences.
STRICTEST_RULES = {
    "paged": FeedRule(queries=2, fewest=PIECE_LENGTH, fewest_logits=PIECE_LENGTH),
    "stateful": FeedRule(first_apart=True, rows_apart=True, fewest_logits=PIECE_LENGTH),
}
TIMED_INFERENCES = 5  # timed forward passes per width
# A GPU has separate attention kernels for prompts without a past, rows with a single new token, and wide forward
# passes. These rules avoid them, cheapest rule first.
GPU_RULES = tuple(
    FeedRule(fewest=fewest, most=most_tokens, first_apart=True, fewest_logits=fewest, rounded=True)
    for fewest, most_tokens in ((2, 64), (8, 64), (16, 32), (16, 16))
)
GPU_TRIAL = ExactnessTrial((40, 600), SHORT_TRIAL.widths, (2, 9))


def find_exactness(
    make_decoder: MakeDecoder, engine: str, vocab_size: int, trial: ExactnessTrial = SHORT_TRIAL
) -> Exactness:
    """Find the cheapest exact rule: every token then has the same bits, however its text is divided.

    ``make_decoder`` makes a decoder with a feed rule. Random ids are below ``vocab_size``.
    """
    strictest_rule = STRICTEST_RULES[engine]
    probe_ids = draw_probe_ids(make_decoder(strictest_rule), vocab_size)
    max_width = find_widest_feed(make_decoder(strictest_rule), probe_ids)
    if max_width == 0:
        return replace(probe_feed_rule(make_decoder(strictest_rule), vocab_size, trial), rule=None)
    strictest_rule = replace(strictest_rule, most=max_width)
    differing_by_rule: dict[str, int] = {}

    def probe_rule(feed_rule: FeedRule) -> Exactness:
        exactness = probe_feed_rule(make_decoder(feed_rule), vocab_size, trial)
        differing_by_rule[str(feed_rule)] = exactness.differing
        return exactness

    feed_rule = find_cheapest_rule(make_decoder, strictest_rule, probe_ids)
    exactness = probe_rule(feed_rule)
    if not exactness.is_exact and feed_rule != strictest_rule:
        exactness = probe_rule(strictest_rule)  # if it isn't exact, weaker rules aren't, either
        if exactness.is_exact:
            stricter_rules = list_stricter_rules(feed_rule, strictest_rule)
            exactness = next(
                (
                    stricter_exactness
                    for stricter_exactness in map(probe_rule, stricter_rules)
                    if stricter_exactness.is_exact
                ),
                exactness,
            )
    # With a higher minimum, a proposed token costs nothing; and the stateful engine proposes nothing by default.
    if engine == "paged" and exactness.rule and exactness.rule.fewest < 2:
        exactness = replace(exactness, guess=measure_two_token_time_ratio(make_decoder(exactness.rule), probe_ids))
    return replace(exactness, tried=differing_by_rule)


def find_exactness_on_gpu(make_decoder: MakeDecoder, vocab_size: int, trial: ExactnessTrial = GPU_TRIAL) -> Exactness:
    """Find the cheapest exact rule for the paged engine on a GPU; see ``GPU_RULES``."""
    differing_by_rule: dict[str, int] = {}

    def probe_rule(feed_rule: FeedRule) -> Exactness:
        wait_for_gpu_kernels(make_decoder(feed_rule), vocab_size)
        exactness = probe_feed_rule(make_decoder(feed_rule), vocab_size, trial)
        differing_by_rule[str(feed_rule)] = exactness.differing
        return exactness

    cheapest_rule, *costlier_rules = GPU_RULES
    exactness = probe_rule(cheapest_rule)
    while not exactness.is_exact and costlier_rules:
        exactness = probe_rule(costlier_rules.pop(0))
    return replace(exactness, tried=differing_by_rule)


def wait_for_gpu_kernels(decoder: Decoder, vocab_size: int) -> None:
    """Run a forward pass of every width within ``decoder``'s rule, and wait until a GPU has compiled their kernels.

    For a new width, a GPU first uses a general kernel, compiles a special kernel in the background, and then switches
    to it; the two round differently.
    """
    feed_rule = decoder.rule
    probe_ids = draw_probe_ids(decoder, vocab_size)[: feed_rule.most]
    width = feed_rule.fewest
    while width <= len(probe_ids):
        for _ in range(2):
            decoder.reset(1)
            decoder.feed([probe_ids[:1]], [1])
            decoder.feed([probe_ids[1:width]], [width - 1])
        width *= 2
    decoder.reset(1)
    wait_for_compilation()


def read_saved_exactness(folder: Path, options: DeviceOptions, engine: str) -> Exactness | None:
    """Return the exactness found by an earlier run, if any."""
    return read_cached(Exactness, find_exactness_file(folder, options, engine))


def find_exactness_file(folder: Path, options: DeviceOptions, engine: str) -> Path | None:
    properties = make_compile_properties(choose_crash_free_options(folder, options))
    property_pairs = sorted(
        (property_name, value) for property_name, value in properties.items() if property_name != "CACHE_DIR"
    )
    finding_key = repr((engine, EXACTNESS_PROBE_VERSION, options.device, property_pairs))
    return find_findings_file("exactness", folder, finding_key, options.cache_folder, options.device)


# ---------------------------------------------------------------- finding the rule


def draw_probe_ids(decoder: Decoder, vocab_size: int) -> np.ndarray:
    """Return random ids, enough for the widest forward pass to try, or for the whole context if it is shorter."""
    max_width = min(RISING_WIDTHS[-1], decoder.context_length or RISING_WIDTHS[-1])
    return np.random.default_rng(0).integers(0, vocab_size, max_width)


def find_widest_feed(decoder: Decoder, probe_ids: np.ndarray) -> int | None:
    """Return the maximum exact number of tokens in a forward pass; None for no maximum, 0 if it is too small."""
    narrow_decoder = decoder.fork()
    expected_hashes: list[bytes] = []

    def is_equal_when_fed_together(width: int) -> bool:
        decoder.reset(1)
        fed_hashes = hash_logits_rows(decoder.feed([probe_ids[:width]], [width])[0])
        if fed_hashes[: len(expected_hashes)] != expected_hashes[:width]:
            return False
        while len(expected_hashes) < width:
            piece = probe_ids[len(expected_hashes) : min(len(expected_hashes) + PIECE_LENGTH, width)]
            expected_hashes.extend(hash_logits_rows(narrow_decoder.feed([piece], [len(piece)])[0]))
        return fed_hashes == expected_hashes[:width]

    widest_feed = 0
    for width in [width for width in RISING_WIDTHS if width < len(probe_ids)] + [len(probe_ids)]:
        if not is_equal_when_fed_together(width):
            break
        widest_feed = width
    else:
        return None
    narrow_decoder.reset(1)
    expected_hashes.clear()
    smaller_widths = [width for width in FALLING_WIDTHS if width < len(probe_ids)]
    return widest_feed or next(filter(is_equal_when_fed_together, smaller_widths), 0)


def find_cheapest_rule(make_decoder: MakeDecoder, strictest_rule: FeedRule, probe_ids: np.ndarray) -> FeedRule:
    """Return the rule with the fewest tokens and logits, and apparently still the ``strictest_rule``'s bits."""
    decoder = make_decoder(strictest_rule)
    context_length = min(PIECE_LENGTH, len(probe_ids))
    probe_ids = probe_ids[: PIECE_LENGTH + SINGLE_TOKEN_COUNT + sum(range(PIECE_LENGTH))]
    pieces = [
        probe_ids[piece_start : piece_start + PIECE_LENGTH] for piece_start in range(0, len(probe_ids), PIECE_LENGTH)
    ]
    expected_hashes = [
        row_hash for piece in pieces for row_hash in hash_logits_rows(decoder.feed([piece], [len(piece)])[0])
    ]

    def lower_rule_counts(feed_rule: FeedRule, count_names: tuple[str, ...], single_token_count: int) -> FeedRule:
        """Return ``feed_rule`` with the smallest count in these fields, the same for all, without changing bits."""
        count_so_far = min(getattr(feed_rule, count_name) for count_name in count_names)
        for min_count in [min_count for min_count in MIN_COUNTS_TO_TRY if min_count < count_so_far]:
            lesser_rule = replace(feed_rule, **dict.fromkeys(count_names, min_count))
            # Single tokens come first: they differ most often. Other widths may also have separate kernels.
            widths = [1] * single_token_count + list(range(min_count + 1, PIECE_LENGTH))
            if has_expected_bits(make_decoder(lesser_rule), probe_ids, context_length, widths, expected_hashes):
                return lesser_rule
        return feed_rule

    if strictest_rule.fewest == 1:
        return lower_rule_counts(strictest_rule, ("fewest_logits",), SINGLE_TOKEN_COUNT)
    feed_rule = lower_rule_counts(strictest_rule, ("fewest", "fewest_logits"), SINGLE_TOKEN_COUNT)
    feed_rule = lower_rule_counts(feed_rule, ("fewest",), SINGLE_TOKEN_COUNT)
    return lower_rule_counts(feed_rule, ("fewest_logits",), SINGLE_TOKEN_COUNT_FOR_LOGITS)


def list_stricter_rules(feed_rule: FeedRule, strictest_rule: FeedRule) -> Iterator[FeedRule]:
    """Yield rules stricter than ``feed_rule``, with rising counts of tokens and logits, below the strictest rule's."""
    for min_count in MIN_COUNTS_TO_TRY:
        min_tokens = min(max(feed_rule.fewest, min_count), strictest_rule.fewest)
        stricter_rule = replace(feed_rule, fewest=min_tokens, fewest_logits=max(feed_rule.fewest_logits, min_count))
        if stricter_rule not in (feed_rule, strictest_rule):
            yield stricter_rule


def has_expected_bits(
    decoder: Decoder, probe_ids: np.ndarray, context_length: int, widths: list[int], expected_hashes: list[bytes]
) -> bool:
    """Return whether the ids after the context have the expected bits if fed in pieces of these widths."""
    decoder.reset(1)
    decoder.feed([probe_ids[:context_length]], [0])
    for width in widths:
        piece = probe_ids[context_length : context_length + width]
        if (
            len(piece)
            and hash_logits_rows(decoder.feed([piece], [len(piece)])[0])
            != expected_hashes[context_length : context_length + width]
        ):
            return False
        context_length += width
    return True


def measure_two_token_time_ratio(decoder: Decoder, probe_ids: np.ndarray) -> float:
    """Return the time of a forward pass over two tokens, relative to a single token."""
    min_seconds = {1: math.inf, 2: math.inf}  # the minimum, because a pass may be slow for many reasons
    context_length = min(RISING_WIDTHS[0], len(probe_ids) - 2)
    decoder.reset(1)
    decoder.feed([probe_ids[:context_length]], [0])
    for _ in range(TIMED_INFERENCES):
        for width in min_seconds:
            for _ in range(2):  # the first pass of a new width takes longer
                decoder.truncate(0, context_length)
                start_time = time.perf_counter()
                decoder.feed([probe_ids[context_length : context_length + width]], [1])
                min_seconds[width] = min(min_seconds[width], time.perf_counter() - start_time)
    return min_seconds[2] / min_seconds[1]


def hash_probe_logits(decoder: Decoder, vocab_size: int) -> list[bytes]:
    """Return hashes of the logits after each token of a random text, fed in pieces of many widths."""
    probe_ids = draw_probe_ids(decoder, vocab_size)
    widths = itertools.cycle((40, *SHORT_TRIAL.widths))
    logits_hashes: list[bytes] = []
    while len(piece := probe_ids[len(logits_hashes) : len(logits_hashes) + next(widths)]):
        logits_hashes += hash_logits_rows(decoder.feed([piece], [len(piece)])[0])
    return logits_hashes


def hash_logits_rows(logits: np.ndarray) -> list[bytes]:
    return [hashlib.blake2b(row, digest_size=8).digest() for row in np.ascontiguousarray(logits)]


# ---------------------------------------------------------------- probing a rule


def probe_feed_rule(decoder: Decoder, vocab_size: int, trial: ExactnessTrial = SHORT_TRIAL) -> Exactness:
    """Feed random texts in many ways by the decoder's rule, and compare the bits with one pass over each text."""
    generator = np.random.default_rng(0)
    max_context_length = decoder.context_length
    position_count = 0
    differing_count = 0
    tail_length = sum(trial.widths)
    context_lengths = [
        context_length
        for context_length in trial.context_lengths
        if not max_context_length or context_length + tail_length <= max_context_length
    ]
    for context_length in context_lengths or [max(2, (max_context_length or 0) - tail_length)]:
        probe_ids = generator.integers(
            0, vocab_size, min(context_length + tail_length, max_context_length or context_length + tail_length)
        )
        pieces_start = max(1, len(probe_ids) - tail_length)
        decoder.reset(1)
        expected_hashes = hash_logits_rows(decoder.feed([probe_ids], [len(probe_ids)])[0])
        prober = FeedRuleProber(decoder, probe_ids, pieces_start, generator)
        piece_readings = [prober.feed_in_pieces(trial.widths), prober.feed_after_rollbacks(trial.widths)]
        piece_readings += [prober.feed_in_batch(row_count) for row_count in trial.batch_sizes]
        for reading_start, logits in itertools.chain.from_iterable(piece_readings):
            logits_hashes = hash_logits_rows(logits)
            position_count += len(logits_hashes)
            differing_count += sum(a != b for a, b in zip(logits_hashes, expected_hashes[reading_start:], strict=False))
        decoder.reset(1)
    exact_rule = None if differing_count else decoder.rule
    return Exactness(exact_rule, position_count, differing_count)


class FeedRuleProber:
    """Feeds ``probe_ids`` (n,) to ``decoder`` in several ways, in pieces from position ``pieces_start`` on.

    Each way yields (position of the first token, logits (positions, vocab)).
    """

    def __init__(
        self, decoder: Decoder, probe_ids: np.ndarray, pieces_start: int, generator: np.random.Generator
    ) -> None:
        self.decoder = decoder
        self.probe_ids = probe_ids
        self.pieces_start = pieces_start
        self.generator = generator

    def feed_in_pieces(self, widths: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """Read the context in random pieces, with a random number of logits for each, then continue."""
        self.decoder.reset(1)
        position = 0
        while position < self.pieces_start:
            width = int(self.generator.integers(1, self.generator.choice((2, 4, *RISING_WIDTHS)) + 1))
            piece = self.probe_ids[position : min(self.pieces_start, position + width)]
            logits_count = int(self.generator.integers(0, len(piece) + 1))
            position += len(piece)
            logits = self.decoder.feed([piece], [logits_count])[0]
            if logits_count:
                yield position - logits_count, logits
        yield from self.feed_pieces(widths)

    def feed_after_rollbacks(self, widths: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """Feed pieces, each after rejected and rolled-back tokens, in a fork first rewound into the context."""
        self.feed_context()
        fork = self.decoder.fork()
        fork.truncate(0, min(max(1, self.pieces_start - 8), len(fork.rows[0])))  # a fork may be empty
        unread_ids = self.probe_ids[len(fork.rows[0]) : self.pieces_start]
        if len(unread_ids):
            fork.feed([unread_ids], [0])
        prober = FeedRuleProber(fork, self.probe_ids, self.pieces_start, self.generator)
        yield from prober.feed_pieces(tuple(reversed(widths)), with_rejections=True)
        fork.reset(0)

    def feed_in_batch(self, row_count: int) -> Iterator[tuple[int, np.ndarray]]:
        """Read the text in pieces as the first of ``row_count`` rows, with other texts of other lengths."""
        self.feed_context()
        self.decoder.reorder([0] * row_count)
        for decoder_row in range(1, row_count):
            self.decoder.truncate(decoder_row, int(self.generator.integers(0, self.pieces_start)))
        widths = itertools.cycle((1, 3, 1, 1, 2, 5))
        position = len(self.decoder.rows[0])
        while position < len(self.probe_ids):
            free_counts = [
                len(self.probe_ids) - len(decoder_row) for decoder_row in self.decoder.rows
            ]  # junk only up to the end of the context
            pieces = [
                self.draw_random_ids(min(free_count, int(self.generator.integers(0, 6)))) for free_count in free_counts
            ]
            pieces[0] = self.probe_ids[position : position + next(widths)]
            logits = self.decoder.feed(pieces, [len(piece) for piece in pieces])[0]
            yield position, logits
            position += len(pieces[0])
        self.decoder.reorder([0])

    def feed_context(self) -> None:
        self.decoder.truncate(0, min(self.pieces_start, len(self.decoder.rows[0])))
        if len(unread_ids := self.probe_ids[len(self.decoder.rows[0]) : self.pieces_start]):
            self.decoder.feed([unread_ids], [0])

    def feed_pieces(self, widths: tuple[int, ...], with_rejections: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        position = self.pieces_start
        for width in widths:
            if position >= len(self.probe_ids):
                return
            if with_rejections:
                random_ids = self.draw_random_ids(min(3, len(self.probe_ids) - position))
                self.decoder.feed([random_ids], [len(random_ids)])
                self.decoder.truncate(0, position)
                missing_ids = self.probe_ids[len(self.decoder.rows[0]) : position]
                if len(missing_ids):  # recurrent states went back further, to an earlier snapshot
                    self.decoder.feed([missing_ids], [0])
            piece = self.probe_ids[position : position + width]
            yield position, self.decoder.feed([piece], [len(piece)])[0]
            position += width

    def draw_random_ids(self, id_count: int) -> np.ndarray:
        return self.generator.integers(0, int(self.probe_ids.max()) + 1, id_count)
