# /// script
# dependencies = ["langchain-openai>=1,<2"]
# ///
"""LangChain's ChatOpenAI: invoke, stream, structured output in two ways, tools."""

import os
from importlib.metadata import version
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

print("version langchain-openai", version("langchain-openai"))
llm = ChatOpenAI(
    base_url=os.environ["BASE_URL"] + "/v1",
    api_key=os.environ["API_KEY"],
    model=os.environ["MODEL"],
    temperature=0,
    max_tokens=100,
)


class Sum(BaseModel):
    """A sum."""

    model_config = ConfigDict(extra="forbid")  # what a schema allows, a small model writes
    total: int = Field(ge=0, le=99)  # a small model writes digits for ever


whole = llm.invoke("What is 2 + 3?")
assert whole.content and whole.usage_metadata["output_tokens"] > 0
print("ok invoke")
assert "".join(c.content for c in llm.stream("What is 2 + 3?")) == whole.content
print("ok stream")
for method in ("json_schema", "function_calling"):
    assert isinstance(llm.with_structured_output(Sum, method=method).invoke("What is 2 + 3?"), Sum)
    print("ok structured,", method)
called = llm.bind_tools([Sum], tool_choice="Sum").invoke("Add 2 and 3.")
assert called.tool_calls[0]["name"] == "Sum" and set(called.tool_calls[0]["args"]) == {"total"}
print("ok tools")


class Pet(BaseModel):  # says nothing of other properties
    """A pet."""

    kind: Literal["cat", "dog"]
    old: bool


for method in ("json_schema", "function_calling"):
    assert isinstance(llm.with_structured_output(Pet, method=method).invoke("Which pet?"), Pet)
called = llm.bind_tools([Pet], tool_choice="any", parallel_tool_calls=False).invoke("Which pet?")
assert called.tool_calls[0]["name"] == "Pet"
print("ok a model that says nothing of other properties")
