"""Decode steps whose rows share blocks, for tests on a CPU (interpreted_shared.py) and on a GPU.

A case has a block table of any shape.  The reference is a softmax in float64 over the keys and values that the table
names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnMeta, AttnSpec, GraphKey
from minivllm.core.interfaces.kvformat import KVFormat
from minivllm.device.layers.rotary import prepare_qk
from minivllm.plugins.attention.options import TritonOptions
from minivllm.plugins.attention.triton_backend import Triton
from minivllm.plugins.kvformat.plain import Bf16, Fp16, Fp32
from minivllm.testing.attention_world import make_meta

FORMATS = {"float32": Fp32, "float16": Fp16, "bfloat16": Bf16}


@dataclass
class Case:
    """A decode step: its layer, lengths and block table.  ``lengths`` [R] include the new token of each row."""

    spec: AttnSpec
    block: int
    lengths: list[int]
    table: np.ndarray  # i32 [slots, columns]
    slots: list[int]
    dtype: str = "float32"
    device: str = "cpu"
    fmt: KVFormat | None = None
    used: list[int] = field(default_factory=list)  # blocks of the table

    def __post_init__(self) -> None:
        self.fmt = self.fmt or FORMATS[self.dtype]()
        self.used = sorted({int(b) for b in self.table.ravel()} - {0})
        spec, generator = self.spec, torch.Generator().manual_seed(len(self.lengths))

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(getattr(torch, self.dtype)).to(self.device)

        ctx = AttentionContext(self.device, self.dtype, self.fmt, self.block, 600, 1 << 20, prepare_qk)
        self.on, self.off = (Triton(TritonOptions(shared_prefixes=mode), ctx) for mode in ("always", "off"))
        self.layer = AttnLayer(0, 0, spec)
        self.layer.cache = {
            name: torch.zeros(1 + max(self.used), *t.shape, dtype=getattr(torch, t.dtype), device=self.device)
            for name, t in self.on.layout(spec, self.fmt, self.block).tensors.items()
        }
        n = (1 + max(self.used)) * self.block
        k, v = draw(n, spec.kv_heads, spec.dim_qk), draw(n, spec.kv_heads, spec.dim_v)
        self.fmt.store(self.layer.cache, k, v, torch.arange(n, device=self.device))
        if spec.sinks:
            self.layer.sinks = draw(spec.heads).float() * 2
        if spec.alibi is not None:
            self.layer.slopes = torch.tensor(spec.alibi, device=self.device)
        self.q = draw(len(self.lengths), spec.heads, spec.dim_qk)

    def meta(self) -> AttnMeta:
        rows = [(slot, 1, n) for slot, n in zip(self.slots, self.lengths, strict=True)]
        table = self.table[None].copy()
        return make_meta(rows, table, self.block, self.device)

    def run(self, backend: Triton, key: GraphKey | None = None, meta: AttnMeta | None = None) -> tuple[Tensor, Tensor]:
        """Return out [R, heads, dim_v] and lse [R, heads] of a back end."""
        meta, rows = meta or self.meta(), len(self.lengths)
        out = torch.full((rows, self.spec.heads, self.spec.dim_v), torch.nan, dtype=self.q.dtype, device=self.device)
        lse = torch.full((rows, self.spec.heads), torch.nan, device=self.device)
        backend.plan(meta, key or GraphKey(shared=True))
        backend.forward(self.layer, self.q, meta, out, lse)
        self.last = meta
        return out, lse

    def shared(self) -> list[int]:
        """Return the tokens of each row that the last step read together with other rows."""
        (work,) = (work for key, work in self.last.work.items() if key[0] == "shared")
        return work.parts.rows[:, 0].tolist()

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return out and lse in float64."""
        spec, outs, sums = self.spec, [], []
        for row, (slot, n) in enumerate(zip(self.slots, self.lengths, strict=True)):
            blocks = torch.from_numpy(self.table[slot, : -(-n // self.block)]).long().to(self.device)
            k, v = (x[:n].double() for x in self.fmt.load(self.layer.cache, blocks, torch.float32))
            q = self.q[row].double().view(spec.kv_heads, -1, spec.dim_qk)
            s = torch.einsum("hgd,nhd->hgn", q, k) * spec.softmax_scale
            if spec.softcap is not None:
                s = spec.softcap * torch.tanh(s / spec.softcap)
            s = s.reshape(spec.heads, n)
            if self.layer.slopes is not None:
                s = s + self.layer.slopes.double()[:, None] * torch.arange(1 - n, 1, device=s.device)
            total = s.logsumexp(-1)
            if self.layer.sinks is not None:
                total = torch.logaddexp(total, self.layer.sinks.double())
            p = (s - total[:, None]).exp().view(spec.kv_heads, -1, n)
            outs.append(torch.einsum("hgn,nhd->hgd", p, v[..., : spec.dim_v]).reshape(spec.heads, spec.dim_v))
            sums.append(total)
        return torch.stack(outs), torch.stack(sums)

    def check(self, most: float, key: GraphKey | None = None) -> list[int]:
        """Compare a step that shares with the reference; return the shared tokens of each row."""
        out, lse = self.run(self.on, key)
        want, sums = self.exact()
        assert float((out.double() - want).abs().max()) <= most and float((lse.double() - sums).abs().max()) <= most
        return self.shared()


def table_of(rows: list[tuple[list[int], int]], seed: int = 0, columns: int = 0) -> tuple[np.ndarray, list[int]]:
    """Return a block table and the slot of each row.

    ``rows`` has (blocks that others may have too, number of blocks) of each row; the blocks behind are its own.  Slots
    are in random order, and entries behind a row's blocks name blocks of other rows.
    """
    random = np.random.default_rng(seed)
    first = 1 + max((max(shared, default=0) for shared, _ in rows), default=0)
    own = iter(range(first, first + sum(n for _, n in rows)))
    slots = random.permutation(len(rows) + 2)[: len(rows)].tolist()
    width = max(columns, 1 + max(n for _, n in rows))
    table = random.integers(1, first + 1, (len(rows) + 2, width)).astype(np.int32)
    for slot, (shared, n) in zip(slots, rows, strict=True):
        blocks = (shared + [next(own) for _ in range(n)])[:n]
        table[slot, :n] = blocks
    return table, slots
