"""Drafters, which propose tokens, and the lookahead, the number of tokens to propose."""
