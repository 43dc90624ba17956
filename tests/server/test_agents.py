"""Agents of other libraries: their own loops call a tool five times, through a real server and the real model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import pytest
from pydantic import BaseModel, Field
from servers import REAL, Running

if TYPE_CHECKING:
    import openai  # which takes a second

pytestmark = [
    pytest.mark.slow,  # test_messages.py calls tools with the demo pair, test_like_llama_cpp.py with OpenAI's fields
    pytest.mark.skipif(not REAL.is_dir(), reason="the real model could not be fetched"),
]

STEPS = 5
SYSTEM = "You follow a recipe. Call take_step for each step."
QUESTION = "Bake bread."
Way = Literal["required", "auto"]


class TakeStep(BaseModel):
    """Take a step of the recipe."""

    number: Annotated[int, Field(ge=1, le=9, description="The step's number.")]
    pace: Annotated[Literal["slow", "fast"], Field(description="How fast to go.")]


@dataclass
class Kitchen:
    """What an agent did, and what it should do next.

    taken: the arguments with which the tool was called.
    asked, told: the ids of the calls, and of their results.
    cached: for each answer, how many tokens of its prompt were found in the cache.
    """

    way: Way
    opening: str  # the id of the token with which a call begins
    taken: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def take(self, number: int, pace: str) -> str:
        TakeStep(number=number, pace=pace)  # type: ignore[arg-type]  # raises if they don't fit
        self.taken.append({"number": number, "pace": pace})
        return f"Step {len(self.taken)} is done."

    @property
    def done(self) -> bool:
        return len(self.taken) == STEPS

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of the next request that make a small model call or answer: it hardly calls by itself."""
        if self.way == "required":
            return {"tool_choice": "none" if self.done else "required"}
        return {"tool_choice": "auto", "logit_bias": {self.opening: -100 if self.done else 6}}

    def note(self, message: Any, usage: Any) -> None:
        """Note the calls of an answer of the client openai."""
        self.asked += [call.id for call in message.tool_calls or []]
        self.cached.append(usage.prompt_tokens_details.cached_tokens)

    def check(self, text: str | None) -> None:
        assert self.done and text and text.strip()
        assert self.asked == self.told and len(set(self.asked)) == STEPS and all(self.asked)
        assert len(self.cached) == STEPS + 1 and all(self.cached[1:])


@pytest.fixture(scope="module")
def real(real_server: Running) -> Iterator[Running]:
    before = len(real_server.log.read_text("utf-8"))
    yield real_server
    log = real_server.log.read_text("utf-8")[before:]
    assert set(re.findall(r" /v1/\S+ (\d+) ", log)) <= {"200"} and "Error" not in log and "unknown" not in log, log


@pytest.fixture
def kitchen(real: Running, way: Way) -> Kitchen:
    opening = real.post("/tokenize", {"content": "<", "add_special_tokens": False}).json()["tokens"]
    return Kitchen(way, str(*opening))


WAYS = get_args(Way)
ways = pytest.mark.parametrize("way", WAYS)


def client_of(real: Running) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120)


def whole(client: openai.OpenAI, **body: Any) -> Any:
    return client.chat.completions.create(**body)


def streamed(client: openai.OpenAI, **body: Any) -> Any:
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        answer = stream.get_final_completion()
    text = "".join(event.delta for event in events if event.type == "content.delta")
    calls = [event.arguments for event in events if event.type == "tool_calls.function.arguments.done"]
    message = answer.choices[0].message
    assert text == (message.content or "")
    assert calls == [call.function.arguments for call in message.tool_calls or []]
    return answer


def parsed(client: openai.OpenAI, **body: Any) -> Any:
    answer = client.chat.completions.parse(**body)
    for call in answer.choices[0].message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, TakeStep)
    return answer


