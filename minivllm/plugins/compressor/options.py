"""Options of the built-in compressors."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError(f"{value} is even; expected an odd number, so that neighbours on both sides count")
    return value


Kernel = Annotated[int, AfterValidator(_odd)]


class StreamingOptions(BaseModel):
    """The options of ``streaming``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sinks: int = Field(4, ge=0, description="First tokens that always stay.")
    rerotate: bool = Field(False, description="Rotate the kept keys to new, dense positions, as in the paper.")


class SnapKVOptions(BaseModel):
    """Options of the compressor ``snapkv``: how many last queries are read, and over how many neighbours to average."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int = Field(32, ge=1, le=256, description="Last tokens whose queries are read.")
    kernel: Kernel = Field(5, ge=1, le=63, description="Neighbours over which attention is averaged.")


class H2OOptions(BaseModel):
    """Options of the compressor ``h2o``: the share of newest tokens, and whether attention is averaged or summed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recent: float = Field(0.5, ge=0, le=1, description="Share of the kept tokens that are the newest ones.")
    mean: bool = Field(False, description="Compare the mean attention of the queries that see a token, not the sum.")


class RKVOptions(BaseModel):
    """The options of ``rkv``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int = Field(8, ge=1, le=256, description="Last tokens whose queries are read, and which stay.")
    kernel: Kernel = Field(7, ge=1, le=63, description="Neighbours of which the largest attention counts.")
    importance: float = Field(0.1, ge=0, le=1, description="Weight of attention; the rest is that of redundancy.")
