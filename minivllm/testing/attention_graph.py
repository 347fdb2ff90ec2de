"""Steps captured in a CUDA graph.

A captured step is planned with its ``GraphKey`` and the longest lengths that the host may ever name.  For a replay the
new metadata is copied into the same tensors and host arrays and the graph is replayed.  ``plan`` is captured with the
step if the back end declares ``plan: device``; otherwise it is called again before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, GraphKey

from .attention_math import Place, attend, compare
from .attention_world import Rows, Seq, Setting, World

if TYPE_CHECKING:
    from .attention import AttentionConformance

TOKENS = 300


def check_decode(suite: AttentionConformance, setting: Setting) -> None:
    """Five rows of one token each, the last of them sometimes padding."""
    world = World(suite, setting, 7, TOKENS)
    seqs = [world.add(past) for past in (3, 290, 15, 16, 40, 1)]
    pad = world.add_null()
    steps = [[0, 1, 2, 3, 4], [5, 4, 3, 2, 1], [1, 0, 5], [2]]
    plans = [[(seqs[i], 1) for i in step] + [(pad, 1)] * (5 - len(step)) for step in steps]
    _replay(world, GraphKey("decode", 5, 5), plans)


def check_mixed(suite: AttentionConformance, setting: Setting) -> None:
    """Four rows that bring twenty tokens together, cut differently each time; those of one token come first."""
    world = World(suite, setting, 4, TOKENS)
    seqs = [world.add(past) for past in (0, 200, 17, 5)]
    cuts = [(5, 5, 5, 5), (1, 1, 16, 2), (2, 14, 2, 2), (1, 2, 4, 13), (1, 1, 1, 17)]
    _replay(world, GraphKey("mixed", 4, 20), [list(zip(seqs, cut, strict=True)) for cut in cuts])


def _replay(world: World, key: GraphKey, plans: Sequence[Rows]) -> None:
    """Capture the first plan, replay all of them and compare each with the definition."""
    (layer,) = world.layers
    meta = _bounded(world.meta(plans[0]), TOKENS)
    if key.kind == "mixed":
        meta.decode_rows = key.rows  # only the device knows which rows bring one token
    on_device = world.suite.spec.traits.get("plan") == "device"
    static = [x.clone() for x in world.inputs(layer, plans[0])]
    spec = layer.spec
    out = torch.zeros(key.tokens, spec.heads, spec.dim_v, dtype=world.dtype, device=world.device)

    def run() -> None:
        if on_device:
            world.backend.plan(meta, key)
        q = world.backend.write(layer, *static, meta, None)
        world.backend.forward(layer, q, meta, out)

    with torch.inference_mode():
        if not on_device:
            world.backend.plan(meta, key)
        graph = _captured(run)
        for rows in plans:
            _copy_into(meta, world.meta(rows))
            for mine, new in zip(static, world.inputs(layer, rows), strict=True):
                mine.copy_(new)
            out.fill_(torch.nan)
            if not on_device:
                world.backend.plan(meta, key)
            graph.replay()
            torch.cuda.synchronize()
            for seq, new in rows:
                seq.length += new if seq.live else 0
            _compare(world, layer, rows, static[0].cpu(), out.cpu())


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warmed up on a stream of its own first, as capturing demands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _bounded(meta: AttnMeta, longest: int) -> AttnMeta:
    """The meta with storage of its own for each tensor, and the greatest lengths that the host may name."""
    for f in fields(meta):
        value = getattr(meta, f.name)
        if isinstance(value, Tensor):
            setattr(meta, f.name, value.clone(memory_format=torch.contiguous_format))
        elif isinstance(value, np.ndarray):
            setattr(meta, f.name, np.array(value))
    meta.host_kv_len[:] = longest
    return meta


def _copy_into(meta: AttnMeta, new: AttnMeta) -> None:
    for f in fields(meta):
        value = getattr(meta, f.name)
        if isinstance(value, Tensor):
            value.copy_(getattr(new, f.name))
        elif isinstance(value, np.ndarray):
            value[:] = getattr(new, f.name)
        elif f.name not in ("work", "decode_rows"):
            setattr(meta, f.name, getattr(new, f.name))


def _compare(world: World, layer: AttnLayer, rows: Rows, q: Tensor, out: Tensor) -> None:
    first = 0
    for i, (seq, new) in enumerate(rows):
        if seq.live:
            _compare_row(world, layer, seq, Place(i, first, new, seq.length, world.block, f"replayed; {world.setting}"),
                         q[first : first + new], out)  # fmt: skip
        first += new


def _compare_row(world: World, layer: AttnLayer, seq: Seq, place: Place, q: Tensor, out: Tensor) -> None:
    k, v = world.stored(layer, seq, seq.length)
    sinks = None if layer.sinks is None else layer.sinks.cpu()
    want = attend(q.double(), k, v, layer.spec, sinks)
    naive = attend(q, k.to(q.dtype), v.to(q.dtype), layer.spec, sinks)
    compare(out, None, None, want, naive, place, q.dtype)
