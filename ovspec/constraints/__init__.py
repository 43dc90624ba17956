"""What changes or limits the tokens that may come next."""
