"""The prompts that completions repeat, with their tokens' log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from ovspec.errors import OvspecError
from ovspec.integrations.batch_answers import Place, echoed, prompt_logprobs
from ovspec.model import LanguageModel
from ovspec.serving.engine import Engine
from ovspec.serving.errors import ApiError
from ovspec.serving.requests import TextRequest

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
            computed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            engine.do(errand(lm, ids, request.options.get("logprobs") or 0, computed))
            places = echoed(lm.tokenizer, ids, before, await computed)
        echoes.append((before, places))
    return echoes


def errand(lm: LanguageModel, ids: list[int], tops: int, computed: asyncio.Future[Any]) -> Generator[None]:
    """Compute a prompt's log-probabilities in the engine's thread, unless nobody waits for them any more."""

    def tell(result: Any) -> None:
        if computed.cancelled():
            return
        if isinstance(result, Exception):
            computed.set_exception(result)
        else:
            computed.set_result(result)

    steps = prompt_logprobs(lm, ids, tops)
    try:
        while not computed.cancelled():
            next(steps)
            yield
        steps.close()
    except StopIteration as ended:
        computed.get_loop().call_soon_threadsafe(tell, ended.value)
    except OvspecError as error:
        computed.get_loop().call_soon_threadsafe(tell, ApiError(500, str(error)))
