"""What the `openai` package makes of a server, run by a Python that has it: `openai_package.py URL CHECK`.

It fails where an answer is not what OpenAI's own would be. The engine behind the server says what said.py has it say.
"""

import asyncio
import json
import sys
from collections.abc import Callable

import openai

URL, CHECK = sys.argv[1:]
KEY = "a-key-of-24-characters-."
NUM_TOKENS = 9  # of "The cät sat.", with the one that ends it
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a day",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "string"}}},
        "strict": None,
    },
}
CITY = {"city": "Bern", "day": "today"}


def refused(kind: type[openai.OpenAIError], ask: Callable[[], object]) -> openai.APIStatusError:
    try:
        ask()
    except kind as error:
        assert isinstance(error, openai.APIStatusError)
        return error
    raise AssertionError(f"no {kind.__name__}")


def models() -> None:
    assert [model.id for model in client.models.list()] == ["plain", "hermes"]
    assert client.models.retrieve("hermes").owned_by == "nanodag"


def chat() -> None:
    reply = client.chat.completions.create(model="plain", messages=HI, max_completion_tokens=40, user="me", store=False)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "The cät sat.", "stop")
    assert choice.message.refusal is None and choice.message.tool_calls is None and choice.logprobs is None
    assert reply.usage is not None and reply.usage.total_tokens == reply.usage.prompt_tokens + NUM_TOKENS
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion"
    raw = client.chat.completions.with_raw_response.create(model="plain", messages=HI)
    assert raw.headers["content-type"] == "application/json"


def choices() -> None:
    reply = client.chat.completions.create(model="plain", messages=HI, n=3, seed=7, temperature=0.5, top_p=0.9)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None and reply.usage.completion_tokens == 3 * NUM_TOKENS
    parts = {0: "", 1: ""}
    for part in client.chat.completions.create(model="plain", messages=HI, n=2, stream=True):
        for choice in part.choices:
            parts[choice.index] += choice.delta.content or ""
    assert set(parts.values()) == {"The cät sat."}


