"""Runs a model without the engine: AttnMeta is built by hand over a cache whose blocks come in random order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from minivllm.core.interfaces.attention import AttentionContext, GraphKey
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.quantizer import Shard
from minivllm.device.layers.parts import ModelParts
from minivllm.device.layers.rotary import prepare_qk
from minivllm.device.loading import shapes
from minivllm.device.loading.weights import build_model, load_weights
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.kvformat.plain import Bf16, Fp16, Fp32
from minivllm.plugins.quantizer.none import Unquantized

from .attention_world import keep_tensors, make_meta

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
FORMATS = {"float32": Fp32, "bfloat16": Bf16, "float16": Fp16}


class Harness:
    """One model, S slots; ``step`` feeds tokens to some slots and gives the logits of all of them.

    Without a path the model stays as it is built, for who asks only what it consists of.
    """

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
        shard: Shard | None = None,
        group=None,
        backend=Sdpa,
        load_format: str = "auto",
        seed: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        fmt = FORMATS[kv or dtype]()
        self.block, self.device = block, device
        ctx = AttentionContext(device, dtype, fmt, block, slots, max_len, prepare_qk, batch_invariant)
        self.backend = backend(None, ctx)
        self.parts = ModelParts(
            device, dtype, quantizer or Unquantized(), self.backend, shard, group, batch_invariant=batch_invariant
        )
        if path is not None:
            self.parts.found = shapes.check(str(path), arch, cfg, self.parts, load_format, True, 1 << 50)
        self.model = build_model(arch, cfg, self.parts, path or "")
        for module in self.parts.modules.values():  # what nothing fills must be seen
            for tensor in module.tensors.values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        if path is not None:
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
        # a sequence longer than ``switch`` has another rotary embedding from its first token on: ``ends`` says how long
        # it becomes, where a step does not bring it all
        self.switch, self.ends, self.rope_rows = arch.switch(cfg), [0] * slots, max_len + 1
        self.taps: Any = None  # of all steps (``model.StepTaps``)
        self.kept: dict[tuple[str, Any], torch.Tensor] = {}  # what is one tensor for all steps, as in the engine

    def step(self, feed: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """slot -> tokens; returns slot -> logits [tokens, V]."""
        logits, order = self.logits(feed)
        return dict(zip(order, logits.split([len(feed[s]) for s in order]), strict=True))

    def logits(
        self, feed: Mapping[int, Sequence[int]], wanted: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits of all tokens of a step [T, V], or of the ``wanted`` ones if the model takes indices; their slots in
        order."""
        order = sorted(feed, key=lambda s: len(feed[s]) != 1)
        for s in order:
            self.known[s] += len(feed[s])
        meta = make_meta([(s, len(feed[s]), self.known[s]) for s in order], self.table, self.block, self.device)
        keep_tensors(self.kept, meta, ("table",))
        position = meta.position
        if self.switch is not None:
            first = [max(self.known[s], self.ends[s]) > self.switch for s in order]
            meta.position = position + self.rope_rows * torch.tensor(first, device=self.device)[meta.row]
        self.backend.plan(meta, GraphKey())
        ids = torch.tensor([t for s in order for t in feed[s]], device=self.device)
        with torch.inference_mode():
            pick = None if wanted is None else torch.tensor(wanted, device=self.device)
            hidden = self.model(StepTensors(ids, position, meta, pick, self.taps))
            return self.model.logits(hidden).float(), order

    def chunked(self, slot: int, tokens: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, V] of a sequence that comes in several steps, cut before the tokens of these numbers."""
        edges, self.ends[slot] = [0, *cuts, len(tokens)], len(tokens)
        return torch.cat([self.step({slot: tokens[a:b]})[slot] for a, b in itertools.pairwise(edges)])

    def greedy(self, slot: int, prompt: Sequence[int], n: int) -> list[int]:
        logits, tokens = self.step({slot: prompt})[slot], []
        for _ in range(n):
            tokens.append(int(logits[-1].argmax()))
            logits = self.step({slot: tokens[-1:]})[slot]
        return tokens


class Seat:
    """One process of a tensor-parallel group that threads play (``device.layers.communicator.Communicator``).  All of
    them get what only rank 0 needs."""

    def __init__(self, rank: int, sent: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.sent, self.barrier = rank, len(sent), sent, barrier
        self.peers = None

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(torch.stack(self.all_of(x)).sum(0))

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        return torch.cat(self.all_of(x), dim=1)[:, :width]

    def all_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.sent[self.rank] = x.clone()
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()  # before anyone overwrites what the others read
        return found


def seats(n: int) -> list[Seat]:
    sent, barrier = [None] * n, threading.Barrier(n, timeout=60)
    return [Seat(rank, sent, barrier) for rank in range(n)]


def play(seats: Sequence[Seat], calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls that wait for each other, one for each seat; raises the error that came first."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as exc:
            errors.append(exc)
            seats[i].barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
