"""The allowed ranges of numeric options."""

from dataclasses import dataclass

LARGEST_NUMBER = 3e38  # the range of float32


@dataclass(frozen=True)
class NumberLimits:
    """The range of a number, and its description for error messages.

    excludes_minimum: ``minimum`` itself is out of range.
    special_value: an additional allowed number outside of the range.
    """

    minimum: float = -LARGEST_NUMBER
    maximum: float = LARGEST_NUMBER
    description: str = "a number from -3e38 to 3e38"
    excludes_minimum: bool = False
    special_value: float | None = None


AT_LEAST_1 = NumberLimits(1, description="at least 1")
TOKEN_COUNT = NumberLimits(0, description="0 or more, or -1 for the rest of the context", special_value=-1)
TEXT_COUNT = NumberLimits(1, 10_000, "at least 1 and at most 10,000")
NOT_NEGATIVE = NumberLimits(0, description="0 or more")
PROBABILITY = NumberLimits(0, 1, "above 0 and at most 1", excludes_minimum=True)
FRACTION = NumberLimits(0, 1, "from 0 to 1")
ANY_NUMBER = NumberLimits()
TEMPERATURE = NumberLimits(0, description="0 (greedy) or more")
POSITIVE = NumberLimits(0, description="above 0", excludes_minimum=True)
LOOKAHEAD = NumberLimits(0, description="0 or more, or auto")
