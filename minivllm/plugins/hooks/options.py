"""Options of the hooks in this folder."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from minivllm.errors import shown

SUFFIXES = (".csv", ".jsonl")


class StepLogOptions(BaseModel):
    """The options of the log of steps: its file, and how often a step is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field("steps.jsonl", description="The file, written anew; .csv or .jsonl says the format.")
    every: int = Field(1, ge=1, description="Write each step whose number is a multiple of this.")

    @field_validator("path")
    @classmethod
    def _known(cls, path: str) -> str:
        if not path.endswith(SUFFIXES):
            raise ValueError(f"{shown(path)}: expected a file that ends in {' or '.join(SUFFIXES)}")
        return path


class LiveOptions(BaseModel):
    """Options of the hook ``live``, the view in the terminal: how often it is drawn, and whether it stays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    refresh_per_second: float = Field(4.0, gt=0, le=30, description="Times that the view is drawn in a second.")
    keep: bool = Field(True, description="Leave the last view in the terminal when the engine stops.")


class SpansOptions(BaseModel):
    """Where spans go."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    exporter: Literal["otlp", "console", "program"] = Field(
        "otlp", description="OTLP over HTTP, standard output, or the tracer provider that the program has set."
    )
    endpoint: str | None = Field(
        None, description="Of OTLP, such as http://localhost:4318/v1/traces; none: as OTEL_EXPORTER_OTLP_* say."
    )
    model_name: str | None = Field(None, description="What spans call the model; none: the name of its directory.")
