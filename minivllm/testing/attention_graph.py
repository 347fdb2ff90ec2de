"""Checks of attention steps that are captured in a CUDA graph.

At the capture, ``plan`` gets the ``GraphKey`` of the step and the longest lengths that the host may ever name.  Before
a replay, new metadata is copied into the same tensors.  If the back end declares ``plan: device``, ``plan`` is captured
with the step.  Otherwise ``plan`` is called again before each replay, with the host arrays of the new step.

On a CPU a replay runs the back end once more, with the host arrays as they were at the capture.  A back end that reads
lengths from these arrays, or keeps data of an earlier step, fails there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnMeta, GraphKey

from .attention_math import TokenPlace, compare
from .attention_world import Rows, Setting, World, WorldSeq, WorldSuite
from .waiting import no_wait, waits

TOKENS = 300  # most tokens of a sequence
LONG = 360  # number of tokens that a sequence may have in the test of shared blocks


def check_decode(suite: WorldSuite, setting: Setting) -> None:
    """Check captured decode steps of five and of two rows, replayed in turns.

    Where a step has fewer rows, rows without blocks pad it.
    """
    world = World(suite, setting, 7, TOKENS)
    seqs = [world.add(past) for past in (3, 290, 15, 16, 40, 1)]
    pad = world.add_null()
    chosen = [[0, 1, 2, 3, 4], [2, 1], [5, 4, 3, 2, 1], [3], [1, 0, 5], [4, 0], [2, 0, 4], [1, 5]]
    steps = []
    for i, indices in enumerate(chosen):
        size = 2 if i % 2 else 5
        steps.append(_decode_step(seqs, indices, pad, size))
    keys = [GraphKey("decode", 5, 5), GraphKey("decode", 2, 2)]
    _capture_and_replay(world, keys, steps)


def _decode_step(seqs: Sequence[WorldSeq], chosen: Sequence[int], pad: WorldSeq, size: int) -> Rows:
    """Return ``size`` rows of one token, of the chosen sequences and then of ``pad``."""
    rows = [(seqs[index], 1) for index in chosen]
    padding = [(pad, 1)] * (size - len(rows))
    return rows + padding


def check_mixed(suite: WorldSuite, setting: Setting) -> None:
    """Check captured mixed steps of up to four rows with up to twenty tokens, divided differently in each replay.

    Rows of one token come first.  The rows and tokens that pad a step belong to no sequence.
    """
    world = World(suite, setting, 5, TOKENS)
    seqs = [world.add(past) for past in (0, 200, 17, 5)]
    lengths = [(5, 5, 5, 5), (1, 1, 16, 2), (2, 14, 2), (1, 2, 4, 13), (1, 1, 1, 17), (9,), (1, 1, 2)]
    steps = []
    for q_len in lengths:
        rows = zip(seqs, q_len, strict=False)
        steps.append(list(rows))
    keys = [GraphKey("mixed", 4, 20), GraphKey("mixed", 6, 24)]
    _capture_and_replay(world, keys, steps)


def check_shared(suite: WorldSuite, setting: Setting) -> None:
    """Check captured decode steps whose rows share blocks (``GraphKey.shared``); rows come and leave in any order."""
    world = World(suite, setting, 8, LONG)
    head = world.add(LONG - 12)
    other = world.add(LONG - 40)
    seqs = [head, other]
    for _ in range(4):
        seqs.append(world.add(head.length, like=head))
    seqs.append(world.add(7))
    seqs.append(world.add(5, like=head))
    pad = world.add_null()
    chosen = [[0, 2, 3, 4, 5, 1], [1, 6, 7], [5, 1, 4, 6, 3, 0], [2, 3, 4, 5], [7, 0, 2, 3, 4, 5]]
    steps = [_decode_step(seqs, indices, pad, 6) for indices in chosen]
    keys = [GraphKey("decode", 6, 6, shared=True)]
    _capture_and_replay(world, keys, steps)


class _Step:
    """A captured step of one attention layer, with the tensors that it reads and writes at each replay."""

    def __init__(self, world: World, key: GraphKey, rows: Rows) -> None:
        self.world = world
        self.key = key
        (self.layer,) = world.layers
        self.spare = world.add_null().slot
        self.meta = _bounded(self._meta(rows), world.tokens)
        if key.kind == "mixed":
            # the number of tokens of each row is only on the device, so a kernel must read it there
            self.meta.decode_rows = key.rows
            self.meta.host_q_len[:] = key.tokens
        self.on_device = world.suite.spec.traits.get("plan") == "device"
        self.static = [x.clone() for x in self._inputs(rows)]
        spec = self.layer.spec
        self.out = torch.zeros(key.tokens, spec.heads, spec.dim_v, dtype=world.dtype, device=world.device)
        self.bounds = _host_arrays(self.meta)
        self.on_gpu = world.device.startswith("cuda")
        if not self.on_device:
            world.backend.plan(self.meta, key)
        if self.on_gpu:
            self.replay = _captured(self._run)
            return
        self.replay = self._run
        if "cuda" in world.suite.values("device", "cuda"):
            with waits(world.device) as found:
                self._run()
            no_wait(found, f"a {key.kind} step")

    def _meta(self, rows: Rows) -> AttnMeta:
        """Return the metadata of a step, padded to the captured size.

        Padding rows have no token and a slot that no sequence uses.  Padding tokens write to the null block.
        """
        meta = self.world.meta(rows)
        tokens = len(meta.row)
        more = self.key.rows - len(rows)
        meta.slots = _padded(meta.slots, more, self.spare)
        meta.cu_q = _padded(meta.cu_q, more, tokens)
        meta.q_len = _padded(meta.q_len, more)
        meta.kv_len = _padded(meta.kv_len, more)
        for name in ("position", "row", "slot_map"):
            of_tokens = getattr(meta, name)
            padded = _padded(of_tokens, self.key.tokens - tokens)
            setattr(meta, name, padded)
        behind = (0, more)
        meta.host_q_len = np.pad(meta.host_q_len, behind)
        meta.host_kv_len = np.pad(meta.host_kv_len, ((0, 0), behind))
        return meta

    def _inputs(self, rows: Rows) -> list[Tensor]:
        """Return q, k and v of a step, with NaN for the padding tokens."""
        padded = []
        for x in self.world.inputs(self.layer, rows):
            shape = (self.key.tokens - len(x), *x.shape[1:])
            padding = x.new_full(shape, torch.nan)
            padded.append(torch.cat([x, padding]))
        return padded

    def _run(self) -> None:
        """Run ``plan`` if it is captured, ``write`` and ``forward`` on the step's tensors."""
        backend = self.world.backend
        if self.on_device:
            backend.plan(self.meta, self.key)
        q = backend.write(self.layer, *self.static, self.meta, None)
        backend.forward(self.layer, q, self.meta, self.out)

    def check(self, rows: Rows) -> None:
        """Replay the step on other rows and compare the results with exact attention.

        Afterwards the live sequences have the new tokens.
        """
        world = self.world
        meta = self._meta(rows)
        _copy_tensors(self.meta, meta)
        for static, new in zip(self.static, self._inputs(rows), strict=True):
            static.copy_(new)
        self.out.fill_(torch.nan)
        if not self.on_device:
            _set_host_arrays(self.meta, _host_arrays(meta))
            world.backend.plan(self.meta, self.key)
            _set_host_arrays(self.meta, self.bounds)
        self.replay()
        if self.on_gpu:
            torch.cuda.synchronize()
        selected = world.selected(self.layer, self.static[0], meta, rows)
        for seq, new in rows:
            if seq.live:
                seq.length += new
        self._compare(rows, selected)

    def _compare(self, rows: Rows, selected: Sequence[Tensor | None]) -> None:
        """Compare the outputs of the live rows with exact attention."""
        world = self.world
        q = self.static[0].cpu()
        out = self.out.cpu()
        first = 0
        for i, (seq, new) in enumerate(rows):
            if seq.live:
                queries = q[first : first + new]
                exact, naive = world.expected(self.layer, seq, queries, seq.length, selected[i])
                place = TokenPlace(i, first, new, seq.length, world.block, f"replayed; {world.setting}")
                compare(out, None, exact, naive, place, q.dtype)
            first += new


