"""What the endpoints share: who is let in, how much a request may take, and the threads that prepare it."""

import asyncio
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from fastapi import Request

from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError, PromptError, UnavailableError
from ovspec.drafting.drafter import DraftLimits
from ovspec.engine.engine_thread import EngineThread
from ovspec.engine.row import Row
from ovspec.params import Params, make_params
from ovspec.params.serving import ServeParams
from ovspec.protocols.apis import TextApi
from ovspec.protocols.bodies import RequestError
from ovspec.protocols.requests import TextRequest
from ovspec.server.errors import ApiError, ServerEnded, about_prompt, as_api_error, for_clients, too_long
from ovspec.server.guard import IGNORED
from ovspec.server.metrics import Metrics
from ovspec.text.generation_config import read_recommended_sampling
from ovspec.text.infill import NO_FIM_ERROR, Infill

T = TypeVar("T")

# What threads do. Checking a grammar, or a long text, holds up no request without one.
Work = Literal["texts", "long", "grammars"]
AGAIN = 2  # seconds after which a client that was refused may try again
MOST_TEXTS = 128  # of a request
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 4_000  # of a request, the characters of all of them together
MOST_LOGPROBS = 300_000  # of a request: tokens, and most likely tokens beside each


class Service:
    """What the endpoints share; ``names``: those of the model, of which answers have the first."""

    def __init__(self, lm: LanguageModel, engine: EngineThread, names: list[str], options: ServeParams) -> None:
        self.lm, self.engine, self.names, self.options = lm, engine, names, options
        self.metrics = Metrics(engine)
        engine.on_round = self.metrics.note_round
        self.requests = self._texts = 0  # that are being answered
        self.draining = self.given_up = False
        self._preparations = set[asyncio.Task[Any]]()  # those whose requests the engine doesn't have yet
        self.began = int(time.time())
        given = {} if options.temperature is None else {"temperature": options.temperature}
        self.recommended = read_recommended_sampling(lm.folder, given)
        self.sampling = (given if options.temperature else {}) | self.recommended  # of requests that set none
        defaults = make_params({"max_tokens": options.max_tokens, **self.sampling})
        # Without a schema, for which the mode is, no check would let it pass; see ``Overrides.params``.
        self.defaults = replace(defaults, json_schema_mode=options.json_schema_mode)
        self._threads = {work: ThreadPoolExecutor(4, f"ovspec {work}") for work in get_args(Work)}

    # ------------------------------------------------------------ who is let in

    def check_open(self, texts: int = 1) -> None:
        """Raise ApiError if no further request for this many texts can be taken."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=10)
        if not self.engine.is_alive:
            raise ApiError(503, "The server's engine has stopped; start the server again.")
        most = self.options.batch_size + self.options.queue_size
        if self._texts + min(texts, most) > most:  # a request for more than that is taken if there is no other
            raise ApiError(429, "Too many texts are waiting; try again later.", retry_after=AGAIN)

    @contextmanager
    def counted(self, texts: int = 1) -> Generator[None]:
        """Count a request for this many texts while it is answered; raises ApiError if it can't be taken."""
        texts = min(texts, MOST_TEXTS)
        self.check_open(texts)
        self.requests, self._texts = self.requests + 1, self._texts + texts
        try:
            yield
        finally:
            self.requests, self._texts = self.requests - 1, self._texts - texts

    def give_up(self) -> None:
        """End all requests, those that are being prepared, too."""
        self.given_up = True
        for task in [*self._preparations]:
            task.cancel()
        self.engine.fail_all(ServerEnded())

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model, and the server is strict about it."""
        if name and self.options.strict_model:
            self.check_name(name)

    def check_name(self, name: str) -> None:
        """Raise ApiError for a name that the model doesn't have."""
        if name not in self.names:
            only = " and ".join(self.names)
            raise ApiError(404, f"There is no model {name!r:.80} here, only {only}.", "model", "model_not_found")

    # ------------------------------------------------------------ work in threads

    def read_variables(self, variables: dict[str, Any], tools: bool, ignored: dict[str, None]) -> dict[str, Any]:
        """Return the variables that the chat template reads; names of the others are added to ``ignored``."""
        unread = self.lm.runtime.prompts.chat_format.template.unread_variables(variables, tools or "tools" in variables)
        ignored |= {f"chat_template_kwargs.{name}": None for name in unread}
        return {name: value for name, value in variables.items() if name not in unread}

    def note(self, ignored: Iterable[str], http: Request) -> None:
        """Note what is left out of a request for the guard; raises ApiError for it if the server is strict."""
        if (name := next(iter(ignored), None)) is None:
            return
        if self.options.strict_fields:
            raise ApiError(400, f"{name} is not supported; leave it out.", name)
        setattr(http.state, IGNORED, [*getattr(http.state, IGNORED, ()), *ignored])

    async def apart(self, function: Callable[..., Any], *arguments: Any, work: Work = "texts") -> Any:
        """Return what a function returns, run in a thread, so that other requests go on; OvspecErrors become 400s."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[work], partial(function, *arguments))
        except RequestError as error:
            raise ApiError(400, str(error), error.param) from None
        except UnavailableError as error:
            raise as_api_error(error, self.lm) from None
        except OvspecError as error:
            message = for_clients(error, self.lm)
            field = re.search(r"`([\w.]+)`", message)
            raise ApiError(400, message, field and field[1]) from None

    @asynccontextmanager
    async def preparing(self, began: float) -> AsyncGenerator[None]:
        """Raise ApiError if what is done inside takes too long, or when ``give_up`` is called."""
        task, left = asyncio.current_task(), began + self.options.request_timeout - time.monotonic()
        assert task
        self._preparations.add(task)
        try:
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            raise too_long(self.options.request_timeout) from None
        except asyncio.CancelledError:
            if not self.given_up:
                raise
            task.uncancel()
            raise as_api_error(ServerEnded(), self.lm) from None
        finally:
            self._preparations.discard(task)

    # ------------------------------------------------------------ what a request may take

    def read(self, api: TextApi, body: Any, http: Request) -> TextRequest:
        """Return the request in a body; what it leaves out is noted for the guard, or wrong if the server is strict."""
        request = replace(api.read(body), context=self.lm.target.ir.context_length)
        options, ignored = request.overrides.values, dict.fromkeys(request.ignored)
        if request.is_chat and (variables := options.get("chat_template_kwargs")):
            options["chat_template_kwargs"] = self.read_variables(variables, bool(options.get("tools")), ignored)
        self.note(ignored, http)
        return replace(request, ignored=(*ignored,))

    def params(self, request: TextRequest) -> Params:
        """Return the params of a request, complete; raises OvspecError for what can't be met or is too much."""
        if request.infills and not self.lm.tokenizer.fim_tokens:
            raise ApiError(501, NO_FIM_ERROR, "suffix" if request.kind == "completion" else None)
        params = request.overrides.params(self.defaults, request.kind)
        with request.overrides.client_names():
            params = self.lm.runtime.row_maker.complete_params(params)
        stops, characters = len(params.stop_strings), sum(map(len, params.stop_strings))
        if stops > MOST_STOPS or characters > MOST_STOP_CHARACTERS:
            limit = f"at most {MOST_STOPS} with {MOST_STOP_CHARACTERS:,} are allowed"
            name = request.overrides.names.get("stop", "stop")
            raise RequestError(f"{name} has {stops} strings with {characters} characters in all; {limit}.", name)
        if (texts := params.n * len(request.prompts)) > MOST_TEXTS:
            raise RequestError(f"The request asks for {texts} texts; at most {MOST_TEXTS} are allowed.", "n")
        # A text that the context can't hold is refused before it is encoded, which would take long.
        context = self.lm.target.ir.context_length
        most = self.lm.tokenizer.max_characters(context) if context else math.inf
        for prompt in request.prompts:
            size = len(prompt) if isinstance(prompt, str) else request.chat_size if request.is_chat else 0
            size = prompt.needed_characters if isinstance(prompt, Infill) else size
            if size > most:
                told = f"The prompt has {size} characters, but the context is {context} tokens; shorten the prompt."
                raise about_prompt(PromptError(told, too_long=True), self.lm, request.prompt_field)
        return params

    def limits(self, request: TextRequest, params: Params) -> DraftLimits:
        """Return what may be proposed for a request; raises RequestError for drafters that the server doesn't have."""
        if (draft := request.draft) is None:
            return DraftLimits(None, params.lookahead_limit)
        choice, model = self.lm.runtime.models.choice, self.lm.draft
        loaded = ("lookup",) * bool(choice and choice.lookup) + ((model.proposer_name,) if model else ())
        wanted = frozenset() if draft == "none" else frozenset(draft.split(","))
        if not wanted <= {*loaded}:
            has = " and ".join(loaded) or "no drafters"
            told = f'draft is {draft!r:.80}; this server has {has}, and "none" proposes nothing.'
            raise RequestError(told, "draft")
        return DraftLimits(wanted, params.lookahead_limit)

    def check_room(self, request: TextRequest, rows: list[Row]) -> None:
        """Let texts end where memory ends, as they do where the context ends: agents ask for the most of any model.

        Raises:
            ApiError: a prompt doesn't fit into memory, or no answer can hold the log-probabilities.
        """
        most = self.engine.most_tokens
        for row in rows:
            if row.prompt_length >= most:
                tokens = f"The prompt has {row.prompt_length} tokens, but this server has room for {most}"
                raise about_prompt(
                    PromptError(f"{tokens}; shorten the prompt.", too_long=True), self.lm, request.prompt_field
                )
            row.limit_length(most)
        if (tops := rows[0].params.logprobs) is None:
            return
        tokens = sum(row.max_length - (0 if request.echo else row.prompt_length) for row in rows)
        if (count := tokens * (1 + tops)) > MOST_LOGPROBS:
            told = f"The answer could have {count:,} log-probabilities; at most {MOST_LOGPROBS:,} are allowed"
            name = "top_logprobs" if request.is_chat else "logprobs"
            raise ApiError(400, f"{told}: lower max_tokens, n or {name}.", name)


async def unless_gone(http: Request, work: Awaitable[T]) -> T:
    """Return what ``work`` returns; if the client goes away, which stops no endpoint, cancel it and raise ApiError."""

    async def leave() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client has closed the connection.")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
