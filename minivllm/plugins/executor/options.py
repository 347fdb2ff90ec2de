"""Options of the built-in executors."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class MultiprocessOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    timeout: float = Field(
        120.0,
        ge=1,
        le=86_400,
        description="seconds without progress, after which the engine ends and names the missing processes",
    )
    start_timeout: float = Field(
        1800.0, ge=1, le=86_400, description="seconds that loading the model may take, and a call such as a profile"
    )
    checked: bool = Field(
        False,
        description="compare the plans, hidden states and columns of all processes before each step, which costs a "
        "call between processes",
    )
    sums: Literal["auto", "nccl"] = Field(
        "auto",
        description="way in which GPUs add: `auto` through memory that all of them reach, if there is any; `nccl` by "
        "the library",
    )


ADDRESS = r"(?:\[([^\]]+)\]|([^:/\[\]]+)):(\d+)"  # host:port, with an IPv6 address in brackets


class RayOptions(MultiprocessOptions):
    address: str = Field(
        "",
        max_length=300,
        description="host:port of a Ray cluster that runs; `auto`: the one that RAY_ADDRESS names or this machine is a "
        "node of; empty: a cluster of one node is started here, and ends with the engine",
    )
    placement_timeout: float = Field(
        10.0, ge=1, le=86_400, description="seconds that the cluster may take to have a free place for each process"
    )
    transport: Literal["auto", "tcp"] = Field(
        "auto",
        description="how plans go to a process: `auto` through shared memory on this machine, over TCP to others; "
        "`tcp` over TCP to all",
    )

    @field_validator("address")
    @classmethod
    def _names_a_cluster(cls, address: str) -> str:
        if address not in ("", "auto") and not re.fullmatch(ADDRESS, address):
            raise ValueError("expected host:port of a Ray cluster, or auto")
        return address


class SimOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    step_ms: float = Field(5.0, ge=0, le=60_000, description="milliseconds of each step")
    row_ms: float = Field(0.0, ge=0, le=60_000, description="further milliseconds for each row of a step")
    token_ms: float = Field(0.0, ge=0, le=60_000, description="further milliseconds for each token of a step")
    sample_ms: float = Field(
        0.0,
        ge=0,
        le=60_000,
        description="milliseconds of drawing, which begins when the masks of the rows have arrived",
    )
    costs: str = Field(
        "",
        description="file that `minivllm calibrate` wrote: steps take the time that they took on the measured device; "
        "`step_ms`, `row_ms` and `token_ms` may then not be set",
    )
    clock: Literal["real", "virtual"] = Field(
        "real",
        description="`real`: a result comes when its time has passed; `virtual`: a result comes at once, and the "
        "engine's clock advances by its time",
    )
    vocab_size: int = Field(
        0, ge=0, le=2**31 - 1, description="number of tokens of the vocabulary; 0: as many as the model has"
    )
    answer_tokens: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="mean number of tokens before an end-of-sequence token; 0: it is as likely as any other token",
    )
    drafts_accepted: float = Field(0.7, ge=0, le=1, description="share of a drafter's tokens that are accepted")
    check: bool = Field(
        False,
        description="check that each KV slot that a row reads has the tokens of this row, which makes steps slower",
    )

    @model_validator(mode="after")
    def _one_pace(self) -> SimOptions:
        fields = type(self).model_fields
        given = [n for n in ("step_ms", "row_ms", "token_ms") if getattr(self, n) != fields[n].default]
        if self.costs and given:
            raise ValueError(f"costs and {given[0]} both define the time of a step; leave one of them out")
        return self
