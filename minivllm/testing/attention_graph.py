"""Steps captured in a CUDA graph.

A captured step is planned with its ``GraphKey`` and the longest lengths that the host may ever name.  For a replay the
new metadata is copied into the same tensors and the graph is replayed.  ``plan`` is captured with the step if the back
end declares ``plan: device``; otherwise it is called again before each replay, and sees the host arrays of the step.

On a CPU a replay runs the back end once more, with the host arrays as they were at the capture: what it took from them,
or kept from an earlier step, shows there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, GraphKey

from .attention_math import Place, attend, compare
from .attention_world import Rows, Setting, World, WorldSeq, WorldSuite
from .waiting import no_wait, waits

TOKENS = 300


def check_decode(suite: WorldSuite, setting: Setting) -> None:
    """Check captures of two sizes that are replayed in turns: five rows of one token, some padded, and two rows."""
    world = World(suite, setting, 7, TOKENS)
    seqs = [world.add(past) for past in (3, 290, 15, 16, 40, 1)]
    pad = world.add_null()
    steps = [[0, 1, 2, 3, 4], [2, 1], [5, 4, 3, 2, 1], [3], [1, 0, 5], [4, 0], [2, 0, 4], [1, 5]]
    plans = [[(seqs[i], 1) for i in step] + [(pad, 1)] * (5 - 3 * (n % 2) - len(step)) for n, step in enumerate(steps)]
    _replay(world, [GraphKey("decode", 5, 5), GraphKey("decode", 2, 2)], plans)


def check_mixed(suite: WorldSuite, setting: Setting) -> None:
    """Check captures of up to four rows with up to twenty tokens, cut differently each time.

    Rows of one token come first.  Rows and tokens that fill a capture up belong to no sequence."""
    world = World(suite, setting, 5, TOKENS)
    seqs = [world.add(past) for past in (0, 200, 17, 5)]
    cuts = [(5, 5, 5, 5), (1, 1, 16, 2), (2, 14, 2), (1, 2, 4, 13), (1, 1, 1, 17), (9,), (1, 1, 2)]
    keys = [GraphKey("mixed", 4, 20), GraphKey("mixed", 6, 24)]
    _replay(world, keys, [list(zip(seqs, cut, strict=False)) for cut in cuts])


class _Step:
    """A captured step of a world with one layer, and the memory that it reads and writes."""

    def __init__(self, world: World, key: GraphKey, rows: Rows) -> None:
        self.world, self.key, (self.layer,) = world, key, world.layers
        self.spare = world.add_null().slot
        self.meta = _bounded(self._meta(rows), TOKENS)
        if key.kind == "mixed":
            self.meta.decode_rows = key.rows  # only the device knows which rows bring one token
            self.meta.host_q_len[:] = key.tokens
        self.on_device = world.suite.spec.traits.get("plan") == "device"
        self.static = [x.clone() for x in self._inputs(rows)]
        spec = self.layer.spec
        self.out = torch.zeros(key.tokens, spec.heads, spec.dim_v, dtype=world.dtype, device=world.device)
        self.bounds = _host(self.meta)
        if not self.on_device:
            world.backend.plan(self.meta, key)
        self.replay = _captured(self._run) if world.device.startswith("cuda") else self._run
        if not world.device.startswith("cuda") and "cuda" in world.suite.values("device", "cuda"):
            with waits(world.device) as found:
                self._run()
            no_wait(found, f"a {key.kind} step")

    def _meta(self, rows: Rows) -> AttnMeta:
        """Filled up to the captured size: rows without a token in a slot of nobody, tokens for the null block."""
        meta = self.world.meta(rows)
        tokens, more = len(meta.row), self.key.rows - len(rows)
        meta.slots = _longer(meta.slots, more, self.spare)
        meta.cu_q = _longer(meta.cu_q, more, tokens)
        meta.q_len, meta.kv_len = _longer(meta.q_len, more), _longer(meta.kv_len, more)
        for name in ("position", "row", "slot_map"):
            setattr(meta, name, _longer(getattr(meta, name), self.key.tokens - tokens))
        meta.host_q_len = np.pad(meta.host_q_len, (0, more))
        meta.host_kv_len = np.pad(meta.host_kv_len, ((0, 0), (0, more)))
        return meta

    def _inputs(self, rows: Rows) -> list[Tensor]:
        """q, k and v of a step; NaN for tokens of nobody."""
        given = self.world.inputs(self.layer, rows)
        return [torch.cat([x, x.new_full((self.key.tokens - len(x), *x.shape[1:]), torch.nan)]) for x in given]

    def _run(self) -> None:
        if self.on_device:
            self.world.backend.plan(self.meta, self.key)
        q = self.world.backend.write(self.layer, *self.static, self.meta, None)
        self.world.backend.forward(self.layer, q, self.meta, self.out)

    def again(self, rows: Rows) -> None:
        """Replay the step on other rows, which have grown afterwards, and compare with the definition."""
        world = self.world
        meta = self._meta(rows)
        _copy_into(self.meta, meta)
        for mine, new in zip(self.static, self._inputs(rows), strict=True):
            mine.copy_(new)
        self.out.fill_(torch.nan)
        if not self.on_device:
            _set_host(self.meta, _host(meta))
            world.backend.plan(self.meta, self.key)
            _set_host(self.meta, self.bounds)
        self.replay()
        if world.device.startswith("cuda"):
            torch.cuda.synchronize()
        selected = world.selected(self.layer, self.static[0], meta, rows)
        for seq, new in rows:
            seq.length += new if seq.live else 0
        _compare(world, self.layer, rows, self.static[0].cpu(), self.out.cpu(), selected)


def _replay(world: World, keys: Sequence[GraphKey], plans: Sequence[Rows]) -> None:
    """Capture the first plan of each key, then run all plans, which are of the keys in turn."""
    with torch.inference_mode():
        steps = [_Step(world, key, plans[i]) for i, key in enumerate(keys)]
        for i, rows in enumerate(plans):
            steps[i % len(steps)].again(rows)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """The replay.  Warmed up on a stream of its own first, as capturing demands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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