def stop() -> None:
    reply = client.chat.completions.create(model="plain", messages=HI, stop=[" sat", "never"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("The cät", "stop")
    reply = client.chat.completions.create(model="plain", messages=HI, max_tokens=2)
    assert reply.choices[0].finish_reason == "length"


def stream() -> None:
    options = {"include_usage": True}
    reply = client.chat.completions.create(model="plain", messages=HI, stream=True, stream_options=options)
    *parts, last = reply
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "The cät sat."
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == ["stop"]
    assert last.choices == [] and last.usage.completion_tokens == NUM_TOKENS
    with client.chat.completions.stream(model="plain", messages=HI) as helper:  # which puts the parts together
        events = [event.type for event in helper]
        whole = helper.get_final_completion()
    assert whole.choices[0].message.content == "The cät sat." and "content.done" in events


def logprobs() -> None:
    asked = {"model": "plain", "messages": HI, "logprobs": True, "top_logprobs": 2}
    reply = client.chat.completions.create(**asked)
    scores = reply.choices[0].logprobs
    assert scores is not None and [len(one.top_logprobs) for one in scores.content] == [2] * (NUM_TOKENS - 1)
    assert b"".join(bytes(one.bytes) for one in scores.content).decode() == "The cät sat."
    assert scores.content[0].logprob == -0.5
    streamed = [
        one
        for part in client.chat.completions.create(**asked, stream=True)
        for choice in part.choices
        for one in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert [one.logprob for one in streamed] == [one.logprob for one in scores.content]
    with client.chat.completions.stream(**asked) as helper:
        gathered = helper.get_final_completion().choices[0].logprobs
    assert gathered is not None and gathered.content == scores.content


def completions() -> None:
    reply = client.completions.create(model="plain", prompt="Once", max_tokens=3, echo=True, logprobs=2)
    (choice,) = reply.choices
    assert choice.text.startswith("Once") and choice.finish_reason == "length"
    scores = choice.logprobs
    count = reply.usage.total_tokens
    assert scores.token_logprobs[0] is None and len(scores.tokens) == len(scores.text_offset) == count
    assert len(scores.top_logprobs) == len(scores.token_logprobs) == count
    assert "".join(client.completions.create(model="plain", prompt=[5, 6]).choices[0].text) == "The cät sat."
    several = client.completions.create(model="plain", prompt=["a", "b"], n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    streamed = client.completions.create(model="plain", prompt="Once", stream=True)
    assert "".join(part.choices[0].text for part in streamed) == "The cät sat."


def called(message: object) -> None:
    (call,) = message.tool_calls
    assert call.type == "function" and call.id and call.function.name == "weather"
    assert json.loads(call.function.arguments) == CITY


def tools() -> None:
    asked = {"model": "hermes", "messages": HI, "tools": [WEATHER], "tool_choice": "auto"}
    reply = client.chat.completions.create(**asked, parallel_tool_calls=True)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    called(choice.message)
    back = [*HI, choice.message, {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}]
    after = client.chat.completions.create(model="hermes", messages=back, tools=[WEATHER])
    assert (after.choices[0].message.content, after.choices[0].finish_reason) == ("It is rain.", "stop")
    dumped = [*HI, choice.message.model_dump(), back[-1]]
    assert client.chat.completions.create(model="hermes", messages=dumped).choices[0].message.content == "It is rain."


def tools_streamed() -> None:
    asked = {"model": "hermes", "messages": HI, "tools": [WEATHER]}
    calls, arguments, ends = [], "", []
    for part in client.chat.completions.create(**asked, stream=True):
        (choice,) = part.choices
        ends += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            calls += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
    assert (calls, json.loads(arguments), ends) == (["weather"], CITY, ["tool_calls"])
    with client.chat.completions.stream(**asked) as helper:
        called(helper.get_final_completion().choices[0].message)
    runner_tools = [openai.pydantic_function_tool(weather_model(), name="weather")]
    with client.chat.completions.stream(model="hermes", messages=HI, tools=runner_tools) as helper:
        whole = helper.get_final_completion()
    assert whole.choices[0].message.tool_calls[0].function.parsed_arguments.city == "Bern"


def weather_model() -> type:
    import pydantic

    return pydantic.create_model("weather", city=(str, ...), day=(str, ...))


def errors() -> None:
    def ask(**how: object) -> Callable[[], object]:
        return lambda: client.chat.completions.create(**{"model": "plain", "messages": HI, **how})

    error = refused(openai.NotFoundError, ask(model="gpt-5"))
    assert (error.code, error.param) == ("model_not_found", "model")
    error = refused(openai.BadRequestError, ask(max_tokens=10**6))
    assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")
    error = refused(openai.BadRequestError, ask(max_tokens=10**6, stream=True))
    assert error.code == "context_length_exceeded"
    error = refused(openai.BadRequestError, ask(temperature=-1))
    assert error.param == "temperature" and "temperature" in error.message
    error = refused(openai.BadRequestError, ask(response_format={"type": "json_object"}))
    assert error.param == "response_format"
    stranger = client.with_options(api_key="a-key-that-is-of-nobody")
    error = refused(openai.AuthenticationError, stranger.models.list)
    assert error.code == "invalid_api_key"
    refused(openai.NotFoundError, lambda: client.embeddings.create(model="plain", input="a"))
    refused(openai.NotFoundError, lambda: client.responses.create(model="plain", input="a"))
    try:
        for _ in ask(messages=[{"role": "user", "content": "fail"}], stream=True)():
            pass
        raise AssertionError("an engine that fails in a stream ended it well")
    except openai.APIError as error:
        assert "The engine failed" in error.message
    refused(openai.InternalServerError, ask(messages=[{"role": "user", "content": "fail"}]))


def concurrent() -> None:
    async def main() -> None:
        many = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)

        async def one() -> str:
            stream = await many.chat.completions.create(model="plain", messages=HI, stream=True)
            return "".join([part.choices[0].delta.content or "" async for part in stream])

        assert set(await asyncio.gather(*(one() for _ in range(16)))) == {"The cät sat."}
        left = await many.chat.completions.create(model="plain", messages=HI, stream=True)
        await left.close()

    asyncio.run(main())


globals()[CHECK]()
