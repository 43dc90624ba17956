"""/compare: answer a chat with plain decoding and with speculation, in turns, and compare texts and times."""

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import replace

from fastapi import FastAPI, Request
from starlette.responses import Response

from ovspec.api.comparison import ResultPair, compare_turns, iterate_turns, rotate_modes
from ovspec.base.json_types import JsonObject
from ovspec.engine.results import Piece
from ovspec.engine.row import NO_DRAFTING, Row
from ovspec.protocols.apis import TEXT_APIS
from ovspec.protocols.chat.bodies import ChatRequest
from ovspec.protocols.reply import DONE_EVENT, KEEP_ALIVE_EVENT, ReplyInputs
from ovspec.protocols.requests import may_compile_grammar
from ovspec.server.admission import WorkKind, run_unless_disconnected
from ovspec.server.compared_reply import ComparedChat, ComparingReplyMaker, report_comparison, report_turn
from ovspec.server.context import ServerContext
from ovspec.server.endpoints import EventStream, format_event, generate_pieces
from ovspec.server.errors import ApiError, make_timeout_error
from ovspec.server.openapi import STREAM_CONTENT, describe_error_responses
from ovspec.server.preparation import PreparedRequest

CHAT_API = TEXT_APIS["/v1/chat/completions"]
PLAIN, SPECULATIVE = 0, 1  # the choices of a comparison


class CompareEndpoint:
    """The endpoint that generates a text plainly and with speculation, in turns."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def compare_request(self, body: ChatRequest, http_request: Request) -> Response:
        """Answer a chat plainly and with speculation, in turns, and compare the texts and their times."""
        admission = self._context.admission
        with ExitStack() as cleanup_stack:
            cleanup_stack.enter_context(admission.admit(2))
            admission.check_requested_model(body.model)
            prepared = await run_unless_disconnected(http_request, self._make_row(body, http_request, PLAIN))
            refuse_incomparable(prepared)
            [plain_row] = prepared.reply_inputs.rows
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
        """Yield the pieces of a row, and None after a long wait; validate its text at the end."""
        async with aclosing(generate_pieces(self._context, [row], time.monotonic())) as piece_batches:
            async for pieces in piece_batches:
                if not pieces:
                    yield None
                for _, piece in pieces:
                    if piece.finish_reason:
                        await self._context.threads.run_in_thread(row.result, work_kind="grammars")
                    yield piece

    async def _compare_texts(
        self, body: ChatRequest, http_request: Request, reply_inputs: ReplyInputs, reply_maker: ComparingReplyMaker
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
            yield format_event(reply_maker.comparison_event(report_turn(turns)))
        first_pair = rows[PLAIN].result(), rows[SPECULATIVE].result()
        reply_maker.report = report_comparison(
            compare_turns(self._context.lm, [], first_pair, turns, compute_gaps=False), len(turns)
        )
        yield format_event(reply_maker.comparison_event(reply_maker.report))
        yield DONE_EVENT


def refuse_incomparable(prepared: PreparedRequest) -> None:
    """Raise ApiError for a request whose texts with and without speculation can't be compared."""
    if len(prepared.reply_inputs.rows) > 1:
        raise ApiError(400, "n must be 1 in a comparison; leave n out.", "n")
    if prepared.reply_inputs.rows[0].prefill_only:
        raise ApiError(400, "max_tokens must be at least 1 in a comparison.", "max_tokens")
    for field, forbids in (
        ("draft", prepared.reply_inputs.request.draft == "none"),
        ("lookahead", prepared.params.lookahead_limit == 0),
    ):
        if forbids:
            raise ApiError(
                400, f"There is nothing to compare, because {field} turns speculation off; leave {field} out.", field
            )


def add_compare_endpoint(app: FastAPI, context: ServerContext) -> None:
    """Add the endpoint that compares plain decoding and speculation."""
    endpoint = CompareEndpoint(context)
    reply_description = {"model": ComparedChat, "description": "Both texts.", "content": STREAM_CONTENT}
    responses: dict[int | str, JsonObject] = {200: reply_description, **describe_error_responses("/compare")}
    summary = "Answer a chat with plain and with speculative decoding, alternately, and compare times and texts."

    @app.post("/compare", tags=["inside"], summary=summary, response_model=None, responses=responses)
    async def compare(body: ChatRequest, http: Request) -> Response:
        return await endpoint.compare_request(body, http)


async def exhaust(events: AsyncGenerator[bytes]) -> None:
    """Run a comparison to its end."""
    async for _ in events:
        pass
