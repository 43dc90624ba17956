"""The prompts that completions repeat, with their tokens' log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from ovspec.errors import OvspecError
from ovspec.integrations.batch_answers import Place, echoed, prompt_logprobs
from ovspec.loop.results import TokenLogprob
from ovspec.serving.engine import Engine, Errand
from ovspec.serving.requests import TextRequest
from ovspec.serving.texts import as_api_error

Echo = tuple[str, list[Place]]  # a prompt's text, and its tokens if log-probabilities are wanted
SILENT: Echo = ("", [])


async def echoes_of(engine: Engine, request: TextRequest) -> list[Echo]:
    """Return what is repeated of each prompt."""
    if not request.echo:
        return [SILENT] * len(request.prompts)
    echoes, lm = list[Echo](), engine.lm
    for prompt, row in zip(request.prompts, request.rows[:: request.n], strict=True):
        ids = row.record.prompt_ids.tolist() if row.record else []
        before = prompt if isinstance(prompt, str) else lm.tokenizer.decode(ids)
        places = list[Place]()
        if row.logprobs is not None:
            places = echoed(lm.tokenizer, ids, before, await logprobs_of(engine, ids, request))
        echoes.append((before, places))
    return echoes


async def logprobs_of(engine: Engine, ids: list[int], request: TextRequest) -> list[TokenLogprob | None]:
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
        computing = prompt_logprobs(engine.lm, ids, request.options.get("logprobs") or 0)
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

    engine.do(Errand(steps(), fail))
    return await computed
