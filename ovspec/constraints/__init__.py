"""Constraints, which change the logits or limit the tokens that may come next."""
