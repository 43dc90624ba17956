"""Comparing and verifying: a chat answered plainly and with speculation in turns, and a finished text checked."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import replace

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from ovspec.api.comparison import Comparison, ResultPair, compare_turns, iterate_turns, rotate_modes
from ovspec.api.verify import Verification, result_from_json, verify_in_steps
from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.engine.engine_thread import BackgroundTask
from ovspec.engine.results import Piece, Result
from ovspec.engine.row import NO_DRAFTING, Row
from ovspec.engine.runtime import Runtime
from ovspec.protocols.apis import TEXT_APIS
from ovspec.protocols.chat.bodies import ChatRequest
from ovspec.protocols.chat.reply import ChatCompletion, ChatReplyMaker, Chunk
from ovspec.protocols.reply import DONE_EVENT, KEEP_ALIVE_EVENT, ReplyInputs, ReplyModel
from ovspec.protocols.requests import TextRequest, may_compile_grammar
from ovspec.protocols.verify import VerifyRequest
from ovspec.server.admission import WorkKind, run_unless_disconnected
from ovspec.server.context import ServerContext
from ovspec.server.endpoints import EventStream, format_event, generate_pieces
from ovspec.server.errors import ApiError, make_text_error, make_timeout_error
from ovspec.server.preparation import PreparedRequest, check_stop_strings

CHAT_API = TEXT_APIS["/v1/chat/completions"]
PLAIN, SPECULATIVE = 0, 1  # the choices of a comparison


class ComparisonReport(ReplyModel):
    """How a text that was generated plainly and with speculation compares, by 'ovspec generate --compare'."""

    turns: int = Field(description="Timed turns so far.")
    equal: bool | None = Field(None, description="Whether all texts have the same tokens.")
    equality_sentence: str = ""
    speedup: float | None = Field(None, description="Of the median turn; null where speculation can't be its cause.")
    speedup_sentence: str = ""
    plain_per_second: float = Field(0.0, description="Tokens after the first one, in the median turn.")
    speculative_per_second: float = 0.0


class ComparedChat(ChatCompletion):
    """Two choices: the text without and with speculation."""

    comparison: ComparisonReport


class ComparedChunk(Chunk):
    """A chunk of both texts' stream; those after the texts have a comparison and no choices."""

    comparison: ComparisonReport | None = None


class VerifyReply(ReplyModel):
    ok: bool = Field(description="Whether each token is the one that the model chooses there.")
    tokens: int
    exact: int = Field(description="Tokens before the first one that the model doesn't choose.")
    problem: str | None = Field(description="What else is wrong, such as the text's end.")
    wrong_id: int | None = Field(None, description="The first token that the model doesn't choose.")
    chosen_id: int | None = Field(None, description="The token that it chooses there; null where the text must end.")


