"""Whatever proposes tokens, and how many."""
