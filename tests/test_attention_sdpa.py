"""The sdpa back end against a dense float64 reference over shuffled, partly shared block tables and poisoned slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from minivllm.testing.harness import FORMATS, make_meta
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnSpec, GraphKey
from minivllm.core.interfaces.kvformat import KVLayout, TensorSpec
from minivllm.errors import PluginError
from minivllm.plugins.attention import sdpa
from minivllm.plugins.attention.sdpa import Sdpa

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POISON = 1e4


class World:
    """Sequences with known keys and values, scattered over a cache; all other slots hold ``poison``."""

    def __init__(self, spec, kv_lens, block=4, device="cpu", dtype="float32", poison=POISON, shared=0, seed=0):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.spec, self.block, self.device, self.dtype = spec, block, device, getattr(torch, dtype)
        slots, columns = len(kv_lens) + 2, max(-(-max(kv_lens) // block), 1) + 1
        blocks = 1 + slots * columns
        self.slot_of = rng.permutation(slots)[: len(kv_lens)]
        table = (rng.permutation(blocks - 1) + 1)[: slots * columns].reshape(1, slots, columns).astype(np.int32)
        n_shared = shared // block
        for s in self.slot_of:  # a common prefix lies in the same blocks
            table[0, s, :n_shared] = table[0, self.slot_of[0], :n_shared]
        self.table = table
        make = lambda n, d: torch.randn(n, spec.kv_heads, d, dtype=torch.float64).to(self.dtype).double()  # noqa: E731
        self.k = [make(n, spec.dim_qk) for n in kv_lens]
        self.v = [make(n, spec.dim_v) for n in kv_lens]
        for i in range(len(kv_lens)):
            n = min(shared, kv_lens[i], kv_lens[0])
            self.k[i][:n], self.v[i][:n] = self.k[0][:n], self.v[0][:n]
            if spec.v_in_k:
                self.v[i] = self.k[i][..., : spec.dim_v]
        fmt = FORMATS[dtype]()
        self.backend = Sdpa(None, AttentionContext(device, dtype, fmt, block, slots, columns * block))
        self.sinks = torch.randn(spec.heads) if spec.sinks else None
        sinks = None if self.sinks is None else self.sinks.to(device)
        self.layer = AttnLayer(0, 0, spec, sinks=sinks)
        self.layer.cache = {
            n: torch.full((blocks, *t.shape), poison, dtype=self.dtype, device=device)
            for n, t in self.backend.layout(spec, fmt, block).tensors.items()
        }

    def run(self, q_lens, lse=False):
        """A row's last ``q_len`` tokens are new, the others are in the cache; returns (out, lse, reference)."""
        spec, rows = self.spec, [(self.slot_of[i], q, len(self.k[i])) for i, q in enumerate(q_lens)]
        rows_before = [(s, kv - q, kv - q) for s, q, kv in rows if kv > q]
        if rows_before:
            k = torch.cat([self.k[i][: len(self.k[i]) - q] for i, q in enumerate(q_lens)])
            v = torch.cat([self.v[i][: len(self.v[i]) - q] for i, q in enumerate(q_lens)])
            self._write(make_meta(rows_before, self.table, self.block, self.device, decode_rows=0), k, v)
        meta = make_meta(rows, self.table, self.block, self.device)
        new = [x[len(x) - q :] for x, q in zip(self.k, q_lens, strict=True)]
        self._write(meta, torch.cat(new), torch.cat([x[len(x) - q :] for x, q in zip(self.v, q_lens, strict=True)]))
        q = torch.randn(sum(q_lens), spec.heads, spec.dim_qk, dtype=torch.float64).to(self.dtype)
        out = torch.full((len(q), spec.heads, spec.dim_v), 7.0, dtype=self.dtype, device=self.device)
        norm = torch.full((len(q), spec.heads), 7.0, device=self.device) if lse else None
        self.backend.plan(meta, GraphKey())
        self.backend.forward(self.layer, q.to(self.device), meta, out, norm)
        want = [self._dense(x, i) for i, x in enumerate(q.double().split(list(q_lens)))]
        return out.double().cpu(), None if norm is None else norm.double().cpu(), want

    def _write(self, meta, k, v):
        k, v = k.to(self.device, self.dtype), v.to(self.device, self.dtype)
        self.backend.write(self.layer, k.new_empty(len(k), 1, 1), k, v, meta, None)

    def _dense(self, q, i):
        """(out, lse) of one row by the definition, float64, one query and head at a time."""
        spec, k, v = self.spec, self.k[i], self.v[i]
        out, lse = torch.zeros(len(q), spec.heads, spec.dim_v).double(), torch.zeros(len(q), spec.heads).double()
        for t in range(len(q)):
            pos = len(k) - len(q) + t
            lo = 0 if spec.window is None else max(0, pos - spec.window + 1)
            for h in range(spec.heads):
                kv = h // (spec.heads // spec.kv_heads)
                s = k[lo : pos + 1, kv] @ q[t, h] * (spec.scale if spec.scale is not None else spec.dim_qk**-0.5)
                if spec.softcap is not None:
                    s = spec.softcap * torch.tanh(s / spec.softcap)
                every = s if self.sinks is None else torch.cat([s, self.sinks[h : h + 1].double()])
                lse[t, h] = every.logsumexp(0)
                out[t, h] = (s - lse[t, h]).exp() @ v[lo : pos + 1, kv]
        return out, lse

    def check(self, q_lens, tolerance=1e-5, lse=False):
        out, norm, want = self.run(q_lens, lse)
        assert (out - torch.cat([o for o, _ in want])).abs().max() <= tolerance
        if lse:
            assert (norm - torch.cat([n for _, n in want])).abs().max() <= tolerance


