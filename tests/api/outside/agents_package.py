"""One tool call round by `openai-agents`, run by a Python that has it: `agents_package.py URL CHECK`."""

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL, CHECK = sys.argv[1:]
asked: list[tuple[str, str]] = []


@function_tool
def weather(city: str, day: str) -> str:
    """The weather of a city on a day."""
    asked.append((city, day))
    return "rain"


def agent() -> Agent:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="a-key-of-24-characters-.", max_retries=0)
    model = OpenAIChatCompletionsModel(model="hermes", openai_client=client)
    return Agent(
        name="a", instructions="Look it up.", model=model, tools=[weather],
        model_settings=ModelSettings(temperature=0.0, max_tokens=400),
    )  # fmt: skip


EXPECTED = ("It is rain.", [("Bern", "today")])


async def whole() -> None:
    result = await Runner.run(agent(), "How is it in Bern?")
    assert (result.final_output, asked) == EXPECTED, (result.final_output, asked)


async def streamed() -> None:
    result = Runner.run_streamed(agent(), "How is it in Bern?")
    kinds = [event.type async for event in result.stream_events()]
    assert (result.final_output, asked) == EXPECTED, (result.final_output, asked)
    assert "raw_response_event" in kinds


asyncio.run({"whole": whole, "streamed": streamed}[CHECK]())
