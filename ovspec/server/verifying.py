"""/verify: check a finished text with one forward pass, between the rounds of other texts."""

import asyncio
import time
from dataclasses import replace

from fastapi import FastAPI, Request
from pydantic import Field

from ovspec.api.verify import Verification, result_from_json, verify_in_steps
from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.engine.engine_thread import BackgroundTask
from ovspec.engine.runtime import Runtime
from ovspec.protocols.bodies import VerifyRequest
from ovspec.protocols.reply import ReplyModel
from ovspec.protocols.requests import TextRequest
from ovspec.server.admission import run_unless_disconnected
from ovspec.server.context import ServerContext
from ovspec.server.errors import make_text_error
from ovspec.server.preparation import check_stop_strings


class VerifyReply(ReplyModel):
    ok: bool = Field(description="Whether each token is the model's own choice.")
    tokens: int
    exact: int = Field(description="Tokens before the first wrong token.")
    problem: str | None = Field(description="Any other problem, such as a wrong end of the text.")
    wrong_id: int | None = Field(None, description="The first wrong token.")
    chosen_id: int | None = Field(None, description="The model's choice in its place; null if the text must end.")


def add_verify_endpoint(app: FastAPI, context: ServerContext) -> None:
    """Add the endpoint that checks a finished text."""
    summary = "Check with one forward pass whether each token of a text is the model's choice."

    @app.post("/verify", tags=["inside"], summary=summary)
    async def verify(body: VerifyRequest, http: Request) -> VerifyReply:
        context.admission.check_requested_model(body.model)
        with context.admission.admit():
            async with context.admission.limit_preparation_time(time.monotonic()):
                return report_verification(await run_unless_disconnected(http, verify_choice(context, body.choice)))


async def verify_choice(context: ServerContext, choice: JsonObject) -> Verification:
    """Check a choice of a reply; raises ApiError if it can't be checked."""
    prepare = prepare_verification, context.lm.runtime, choice
    task = await context.threads.run_in_thread(*prepare, work_kind="grammars")
    try:
        return await asyncio.wrap_future(context.engine.add_task(task))
    except OvspecError as error:
        raise make_text_error(error, context.lm) from None


def report_verification(verification: Verification) -> VerifyReply:
    difference = verification.difference
    return VerifyReply(
        ok=verification.ok,
        tokens=verification.tokens,
        exact=verification.exact,
        problem=verification.problem,
        wrong_id=difference and difference.found,
        chosen_id=difference and difference.chosen,
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
