"""The functions of the accelerator.  Write the body of each one; everything else in this package calls them.

``reference.py`` has the same functions on a CPU and defines their results.  R rows of a batch, Q queries of a row, P
pages of a row.  All sizes of a batch are powers of two, so that a compiler sees few shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from minivllm.plugin import PluginError


class Missing(PluginError):
    """The error of a function of ``Device`` that is not written yet."""

    def __init__(self, function: str) -> None:
        super().__init__(f"minivllm-accelerator-template: Device.{function} is not written; write it in device.py")


@dataclass(frozen=True)
class Batch:
    """The rows of one call of ``Device.attend``.

    The queries of row r are the last ``q_len[r]`` of its ``kv_len[r]`` positions.  Positions from ``kv_len[r]`` on,
    queries from ``q_len[r]`` on and rows with ``kv_len[r] == 0`` are padding.
    """

    pages: Tensor  # i32 [R, P] block of each page of a row
    q_len: Tensor  # i32 [R]
    kv_len: Tensor  # i32 [R]
    window: int | None  # number of positions that a query sees, its own included; None means all
    scale: float  # factor of the scores


class Device:
    """An accelerator."""

    def open(self) -> str:
        """Prepare the device, and return its name in torch, such as "xla:0".  ResourceError if it is not there."""
        raise Missing("open")

    def wait(self) -> None:
        """Return when the device has finished all steps that were enqueued."""
        raise Missing("wait")

    def close(self) -> None:
        """Free the device, which can be opened again.  This default frees nothing."""

    def store(self, cache: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k [T, kv_heads, dim] and v [T, kv_heads, dim_v] to the flat slots i64 [T] of the cache.

        ``cache`` has ``k`` and ``v`` [blocks, block, kv_heads, dim].  Slot s is token s % block of block s // block.
        Several padded tokens may have the same slot of block 0.
        """
        raise Missing("store")

    def attend(self, q: Tensor, cache: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the outputs [R, Q, heads, dim_v] of queries q [R, Q, heads, dim].

        Query head h reads KV head h // (heads / kv_heads).  Query i of row r sees the positions up to its own,
        ``kv_len[r] - q_len[r] + i``, within the window.  Other positions may hold NaN, so multiplying them by 0 is
        wrong.  The outputs of padding may be anything.
        """
        raise Missing("attend")
