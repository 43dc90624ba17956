"""The promise on a folder: texts don't depend on guesses, neighbours or the engine's cache, and ``verify`` agrees."""

from __future__ import annotations

from pathlib import Path

import ovspec

# Random models repeat themselves where they have little choice.
PROMPTS = ["1 2 3 4 5 6 7 8 9 0 1 2 3 ", "7 7 7 7 8 7 7 7 8 7 ", "0 0 1 0 0 1 0 0 "]
REGEX = "([0-9] ){24}"


def check_texts_are_exact(folder: Path, cache_dir: Path) -> None:
    """Generate plain, with guesses, in a batch and sampled; ``folder`` computes as it does for a user."""
    lm = ovspec.load(folder, "lookup", cache_dir=cache_dir)
    options = {"max_tokens": 48, "regex": REGEX}
    for seed in (None, 5):
        sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
        plain = [lm.generate(prompt, lookahead=0, **options, **sampling) for prompt in PROMPTS]
        guessed = [lm.generate(prompt, lookahead=4, **options, **sampling) for prompt in PROMPTS]
        batched = lm.generate(PROMPTS, lookahead=4, **options, **sampling)
        texts = [[result.token_ids for result in results] for results in (plain, guessed, batched)]
        assert texts[0] == texts[1] == texts[2]
        assert sum(result.stats.accepted for result in guessed)
        assert all(lm.verify(result).ok for result in (*plain, *guessed, *batched))