MIXED = ([1, 1, 1, 4, 3, 9, 9, 1, 8], [1, 4, 17, 4, 11, 9, 13, 5, 8])  # q_len, kv_len: decode rows first


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("window", [None, 1, 4, 1000])
def test_mixed_decode_and_prefill_equal_the_reference(heads, window, device):
    World(AttnSpec(*heads, 8, 8, window=window), MIXED[1], device=device).check(MIXED[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "feature",
    [
        {"softcap": 2.0},
        {"sinks": True},
        {"scale": 0.7},
        {"sinks": True, "softcap": 3.0, "window": 5, "scale": 0.9},
        {"dim_v": 16},
        {"dim_v": 4, "v_in_k": True, "kv_heads": 1},
    ],
    ids=str,
)
def test_features_equal_the_reference(feature, device):
    spec = AttnSpec(**{"heads": 4, "kv_heads": 2, "dim_qk": 8, "dim_v": 8, **feature})
    World(spec, MIXED[1], device=device).check(MIXED[0])
    World(spec, MIXED[1], device=device).check(MIXED[0], lse=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_half_precision(dtype, tolerance, device):
    World(AttnSpec(4, 2, 64, 64), MIXED[1], device=device, dtype=dtype).check(MIXED[0], tolerance)


@pytest.mark.parametrize("kv", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("q", [1, 2, 15])
def test_block_borders(kv, q):
    World(AttnSpec(4, 2, 8, 8), [kv, kv, 3], block=16).check([q, q, 3] if q > 1 else [1, 1, 3])


def test_rows_that_share_prefix_blocks_read_the_same_prefix():
    World(AttnSpec(4, 2, 8, 8), [13, 17, 14], shared=12).check([1, 5, 2])


@pytest.mark.parametrize("window", [None, 3])
def test_nan_outside_a_row_does_not_reach_it(window):
    World(AttnSpec(4, 2, 8, 8, window=window), MIXED[1], poison=float("nan")).check(MIXED[0])
    World(AttnSpec(4, 2, 8, 8, window=window, sinks=True), MIXED[1], poison=float("nan")).check(MIXED[0])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=10),
    window=st.sampled_from([None, 1, 4, 7]),
    sinks=st.booleans(),
    block=st.sampled_from([1, 4, 16]),
    small=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_mix_of_rows_equals_the_reference(rows, window, sinks, block, small, seed):
    """``small`` makes every limit tiny, so that rows are split and joined in all the ways that large steps are."""
    rows.sort(key=lambda r: r[0] != 1)
    world = World(AttnSpec(2, 1, 4, 4, window=window, sinks=sinks), [q + c for q, c in rows], block=block, seed=seed)
    if small:
        world.backend.limits = sdpa.Limits(gather=3000, pairs=40, batch_bytes=500, batch_pairs=20)
    world.check([q for q, _ in rows])


def test_rows_of_very_different_length_are_not_padded_to_the_longest():
    lens = np.array([20] * 60 + [2000] + [30] * 3)
    groups = sdpa.split_by_length(lens, 1024, sdpa.GPU)
    assert sorted(i for rows, _ in groups for i in np.arange(64)[rows]) == list(range(64))
    assert sum(len(np.arange(64)[rows]) * longest for rows, longest in groups) < 2 * lens.sum()
    assert len(sdpa.split_by_length(np.full(64, 300), 1024, sdpa.GPU)) == 1


@pytest.mark.parametrize("limits", [sdpa.CPU, sdpa.GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("low", [10, 1000, 1499])
def test_no_batch_gathers_more_than_the_limit_unless_a_row_does(limits, low):
    lens, token_bytes = np.random.default_rng(0).integers(low, 1500, 512), 8 * 256 * 2
    groups = sdpa.split_by_length(lens, token_bytes, limits)
    for rows, most in groups:
        mine = lens[rows]
        assert mine.max() <= most and (len(mine) == 1 or len(mine) * most * token_bytes <= limits.gather)
    assert sorted(i for rows, _ in groups for i in np.arange(512)[rows]) == list(range(512))


def test_empty_rows_give_finite_numbers_and_disturb_nobody():
    """Padded rows: no length at all on the device, in a table of null blocks; and rows without a query."""
    world = World(AttnSpec(4, 2, 8, 8), [5, 5, 9, 9])
    rows = [(world.slot_of[0], 1, 5), (world.slot_of[1], 1, 5), (world.slot_of[2], 0, 9), (world.slot_of[3], 4, 9)]
    for i in (0, 3):
        meta = make_meta([(world.slot_of[i], len(world.k[i]), len(world.k[i]))], world.table, 4, decode_rows=0)
        world._write(meta, world.k[i], world.v[i])
    meta = make_meta(rows, world.table, 4, decode_rows=2)
    meta.kv_len[0, 1] = 0
    meta.table[0, world.slot_of[1]] = 0
    q = torch.randn(6, 4, 8)
    out = torch.empty(6, 4, 8)
    world.backend.forward(world.layer, q, meta, out)
    assert out[1].isfinite().all()
    assert (out[:1] - world._dense(q[:1].double(), 0)[0]).abs().max() < 1e-5
    assert (out[2:] - world._dense(q[2:].double(), 3)[0]).abs().max() < 1e-5


def test_lengths_come_from_the_device_where_the_host_only_knows_a_bound():
    world = World(AttnSpec(4, 2, 8, 8), [6, 6], poison=float("nan"))
    for i in (0, 1):
        meta = make_meta([(world.slot_of[i], 6, 6)], world.table, 4, decode_rows=0)
        world._write(meta, world.k[i], world.v[i])
    meta = make_meta([(world.slot_of[0], 1, 6), (world.slot_of[1], 1, 6)], world.table, 4)
    meta.host_kv_len[:] += 9
    q, out = torch.randn(2, 4, 8), torch.empty(2, 4, 8)
    world.backend.forward(world.layer, q, meta, out)
    want = torch.cat([world._dense(q[i : i + 1].double(), i)[0] for i in (0, 1)])
    assert (out - want).abs().max() < 1e-5


def test_write_touches_the_named_slots_and_nothing_else():
    world = World(AttnSpec(4, 2, 8, 8), [7, 5])
    before = {n: t.clone() for n, t in world.layer.cache.items()}
    meta = make_meta([(world.slot_of[0], 1, 7), (world.slot_of[1], 3, 5)], world.table, 4)
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    world.backend.write(world.layer, torch.empty(4, 4, 8), k, v, meta, None)
    for name, new in (("k", k), ("v", v)):
        got, old = world.layer.cache[name].flatten(0, 1), before[name].flatten(0, 1)
        touched = meta.slot_map[0]
        assert torch.equal(got[touched], new)
        rest = torch.ones(len(got), dtype=torch.bool).index_fill_(0, touched, False)
        assert torch.equal(got[rest], old[rest])


def test_what_is_not_supported_is_refused():
    world = World(AttnSpec(2, 2, 4, 4), [3])
    meta = make_meta([(world.slot_of[0], 1, 3)], world.table, 4)
    with pytest.raises(PluginError, match="no attention scores"):
        world.backend.forward(world.layer, torch.empty(1, 2, 4), meta, torch.empty(1, 2, 4), scores=torch.empty(1))

    class PerBlock(FORMATS["float32"]):
        def layout(self, spec, block):
            return KVLayout(block, {"k_scale": TensorSpec((1,), "float32")})

    with pytest.raises(PluginError, match="k_scale"):
        world.backend.layout(world.spec, PerBlock(), 4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_kv_formats_store_by_slot_and_load_by_block(fmt):
    format_ = FORMATS[fmt]()
    layout = format_.layout(AttnSpec(4, 2, 8, 6), 4)
    assert layout.bytes == 4 * 2 * 14 * getattr(torch, fmt).itemsize
    cache = {n: torch.zeros(5, *t.shape, dtype=getattr(torch, t.dtype)) for n, t in layout.tensors.items()}
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 6)
    format_.store(cache, k, v, torch.tensor([7, 13, 4]))
    got_k, got_v = format_.load(cache, torch.tensor([[3, 1]]), torch.float32)
    assert got_k.shape == (1, 8, 2, 8) and got_v.shape == (1, 8, 2, 6)
    at = torch.tensor([7, 1, 4])  # block 3 comes first, then block 1
    assert torch.equal(got_k[0, at], k.to(getattr(torch, fmt)).float())
    assert torch.equal(got_v[0, at], v.to(getattr(torch, fmt)).float())
    assert got_k.abs().sum() == got_k[0, at].abs().sum()
