"""The ranges that numbers among the options may have."""

from dataclasses import dataclass

LARGEST_NUMBER = 3e38  # what a float32 can hold


@dataclass(frozen=True)
class Limits:
    """The range of a number, and how messages describe it.

    above: ``least`` itself is out of range.
    special: a number outside of the range that is allowed, too.
    """

    least: float = -LARGEST_NUMBER
    most: float = LARGEST_NUMBER
    words: str = "a number from -3e38 to 3e38"
    above: bool = False
    special: float | None = None


AT_LEAST_1 = Limits(1, words="at least 1")
TOKEN_COUNT = Limits(0, words="0 or more, or -1 for as many as the context holds", special=-1)
TEXT_COUNT = Limits(1, 10_000, "at least 1 and at most 10,000")
NOT_NEGATIVE = Limits(0, words="0 or more")
PROBABILITY = Limits(0, 1, "above 0 and at most 1", above=True)
FRACTION = Limits(0, 1, "from 0 to 1")
ANY_NUMBER = Limits()
TEMPERATURE = Limits(0, words="0 (greedy) or more")
POSITIVE = Limits(0, words="above 0", above=True)
LOOKAHEAD = Limits(0, words="0 or more, or auto")
