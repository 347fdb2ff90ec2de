"""Norm, rotary, activation, embedding and head against their definitions in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnSpec, GraphKey, QKPre
from minivllm.core.interfaces.decoder import ACTIVATIONS, Norm, Rope
from minivllm.core.interfaces.model import StepTensors
from minivllm.core.interfaces.quantizer import ModuleInfo, Shard
from minivllm.device.layers import fields, invariant
from minivllm.device.layers.activation import APPLY, gate_mul
from minivllm.device.layers.attention import AttentionLayer
from minivllm.device.layers.linear import Dense, Linear
from minivllm.device.layers.norm import LayerNorm, RMSNorm
from minivllm.device.layers.parts import ModelParts
from minivllm.device.layers.rotary import inverse_frequencies, prepare_qk, rotary_tables
from minivllm.device.worker import step
from minivllm.errors import ModelError, PluginError
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.kvformat.plain import Fp32
from minivllm.plugins.quantizer.none import Unquantized
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import ARCHS, LLAMA3_ROPE, tiny_config, tiny_dir


def parts(dtype="float32", **more) -> ModelParts:
    backend = Sdpa(None, AttentionContext("cpu", dtype, Fp32(), 4, 4, 64, prepare_qk))
    return ModelParts("cpu", dtype, Unquantized(), backend, **more)


def rms(x, w, eps=1e-6):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.003)])
def test_norm_adds_the_residual_and_normalises_the_sum(dtype, tolerance):
    norm = RMSNorm("n", 32, Norm(1e-6), getattr(torch, dtype), "cpu")
    norm.weight.copy_(torch.randn(32))
    x, r = torch.randn(2, 5, 32).to(norm.weight.dtype)
    kept = x.clone(), r.clone()
    y, stream = norm(x, r)
    assert torch.equal(stream, x + r) and torch.equal(x, kept[0]) and torch.equal(r, kept[1])
    assert (y - rms(x + r, norm.weight)).abs().max() <= tolerance * 3
    y, stream = norm(x)
    assert torch.equal(stream, x) and (y - rms(x, norm.weight)).abs().max() <= tolerance * 3


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.003)])
def test_a_layer_norm_adds_the_offset_to_its_weight(dtype, tolerance, biased):
    """Nemotron stores weight - 1.  In half precision the sum of 1 and a small weight would lose most of its bits."""
    norm = LayerNorm("n", 32, Norm(1e-5, offset=1.0, centered=True, bias=biased), getattr(torch, dtype), "cpu")
    weight, bias = (torch.randn(2, 32) * 0.001).to(getattr(torch, dtype))
    norm.load("", "weight", weight)
    if biased:
        norm.load("", "bias", bias)
    assert torch.equal(norm.weight, 1 + weight.float())
    x, r = torch.randn(2, 5, 32).to(weight.dtype)
    y, stream = norm(x, r)
    want = (x + r).double()
    want = torch.nn.functional.layer_norm(want, (32,), 1 + weight.double(), bias.double() if biased else None, 1e-5)
    assert y.dtype == x.dtype and torch.equal(stream, x + r)
    assert (y - want).abs().max() <= tolerance * 3


def test_the_gate_of_silu_is_swiglu():
    x = torch.randn(5, 12)
    gate, up = x.double().chunk(2, -1)
    assert (gate_mul(x) - gate * torch.sigmoid(gate) * up).abs().max() < 1e-6


def rotate64(x, angle):
    """Rotate the pairs (i, i + dim / 2) of each head by ``angle`` [T, dim / 2]."""
    a, b = x.double().chunk(2, -1)
    cos, sin = angle.double().cos()[:, None], angle.double().sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_prepare_qk_normalises_heads_and_rotates_pairs(norms, keep):
    work = {} if keep else None
    position = torch.tensor([0, 3, 50, 7])
    cos, sin = rotary_tables(Rope(8, 100.0), 64, "cpu")
    wq, wk = torch.rand(2, 8) + 0.5
    pre = QKPre(cos, sin, wq if norms else None, wk if norms else None)
    angle = position[:, None].double() * 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    for _ in range(2):  # the second layer takes the rows that the first one gathered
        q, k = torch.randn(4, 6, 8), torch.randn(4, 2, 8)
        got_q, got_k = prepare_qk(q, k, position, pre, work)
        assert (got_q - rotate64(rms(q, wq) if norms else q, angle)).abs().max() < 1e-4
        assert (got_k - rotate64(rms(k, wk) if norms else k, angle)).abs().max() < 1e-4
    assert work is None or len(work) == 1
    assert torch.equal(cos[1], torch.cat([cos[1, :4], cos[1, :4]]))  # the tables themselves stay as they were
    assert sin[1, 0] > 0


def test_rotary_over_the_first_part_of_a_head_passes_the_rest():
    angle = torch.randn(5, 2)
    pre = QKPre(angle.cos().repeat(1, 2), angle.sin().repeat(1, 2))
    q, k = torch.randn(5, 3, 8), torch.randn(5, 1, 8)
    got, _ = prepare_qk(q, k, torch.arange(5), pre)
    assert torch.equal(got[..., 4:], q[..., 4:])
    assert (got[..., :4] - rotate64(q[..., :4], angle)).abs().max() < 1e-5


LONG = [1.0 + i / 8 for i in range(32)]
ROPES = [
    LLAMA3_ROPE,
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 40.0, "rope_theta": 1e4, "original_max_position_embeddings": 64, "mscale": 0.7,
     "mscale_all_dim": 1.2, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4},
    {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": LONG,
     "long_factor": LONG[::-1]},
    {"rope_type": "proportional", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25},
]  # fmt: skip


@pytest.mark.parametrize("longest", [0, 300])
@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
def test_scaled_frequencies_equal_transformers(rope, longest):
    cfg = tiny_config(head_dim=64, rope_parameters=dict(rope))
    want, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](cfg, "cpu", seq_len=longest)
    inv, mine = inverse_frequencies(fields.rope(cfg), longest)
    assert torch.allclose(inv, want, rtol=1e-6, atol=0) and mine == pytest.approx(scale)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(8, 1.0, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 64))),
        Rope(8, 1e4, "yarn", (("factor", 10**30), ("original_max_position_embeddings", 64))),
        Rope(8, 1e4, "linear", (("factor", 10**30),)),
        Rope(8, 1e-30, "linear", (("factor", 1e-37),)),
        Rope(2, 1e4, "dynamic", (("factor", 2.0), ("trained", 16)), 16),
        Rope(2, 1e4, "longrope", (("factor", 2.0), ("original_max_position_embeddings", 1), ("short_factor", (1.0,)),
                                  ("long_factor", (1.0,))), 1),
    ],
)  # fmt: skip
def test_rotary_numbers_without_finite_frequencies_are_refused(rope):
    twice = rope.switch is not None
    with pytest.raises(ModelError, match=f"rope_theta=.*rope_type='{rope.kind}'.*expected the numbers that the model"):
        rotary_tables(rope, 64, "cpu", twice)


@pytest.mark.parametrize("types", [3, "full_attention", {"full_attention": 1}, [None, "full_attention"], [["x"], 1]])
def test_types_of_layers_that_are_no_names_are_refused(types):
    cfg = SimpleNamespace(num_hidden_layers=2, sliding_window=4, layer_types=types)
    for read in (lambda: fields.windows(cfg, types), lambda: fields.layer_types(cfg, "conv")):
        with pytest.raises(ModelError, match=r"layer_types=.*: expected a list with the name of each layer's type"):
            read()
    cfg.layer_types = None
    with pytest.raises(ModelError, match="layer_types=None: expected a list"):
        fields.layer_types(cfg, "conv")


def test_tables_of_a_rope_that_switches_hold_the_long_ones_behind_the_short_ones():
    cfg = tiny_config(head_dim=64, rope_parameters=dict(ROPES[5]))
    rope = fields.rope(cfg)
    assert rope.switch == 64
    cos, _ = rotary_tables(rope, 100, "cpu", twice=True)
    for first, longest in ((0, 0), (100, 99)):
        inv, scale = inverse_frequencies(rope, longest)
        want = torch.outer(torch.arange(100).float(), inv).cos() * scale
        assert torch.allclose(cos[first : first + 100, :32], want)
    assert (cos[:100] - cos[100:]).abs().max() > 0.1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_the_same_whatever_stands_beside_it(activation):
    """``batch_invariant`` takes other operations than torch's own, of equal value."""
    x = torch.randn(7, 61) * 4
    got = invariant.activate(x, activation)
    assert (got - APPLY[activation](x)).abs().max() < 2e-6
    for n in (1, 3, 5, 61):
        alone = torch.stack([invariant.activate(row[:n].clone(), activation) for row in x])
        assert torch.equal(alone, got[:, :n])