def _capture_and_replay(world: World, keys: Sequence[GraphKey], steps: Sequence[Rows]) -> None:
    """Capture the first step of each key, then replay all steps.  The keys take turns in ``steps``."""
    with torch.inference_mode():
        captured = [_Step(world, key, rows) for key, rows in zip(keys, steps, strict=False)]
        for i, rows in enumerate(steps):
            step = captured[i % len(captured)]
            step.check(rows)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """Capture ``run`` in a CUDA graph and return the function that replays it.

    A capture must be preceded by runs on another stream, which warm up the kernels.
    """
    stream = torch.cuda.Stream()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
        run()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _bounded(meta: AttnMeta, longest: int) -> AttnMeta:
    """Give each tensor and array of the metadata separate storage, and set the host's lengths to ``longest``."""
    for f in fields(meta):
        value = getattr(meta, f.name)
        if isinstance(value, Tensor):
            own = value.clone(memory_format=torch.contiguous_format)
            setattr(meta, f.name, own)
        elif isinstance(value, np.ndarray):
            setattr(meta, f.name, np.array(value))
    meta.host_kv_len[:] = longest
    return meta


def _padded(x: Tensor, more: int, value: int = 0) -> Tensor:
    """Return x [..., n] with ``more`` elements of ``value`` appended to its last dimension."""
    *sizes, _ = x.shape
    padding = x.new_full((*sizes, more), value)
    parts = [x, padding]
    return torch.cat(parts, dim=-1)


def _copy_tensors(meta: AttnMeta, new: AttnMeta) -> None:
    """Copy the tensors of ``new`` into those of ``meta``, but not the host arrays, which a replay does not read."""
    for f in fields(meta):
        value = getattr(meta, f.name)
        if isinstance(value, Tensor):
            source = getattr(new, f.name)
            value.copy_(source)


def _host_arrays(meta: AttnMeta) -> dict[str, np.ndarray]:
    """Return copies of the host arrays of the metadata, by field."""
    arrays = {}
    for f in fields(meta):
        value = getattr(meta, f.name)
        if isinstance(value, np.ndarray):
            arrays[f.name] = value.copy()
    return arrays


def _set_host_arrays(meta: AttnMeta, arrays: dict[str, np.ndarray]) -> None:
    """Copy arrays into the host arrays of the metadata."""
    for name, array in arrays.items():
        getattr(meta, name)[:] = array
