"""The prompts that completions repeat, with their tokens' log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from ovspec.errors import OvspecError
from ovspec.loop.perplexity import CHUNK
from ovspec.loop.row import Row
from ovspec.openai.logprobs import Echo, echo_of, prompt_logprobs
from ovspec.openai.requests import TextRequest
from ovspec.sampling.logprobs import TokenLogprob
from ovspec.serving.engine import Engine, Errand
from ovspec.serving.errors import as_api_error

BESIDE = 8  # tokens of a prompt that an inference reads while texts are generated, which wait for it


async def echoes_of(
    engine: Engine, request: TextRequest, rows: list[Row], apart: Callable[..., Awaitable[Any]]
) -> list[Echo]:
    """Return what is repeated of each prompt; ``apart`` runs a function in a thread."""
    echoes = list[Echo]()
    for prompt, row in zip(request.prompts, rows[:: len(rows) // len(request.prompts)], strict=True):
        ids, tops = row.record.prompt_ids.tolist() if row.record else [], row.params.logprobs
        logprobs = None if tops is None else await logprobs_of(engine, ids, tops)
        echoes.append(await apart(echo_of, engine.lm.tokenizer, prompt, ids, logprobs))
    return echoes


async def logprobs_of(engine: Engine, ids: list[int], tops: int) -> list[TokenLogprob | None]:
    """Return the log-probabilities of a prompt's tokens, computed in the engine's thread."""
    loop = asyncio.get_running_loop()
    computed: asyncio.Future[list[TokenLogprob | None]] = loop.create_future()

    def tell(result: list[TokenLogprob | None] | OvspecError) -> None:
        if computed.cancelled():
            return
        if isinstance(result, OvspecError):
            computed.set_exception(as_api_error(result, engine.lm))
        else:
            computed.set_result(result)

    def steps() -> Generator[None]:
        computing = prompt_logprobs(engine.lm, ids, tops, lambda: BESIDE if engine.running else CHUNK)
        while not computed.cancelled():  # else nobody waits any more
            try:
                next(computing)
            except StopIteration as ended:
                loop.call_soon_threadsafe(tell, ended.value)
                return
            yield
        computing.close()

    def fail(error: OvspecError) -> None:
        loop.call_soon_threadsafe(tell, error)

    engine.do(Errand(steps(), fail, len(ids)))
    return await computed
