"""Texts that are generated in all the ways that move what a draft has read."""

from __future__ import annotations

from typing import Any

import ovspec


def moving_texts(lm: ovspec.LanguageModel, prompts: list[str], **options: Any) -> list[list[int]]:
    """Generate texts in a batch, in a session that is rewound, and in a fork; return their tokens."""
    options = {"ignore_eos": True} | options
    found = [result.token_ids for result in lm.generate(prompts[:5], batch_size=3, **options)]
    with lm.session() as session:
        session.append(prompts[0])
        mark = session.mark()
        found.append(session.generate(**options).token_ids)
        session.rewind(mark)
        session.append("\n# and more\n")
        found.append(session.generate(**options).token_ids)
        fork = session.fork()
        found.append(session.generate(**options).token_ids)
        fork.append("x = 1")
        found.append(fork.generate(**options).token_ids)
    return found
