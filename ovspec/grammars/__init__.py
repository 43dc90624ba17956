"""Converts users' grammars (JSON schemas, regular expressions, Lark, GBNF, choices) to llguidance grammars."""
