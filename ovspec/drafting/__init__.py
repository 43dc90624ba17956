"""Drafters, which propose tokens, and the lookahead, which decides how many."""
