"""The functions of ``Device`` in torch on a CPU.  They define the results of the accelerator's functions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .device import Batch, Device


class Reference(Device):
    """The CPU as an accelerator."""

    def open(self) -> str:
        return "cpu"

    def wait(self) -> None:
        """Return at once, because torch has computed a result when the call of an operation returns on a CPU."""

    def store(self, cache: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        for name, new in (("k", k), ("v", v)):
            cache[name].flatten(0, 1)[slots] = new.to(cache[name].dtype)

    def attend(self, q: Tensor, cache: Mapping[str, Tensor], batch: Batch) -> Tensor:
        heads = q.shape[2]
        seen = visible(batch, q.shape[1], batch.pages.shape[1] * cache["k"].shape[1])
        used = seen.any(dim=1)[:, :, None, None]  # [R, keys, 1, 1]; other positions may hold NaN
        k, v = (torch.where(used, load(cache[name], batch.pages, heads), 0.0) for name in ("k", "v"))
        scores = torch.einsum("rqhd,rkhd->rhqk", q.float(), k) * batch.scale
        shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)  # NaN where a query sees nothing
        return torch.einsum("rhqk,rkhd->rqhd", shares, v).to(q.dtype)


def visible(batch: Batch, queries: int, keys: int) -> Tensor:
    """Return which keys each query sees, bool [R, Q, keys]."""
    query = torch.arange(queries)[None, :, None]
    key = torch.arange(keys)[None, None, :]
    position = (batch.kv_len - batch.q_len)[:, None, None] + query
    seen = (key <= position) & (query < batch.q_len[:, None, None])
    return seen if batch.window is None else seen & (key > position - batch.window)


def load(stored: Tensor, pages: Tensor, heads: int) -> Tensor:
    """Return the keys or values of pages i32 [R, P] for each query head, float32 [R, P * block, heads, dim]."""
    found = stored[pages.long()].flatten(1, 2).float()
    return found.repeat_interleave(heads // found.shape[2], dim=2)
