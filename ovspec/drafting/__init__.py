"""Drafters propose tokens; the lookahead decides how many."""
