"""Converts what users write (JSON schemas, regular expressions, Lark, GBNF, choices) to llguidance grammars."""
