"""The cost of a forward pass by its width, learned during generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from ovspec.cache.decoder import FAST_RULE, FeedRule

WIDEST_INFERENCE = 64  # largest width with a learned cost; beyond it, the cost is extrapolated linearly
INITIAL_WIDTH_CHANGE_SHARE = 0.2  # assumed cost of a change of width until measured, as a share of a forward pass
MEASURED_CHANGE_COUNT = 4  # weight of a profile's measurement, in changes
# Bounds of the time factor of a single forward pass; the upper bound is lower if it may have compiled kernels.
FASTEST_FACTOR = 0.1
SLOWEST_FACTOR = 2.0
SLOWEST_FACTOR_OF_FIRST = 1.1
# Exponents for all costs to follow a forward pass's time factor, and additional exponents for its own width and above.
# Both are larger at first: INITIAL_... divided by the number of passes of its width, or of all passes since the last
# prefill, including itself. A pass may be slow for many reasons, but is hardly ever faster than its true cost, so costs
# fall faster than they rise.
ALL_COSTS_EXPONENT = 0.03
OWN_WIDTH_EXPONENT = 0.06
INITIAL_EXPONENT_FOR_RISING_COSTS = 0.5
INITIAL_EXPONENT_FOR_FALLING_COSTS = 1.0
INITIAL_OWN_WIDTH_EXPONENT = 0.3
# With a draft, many consecutive passes have the same width. After this number of them, and with a profile's costs, a
# pass shows the machine's current speed (clock, other work): then all costs follow more, the pass's own width less.
STEADY_INFERENCES = 3
STEADY_ALL_COSTS_EXPONENT = 0.1
STEADY_OWN_WIDTH_EXPONENT = 0.02
WIDTH_CHANGE_LEARNING_RATE = 0.1  # share by which the cost of a change of width follows a measurement; more at first


class InferenceCosts:
    """Milliseconds of a forward pass by its width in tokens, learned from each pass.

    A pass of a new width takes longer, because OpenVINO prepares every layer anew. So a narrower pass is padded to the
    last width if padding takes less time.

    Args:
        measured_ms: the costs of some widths, from a profile; without it, the first repeated width sets the scale.
        width_change_ms: the additional cost of a change of width, if measured.
        can_fill: whether the decoder can pad a forward pass.
        rule: the decoder's feed rule: its minimum tokens per pass, and its maximum; more tokens take several passes.
    """

    def __init__(
        self,
        measured_ms: Mapping[int, float] | None = None,
        width_change_ms: float | None = None,
        can_fill: bool = False,
        rule: FeedRule = FAST_RULE,
    ) -> None:
        costs = initial_costs(measured_ms, rule.most)
        self.is_known = self._was_measured = bool(measured_ms)
        if width_change_ms is None:
            self.width_change_ms = INITIAL_WIDTH_CHANGE_SHARE * float(costs[1])  # added by a change of width
            self._width_change_count = 0  # number of samples for ``width_change_ms``
        else:
            self.width_change_ms = width_change_ms
            self._width_change_count = MEASURED_CHANGE_COUNT
        self._rule = rule
        # For each width, the computed width, with the same cost.
        widths = range(WIDEST_INFERENCE + 1)
        self._computed_widths = np.array(
            [min(rule.padded_token_count(max(1, width)), WIDEST_INFERENCE) for width in widths]
        )
        self.ms_by_width = costs = costs[self._computed_widths]
        self._can_fill = can_fill
        self._last_width = 0
        self._same_width_count = 0  # consecutive passes of the last width
        self._spent_filling_ms = 0.0  # time spent on padding since the last pass without padding
        half_width = WIDEST_INFERENCE // 2
        self._further_token_ms = float(costs[WIDEST_INFERENCE] - costs[half_width]) / half_width  # beyond the widest
        self._inferences_since_prompt = 0  # forward passes since the last prefill
        self._inference_counts: Counter[int] = Counter()  # by width

    def __call__(self, width: int) -> float:
        if width <= WIDEST_INFERENCE:
            return float(self.ms_by_width[width])
        return float(self.ms_by_width[WIDEST_INFERENCE]) + self._further_token_ms * (width - WIDEST_INFERENCE)

    def next_inference_costs(self, change_share: float = 1.0) -> np.ndarray:
        """Return the milliseconds of the next forward pass by needed width, (WIDEST_INFERENCE + 1,).

        ``change_share``: share of the cost of a change of width to count.
        """
        last_width = self._last_width
        if not 0 < last_width <= WIDEST_INFERENCE:
            return self.ms_by_width
        costs = self.ms_by_width + change_share * self.width_change_ms
        costs[last_width] = self.ms_by_width[last_width]
        if self._can_fill:
            np.minimum(costs[:last_width], self.ms_by_width[last_width], out=costs[:last_width])
        return costs[self._computed_widths]

    def choose_fill_width(self, needed_width: int) -> int:
        """Return the width of the next forward pass, in tokens, if it needs at least ``needed_width``."""
        last_width = self._last_width
        if not (self._can_fill and needed_width and needed_width < last_width <= WIDEST_INFERENCE):
            self._spent_filling_ms = 0.0
            return needed_width
        self._spent_filling_ms += max(0.0, float(self.ms_by_width[last_width] - self.ms_by_width[needed_width]))
        if self._spent_filling_ms <= self.width_change_ms:
            return last_width
        self._spent_filling_ms = 0.0
        return needed_width

    def note_untimed_inference(self, width: int, read_prompt: bool = False) -> None:
        """Note a forward pass of ``width`` tokens without a usable time.

        If it was a prefill, the new context length changes all costs alike: they adapt almost as fast as at first.
        """
        self._last_width = width
        if read_prompt:
            self._inferences_since_prompt = 1

    def learn_inference(self, width: int, ms: float, has_draft: bool = True) -> float:
        """Learn from a forward pass of ``width`` tokens and ``ms`` milliseconds: adjust all costs, its width's most.

        A width above ``WIDEST_INFERENCE`` only adjusts the cost of such widths. Returns the usual milliseconds for the
        width; 0.0 at first, until a width repeats: the first pass of each width compiles kernels.

        ``has_draft``: whether it is a pass of a draft model, or of a target with a draft model.
        """
        width = self._rule.padded_token_count(width)
        width_changed = width != self._last_width
        self._last_width = width
        self._same_width_count += 1
        if width_changed:
            self._same_width_count = 0
        if width > WIDEST_INFERENCE:
            if self.is_known:
                self.ms_by_width = np.minimum(self.ms_by_width, ms)  # a narrower pass can't take longer
                excess_ms = ms - float(self.ms_by_width[WIDEST_INFERENCE])
                self._further_token_ms = max(0.0, excess_ms / (width - WIDEST_INFERENCE))
            return ms
        self._inferences_since_prompt += 1
        self._inference_counts[width] += 1
        same_width_ms = float(self.ms_by_width[width])
        usual_ms = same_width_ms + width_changed * self.width_change_ms
        is_first = self._inference_counts[width] == 1  # it may include kernel compilation
        if not self.is_known:  # the first pass without kernel compilation sets the scale
            self.is_known = not is_first
            scale = ms / usual_ms
            self.ms_by_width = self.ms_by_width * scale
            self.width_change_ms *= scale
            return ms if self.is_known else 0.0
        if width_changed and (ms < usual_ms or not is_first):
            self._width_change_count += 1
            measured_width_change_ms = max(0.0, min(ms, SLOWEST_FACTOR * usual_ms) - same_width_ms)
            self.width_change_ms += max(WIDTH_CHANGE_LEARNING_RATE, 1 / self._width_change_count) * (
                measured_width_change_ms - self.width_change_ms
            )
            usual_ms = same_width_ms + self.width_change_ms
        time_factor = min(max(ms / usual_ms, FASTEST_FACTOR), SLOWEST_FACTOR_OF_FIRST if is_first else SLOWEST_FACTOR)
        self._adjust_costs(time_factor, width, width_changed, has_draft)
        return usual_ms

    def _adjust_costs(self, time_factor: float, width: int, width_changed: bool, has_draft: bool) -> None:
        """Let all costs follow a forward pass of ``time_factor`` times its usual time."""
        all_costs_exponent, own_width_exponent = ALL_COSTS_EXPONENT, OWN_WIDTH_EXPONENT
        if self._was_measured and has_draft and self._same_width_count >= STEADY_INFERENCES:
            all_costs_exponent, own_width_exponent = STEADY_ALL_COSTS_EXPONENT, STEADY_OWN_WIDTH_EXPONENT
        initial_exponent = INITIAL_EXPONENT_FOR_RISING_COSTS if time_factor > 1 else INITIAL_EXPONENT_FOR_FALLING_COSTS
        self.ms_by_width *= time_factor ** max(all_costs_exponent, initial_exponent / self._inferences_since_prompt)
        if not width_changed:
            own_width_exponent = max(own_width_exponent, INITIAL_OWN_WIDTH_EXPONENT / self._inference_counts[width])
        own_width_factor = time_factor**own_width_exponent
        self.ms_by_width[max(1, width - 1) :] *= own_width_factor  # the width, its lower neighbour, all larger widths
        self.ms_by_width[width] *= own_width_factor
        self.ms_by_width = self.ms_by_width[self._computed_widths]


def initial_costs(measured_ms: Mapping[int, float] | None, max_width: int | None) -> np.ndarray:
    """Return the initial milliseconds by width, (WIDEST_INFERENCE + 1,); only relative without ``measured_ms``.

    ``max_width``: maximum width of a forward pass; more tokens take several passes.
    """
    widths = np.arange(WIDEST_INFERENCE + 1)
    if measured_ms and len(measured_ms) > 1:
        known_widths = sorted(measured_ms)
        known_ms = [measured_ms[width] for width in known_widths]
        ms_per_token = max(0.0, (known_ms[-1] - known_ms[-2]) / (known_widths[-1] - known_widths[-2]))
        costs = np.interp(widths, known_widths, known_ms) + ms_per_token * np.maximum(0, widths - known_widths[-1])
    else:
        costs = 1 + 0.05 * np.maximum(0, widths - 1.0)
    if max_width and max_width < WIDEST_INFERENCE:
        split_costs = costs[max_width] * (widths // max_width) + np.where(
            widths % max_width, costs[widths % max_width], 0.0
        )
        costs = np.where(widths <= max_width, costs, split_costs)
    return costs