@ways
@pytest.mark.parametrize("ask", [whole, streamed, parsed])
def test_openai(real: Running, kitchen: Kitchen, ask: Callable[..., Any]) -> None:
    import openai

    client, text = client_of(real), None
    tools = [openai.pydantic_function_tool(TakeStep, name="take_step")]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while text is None:
        limits = {"max_tokens": 60, "parallel_tool_calls": False}
        answer = ask(client, model="any", messages=messages, tools=tools, **limits, **kitchen.settings)
        message = answer.choices[0].message
        kitchen.note(message, answer.usage)
        messages.append(message)
        for call in message.tool_calls or []:
            result = kitchen.take(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            kitchen.told.append(call.id)
        ended = answer.choices[0].finish_reason
        assert ended == "tool_calls" if message.tool_calls else ended in ("stop", "length")
        text = None if message.tool_calls else message.content
    kitchen.check(text)


def whole_response(client: openai.OpenAI, **body: Any) -> Any:
    tools: Any = [{"type": "function", **tool["function"]} for tool in body.pop("tools")]
    return client.responses.create(tools=tools, **body)


def streamed_response(client: openai.OpenAI, **body: Any) -> Any:
    with client.responses.stream(**body) as stream:
        events: list[Any] = list(stream)
    answer = events[-1].response  # get_final_response refuses one that ended at the limit, as a model's text may
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    calls = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert text == answer.output_text
    assert calls == [item.arguments for item in answer.output if item.type == "function_call"]
    return answer


def parsed_response(client: openai.OpenAI, **body: Any) -> Any:
    answer = client.responses.parse(**body)
    for item in answer.output:
        assert item.type != "function_call" or isinstance(item.parsed_arguments, TakeStep)
    return answer


@ways
@pytest.mark.parametrize("ask", [whole_response, streamed_response, parsed_response])
def test_openai_responses(real: Running, kitchen: Kitchen, ask: Callable[..., Any]) -> None:
    import openai

    client, text = client_of(real), ""
    tools = [openai.pydantic_function_tool(TakeStep, name="take_step")]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    while not text:
        settings = kitchen.settings
        bias = {"logit_bias": settings.pop("logit_bias")} if "logit_bias" in settings else None
        limits = {"max_output_tokens": 60, "parallel_tool_calls": False, "store": False}
        answer = ask(
            client, model="any", instructions=SYSTEM, input=items, tools=tools, extra_body=bias, **limits, **settings
        )
        kitchen.cached.append(answer.usage.input_tokens_details.cached_tokens)
        for item in answer.output:
            items.append(item.to_dict())
            if item.type == "function_call":
                kitchen.asked.append(item.call_id)
                result = kitchen.take(**json.loads(item.arguments))
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
                kitchen.told.append(item.call_id)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert answer.status == "completed" if calls else answer.status in ("completed", "incomplete")
        text = "" if calls else answer.output_text
    kitchen.check(text)


@ways
@pytest.mark.parametrize("stream", [False, True])
def test_langchain(real: Running, kitchen: Kitchen, stream: bool) -> None:
    agents: Any = pytest.importorskip("langchain.agents")
    middleware: Any = pytest.importorskip("langchain.agents.middleware")
    from langchain_openai import ChatOpenAI

    def take_step(number: int, pace: str) -> str:
        """Take a step of the recipe."""
        return kitchen.take(number, pace)

    from langchain_core.tools import StructuredTool

    @middleware.wrap_model_call
    def steer(request: Any, handler: Any) -> Any:
        settings = kitchen.settings
        return handler(request.override(tool_choice=settings.pop("tool_choice"), model_settings=settings))

    model = ChatOpenAI(
        model="any", base_url=f"{real.url}/v1", api_key="none", max_tokens=60, max_retries=0, streaming=stream,  # type: ignore[call-arg, arg-type]
        stream_usage=True,
    )  # fmt: skip
    tool = StructuredTool.from_function(take_step, args_schema=TakeStep)
    agent = agents.create_agent(model, [tool], system_prompt=SYSTEM, middleware=[steer])
    messages = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
    for message in messages:
        if message.type == "ai":
            kitchen.asked += [call["id"] for call in message.tool_calls]
            kitchen.cached.append(message.usage_metadata["input_token_details"]["cache_read"])
        elif message.type == "tool":
            kitchen.told.append(message.tool_call_id)
    kitchen.check(messages[-1].text)


@ways
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(real: Running, kitchen: Kitchen, api: str, stream: bool) -> None:
    agents: Any = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    def settings() -> Any:
        given = kitchen.settings
        # A response that is cut off is an error for the agent, so the text ends with its first sentence.
        more = {name: value for name, value in given.items() if name == "logit_bias"} | {"stop": ".", "min_tokens": 4}
        return agents.ModelSettings(
            tool_choice=given["tool_choice"], max_tokens=200, include_usage=True, extra_body=more
        )

    @agents.function_tool
    def take_step(number: Annotated[int, Field(ge=1, le=9)], pace: Literal["slow", "fast"]) -> str:
        """Take a step of the recipe."""
        return kitchen.take(number, pace)

    class Steering(agents.RunHooks):
        async def on_tool_end(self, *given: Any) -> None:
            given[1].model_settings = settings()  # of the agent

    async def run() -> Any:
        import openai

        client = openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120)
        model = getattr(agents, api)("any", client)
        agent = agents.Agent(
            "cook", instructions=SYSTEM, model=model, tools=[take_step], model_settings=settings(),
            reset_tool_choice=False,
        )  # fmt: skip
        if not stream:
            return await agents.Runner.run(agent, QUESTION, hooks=Steering())
        result = agents.Runner.run_streamed(agent, QUESTION, hooks=Steering())
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(run())
    for item in result.to_input_list():
        if item.get("type") == "function_call":
            kitchen.asked.append(item["call_id"])
        elif item.get("type") == "function_call_output":
            kitchen.told.append(item["call_id"])
    kitchen.cached = [answer.usage.input_tokens_details.cached_tokens for answer in result.raw_responses]
    kitchen.check(result.final_output)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["required"])
def test_smolagents(real: Running, kitchen: Kitchen, stream: bool) -> None:
    """Its final text is a call, too. Not with auto: it sends calls and results as text, and the model imitates them."""
    smolagents: Any = pytest.importorskip("smolagents")
    counted = [real.metric("ovspec_cached_tokens_total")]

    @smolagents.tool
    def take_step(number: int, pace: Literal["slow", "fast"]) -> str:
        """Take a step of the recipe.

        Args:
            number: The step's number.
            pace: How fast to go.
        """
        return kitchen.take(number, pace)

    def steer(step: Any, agent: Any) -> None:
        kitchen.asked += [call.id for call in step.model_output_message.tool_calls]
        kitchen.told += [call.id for call in step.tool_calls]
        counted.append(real.metric("ovspec_cached_tokens_total"))
        agent.model.kwargs["tool_choice"] = named("final_answer" if kitchen.done else "take_step")

    def named(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    model = smolagents.OpenAIServerModel("any", f"{real.url}/v1", "none", max_tokens=60, tool_choice=named("take_step"))
    agent = smolagents.ToolCallingAgent(
        [take_step], model, step_callbacks=[steer], stream_outputs=stream, verbosity_level=0
    )
    text = agent.run(QUESTION)
    assert kitchen.asked.pop() == kitchen.told.pop()  # of the final text
    kitchen.cached = [round(now - before) for before, now in pairwise(counted)]
    kitchen.check(text)
