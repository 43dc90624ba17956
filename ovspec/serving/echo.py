"""The prompts that completions repeat, with their tokens' log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from ovspec.errors import OvspecError
from ovspec.integrations.batch_answers import Place, echoed, prompt_logprobs
from ovspec.loop.perplexity import CHUNK
from ovspec.loop.results import TokenLogprob
from ovspec.model import LanguageModel, Prompt
from ovspec.serving.engine import Engine, Errand
from ovspec.serving.requests import TextRequest
from ovspec.serving.texts import as_api_error

Echo = tuple[str, list[Place]]  # a prompt's text, and its tokens if log-probabilities are wanted
SILENT: Echo = ("", [])
BESIDE = 8  # tokens of a prompt that an inference reads while texts are generated, which wait for it


async def echoes_of(engine: Engine, request: TextRequest, apart: Callable[..., Awaitable[Any]]) -> list[Echo]:
    """Return what is repeated of each prompt; ``apart`` runs a function in a thread."""
    if not request.echo:
        return [SILENT] * len(request.prompts)
    echoes = list[Echo]()
    for prompt, row in zip(request.prompts, request.rows[:: request.n], strict=True):
        ids = row.record.prompt_ids.tolist() if row.record else []
        logprobs = None if row.logprobs is None else await logprobs_of(engine, ids, request)
        echoes.append(await apart(echo_of, engine.lm, prompt, ids, logprobs))
    return echoes


def echo_of(lm: LanguageModel, prompt: Prompt, ids: list[int], logprobs: list[TokenLogprob | None] | None) -> Echo:
    """Return what is repeated of a prompt."""
    before = prompt if isinstance(prompt, str) else lm.tokenizer.decode(ids)
    return before, [] if logprobs is None else echoed(lm.tokenizer, ids, before, logprobs)


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
        tops = request.options.get("logprobs") or 0
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
