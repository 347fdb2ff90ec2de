"""Products and attention of ``batch_invariant`` under Triton's interpreter; run by test_kernels.py.

``TensorCore`` replaces the interpreter's matrix product.  It models a tensor core: 16 products are added at a time, in
ascending order of the inputs, and each sum is rounded once to float32.  So another order of sums has other bits.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnSpec, GraphKey
from minivllm.core.interfaces.decoder import Norm
from minivllm.core.interfaces.kvformat import KVLayout, TensorSpec
from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.device.kernels import activation, fixed_products, fixed_rows
from minivllm.device.kernels.ahead import CompileAhead
from minivllm.device.kernels.fixed_products import FixedProduct, ProductTile
from minivllm.device.kernels.fixed_rows import Addition, FixedJoined, FixedLinear, FixedRow
from minivllm.device.kernels.norm import add_rms_norm
from minivllm.device.layers.fused import GatedLinear, LinearNorm, NormedLinear
from minivllm.device.layers.linear import Dense, Linear
from minivllm.device.layers.norm import RMSNorm
from minivllm.device.layers.rotary import prepare_qk
from minivllm.errors import ModelError
from minivllm.plugins.attention import triton_fixed, triton_fixed_check
from minivllm.plugins.attention.triton_backend import Triton
from minivllm.plugins.kvformat.plain import Fp32
from minivllm.testing.attention_world import make_meta

TILES = (
    ProductTile(16, 64, 64),
    ProductTile(32, 64, 32),
    ProductTile(64, 128, 64),
    ProductTile(128, 64, 16),
    ProductTile(16, 64, 64, 4, True),
    ProductTile(64, 64, 32, 4, True),
)


@pytest.fixture
def tensor_core(monkeypatch):
    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right, acc = a.data.astype(np.float64), b.data.astype(np.float64), d.data.astype(np.float32)
        for k in range(0, left.shape[-1], 16):
            acc = (acc.astype(np.float64) + left[..., k : k + 16] @ right[..., k : k + 16, :]).astype(np.float32)
        return interpreter.TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def near(got, want, tolerance):
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("tensor_core")
@pytest.mark.parametrize(("n", "k", "leaves"), [(96, 208, 1), (130, 512, 8), (72, 384, 2)])
def test_every_tile_gives_a_row_the_same_bits(n, k, leaves):
    torch.manual_seed(n)
    x, w = torch.randn(70, k), torch.randn(n, k)
    product = FixedProduct(w, leaves)
    want = product.multiply(x, TILES[0])
    near(want, x.double() @ w.double().t(), 1e-4)
    for tile in TILES:
        if leaves > 1 or not tile.spread:
            assert torch.equal(product.multiply(x, tile), want), tile
            assert not product.arrived.any()
    for part in (slice(0, 1), slice(7, 8), slice(3, 40), slice(54, 70)):
        assert torch.equal(product(x[part]), want[part])
    assert product(x[:0]).shape == (0, n)
    if leaves > 1:
        assert not torch.equal(FixedProduct(w, 1).multiply(x, TILES[0]), want), "no power: the order does not matter"


@pytest.mark.usefixtures("tensor_core")
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_a_gated_product_has_the_bits_of_the_product_and_the_gate(kind):
    x, w = torch.randn(21, 96).half(), torch.randn(2 * 40, 96).half()
    gate = FixedJoined(FixedLinear(w, 1, kind))
    want = activation.gate_mul(FixedProduct(w)(x), activation=kind)
    for part in (slice(0, 21), slice(0, 1), slice(5, 20)):
        assert gate.fits(x[part])
        got, squares = gate(x[part])
        assert torch.equal(got, want[part]) and squares is None


@pytest.mark.usefixtures("tensor_core")
@pytest.mark.parametrize(("n", "k", "leaves", "kind"), [(128, 256, 1, None), (192, 512, 8, None), (64, 128, 1, "silu")])
def test_the_kernel_of_few_rows_has_the_bits_of_the_tiles(n, k, leaves, kind):
    torch.manual_seed(n)
    x, w = torch.randn(20, k), torch.randn(n if kind is None else 2 * n, k)
    product = FixedProduct(w, leaves, kind)
    row = FixedRow(product)
    want = product(x)
    for i in (0, 7, 19):
        assert torch.equal(row(x[i : i + 1]), want[i : i + 1])
        assert not row.arrived.any()
    for few in (2, 7, fixed_rows.MOST_ROWS):
        assert torch.equal(row(x[:few]), want[:few]) and not row.arrived.any()
    near(want[:1], activation.gate_mul(x[:1] @ w.t()) if kind else x[:1] @ w.t(), 1e-3)
    linear = FixedLinear(w, leaves, kind)
    assert linear.row is not None and torch.equal(linear(x[3:4]), want[3:4]) and torch.equal(linear(x), want)


@pytest.mark.usefixtures("tensor_core")
@pytest.mark.parametrize("kind", [None, "silu"])
def test_the_kernel_of_one_row_computes_the_addition_and_the_norm_before_the_product(kind):
    x, residual, norm = torch.randn(1, 256), torch.randn(1, 256) * 9, torch.rand(256)
    w = torch.randn(128, 256)
    joined = FixedJoined(FixedLinear(w, 1, kind))
    assert joined.fits(x) and joined.adds(x) and not joined.adds(x.expand(2, 256))
    stream = torch.full_like(x, torch.nan)
    got, _ = joined(x, before=Addition(residual, stream, norm, 1e-6))
    normed, total = add_rms_norm(x, residual.clone(), norm, 1e-6)
    want, _ = joined(normed)
    assert torch.equal(stream, total) and torch.equal(got, want)


def linear_layer(name, inputs, parts, split=None):
    info = ModuleInfo(name, "linear", inputs, parts, "float32", "cpu", split=split)
    scheme = Dense(info, invariant=True)
    scheme.weight.normal_()
    leaves = fixed_products.leaves_of(inputs) if split == "row" else 1
    scheme.fixed = FixedLinear(scheme.weight, leaves)
    return Linear(info, scheme)


@pytest.mark.usefixtures("tensor_core")
def test_a_row_alone_has_the_bits_of_a_row_among_others_in_each_layer_and_in_the_residual_stream(monkeypatch):
    torch.manual_seed(2)
    norms = [RMSNorm("norm", 128, Norm(1e-6), torch.float32, "cpu", fuse=True) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 2.0)
    o = LinearNorm(linear_layer("o", 256, (("", 128),), "row"), norms[0], False, False)
    both = linear_layer("gate_up", 128, (("gate", 192), ("up", 192)))
    up = GatedLinear(both, activation.gate_mul, True)
    down = LinearNorm(linear_layer("down", 192, (("", 128),), "row"), norms[1], False, False)
    qkv = NormedLinear(linear_layer("qkv", 128, (("", 320),)), True)
    o.follow(up)
    up.follow(down)
    down.follow(qkv)

    def layer(x, residual, watched=False):
        """Return q, k and v of the next layer and the residual stream, and whether additions were joined."""
        h, stream = o(x, residual)
        joined = h.before is not None
        h, stream = down(up(h), stream)
        joined &= h.before is not None
        if watched:
            h = h.added()
            before = stream.clone()
            assert h.before is None
        result = qkv(h)
        assert not watched or torch.equal(before, stream)
        return result, stream, joined

    x, residual = torch.randn(3, 256), torch.randn(3, 128) * 5
    want, total, joined = layer(x, residual.clone())
    assert not joined
    for i in range(3):
        for watched in (False, True):
            got, stream, joined = layer(x[i : i + 1], residual[i : i + 1].clone(), watched)
            assert joined and torch.equal(got, want[i : i + 1]) and torch.equal(stream, total[i : i + 1])
    both.adapter = SimpleNamespace(on=True)  # its product depends on adapters, so the norm is separate
    h, _ = o(x[:1], residual[:1].clone())
    assert h.before is None


def test_weights_of_other_sizes_have_no_kernel_of_one_row():
    def chunk(n, k, leaves=1):
        return fixed_rows.chunk_of(FixedProduct(torch.empty(n, k, dtype=torch.float16), leaves, check=False))

    assert chunk(4096, 1024) == 1024 and chunk(1024, 3072, 8) == 128 and chunk(1024, 2048, 8) == 256
    assert (
        chunk(128, 768)
        == chunk(128, 2048)
        == chunk(100, 1024)
        == chunk(128, 8 * 768, 8)
        == chunk(64 * 133, 1024)
        == chunk(128, 512, 4)
        == 0
    )


def test_the_order_of_sums_depends_on_the_inputs_of_the_whole_layer():
    assert [fixed_products.leaves_of(k) for k in (2048, 3072, 14336, 9728, 1344, 200)] == [8, 8, 8, 8, 1, 1]
    for shape, leaves in (((1024, 2048), 8), ((4096, 14336), 8), ((6144, 1024), 1)):
        tiles = fixed_products.tiles_of(shape[0], shape[1] // leaves, leaves, False, False)
        assert [most for most, _ in tiles] == [16, 32, 64, 256, 512, 0]
        for most, tile in tiles:
            assert leaves == 1 or shape[1] // leaves % tile.inputs == 0
            assert tile.outputs % 64 == 0  # the weight's side of a Hopper's instruction
            places = -(-most // tile.rows) * -(-shape[0] // tile.outputs)
            assert not tile.spread or (leaves > 1 and 0 < places <= fixed_products.COUNTERS)


def test_one_tile_remains_where_tiles_do_not_agree(monkeypatch):
    monkeypatch.setattr(fixed_products, "agreeing", lambda *of: False)
    assert len(FixedProduct(torch.randn(64, 512).half(), 8).tiles) == 1


@pytest.mark.parametrize("kind", ["narrow", "wide", "split", "gated"])
def test_every_tile_that_a_product_uses_is_compared(monkeypatch, kind):
    """Also those of more outputs than the small weight of the comparison has."""
    shape = (2 * fixed_products.WIDE if kind in ("wide", "gated") else 1024, 1024)
    leaves, activation = 8 if kind == "split" else 1, "silu" if kind == "gated" else None
    monkeypatch.setattr(fixed_products, "capability", lambda device: 9)
    weight = torch.empty(shape, dtype=torch.float16)

    def used(differs):
        """Return the tiles of a product on a device on which the tile ``differs`` gives other bits."""
        found = lambda *of: torch.tensor(float(of[-1] == differs))  # noqa: E731
        monkeypatch.setattr(fixed_products, "_sums", found)
        return [tile for _, tile in FixedProduct(weight, leaves, activation).tiles]

    tiles = used(None)
    assert len(set(tiles)) >= 4
    for tile in set(tiles):
        assert used(tile) == tiles[-1:]
        if tile.spread:
            assert used(tile._replace(spread=False)) == tiles[-1:]


def test_weights_that_the_kernel_cannot_read_are_refused():
    with pytest.raises(ModelError, match="expected a multiple of 16 bytes"):
        FixedProduct(torch.randn(4, 3))
    with pytest.raises(ValueError, match="expected leaves of a multiple of 64 inputs"):
        FixedProduct(torch.randn(4, 96), 2)


def attention(spec, rows, cache, sinks, slopes, captured=None, short=False):
    """Attend rows (slot, new tokens, keys) of a cache in which slot i has blocks 20 i + 1 to 20 i + 20."""
    table = (np.arange(20)[None, None] + 20 * np.arange(4)[None, :, None] + 1).astype(np.int32)
    meta = make_meta(rows, table, 16)
    context = AttentionContext("cpu", "float32", Fp32(), 16, 8, 320, prepare_qk, batch_invariant=True)
    backend = Triton(None, context)
    backend.plan(meta, captured or GraphKey())
    backend.short |= {spec} if short else set()
    random = torch.Generator().manual_seed(5)
    q = torch.randn(4, 320, spec.heads, spec.dim_qk, generator=random)  # of each slot and position
    q = torch.cat([q[slot, keys - new : keys] for slot, new, keys in rows])
    out, lse = torch.full_like(q[..., : spec.dim_v], torch.nan), torch.full(q.shape[:2], torch.nan)
    backend.forward(AttnLayer(0, 0, spec, cache, sinks, slopes), q, meta, out, lse)
    parts = next(value for key, value in meta.work.items() if key[0] == "parts")
    return out, lse, parts.programs


@pytest.mark.usefixtures("tensor_core")
@pytest.mark.parametrize("case", ["plain", "window", "sinks"])
def test_programs_that_share_a_row_give_the_bits_of_one_program(case, monkeypatch):
    monkeypatch.setattr(triton_fixed, "PART", 64)
    torch.manual_seed(3)
    spec = AttnSpec(4, 2, 16, 16, window=100 if case == "window" else None, sinks=case == "sinks")
    sinks = torch.randn(4) if spec.sinks else None
    cache = {name: torch.randn(81, 16, 2, 16) for name in "kv"}
    rows = [(0, 1, 300), (1, 1, 64), (2, 1, 7), (3, 40, 211)]
    monkeypatch.setattr(triton_fixed, "PROGRAMS", 1)
    whole, norms, alone = attention(spec, rows, cache, sinks, None)
    monkeypatch.setattr(triton_fixed, "PROGRAMS", 1000)
    shared = attention(spec, rows, cache, sinks, None)
    assert alone == 1 and shared[2] == 5  # parts of the longest row
    assert torch.equal(shared[0], whole) and torch.equal(shared[1], norms)
    first = 0
    for slot, new, keys in rows:  # alone, and its last token alone, as decoded
        for only in (new, 1):
            got = attention(spec, [(slot, only, keys)], cache, sinks, None)
            last = slice(first + new - only, first + new)
            assert torch.equal(got[0], whole[last]) and torch.equal(got[1], norms[last])
        first += new
    decoded = attention(spec, rows[:3], cache, sinks, None, GraphKey("decode", 3, 3))
    assert torch.equal(decoded[0], whole[:3])
    monkeypatch.setattr(triton_fixed, "PART", 128)
    assert not torch.equal(attention(spec, rows, cache, sinks, None)[0], whole), "no power: parts do not matter"


class Launches:
    """A kernel that keeps the constants of its launches."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.constants = []

    def __getitem__(self, grid):
        def launch(*given, **constants):
            self.constants.append(constants)
            self.kernel[grid](*given, **constants)

        return launch


