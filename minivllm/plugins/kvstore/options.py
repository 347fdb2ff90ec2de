"""Options of the built-in stores."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CpuStoreOptions(BaseModel):
    """The options of the tier in CPU memory: its size, when pages are stored, and when a request loads them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int = Field(4 << 30, ge=1 << 16, description="Bytes of CPU memory for pages, of all ranks together.")
    eager: bool = Field(
        False, description="Store a block soon after it was computed; false: when the device evicts it."
    )
    load: Literal["cheaper", "always"] = Field(
        "cheaper", description="Load pages if that is expected to be faster than computing them, or always."
    )
    patience: float = Field(
        5.0, gt=0, le=3600, description="Seconds that a request waits for its pages before it computes them."
    )


class DiskStoreOptions(BaseModel):
    """The options of the tier on disk: its folder and size, when pages are stored, and when a request loads them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        "~/.cache/minivllm/kv", min_length=1, description="Folder for the files; engines and models may share it."
    )
    bytes: int = Field(16 << 30, ge=1 << 20, description="Bytes of all files in the folder that may be deleted.")
    eager: bool = Field(True, description="Store a block soon after it was computed; false: when the device evicts it.")
    load: Literal["cheaper", "always"] = Field(
        "cheaper", description="Load pages if that is expected to be faster than computing them, or always."
    )
    patience: float = Field(
        5.0, gt=0, le=3600, description="Seconds that a request waits for its pages before it computes them."
    )