def _longer(x: Tensor, more: int, value: int = 0) -> Tensor:
    """x [..., n] with ``more`` values behind it."""
    return torch.cat([x, x.new_full((*x.shape[:-1], more), value)], dim=-1)


def _copy_into(meta: AttnMeta, new: AttnMeta) -> None:
    """The tensors; what the host knows of a step is not seen by a replay."""
    for f in fields(meta):
        value = getattr(meta, f.name)
        if isinstance(value, Tensor):
            value.copy_(getattr(new, f.name))


def _host(meta: AttnMeta) -> dict[str, np.ndarray]:
    return {f.name: np.array(x) for f in fields(meta) if isinstance(x := getattr(meta, f.name), np.ndarray)}


def _set_host(meta: AttnMeta, values: dict[str, np.ndarray]) -> None:
    for name, value in values.items():
        getattr(meta, name)[:] = value


def _compare(
    world: World, layer: AttnLayer, rows: Rows, q: Tensor, out: Tensor, selected: Sequence[Tensor | None]
) -> None:
    first = 0
    for i, (seq, new) in enumerate(rows):
        if seq.live:
            _compare_row(
                world,
                layer,
                seq,
                Place(i, first, new, seq.length, world.block, f"replayed; {world.setting}"),
                q[first : first + new],
                out,
                selected[i],
            )
        first += new


def _compare_row(
    world: World, layer: AttnLayer, seq: WorldSeq, place: Place, q: Tensor, out: Tensor, selected: Tensor | None
) -> None:
    k, v = world.stored(layer, seq, seq.length)
    sinks = None if layer.sinks is None else layer.sinks.cpu()
    want = attend(q.double(), k, v, layer.spec, sinks, selected)
    naive = attend(q, k.to(q.dtype), v.to(q.dtype), layer.spec, sinks, selected)
    compare(out, None, want, naive, place, q.dtype)
