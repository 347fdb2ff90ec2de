# /// script
# dependencies = ["openai-agents>=0.20"]
# ///
"""The Agents SDK with its defaults, which use the Responses API: a tool, a stream, a typed answer."""

import asyncio
import os
from importlib.metadata import version
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

print("version openai-agents", version("openai-agents"))
MODEL = os.environ["MODEL"]
set_default_openai_client(AsyncOpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key=os.environ["API_KEY"]))
set_tracing_disabled(True)
calls = []


class Choice(BaseModel):
    word: Literal["red", "green"]


@function_tool
def choose(colour: Literal["red", "green"]) -> str:
    """Choose a colour."""
    calls.append(colour)
    return f"you chose {colour}"


async def main():
    # the model is forced to call once; the second turn is free, and its text ends the run
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=40)
    agent = Agent(name="Chooser", instructions="Choose.", model=MODEL, tools=[choose], model_settings=settings)
    result = await Runner.run(agent, "Choose a colour.")
    assert calls and result.final_output is not None
    print("ok run")
    streamed = Runner.run_streamed(agent, "Choose a colour.")
    kinds = {event.type async for event in streamed.stream_events()}
    assert "raw_response_event" in kinds and len(calls) > 1
    print("ok stream")
    typed = Agent(name="Typed", instructions="Choose.", model=MODEL, output_type=Choice)
    assert (await Runner.run(typed, "Choose a colour.")).final_output.word in ("red", "green")
    print("ok typed")


asyncio.run(main())