def test_llama3_scaling_with_swapped_limits_is_refused():
    bad = {**LLAMA3_ROPE, "high_freq_factor": 0.5}
    with pytest.raises(ModelError, match="high_freq_factor above"):
        fields.rope(SimpleNamespace(rope_parameters=bad))


def test_merged_linear_stacks_its_parts_in_order():
    linear = parts().linear("qkv", 4, [("q", 3), ("k", 2)], bias=True)
    weights = {"q": torch.randn(3, 4), "k": torch.randn(2, 4)}
    biases = {"q": torch.randn(3), "k": torch.randn(2)}
    assert linear.wanted() == {
        ("q", "weight"): (3, 4),
        ("q", "bias"): (3,),
        ("k", "weight"): (2, 4),
        ("k", "bias"): (2,),
    }
    for p in ("k", "q"):
        linear.load(p, "weight", weights[p])
        linear.load(p, "bias", biases[p])
    x = torch.randn(5, 4)
    want = torch.cat([x @ weights[p].T + biases[p] for p in ("q", "k")], -1)
    assert torch.allclose(linear(x), want, atol=1e-6)


def test_dense_writes_into_out_and_refuses_adapters():
    scheme = Dense(ModuleInfo("m", "linear", 4, (("", 3),), "float32", "cpu"))
    scheme.load("weight", torch.randn(3, 4).double(), "")
    x, out = torch.randn(2, 4), torch.empty(2, 3)
    assert scheme.apply(x, out) is out and torch.allclose(out, scheme.apply(x))
    with pytest.raises(PluginError, match="adapter"):
        scheme.apply(x, adapter=object())
    with pytest.raises(ModelError, match="expected a floating-point"):
        scheme.load("weight", torch.zeros(3, 4, dtype=torch.int8), "")