@pytest.mark.usefixtures("tensor_core")
@pytest.mark.parametrize("case", ["plain", "window", "sinks", "slopes", "softcap"])
@pytest.mark.parametrize("programs", [1, 1000])
def test_tiles_of_a_part_computed_together_have_the_bits_of_tiles_one_after_another(case, programs, monkeypatch):
    torch.manual_seed(4)
    features = {
        "window": {"window": 100},
        "sinks": {"sinks": True},
        "slopes": {"alibi": (0.5, 0.25, 0.1, 0.7)},
        "softcap": {"softcap": 3.0},
    }
    spec = AttnSpec(4, 2, 16, 16, **features.get(case, {}))
    sinks = torch.randn(4) if spec.sinks else None
    slopes = torch.rand(4) if spec.alibi is not None else None
    cache = {name: 3 * torch.randn(81, 16, 2, 16) for name in "kv"}
    rows = [(0, 1, 300), (1, 1, 128), (2, 1, 7), (3, 1, 257)]
    monkeypatch.setattr(triton_fixed, "PROGRAMS", programs)
    monkeypatch.setattr(triton_fixed, "WHOLE_PROGRAMS", programs)
    launches = Launches(triton_fixed._attend)
    monkeypatch.setattr(triton_fixed, "_attend", launches)
    want = attention(spec, rows, cache, sinks, slopes)
    together = attention(spec, rows, cache, sinks, slopes, short=True)
    monkeypatch.setattr(triton_fixed, "WHOLE_DIM", 8)
    apart = attention(spec, rows, cache, sinks, slopes, short=True)
    assert [one["WHOLE"] for one in launches.constants] == [False, True, False]
    assert [one["M"] for one in launches.constants] == [64, 16, 16]
    assert together[2] == apart[2] == want[2] == (1 if programs == 1 else 3)
    for got in (together, apart):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("case", ["plain", "window"])
