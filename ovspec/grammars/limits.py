"""Limits of llguidance, for checking grammars and for following them."""

from __future__ import annotations

from llguidance import LLParserLimits

# C over 131,072 tokens takes 41,000 items for a mask on average and fails with
# a limit of 20,000; with this limit, the most ambiguous grammars take a second or two for a step before they fail.
LIMITS = LLParserLimits(
    max_items_in_row=1000, step_max_items=100_000, max_lexer_states=50_000,
    precompute_large_lexemes=True, verbose_errors=False,
)  # fmt: skip