class InsideEndpoints:
    """The endpoints that show how a text came about."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def compare_request(self, body: ChatRequest, http_request: Request) -> Response:
        """Answer a chat plainly and with speculation, in turns, and compare the texts and their times."""
        if (body.n or body.n_cmpl or 1) != 1:
            raise ApiError(400, "n must be 1 in a comparison; leave it out.", "n")
        if body.draft == "none" or body.lookahead == 0:
            raise ApiError(
                400, "Without speculation there is nothing to compare; leave draft and lookahead out.", "draft"
            )
        admission = self._context.admission
        with ExitStack() as cleanup_stack:
            cleanup_stack.enter_context(admission.admit(2))
            admission.check_requested_model(body.model)
            make_rows = self._make_row(body, http_request, PLAIN)
            prepared = await run_unless_disconnected(http_request, make_rows)
            [plain_row] = prepared.reply_inputs.rows
            if plain_row.prefill_only:
                raise ApiError(400, "max_tokens must be at least 1 in a comparison.", "max_tokens")
            if plain_row.params.is_sampled:
                body = body.model_copy(update={"seed": plain_row.params.seed})
            other = await run_unless_disconnected(http_request, self._make_row(body, http_request, SPECULATIVE))
            reply_inputs = replace(prepared.reply_inputs, rows=[plain_row, *other.reply_inputs.rows])
            reply_maker = ComparingReplyMaker(reply_inputs)
            events = self._compare_texts(body, http_request, reply_inputs, reply_maker)
            if reply_inputs.request.stream:
                first_event = await run_unless_disconnected(http_request, anext(events))
                return EventStream(first_event, events, reply_maker, cleanup_stack.pop_all().close)
            await run_unless_disconnected(http_request, exhaust(events))
            reply = reply_maker.whole_reply([row.result() for row in reply_inputs.rows])
            return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")

    async def verify_choice(self, body: VerifyRequest, http_request: Request) -> VerifyReply:
        """Check each token of a finished text by one forward pass, between the rounds of other texts."""
        context = self._context
        context.admission.check_requested_model(body.model)
        with context.admission.admit():
            arguments = context.lm.runtime, body.choice
            task = await context.threads.run_in_thread(prepare_verification, *arguments, work_kind="grammars")
            future = asyncio.wrap_future(context.engine.add_task(task))
            try:
                verification: Verification = await run_unless_disconnected(http_request, future)
            except OvspecError as error:
                raise make_text_error(error, context.lm) from None
        difference = verification.difference
        return VerifyReply(
            ok=verification.ok,
            tokens=verification.tokens,
            exact=verification.exact,
            problem=verification.problem,
            wrong_id=difference and difference.found,
            chosen_id=difference and difference.chosen,
        )

    async def _make_row(self, body: ChatRequest, http_request: Request, mode: int) -> PreparedRequest:
        """Return a request with a new row for the text of a mode."""
        arrival_time = time.monotonic()
        work_kind: WorkKind = "grammars" if may_compile_grammar(body) else "texts"
        prepare = self._context.preparer.prepare_request
        async with self._context.admission.limit_preparation_time(arrival_time):
            prepared = await self._context.threads.run_in_thread(
                prepare, CHAT_API, body, http_request, arrival_time, work_kind=work_kind
            )
        if mode == PLAIN:
            prepared.reply_inputs.rows[0].draft_limits = NO_DRAFTING
        return prepared

    async def _generate(self, row: Row) -> AsyncGenerator[Piece | None]:
        """Yield the pieces of a row, and None where nothing has come for long; judge its text at the end."""
        async with aclosing(generate_pieces(self._context, [row], time.monotonic())) as piece_batches:
            async for pieces in piece_batches:
                if not pieces:
                    yield None
                for _, piece in pieces:
                    if piece.finish_reason:
                        await self._context.threads.run_in_thread(row.result, work_kind="grammars")
                    yield piece

    async def _compare_texts(
        self, body: ChatRequest, http_request: Request, reply_inputs: ReplyInputs, reply_maker: "ComparingReplyMaker"
    ) -> AsyncGenerator[bytes]:
        """Generate both texts, yield their events, time them in turns, and yield the comparison."""
        end_time = time.monotonic() + self._context.options.request_timeout
        is_stream = reply_inputs.request.stream
        for event in reply_maker.first_events() if is_stream else ():
            yield format_event(event)
        rows = reply_inputs.rows
        for mode, row in enumerate(rows):
            async for piece in self._generate(row):
                piece_events = reply_maker.piece_events(mode, piece) if piece and is_stream else (KEEP_ALIVE_EVENT,)
                for event in piece_events:
                    yield format_event(event)
        turns = list[ResultPair]()
        for turn in iterate_turns():
            timed_rows = dict[int, Row]()
            for mode in rotate_modes((PLAIN, SPECULATIVE), turn):
                if time.monotonic() > end_time:
                    raise make_timeout_error(self._context.options.request_timeout)
                prepared = await self._make_row(body, http_request, mode)
                [timed_rows[mode]] = prepared.reply_inputs.rows
                async for piece in self._generate(timed_rows[mode]):
                    if piece is None:
                        yield KEEP_ALIVE_EVENT
            turns.append((timed_rows[PLAIN].result(), timed_rows[SPECULATIVE].result()))
            yield format_event(reply_maker.comparison_event(ComparisonReport(turns=len(turns))))
        first_pair = rows[PLAIN].result(), rows[SPECULATIVE].result()
        reply_maker.report = report_comparison(
            compare_turns(self._context.lm, [], first_pair, turns, compute_gaps=False), len(turns)
        )
        yield format_event(reply_maker.comparison_event(reply_maker.report))
        yield DONE_EVENT


class ComparingReplyMaker(ChatReplyMaker):
    """The reply to a comparison: a chat's with two choices, and the comparison. ``report``: of all turns."""

    report = ComparisonReport(turns=0)

    def comparison_event(self, report: ComparisonReport) -> ComparedChunk:
        return ComparedChunk(**self._identity, choices=[], comparison=report)

    def whole_reply(self, results: list[Result]) -> ComparedChat:
        chat = super().whole_reply(results)
        fields = {name: getattr(chat, name) for name in chat.model_fields_set}
        return ComparedChat(**fields, comparison=self.report)


def report_comparison(comparison: Comparison, turn_count: int) -> ComparisonReport:
    speedup = comparison.speedup
    return ComparisonReport(
        turns=turn_count,
        equal=comparison.divergence is None,
        equality_sentence=comparison.equality_sentence,
        speedup=speedup.claimed_ratio,
        speedup_sentence=comparison.speedup_sentence,
        plain_per_second=1e3 / speedup.plain_ms if speedup.plain_ms else 0.0,
        speculative_per_second=1e3 / speedup.speculative_ms if speedup.speculative_ms else 0.0,
    )


def prepare_verification(runtime: Runtime, choice: JsonObject) -> BackgroundTask:
    """Return the task that checks a choice of a reply; raises OvspecError if it can't be checked."""
    result = result_from_json(choice)
    record = result.record
    assert record
    check_stop_strings(TextRequest("chat", []), record.params)
    result = replace(result, record=replace(record, params=replace(record.params, logprobs=None)))
    steps = verify_in_steps(runtime, result)
    next(steps)
    return BackgroundTask(steps, len(record.prompt_ids) + len(record.healed_ids) + len(result.token_ids))


async def exhaust(events: AsyncGenerator[bytes]) -> None:
    """Let all events of a comparison be made."""
    async for _ in events:
        pass
