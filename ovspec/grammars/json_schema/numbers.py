"""Regular expressions for the texts of JSON numbers within bounds."""

from __future__ import annotations

import re
from decimal import Decimal

from ovspec.grammars.json_schema.shapes import Numbers

# As many digits as llama.cpp's grammars allow: readers round longer numbers, and a model could write forever.
WHOLE, FRACTION, EXPONENT = "(0|[1-9][0-9]{0,15})", r"(\.[0-9]{1,16})", "([eE][+-]?[0-9]{1,3})"
LARGEST = 10**16 - 1
EXACT = 2**53  # readers may keep numbers as 64-bit floats


def expressions(numbers: Numbers) -> tuple[list[str], list[str]]:
    """Return the regular expressions that the text of a number must match, all of them, and those that it mustn't.

    ``multiple`` isn't covered.
    """
    if numbers.values is not None:
        return ["|".join(sorted(map(spelt, numbers.values)))], []
    plain = numbers.low or numbers.high or numbers.excluded  # with an exponent, any number could be written
    right = [f"-?{WHOLE}{'' if numbers.integer else f'{FRACTION}?' if plain else f'{FRACTION}?{EXPONENT}?'}"]
    wrong = ["|".join(sorted(map(every_text, numbers.excluded)))] if numbers.excluded else []
    for bound, upper in ((numbers.low, False), (numbers.high, True)):
        if bound:
            value, same, other = (-bound.value, "-", "") if upper else (bound.value, "", "-")
            if value > 0 or (not value and bound.strict):
                right.append(f"{same}({above(value, bound.strict)})")
            elif value or upper:
                wrong.append(f"{other}({above(-value, not bound.strict)})")
            else:
                wrong.append("-.*")  # and no -0
    return right, wrong


def spelt(value: Decimal) -> str:
    """Return the expression of one number; an integer may be written with a fraction of 0."""
    if int(value.as_tuple().exponent) > 0 or 0 < abs(value) < Decimal("1e-6"):
        return re.escape(str(value))
    if value == value.to_integral_value():
        return rf"{int(value)}(\.0)?" if abs(value) <= EXACT else str(int(value))
    return re.escape(format(value, "f"))


def every_text(value: Decimal) -> str:
    """Return the expression of all texts of one number without an exponent."""
    whole, _, fraction = format(abs(value), "f").partition(".")
    fraction = fraction.rstrip("0")
    sign = "-" if value < 0 else "" if value else "-?"
    return sign + (rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?")


def above(value: Decimal, strict: bool) -> str:
    """Return the expression of the numbers above ``value``, which is 0 or more, without a sign."""
    whole, _, fraction = format(value, "f").partition(".")
    fraction = fraction.rstrip("0")
    options = [rf"({larger_wholes(whole)})(\.[0-9]+)?"]
    digits = enumerate(fraction)
    options += [rf"{whole}\.{fraction[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in digits if digit < "9"]
    if strict:
        options.append(rf"{whole}\.{fraction}0*[1-9][0-9]*")
    else:
        options.append(rf"{whole}\.{fraction}[0-9]*" if fraction else rf"{whole}(\.[0-9]+)?")
    return "|".join(options)


def larger_wholes(whole: str) -> str:
    """Return the expression of the whole numbers above ``whole``."""
    options = [rf"[1-9][0-9]{{{len(whole)},}}"]
    for i, digit in enumerate(whole):
        if digit < "9":
            options.append(f"{whole[:i]}[{int(digit) + 1}-9][0-9]{{{len(whole) - i - 1}}}")
    return "|".join(options)


def none_fits(numbers: Numbers) -> bool:
    """Return whether no number that may be written is within the bounds, as far as that is easy to see."""
    if numbers.values is not None:
        return not numbers.values
    low, high = numbers.low, numbers.high
    if (low and low.value > LARGEST + 1) or (high and high.value < -LARGEST - 1):
        return True
    step = numbers.multiple or (Decimal(1) if numbers.integer else None)
    if not (low and high and step):
        return False
    if numbers.integer and numbers.multiple and step != step.to_integral_value():
        return False
    first = (low.value / step).to_integral_value("ROUND_CEILING") * step
    if low.strict and first == low.value:
        first += step
    return first > high.value or (high.strict and first == high.value)