def test_tied_head_shares_memory_and_untied_does_not(tmp_path):
    for tied in (True, False):
        path, cfg, _ = tiny_dir(tmp_path / str(tied), tie_word_embeddings=tied)
        modules = Harness(path, ARCHS["llama"](), cfg).parts.modules
        assert ("weight" in modules["lm_head"].tensors) != tied
        x = torch.randn(3, 32)
        weight = modules["embed"].weight if tied else modules["lm_head"].tensors["weight"]
        assert torch.allclose(modules["lm_head"](x), x @ weight.T, atol=1e-5)


def test_parts_numbers_kv_groups_by_geometry_unless_told():
    full, near = AttnSpec(4, 2, 8, 8), AttnSpec(4, 2, 8, 8, window=3)
    made = parts()
    for i, spec in enumerate([full, near, full]):
        made.attention(i, spec)
    assert [layer.group for layer in made.layers] == [0, 1, 0]
    grouped = parts(groups=[[1], [0, 2]])
    for i, spec in enumerate([full, near, full]):
        grouped.attention(i, spec)
    assert [layer.group for layer in grouped.layers] == [1, 0, 1]
    assert all(layer.index == i for i, layer in enumerate(grouped.layers))


def test_two_modules_of_one_name_are_a_bug():
    made = parts()
    made.norm("n", 4, 1e-6)
    with pytest.raises(ValueError, match="two modules"):
        made.norm("n", 4, 1e-6)


def test_sinks_are_loaded_per_head():
    made = parts()
    layer = made.attention(0, AttnSpec(4, 2, 8, 8, sinks=True))
    assert layer.wanted() == {("", "sinks"): (4,)}
    layer.load("", "sinks", torch.arange(4.0))
    assert torch.equal(made.layers[0].sinks, torch.arange(4.0))


def test_linear_is_a_module_of_parts():
    made = parts()
    linear = made.linear("a.b", 4, [("", 2)])
    assert isinstance(linear, Linear) and made.modules == {"a.b": linear}


def test_factors_of_queries_follow_the_positions_although_runs_share_their_tensors():
    """The tensors of a capture serve a run before it, and a back end need not clear what the run stored."""
    backend = SimpleNamespace(
        plan=lambda meta, key: None,
        write=lambda layer, q, k, v, meta, pre: q,
        forward=lambda layer, q, meta, out, norms: out.copy_(q),
    )
    layer = AttentionLayer("attn", AttnLayer(0, 0, AttnSpec(2, 2, 4, 4)), backend, "cpu", Shard())
    layer.factors = torch.arange(10.0)
    ids, position, x = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]), torch.ones(3, 8)
    meta = SimpleNamespace(position=position, work={})
    for positions in ([0, 1, 2], [7, 3, 9]):
        position.copy_(torch.tensor(positions))
        tensors = StepTensors(ids, position, meta)
        got = step.forward(lambda one: layer(x, x, x, one), backend, tensors, GraphKey())
        assert torch.equal(got, layer.factors[position][:, None].expand(3, 8))