def test_tiles_of_few_lines_are_used_only_if_they_have_the_bits_of_other_tiles(case, monkeypatch):
    monkeypatch.setattr(triton_fixed_check, "PROGRAMS", 3)
    monkeypatch.setattr(triton_fixed, "PROGRAMS", 12)
    spec = AttnSpec(4, 2, 16, 16, window=100 if case == "window" else None, sinks=case == "window")
    heads = (16, 2, 16)
    tensors = {name: TensorSpec(heads, "float32") for name in "kv"}
    monkeypatch.setattr(triton_fixed_check, "AGREED", {})
    given = (spec, torch.float32, KVLayout(16, tensors), 64, torch.device("cpu"))
    calls = []

    def attend(*of, short, **more):
        calls.append(short)
        triton_fixed.attend(*of, short=short, **more)
        if case == "plain" and short:
            of[3][2, 1, 3] += 1e-5

    monkeypatch.setattr(triton_fixed_check, "attend", lambda *of, short, **more: calls.append(short))
    rehearsed = []
    CompileAhead(given[-1], 1).rehearse(lambda: rehearsed.append(triton_fixed_check.short_lines_agree(*given)))
    assert rehearsed == [True] and sorted(calls) == [False, False, True, True] and not triton_fixed_check.AGREED
    calls.clear()
    monkeypatch.setattr(triton_fixed_check, "attend", attend)
    assert triton_fixed_check.short_lines_agree(*given) == (case != "plain")
    assert sorted(calls) == [False, False, True, True]
    assert triton_fixed_check.short_lines_agree(*given) == (case != "plain") and len(calls) == 4  # remembered
    wide = AttnSpec(64, 1, 16, 16)
    assert not triton_fixed_check.short_lines_agree(wide, *given[1:]) and len(calls) == 4


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "bfloat16"])
def test_a_cache_in_another_dtype_than_the_queries_has_no_tiles_of_few_lines(stored, monkeypatch):
    monkeypatch.setattr(triton_fixed_check, "attend", lambda *_, **more: pytest.fail("compared"))
    spec, heads = AttnSpec(4, 2, 16, 16), (16, 2, 16)
    scales = {name: TensorSpec(heads[:2], "float32") for name in ("k_scale", "v_scale")}
    layout = KVLayout(16, {name: TensorSpec(heads, stored) for name in "kv"} | scales)
    assert not triton_fixed_check.short_lines_agree(spec, torch.float16, layout, 64, torch.device("cpu"))


def test_sums_of_long_rows_stay_below_the_limit_of_memory():
    spec = SimpleNamespace(kv_heads=8, dim_v=128)
    few, many = (triton_fixed.parts_of(spec, tiles, 2, 30000, torch.device("cpu"), 264) for tiles in (1, 64))
    assert few.programs == 32 and len(few.sums) == 8 * 2 * few.most and few.most == 235
    assert many.programs == 1 and len(many.sums) == 1
    huge = triton_fixed.parts_of(spec, 32, 64, 30000, torch.device("cpu"), 264)
    assert huge.programs == 1
