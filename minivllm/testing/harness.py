"""Runs a model without the engine: AttnMeta is built by hand over a cache whose blocks come in random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from minivllm.core.interfaces.attention import AttentionContext, AttnMeta, GraphKey
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.quantizer import Shard
from minivllm.core.layers.parts import ALONE, Parts
from minivllm.core.weights import build_model, load_weights
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.kvformat.plain import Bf16, Fp16, Fp32
from minivllm.plugins.quantizer.none import Unquantized

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
FORMATS = {"float32": Fp32, "bfloat16": Bf16, "float16": Fp16}


def make_meta(
    rows: Sequence[tuple[int, int, int]],
    table: np.ndarray,
    block: int,
    device: str = "cpu",
    decode_rows: int | None = None,
) -> AttnMeta:
    """``rows``: (slot, q_len, kv_len), those of one token first; ``table`` i32 [G, S, M]."""
    slots, q_len, kv_len = (np.array(x, np.int64) for x in zip(*rows, strict=True))
    if decode_rows is None:
        decode_rows = int(np.argmax(np.append(q_len, 2) != 1))
    groups = len(table)
    row = np.repeat(np.arange(len(rows)), q_len)
    position = np.concatenate(
        [np.arange(kv - q, kv) for q, kv in zip(q_len, kv_len, strict=True)] + [np.empty(0, np.int64)]
    )
    slot_map = table[:, slots[row], position // block].astype(np.int64) * block + position % block
    i32, i64 = (lambda x: torch.tensor(x, dtype=torch.int32, device=device)), lambda x: torch.tensor(x, device=device)
    kv_all = np.repeat(kv_len[None], groups, 0).astype(np.int32)
    return AttnMeta(
        slots=i64(slots),
        cu_q=i32(np.concatenate([[0], np.cumsum(q_len)])),
        q_len=i32(q_len),
        kv_len=i32(kv_all),
        position=i64(position.astype(np.int64)),
        row=i64(row),
        table=i32(table),
        slot_map=i64(slot_map),
        block=block,
        decode_rows=decode_rows,
        host_q_len=q_len.astype(np.int32),
        host_kv_len=kv_all,
    )


class Harness:
    """One model, S slots; ``step`` feeds tokens to some slots and gives the logits of all of them."""

    def __init__(
        self,
        path,
        arch,
        cfg,
        dtype: str = "float32",
        kv: str | None = None,
        block: int = 4,
        slots: int = 8,
        max_len: int = 96,
        device: str = "cpu",
        quantizer=None,
        shard: Shard = ALONE,
        group=None,
        backend=Sdpa,
        load_format: str = "auto",
        seed: int = 0,
    ) -> None:
        fmt = FORMATS[kv or dtype]()
        self.block, self.device = block, device
        ctx = AttentionContext(device, dtype, fmt, block, slots, max_len)
        self.backend = backend(None, ctx)
        self.parts = Parts(device, dtype, quantizer or Unquantized(), self.backend, shard, group)
        self.model = build_model(arch, cfg, self.parts)
        load_weights(path, arch, cfg, self.parts, load_format, seed)
        groups = 1 + max(layer.group for layer in self.parts.layers)
        per_slot = -(-max_len // block)
        blocks = 1 + slots * per_slot
        order = np.random.default_rng(seed).permuted(np.tile(np.arange(1, blocks), (groups, 1)), axis=1)
        self.table = order.reshape(groups, slots, per_slot).astype(np.int32)
        for layer in self.parts.layers:
            layout = self.backend.layout(layer.spec, fmt, block)
            layer.cache = {  # what nobody wrote must never be read
                n: torch.full((blocks, *t.shape), torch.nan, dtype=getattr(torch, t.dtype), device=device)
                for n, t in layout.tensors.items()
            }
        self.known = [0] * slots

    def step(self, feed: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """slot -> tokens; returns slot -> logits [tokens, V]."""
        order = sorted(feed, key=lambda s: len(feed[s]) != 1)
        for s in order:
            self.known[s] += len(feed[s])
        meta = make_meta([(s, len(feed[s]), self.known[s]) for s in order], self.table, self.block, self.device)
        self.backend.plan(meta, GraphKey())
        ids = torch.tensor([t for s in order for t in feed[s]], device=self.device)
        with torch.inference_mode():
            logits = self.model.logits(self.model(StepTensors(ids, meta.position, meta))).float()
        return dict(zip(order, logits.split([len(feed[s]) for s in order]), strict=True))

    def greedy(self, slot: int, prompt: Sequence[int], n: int) -> list[int]:
        logits, tokens = self.step({slot: prompt})[slot], []
        for _ in range(n):
            tokens.append(int(logits[-1].argmax()))
            logits = self.step({slot: tokens[-1:]})[slot]
        return tokens
