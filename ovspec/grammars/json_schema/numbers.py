"""Regular expressions for the texts of JSON numbers within bounds."""

from __future__ import annotations

import re
from decimal import Decimal

from ovspec.grammars.json_schema.shapes import Numbers

# As many digits as in llama.cpp's grammars: readers round longer numbers, and a model could write digits forever.
WHOLE_EXPRESSION = "(0|[1-9][0-9]{0,15})"
FRACTION_EXPRESSION = r"(\.[0-9]{1,16})"
EXPONENT_EXPRESSION = "([eE][+-]?[0-9]{1,3})"
LARGEST_WHOLE_NUMBER = 10**16 - 1
LARGEST_EXACT_NUMBER = 2**53  # readers may keep numbers as 64-bit floats


def write_number_expressions(numbers: Numbers) -> tuple[list[str], list[str]]:
    """Return the regular expressions a number's text must match, all of them, and the forbidden expressions.

    ``multiple_of`` isn't covered.
    """
    if numbers.values is not None:
        return ["|".join(sorted(map(spell_number, numbers.values)))], []
    required_expressions = ["-?" + WHOLE_EXPRESSION]
    if not numbers.integer:
        # With an exponent, any number would be possible.
        is_bounded = numbers.low or numbers.high or numbers.excluded
        required_expressions[0] += f"{FRACTION_EXPRESSION}?" + f"{EXPONENT_EXPRESSION}?" * (not is_bounded)
    forbidden_expressions: list[str] = []
    if numbers.excluded:
        forbidden_expressions.append("|".join(sorted(map(write_every_spelling, numbers.excluded))))
    if low := numbers.low:
        if low.value > 0 or (not low.value and low.exclusive):
            required_expressions.append(f"({write_numbers_above(low.value, low.exclusive)})")
        elif low.value:
            forbidden_expressions.append(f"-({write_numbers_above(-low.value, not low.exclusive)})")
        else:
            forbidden_expressions.append("-.*")  # and no -0
    if high := numbers.high:
        if high.value < 0 or (not high.value and high.exclusive):
            required_expressions.append(f"-({write_numbers_above(-high.value, high.exclusive)})")
        else:
            forbidden_expressions.append(f"({write_numbers_above(high.value, not high.exclusive)})")
    return required_expressions, forbidden_expressions


def spell_number(value: Decimal) -> str:
    """Return the expression of a number; an integer may be written with a fraction of 0."""
    if int(value.as_tuple().exponent) > 0 or 0 < abs(value) < Decimal("1e-6"):
        return re.escape(str(value))
    if value != value.to_integral_value():
        return re.escape(format(value, "f"))
    return str(int(value)) + r"(\.0)?" * (abs(value) <= LARGEST_EXACT_NUMBER)


def write_every_spelling(value: Decimal) -> str:
    """Return the expression of all spellings of a number, without an exponent."""
    whole, fraction = split_digits(abs(value))
    sign = "-" * (value <= 0) + "?" * (not value)
    return sign + (rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?")


def split_digits(value: Decimal) -> tuple[str, str]:
    """Return the digits of a number before and after its point, without zeros at the end."""
    whole, _, fraction = format(value, "f").partition(".")
    return whole, fraction.rstrip("0")


def write_numbers_above(value: Decimal, exclusive: bool) -> str:
    """Return the expression of the numbers above ``value`` (0 or more), without a sign."""
    whole, fraction = split_digits(value)
    expressions = [rf"({write_wholes_above(whole)})(\.[0-9]+)?"]
    indexed_digits = enumerate(fraction)
    expressions += [rf"{whole}\.{fraction[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in indexed_digits if digit < "9"]
    if exclusive:
        expressions.append(rf"{whole}\.{fraction}0*[1-9][0-9]*")
    else:
        expressions.append(rf"{whole}\.{fraction}[0-9]*" if fraction else rf"{whole}(\.[0-9]+)?")
    return "|".join(expressions)


def write_wholes_above(whole: str) -> str:
    """Return the expression of the whole numbers above ``whole``."""
    expressions = [rf"[1-9][0-9]{{{len(whole)},}}"]
    for i, digit in enumerate(whole):
        if digit < "9":
            expressions.append(f"{whole[:i]}[{int(digit) + 1}-9][0-9]{{{len(whole) - i - 1}}}")
    return "|".join(expressions)


def has_no_number(numbers: Numbers) -> bool:
    """Return whether the bounds exclude every writable number, as far as this is easy to see."""
    if numbers.values is not None:
        return not numbers.values
    low, high = numbers.low, numbers.high
    if (low and low.value > LARGEST_WHOLE_NUMBER + 1) or (high and high.value < -LARGEST_WHOLE_NUMBER - 1):
        return True
    step = numbers.multiple_of or (Decimal(1) if numbers.integer else None)
    if not (low and high and step):
        return False
    if numbers.integer and numbers.multiple_of and step != step.to_integral_value():
        return False
    smallest = (low.value / step).to_integral_value("ROUND_CEILING") * step
    if low.exclusive and smallest == low.value:
        smallest += step
    return smallest > high.value or (high.exclusive and smallest == high.value)
