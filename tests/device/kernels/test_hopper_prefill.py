"""The Hopper kernel of prefill attention: which steps use it, its compiled code, and on a GPU its outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnSpec, GraphKey
from minivllm.device.kernels.ahead import CompileAhead
from minivllm.device.layers.rotary import prepare_qk
from minivllm.plugins.attention import hopper_check, hopper_choice, triton_backend
from minivllm.plugins.attention.options import TritonOptions
from minivllm.plugins.attention.sdpa import attend_explicit
from minivllm.plugins.kvformat.plain import Bf16, Fp16
from minivllm.testing.attention_world import make_meta

LLAMA = AttnSpec(32, 8, 128, 128)
WINDOW = AttnSpec(32, 8, 128, 128, window=4096)


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def on_hopper(test):
    skip = pytest.mark.skipif(not has_hopper(), reason="no GPU of compute capability 9.0")
    return pytest.mark.gpu(skip(test))


# ---- choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "dtypes", "block", "words"),
    [
        (LLAMA, ("bfloat16", "bfloat16"), 64, ""),
        (LLAMA, ("float16", "float16"), 16, ""),
        (LLAMA, ("float16", "float16"), 256, ""),
        (WINDOW, ("bfloat16", "bfloat16"), 128, ""),
        (AttnSpec(64, 8, 64, 64, sinks=True), ("bfloat16", "bfloat16"), 32, ""),
        (AttnSpec(16, 8, 256, 256, softcap=50.0), ("bfloat16", "bfloat16"), 64, ""),
        (AttnSpec(28, 4, 128, 128), ("bfloat16", "bfloat16"), 64, ""),
        (LLAMA, ("float32", "float32"), 64, "dtype float32"),
        (LLAMA, ("bfloat16", "float8_e4m3fn"), 64, "keys and values in float8_e4m3fn"),
        (LLAMA, ("bfloat16", "float16"), 64, "keys and values in float16"),
        (LLAMA, ("bfloat16", "bfloat16"), 8, "blocks of 8 tokens"),
        (LLAMA, ("bfloat16", "bfloat16"), 48, "blocks of 48 tokens"),
        (LLAMA, ("bfloat16", "bfloat16"), 192, "blocks of 192 tokens"),
        (AttnSpec(32, 8, 96, 96), ("bfloat16", "bfloat16"), 64, "heads of 96 and 96"),
        (AttnSpec(32, 8, 256, 128), ("bfloat16", "bfloat16"), 64, "heads of 256 and 128"),
        (AttnSpec(32, 8, 128, 128, window=128), ("bfloat16", "bfloat16"), 64, "a window of 128 tokens"),
        (AttnSpec(2, 1, 128, 128, alibi=(0.5, 0.25)), ("bfloat16", "bfloat16"), 64, "ALiBi"),
        (AttnSpec(32, 1, 128, 128), ("bfloat16", "bfloat16"), 64, "32 query heads"),
        (AttnSpec(8, 8, 256, 256), ("bfloat16", "bfloat16"), 64, "1 query heads"),
        (AttnSpec(8, 1, 128, 128, v_in_k=True), ("bfloat16", "bfloat16"), 64, "values inside of keys"),
    ],
    ids=str,
)
def test_a_layer_that_the_kernel_cannot_serve_is_refused_with_the_reason(spec, dtypes, block, words):
    found = hopper_choice.refusal(spec, *dtypes, block)
    assert words in found if words else found == ""


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([(4000, 4000)], True),
        ([(2048, 32048)], True),
        ([(512, 512)] * 32, True),
        ([(512, 600)], True),
        ([(256, 256)], False),
        ([(256, 32000)], False),
        ([(128, 128)] * 100, False),
        ([(9, 3000)] * 200, False),
    ],
    ids=str,
)
def test_the_shape_of_a_step_chooses_its_kernel(rows, chosen, monkeypatch):
    calls = steps_with(monkeypatch, "auto")([(q_len, kv_len) for q_len, kv_len in rows])
    assert calls == ["hopper" if chosen else "prefill"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [({}, "hopper"), ({"hopper": "off"}, "prefill"), ({"capability": 8}, "prefill"), ({"module": None}, "prefill"),
     ({"invariant": True}, "fixed"), ({"capability": 10}, "prefill")],
)  # fmt: skip
def test_only_a_hopper_with_gluon_has_the_kernel_unless_it_is_switched_off(changes, name, monkeypatch):
    given = dict(changes)
    step = steps_with(monkeypatch, given.pop("hopper", "auto"), **given)
    assert step([(4000, 4000)]) == [name]


def test_tiles_have_the_lines_of_the_kernel_and_cover_every_token_once(monkeypatch):
    seen = []
    step = steps_with(monkeypatch, "auto", seen=seen)
    step([(4000, 4000), (700, 900), (33, 33)])
    tiles = seen[-1]
    assert tiles.lines == 128 and tiles.count.tolist() == [len(tiles.row)] == [125 + 22 + 2]
    covered = [(r, t + i) for r, t in zip(tiles.row.tolist(), tiles.token.tolist(), strict=True) for i in range(32)]
    lens = [4000, 700, 33]
    assert sorted(x for x in covered if x[1] < lens[x[0]]) == [(r, t) for r in range(3) for t in range(lens[r])]


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (LLAMA, "auto", "long rows use the Hopper kernel: heads of 128 elements"),
        (LLAMA, "off", "do not use the Hopper kernel: heads of 128 elements; attention.options.hopper is off"),
        (AttnSpec(4, 4, 80, 80), "auto", "heads of 80 elements; heads of 80 and 80 elements"),
        (AttnSpec(8, 8, 64, 64, window=128), "auto", "with a window of 128 tokens; a window of 128"),
    ],
)
def test_the_notes_name_the_kernel_of_each_kind_of_layer_once(spec, options, words, monkeypatch):
    monkeypatch.setattr(triton_backend, "capability", lambda device: 9)
    monkeypatch.setattr(triton_backend, "kernel_module", lambda: SimpleNamespace())
    monkeypatch.setattr(triton_backend, "disagreement", lambda *_: "")
    backend = triton_backend.Triton(TritonOptions(hopper=options), context(Bf16(), 64))
    for _ in range(3):
        backend.layout(spec, Bf16(), 64)
    assert len(backend.notes) == 1 and words in backend.notes[0]


def test_a_device_with_one_kernel_has_no_notes():
    backend = triton_backend.Triton(TritonOptions(), context(Bf16(), 64))
    backend.layout(LLAMA, Bf16(), 64)
    assert backend.notes == []


# ---- comparison at the start -----------------------------------------------------------------------------------------


def attended(layer, q, meta, out, lse, tiles, *_):
    """Compute the tiles of a step row by row, as both kernels do."""
    spec, per_tile = layer.spec, tiles.lines // (layer.spec.heads // layer.spec.kv_heads)
    starts, lengths = meta.cu_q.tolist(), meta.kv_len[0].tolist()
    for row, token in zip(tiles.row.tolist(), tiles.token.tolist(), strict=True):
        if row < 0:
            continue
        begin, end = starts[row] + token, min(starts[row] + token + per_tile, starts[row + 1])
        length = lengths[row]
        blocks = meta.table[0][meta.slots[row]][: -(-length // meta.block)].long()
        k, v = (layer.cache[name][blocks].flatten(0, 1)[:length].float()[None] for name in "kv")
        position = length - starts[row + 1] + torch.arange(begin, end)
        distance = position[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (spec.window or length))
        found, _ = attend_explicit(q[begin:end].float()[None], k, v, mask[None, None], spec, layer.sinks)
        out[begin:end] = found[0].to(out.dtype)


def shifted(layer, q, meta, out, lse, tiles, *_):
    """Leave the last tile out."""
    attended(layer, q, meta, out, lse, tiles._replace(row=tiles.row[:-8], token=tiles.token[:-8]))


def late(layer, q, meta, out, lse, tiles, *_):
    """Read the blocks of the next row for one tile."""
    attended(layer, q, meta, out, lse, tiles)
    slots = meta.slots.roll(1)
    one = tiles._replace(row=tiles.row[:1], token=tiles.token[:1])
    attended(layer, q, SimpleNamespace(**{**vars(meta), "slots": slots}), out, lse, one)


def broken(*_):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (attended, ""), (shifted, "disagrees with the other kernel"), (late, "disagrees with the other kernel"),
        (broken, "it fails on this device: RuntimeError: no such instruction"),
    ],
)  # fmt: skip
def test_a_kernel_that_is_wrong_on_this_device_is_not_used(kernel, words, monkeypatch):
    monkeypatch.setattr(hopper_check, "kernel_module", lambda: SimpleNamespace(attend=kernel))
    monkeypatch.setattr(hopper_check.triton_prefill, "prefill", attended)
    monkeypatch.setattr(hopper_check, "AGREED", set())
    for spec in (AttnSpec(8, 2, 64, 64, sinks=True), AttnSpec(4, 2, 128, 128, window=1024)):
        found = hopper_check.disagreement(spec, torch.float16, 32, torch.device("cpu"))
        assert words in found if words else found == ""
    assert len(hopper_check.AGREED) == (0 if words else 2)
    monkeypatch.setattr(triton_backend, "disagreement", lambda *_: words)
    step = steps_with(monkeypatch, "auto", layout=True)
    assert step([(4000, 4000)]) == ["prefill" if words else "hopper"]


def test_a_rehearsal_compares_no_kernels_and_launches_both_so_that_both_are_compiled(monkeypatch):
    calls = []

    def fails(*_):
        calls.append("hopper")
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(hopper_check, "AGREED", set())
    monkeypatch.setattr(hopper_check.triton_prefill, "prefill", lambda *_: calls.append("prefill"))
    given = AttnSpec(8, 2, 64, 64), torch.float16, 32, torch.device("cpu")
    for kernel, seen in ((lambda *_: calls.append("hopper"), ["hopper", "prefill"]), (fails, ["hopper"])):
        monkeypatch.setattr(hopper_check, "kernel_module", lambda kernel=kernel: SimpleNamespace(attend=kernel))
        found = []
        CompileAhead(torch.device("cpu"), 1).rehearse(
            lambda found=found: found.append(hopper_check.disagreement(*given))
        )
        assert found == [""] and calls == seen and not hopper_check.AGREED
        calls.clear()


def test_smaller_tiles_that_only_a_rehearsal_took_for_equal_are_not_used(monkeypatch):
    answers = [True, False]
    monkeypatch.setattr(triton_backend, "capability", lambda device: 9)
    monkeypatch.setattr(triton_backend, "short_lines_agree", lambda *_: answers.pop(0))
    backend = triton_backend.Triton(TritonOptions(), context(Bf16(), 64, invariant=True))
    for expected in ({LLAMA}, set()):
        backend.layout(LLAMA, Bf16(), 64)
        assert backend.short == expected


def context(fmt, block, device="cpu", dtype="bfloat16", invariant=False):
    return AttentionContext(device, dtype, fmt, block, 8, 40000, prepare_qk, batch_invariant=invariant)


def steps_with(monkeypatch, hopper, capability=9, module=True, invariant=False, seen=None, layout=False):
    """Return a function from (queries, keys) of rows to the kernels of a step, none of which run."""
    calls = []

    def attend(layer, q, meta, out, lse, tiles, variant):
        assert variant == hopper_choice.VARIANTS[layer.spec.dim_qk]
        calls.append("hopper")
        if seen is not None:
            seen.append(tiles)

    def prefill(layer, q, meta, out, lse, tiles, ahead=None):
        assert tiles.lines <= 64
        calls.append("prefill")

    monkeypatch.setattr(triton_backend, "capability", lambda device: capability)
    monkeypatch.setattr(triton_backend, "kernel_module", lambda: module and SimpleNamespace(attend=attend))
    monkeypatch.setattr(triton_backend, "prefill", prefill)
    monkeypatch.setattr(triton_backend, "attend_fixed", lambda *given: calls.append("fixed"))
    backend = triton_backend.Triton(TritonOptions(hopper=hopper), context(Bf16(), 64, invariant=invariant))
    cache = {name: torch.empty(1, 64, 8, 128, dtype=torch.bfloat16) for name in "kv"}
    if layout:
        backend.layout(LLAMA, Bf16(), 64)

    def step(rows):
        calls.clear()
        table = np.zeros((1, len(rows), 640), np.int32)
        meta = make_meta([(slot, *row) for slot, row in enumerate(rows)], table, 64)
        q = torch.empty(1, dtype=torch.bfloat16).expand(sum(row[0] for row in rows), 32, 128)
        monkeypatch.setattr(torch.Tensor, "contiguous", lambda x, *_: x)
        backend.plan(meta, GraphKey())
        backend.forward(AttnLayer(0, 0, LLAMA, cache), q, meta, q)
        return list(calls)

    return step


# ---- compiled code ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(hopper_choice.triton_version() < (3, 6), reason="the installed triton lacks Gluon's functions")
def test_the_kernel_compiles_for_a_hopper_and_spills_few_registers():
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compiled_hopper.py"))
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=900)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [line[0] for line in lines] == ["128", "64", "64", "256"], done.stderr[-3000:]
    for line in lines:
        shared, products, copies, registers, spills = map(int, line[1:])
        assert shared <= 227 * 1024 and products > 0 and copies > 0 and registers <= 168 and spills <= 256, line


# ---- outputs ---------------------------------------------------------------------------------------------------------

RAGGED = [(300, 300), (1000, 1777), (64, 64), (130, 4001), (5, 900), (2, 128), (257, 257)]  # queries and keys of rows
SHAPES = {
    "group of 4": (LLAMA, 64, "bfloat16"),
    "group of 1, blocks of 256": (AttnSpec(4, 4, 128, 128), 256, "bfloat16"),
    "group of 16": (AttnSpec(32, 2, 128, 128), 64, "bfloat16"),
    "group of 7, window, sinks, cap": (
        AttnSpec(14, 2, 128, 128, window=300, sinks=True, softcap=20.0), 16, "float16"),
    "group of 6, blocks of 128, sinks": (AttnSpec(12, 2, 128, 128, sinks=True), 128, "bfloat16"),
    "group of 5, blocks of 32, window": (AttnSpec(10, 2, 128, 128, window=1030), 32, "bfloat16"),
    "heads of 64": (AttnSpec(64, 8, 64, 64), 64, "bfloat16"),
    "heads of 64, window, sinks": (AttnSpec(16, 2, 64, 64, window=128, sinks=True), 64, "float16"),
    "heads of 256": (AttnSpec(16, 2, 256, 256), 64, "bfloat16"),
    "heads of 256, cap, window": (AttnSpec(8, 4, 256, 256, softcap=50.0, window=1024), 32, "bfloat16"),
}  # fmt: skip


class Case:
    """A layer with a cache of random keys and values for some rows, and NaN wherever no query looks."""

    def __init__(self, spec, block, dtype, rows, fmt=None, seed=0):
        self.spec, self.block, self.rows = spec, block, rows
        self.dtype = getattr(torch, dtype)
        fmt = fmt or (Bf16() if dtype == "bfloat16" else Fp16())
        self.backend = triton_backend.Triton(TritonOptions(), context(fmt, block, "cuda", dtype))
        draw = torch.Generator("cuda").manual_seed(seed)
        self.random = lambda *size: torch.randn(*size, device="cuda", generator=draw)
        lengths = np.array([kv_len for _, kv_len in rows])
        pages = -(-lengths // block)
        self.table = np.zeros((1, len(rows), int(pages.max()) + 1), np.int32)
        numbers = np.random.default_rng(seed).permutation(np.arange(1, pages.sum() + 1))
        for row, (at, n) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
            self.table[0, row, :n] = numbers[at : at + n]
        cache = {}
        for name, t in self.backend.layout(spec, fmt, block).tensors.items():
            values = self.random(int(pages.sum()) + 1, *t.shape)
            cache[name] = (values.abs() / 50 if "scale" in name else values).to(getattr(torch, t.dtype))
        self.layer = AttnLayer(0, 0, spec, cache, self.random(spec.heads))
        self.dense = [self.gathered(row) for row in range(len(rows))] if "k_scale" not in cache else []
        for row, (q_len, kv_len) in enumerate(rows):
            if spec.window is not None:
                self.table[0, row, : max(0, kv_len - q_len - spec.window + 1) // block] = 0
            for x in cache.values():
                if kv_len % block and x.dtype.itemsize > 1:
                    x[self.table[0, row, pages[row] - 1], kv_len % block :] = torch.nan
        for x in cache.values():
            if x.dtype.itemsize > 1:
                x[0] = torch.nan
        self.q = self.random(sum(q_len for q_len, _ in rows), spec.heads, spec.dim_qk).to(self.dtype)

    def gathered(self, row):
        kv_len = self.rows[row][1]
        pages = torch.tensor(self.table[0, row, : -(-kv_len // self.block)].astype(np.int64), device="cuda")
        return [self.layer.cache[name][pages].flatten(0, 1)[:kv_len].clone() for name in "kv"]

    def meta(self, rows=None):
        return make_meta([(slot, *row) for slot, row in enumerate(rows or self.rows)], self.table, self.block, "cuda")

    def run(self, meta=None, q=None, key=None):
        q = self.q if q is None else q
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:2], torch.nan, device="cuda")
        meta = meta or self.meta()
        self.backend.plan(meta, key or GraphKey())
        self.backend.forward(self.layer, q, meta, out, lse)
        return out, lse

    def exact(self):
        """Return outputs and log-sum-exps in float64."""
        outs, sums, at, spec = [], [], 0, self.spec
        for (q_len, kv_len), (k, v) in zip(self.rows, self.dense, strict=True):
            q = self.q[at : at + q_len].double().unflatten(1, (spec.kv_heads, -1))
            at += q_len
            s = torch.einsum("tkgd,nkd->tkgn", q, k.double()) * spec.softmax_scale
            if spec.softcap is not None:
                s = spec.softcap * torch.tanh(s / spec.softcap)
            distance = torch.arange(kv_len - q_len, kv_len, device="cuda")[:, None]
            distance = distance - torch.arange(kv_len, device="cuda")
            seen = (distance >= 0) & (distance < (spec.window or kv_len))
            s = s.masked_fill(~seen[:, None, None], -torch.inf)
            if spec.sinks:
                sinks = self.layer.sinks.double().view(1, spec.kv_heads, -1, 1)
                s = torch.cat([s, sinks.expand(q_len, -1, -1, 1)], -1)
            total = s.logsumexp(-1)
            p = (s - total[..., None]).exp()[..., :kv_len]
            outs.append(torch.einsum("tkgn,nkd->tkgd", p, v.double()).flatten(1, 2))
            sums.append(total.flatten(1))
        return torch.cat(outs), torch.cat(sums)


def force(monkeypatch, spec):
    """Use the Hopper kernel for all rows of several tokens, and count its launches."""
    module, launches = hopper_choice.kernel_module(), []

    def attend(*given):
        launches.append(given)
        module.attend(*given)

    monkeypatch.setattr(triton_backend, "refusal", lambda *_: "")
    monkeypatch.setattr(triton_backend, "choose", lambda *_: hopper_choice.VARIANTS[spec.dim_qk])
    monkeypatch.setattr(triton_backend, "kernel_module", lambda: SimpleNamespace(attend=attend))
    return launches


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@on_hopper
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_as_near_to_float64_as_those_of_the_other_kernel(name, monkeypatch):
    case = Case(*SHAPES[name], RAGGED)
    want, sums = case.exact()
    monkeypatch.setattr(triton_backend, "choose", lambda *_: None)
    plain, _ = case.run()
    launches = force(monkeypatch, case.spec)
    out, lse = case.run()
    assert len(launches) == 1
    assert error(out, want) < 1.3 * error(plain, want) + 1e-5
    assert float((lse - sums).abs().max()) < 1e-3


@on_hopper
def test_the_same_step_gives_the_same_bits(monkeypatch):
    case = Case(LLAMA, 64, "bfloat16", [(4000, 4000), (700, 9000), (512, 512)])
    force(monkeypatch, LLAMA)
    out, lse = case.run()
    for _ in range(20):
        assert all(map(torch.equal, case.run(), (out, lse)))


@on_hopper
@pytest.mark.parametrize("sizes", [(2048, 1952), (1000, 1000, 1000, 1000), (64, 3936), (3999, 1)], ids=str)
def test_chunks_of_a_prompt_give_the_outputs_of_the_whole_within_rounding(sizes, monkeypatch):
    case = Case(LLAMA, 64, "bfloat16", [(4000, 4000)])
    force(monkeypatch, LLAMA)
    whole, sums = case.run()
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        part = slice(end - size, end)
        out, lse = case.run(case.meta([(size, end)]), case.q[part])
        torch.testing.assert_close(out, whole[part], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse, sums[part], rtol=1e-4, atol=1e-4)
        print("chunk", size, "ends at", end, "equal bits:", torch.equal(out, whole[part]))


@on_hopper
def test_captured_mixed_steps_replayed_on_other_rows_give_the_bits_of_separate_launches(monkeypatch):
    case = Case(LLAMA, 64, "bfloat16", [(1, 700), (1, 3000), (900, 900), (500, 4001), (70, 640)])
    force(monkeypatch, LLAMA)
    key = GraphKey("mixed", 8, 2048, 8192)
    first, second = [(1, 9), (1, 64), (1, 1), (1000, 3000), (2, 2)], case.rows
    padded = torch.zeros(2048, 32, 128, dtype=torch.bfloat16, device="cuda")
    static = pad(case.meta(first), 8)
    static.host_kv_len = np.full_like(static.host_kv_len, key.span)  # an upper bound, as in the engine
    out, lse = torch.full_like(padded, torch.nan), torch.full((2048, 32), torch.nan, device="cuda")

    def forward():
        case.backend.plan(static, key)
        case.backend.forward(case.layer, padded, static, out, lse)

    forward()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for rows in (second, first, second):
        count = sum(q_len for q_len, _ in rows)
        padded[:count] = case.q[:count]
        fresh = pad(case.meta(rows), 8)
        for name in ("slots", "cu_q", "q_len", "kv_len"):
            getattr(static, name).copy_(getattr(fresh, name))
        out.fill_(torch.nan)
        graph.replay()
        decodes = sum(q_len == 1 for q_len, _ in rows)
        want, _ = case.run(case.meta(rows), case.q[:count])
        assert torch.equal(out[decodes:count], want[decodes:]) and not out[:count].isnan().any()
        torch.testing.assert_close(out[:decodes], want[:decodes], rtol=2e-2, atol=2e-3)
        assert out[count:].isnan().all(), "padding was written"


def pad(meta, rows):
    """Return the metadata of a captured step of ``rows`` rows: padding has no tokens and one key."""
    more = rows - len(meta.q_len)
    zeros = torch.zeros(more, dtype=torch.int32, device="cuda")
    meta.slots = torch.cat([meta.slots, zeros.long()])
    meta.q_len = torch.cat([meta.q_len, zeros])
    meta.cu_q = torch.cat([meta.cu_q, meta.cu_q[-1:].expand(more)]).contiguous()
    meta.kv_len = torch.cat([meta.kv_len, (zeros + 1)[None].expand(len(meta.kv_len), -1)], 1).contiguous()
    meta.host_q_len = np.append(meta.host_q_len, np.zeros(more, np.int32))
    meta.host_kv_len = np.append(meta.host_kv_len, np.ones((len(meta.host_kv_len), more), np.int32), 1)
    meta.decode_rows = rows
    return meta


@on_hopper
def test_a_copy_of_bytes_in_16_bits_is_read_by_the_kernel(monkeypatch):
    from minivllm.plugins.kvformat.scaled import Int8KV

    case = Case(LLAMA, 64, "bfloat16", [(4000, 4000), (1000, 2000)], Int8KV())
    monkeypatch.setattr(triton_backend, "choose", lambda *_: None)
    want, _ = case.run()
    monkeypatch.undo()
    launches = []
    module = hopper_choice.kernel_module()
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *given: (launches.append(given), attend(*given)))
    out, _ = case.run()
    assert len(launches) == 1 and launches[0][0].cache["k"].dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-3)
