"""Mixtures of experts: where tokens go, in what order products are added, and every form of their weights."""

from __future__ import annotations

import json
import sys
import types
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams, Tap
from minivllm.core.interfaces.decoder import CHOSEN_SOFTMAX, CLAMPED, MLP, SIGMOID, DecoderSpec, Experts, Router
from minivllm.core.interfaces.model import ModelArch
from minivllm.core.interfaces.quantizer import ModuleInfo, Quantizer, WeightScheme
from minivllm.device.layers.experts import Mixture, clamped_gate, route
from minivllm.device.layers.fused import Normed
from minivllm.device.layers.linear import Dense
from minivllm.device.loading.weights import find_targets, of_one_form
from minivllm.errors import ModelError, PluginError, RequestError
from minivllm.plugins.model.gpt_oss import GptOss
from minivllm.plugins.model.llama import Llama
from minivllm.plugins.model.mixtral import Mixtral
from minivllm.plugins.model.qwen2_moe import Qwen2Moe
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.plugins.quantizer.int8 import Int8
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import quiet, tiny_config, tiny_dir

PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(24)]
ARCHS = {"mixtral": Mixtral, "qwen2_moe": Qwen2Moe, "qwen3_moe": Qwen3Moe, "gpt_oss": GptOss}
SIZES = {"max_num_seqs": 4, "num_kvcache_blocks": 64, "max_model_len": 64, "device": "cpu", "skip_tokenizer_init": True}


def reference(hf, tokens=PROMPT) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([tokens])).logits[0].float()


# ---- the router ------------------------------------------------------------------------------------------------------


def test_a_softmax_is_of_all_experts_or_of_the_chosen_ones():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    weights, ids = route(logits, 2, Router())
    assert ids.tolist() == [[1, 2]] and ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(weights, logits.softmax(-1)[:, [1, 2]])
    chosen, ids = route(logits, 2, Router(CHOSEN_SOFTMAX))
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(chosen, torch.tensor([[3.0, 2.0]]).softmax(-1))
    torch.testing.assert_close(route(logits, 2, Router(normalize=True))[0], chosen)


def test_of_equal_scores_the_lower_id_is_taken():
    _, ids = route(torch.zeros(3, 8), 3, Router())
    assert ids.tolist() == [[0, 1, 2]] * 3
    _, ids = route(torch.tensor([[0.0, 1.0, 1.0, 2.0, 1.0]]), 3, Router())
    assert ids.tolist() == [[3, 1, 2]]


def test_a_bias_of_the_choice_changes_no_weight():
    logits, bias = torch.tensor([[0.0, 1.0, -1.0]]), torch.tensor([0.0, 0.0, 5.0])
    weights, ids = route(logits, 2, Router(SIGMOID, normalize=True, scale=2.5), bias)
    scores = logits.sigmoid()[0, [2, 1]]
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights[0], 2.5 * scores / scores.sum())


def test_weights_are_rounded_to_the_dtype_of_the_logits_where_that_is_asked():
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded, exact = route(logits, 2, Router())[0], route(logits, 2, Router(rounded=False))[0]
    assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact)


def test_a_token_goes_where_it_goes_alone():
    """Bit for bit, whatever is beside it."""
    logits = torch.randn(33, 12, generator=torch.Generator().manual_seed(1))
    for how in (Router(), Router(normalize=True), Router(CHOSEN_SOFTMAX), Router(SIGMOID, normalize=True)):
        weights, ids = route(logits, 3, how)
        for t in range(33):
            one, its = route(logits[t : t + 1].clone(), 3, how)
            assert torch.equal(one[0], weights[t]) and torch.equal(its[0], ids[t])


def test_the_clamped_gate_is_that_of_gpt_oss():
    x = 8 * torch.randn(7, 10, generator=torch.Generator().manual_seed(2))
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    torch.testing.assert_close(clamped_gate(x, 7.0, 1.702), (up + 1) * gate * torch.sigmoid(1.702 * gate))
    assert clamped_gate(torch.tensor([[-1e30, 1.0]]), None, 1.702).tolist() == [[0.0]]  # and no number that is none


# ---- the products ----------------------------------------------------------------------------------------------------


def one_layer(spec: Experts, **more) -> Harness:
    """Create a model of one layer with these experts and random weights."""

    class Typed(ModelArch):
        def describe(self, cfg) -> DecoderSpec:
            made = Llama().describe(cfg)
            return replace(made, layers=(replace(made.layers[0], mlp=spec),))

    made = Harness(None, Typed(), tiny_config(num_hidden_layers=1), **more)
    torch.manual_seed(0)
    for module in made.parts.modules.values():
        for tensor in module.tensors.values():
            tensor.normal_(0, 0.3)
        module.finish()
    return made


def naive(experts, x):
    """Compute the mixture expert by expert in float64."""
    spec, T = experts.spec, x.double()
    weights, ids = experts.route(experts.router(x))
    gate_up = experts.gate_up.tensors["weight"].double().view(spec.count, 2 * spec.inner, -1)
    down = experts.down.tensors["weight"].double().view(spec.count, -1, spec.inner)
    bias = [m.bias.double().view(spec.count, -1) if spec.bias else None for m in (experts.gate_up, experts.down)]
    out = torch.zeros_like(T)
    for t in range(len(x)):
        for w, e in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            y = gate_up[e] @ T[t] + (bias[0][e] if spec.bias else 0)
            gate, up = y.chunk(2)
            if spec.activation == CLAMPED:
                gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit) + 1
                act = gate * torch.sigmoid(spec.alpha * gate)
            else:
                act = torch.nn.functional.silu(gate)
            out[t] += w * (down[e] @ (act * up) + (bias[1][e] if spec.bias else 0))
    return out


KINDS = {
    "plain": Experts(6, 2, 20),
    "all": Experts(3, 3, 20, router=Router(normalize=True)),
    "one": Experts(5, 1, 20, router=Router(CHOSEN_SOFTMAX, bias=True)),
    "clamped": Experts(4, 2, 20, CLAMPED, Router(CHOSEN_SOFTMAX), bias=True, limit=2.0),
    "sigmoid": Experts(8, 3, 20, router=Router(SIGMOID, normalize=True, scale=2.5, choice_bias=True)),
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_the_sum_is_that_of_the_chosen_experts_times_their_weights(name, invariant):
    experts = one_layer(KINDS[name], batch_invariant=invariant).model.blocks[0].experts
    x = torch.randn(19, 32, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(experts(Normed(x)).double(), naive(experts, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_has_the_bits_that_it_has_alone(dtype):
    spec = replace(KINDS["plain"], shared=MLP(12), shared_gate=True)
    experts = one_layer(spec, batch_invariant=True, dtype=dtype).model.blocks[0].experts
    x = torch.randn(37, 32, generator=torch.Generator().manual_seed(4)).to(getattr(torch, dtype))
    whole = experts(Normed(x))
    for part in (slice(0, 1), slice(5, 6), slice(3, 22), slice(20, 37)):
        assert torch.equal(experts(Normed(x[part].clone())), whole[part])


def test_a_captured_step_computes_all_experts_and_gives_the_same():
    """The host, which sorts tokens by expert, has no part in a step that is captured."""
    experts = one_layer(KINDS["clamped"]).model.blocks[0].experts
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(5))
    _, ids = experts.route(experts.router(x))
    hit = experts._hit(x, ids.flatten().long()).view(9, 2, 32)
    torch.testing.assert_close(experts._all(x, ids), hit, rtol=1e-5, atol=1e-6)


def test_a_step_of_no_tokens_has_no_results():
    experts = one_layer(KINDS["plain"]).model.blocks[0].experts
    assert experts(Normed(torch.empty(0, 32))).shape == (0, 32)


@pytest.mark.parametrize(("share", "fast"), [(20, False), (24, True)])
def test_the_kernels_are_for_shares_of_whole_16_bytes(share, fast):
    """Of two processes each has half of an expert's units; without the kernels the layers serve all sizes."""

    def linear(name, inp, *more):
        info = types.SimpleNamespace(in_features=share if name.endswith("down") else inp)
        return types.SimpleNamespace(scheme=object.__new__(Dense), info=info)

    parts = types.SimpleNamespace(
        router=lambda *more: None,
        normed_linear=lambda router: None,
        expert_linear=linear,
        gate_mul=torch.mul,
        dtype=torch.bfloat16,
        invariant=False,
        fuse=True,
        device="cuda:0",
    )
    assert Mixture("layers.0.mlp", 32, Experts(4, 2, 2 * share), parts).fast is fast


def test_nothing_is_computed_for_experts_that_no_token_goes_to():
    experts = one_layer(KINDS["plain"]).model.blocks[0].experts
    hit = []
    expert = experts.gate_up.expert
    experts.gate_up.expert = lambda x, e: hit.append((e, len(x))) or expert(x, e)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(6))
    _, ids = experts.route(experts.router(x))
    experts(Normed(x))
    assert hit == [(e, int((ids == e).sum())) for e in range(6) if (ids == e).any()]


def test_the_kernels_are_given_the_weights_as_they_lie_and_are_made_once(monkeypatch):
    """A stand-in for ``minivllm.device.kernels.experts`` receives the weights, and the output of the shared MLP."""
    made = []

    class Kernel:
        def __init__(self, gate_up, down, gate_up_bias, down_bias, activation, limit, alpha, fixed):
            made.append(
                (gate_up.shape, down.shape, gate_up_bias.shape, down_bias.shape, activation, limit, alpha, fixed)
            )
            assert gate_up.is_contiguous() and down.is_contiguous()

        def __call__(self, x, ids, weights, squares, eps, stream=None, shared=None):
            assert ids.dtype == torch.int32 and weights.dtype == torch.float32
            y = x * 2 if shared is None else x * 2 + shared.y * torch.sigmoid(x @ shared.gate.view(-1, 1))
            if stream is None:
                return y, None
            stream.residual.add_(y)
            return stream.residual * stream.norm, torch.ones(len(x), 1)

    def routes(logits, chosen, score, normalize, scale, choice_bias, rounded, floor, given):
        assert given is None
        calls.append((chosen, score, normalize, scale, choice_bias, rounded, floor))
        return route(logits, chosen, Router(score, normalize, scale))

    calls: list = []
    stand_in = types.SimpleNamespace(
        ExpertProducts=Kernel,
        ResidualNorm=namedtuple("ResidualNorm", "residual norm eps whole"),
        SharedOutput=namedtuple("SharedOutput", "y gate"),
    )
    monkeypatch.setitem(sys.modules, "minivllm.device.kernels.experts", stand_in)
    monkeypatch.setattr("minivllm.device.kernels.experts", stand_in, raising=False)
    monkeypatch.setitem(sys.modules, "minivllm.device.kernels.router", types.SimpleNamespace(route=routes))
    block = one_layer(KINDS["clamped"]).model.blocks[0]
    block.experts.fast, x = True, torch.ones(5, 32)
    assert torch.equal(block.experts(Normed(x)), 2 * x) and torch.equal(block.experts(Normed(x)), 2 * x)
    assert made == [((4, 40, 32), (4, 32, 20), (4, 40), (4, 32), CLAMPED, 2.0, 1.702, False)]
    assert calls == [(2, CHOSEN_SOFTMAX, False, 1.0, None, True, 0.0)] * 2
    normed = block.down(Normed(x), torch.full((5, 32), 3.0))
    assert torch.equal(normed[1], 5 * x) and normed[0].squares is None  # the layer's norm has no kernel here
    block.down.norm.fused = True
    h, residual = block.down(Normed(x), torch.full((5, 32), 3.0))
    assert torch.equal(residual, 5 * x) and h.squares is not None and torch.equal(h.x, 5 * x * block.down.norm.weight)
    made.clear()
    block = one_layer(replace(KINDS["clamped"], shared=MLP(12), shared_gate=True)).model.blocks[0]
    experts = block.experts
    assert not experts.adds_shared
    experts.fast, block.down.norm.fused = True, True
    assert experts.adds_shared and experts.joins
    wanted = 2 * x + experts._of_shared(Normed(x), *experts.shared)
    torch.testing.assert_close(experts(Normed(x)), wanted)
    torch.testing.assert_close(block.down(Normed(x), torch.full((5, 32), 3.0))[1], 3 + wanted)
    assert len(made) == 1


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_both_forms_of_a_checkpoint_load(family, tmp_path):
    """One tensor an expert, as on the hub, and all in one, as transformers 5 has them in memory."""
    path, cfg, hf = tiny_dir(tmp_path / "hub", family)
    names = load_file(path / "model.safetensors")
    assert any(".experts.3." in name for name in names)
    with quiet():
        hf.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = load_file(tmp_path / "stacked" / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    found = [Harness(tmp_path / form, ARCHS[family](), cfg).step({0: PROMPT})[0] for form in ("hub", "stacked")]
    assert torch.equal(*found) and (found[0] - reference(hf)).abs().max() <= 1e-4


def test_half_of_one_form_is_not_filled_from_the_other(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, "qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if not k.startswith("model.layers.1.mlp.experts.")}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight"):
        Harness(path, Qwen3Moe(), cfg)


@pytest.mark.parametrize(
    ("family", "key", "count", "says"),
    [
        ("qwen3_moe", "num_experts", 4, r"num_experts=4: the checkpoint has experts 0 to 5; expected 6"),
        ("qwen3_moe", "num_experts", 9, r"num_experts=9: the checkpoint has experts 0 to 5; expected 6"),
        ("mixtral", "num_local_experts", 9, r"num_local_experts=9: the checkpoint has experts 0 to 5; expected 6"),
        ("gpt_oss", "num_local_experts", 9, r"num_local_experts=9: tensor 'model\.layers\.0\..* has shape \[6"),
        ("qwen3_moe", "moe_intermediate_size", 40, r"moe_intermediate_size=40: tensor .* has shape \[24, 32\]"),
        ("qwen3_moe", "num_experts_per_tok", 7, r"num_experts_per_tok=7: expected between 1 and num_experts=6"),
        ("qwen3_moe", "decoder_sparse_step", 0, r"decoder_sparse_step=0: expected a whole number"),
    ],
)
def test_numbers_that_the_checkpoint_contradicts_are_named_in_one_line(family, key, count, says, tmp_path):
    path, _, _ = tiny_dir(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    if key == "num_experts":  # as on the hub; transformers 5 writes its other name
        config.pop("num_local_experts")
    (path / "config.json").write_text(json.dumps({**config, key: count}))
    with pytest.raises(ModelError, match=says) as caught:
        LLM(model=str(path), dtype="float32", **SIZES)
    assert "\n" not in str(caught.value)


def test_a_large_model_is_planned_in_moments():
    """48 layers of 128 experts, two kinds of layers: 18 thousand tensors.  What is counted is calls, not seconds."""
    small = {"hidden_size": 8, "moe_intermediate_size": 2, "mlp_only_layers": [3]}
    cfg = tiny_config("qwen3_moe", num_hidden_layers=48, num_experts=128, **small)
    made, arch = Harness(None, Qwen3Moe(), cfg), Qwen3Moe()
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += 1

    rules = of_one_form(arch.weights(cfg), ())
    sys.setprofile(count)
    try:
        targets = find_targets(rules, made.parts)
    finally:
        sys.setprofile(None)
    assert len(targets) > 18_000 and calls < 250 * len(targets)


# ---- quantizers ------------------------------------------------------------------------------------------------------


def test_int8_serves_experts_near_the_weights_that_it_was_given(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, "qwen3_moe")
    made = Harness(path, Qwen3Moe(), cfg, quantizer=Int8())
    experts = made.model.blocks[0].experts
    assert experts.gate_up.tensors["weight"].dtype == experts.down.tensors["weight"].dtype == torch.int8
    assert isinstance(experts.router.scheme, Dense)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(7))
    plain = Harness(path, Qwen3Moe(), cfg).model.blocks[0].experts
    weights, ids = plain.route(plain.router(x))
    want = plain.products(Normed(x), ids, weights)
    assert (experts.products(Normed(x), ids, weights) - want).norm() < 0.02 * want.norm()


def test_a_scheme_that_cannot_hold_experts_is_refused_where_it_is_given_them():
    class Half(WeightScheme):
        def __init__(self, info: ModuleInfo) -> None:
            self.tensors = {}

        def params(self):
            return {}

        def load(self, param, tensor, part):
            pass

        def apply(self, x, out=None, adapter=None):
            return x

    class Takes(Quantizer):
        def scheme(self, m):
            seen.append((m.name, m.kind, m.experts))
            return Half(m) if m.kind == "experts" else None

    seen: list = []
    with pytest.raises(PluginError, match=r"Half stores no experts \(layers\.0\.mlp\.experts\.gate_up\)"):
        Harness(None, Qwen3Moe(), tiny_config("qwen3_moe"), quantizer=Takes(None))
    assert ("layers.0.mlp.router", "router", 0) in seen and seen[-1][1:] == ("experts", 6)


# ---- layers and taps -------------------------------------------------------------------------------------------------


def test_layers_with_and_without_experts_mix():
    cfg = tiny_config("qwen2_moe", num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3])
    layers = Qwen2Moe().describe(cfg).layers
    assert [isinstance(layer.mlp, Experts) for layer in layers] == [False, True, False, False, False]


def test_a_request_reads_where_its_tokens_went(tmp_path):
    """The ids are those of transformers' router; nothing is added to them."""
    path, _, hf = tiny_dir(tmp_path, "qwen3_moe", norm_topk_prob=True)
    seen: list = []
    for module in hf.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.register_forward_hook(lambda m, a, out: seen.append((out[0], out[2])))
    reference(hf)
    taps = [Tap(f"layers.{i}.{what}", read=True) for i in (0, 1) for what in ("router", "experts")]
    with LLM(model=str(path), dtype="float32", **SIZES) as llm:
        points = llm.tap_points()
        assert points["layers.1.router"] == 6 and points["layers.1.experts"] == 2
        one = SamplingParams(max_tokens=1, temperature=0)
        (out,) = llm.generate({"prompt_token_ids": PROMPT}, one, use_tqdm=False, taps=taps)
        for i, (logits, ids) in enumerate(seen):
            assert out.taps[f"layers.{i}.experts"].tolist() == ids.tolist()
            assert abs(out.taps[f"layers.{i}.router"] - logits.detach().numpy()).max() < 1e-4
        with pytest.raises(RequestError, match=r"nothing is added to layers\.0\.experts, which are numbers of experts"):
            llm.generate({"prompt_token_ids": PROMPT}, one, False, [Tap("layers.0.experts", add=[1.0, 1.0])])


def test_what_is_added_to_the_routers_logits_sends_the_request_elsewhere(tmp_path):
    path, _, _ = tiny_dir(tmp_path, "qwen3_moe")
    push = [Tap("layers.0.router", add=[0, 0, 0, 0, 90, 100]), Tap("layers.0.experts", read=True)]
    with LLM(model=str(path), dtype="float32", **SIZES) as llm:
        one = SamplingParams(max_tokens=2, temperature=0)
        rows = [{"prompt_token_ids": PROMPT}] * 2
        pushed, plain = llm.generate(rows, one, use_tqdm=False, taps=[push, push[1:]])
    assert pushed.taps["layers.0.experts"].tolist() == [[5, 4]] * (len(PROMPT) + 1)
    assert plain.taps["layers.0.experts"].tolist() != pushed.taps["layers.0.experts"].tolist()


@pytest.mark.parametrize("family", ARCHS)
def test_32_tokens_are_those_of_transformers_however_they_are_computed(family, tmp_path):
    """Alone and in chunks, beside others, from the prefix cache, after a preemption; bits are the same in all."""
    path, _, hf = tiny_dir(tmp_path, family)
    prompts = [PROMPT, PROMPT[:9], [*PROMPT[:16], 7, 8, 9], PROMPT[::-1]]
    with torch.inference_mode():
        want = [
            hf.generate(
                torch.tensor([p]),
                attention_mask=torch.ones(1, len(p)),
                max_new_tokens=32,
                do_sample=False,
                eos_token_id=None,
            )[0, len(p) :].tolist()
            for p in prompts
        ]
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=0)
    feeds = [{"prompt_token_ids": p} for p in prompts]
    small = {**SIZES, "num_kvcache_blocks": 11, "kvcache_block_size": 8, "max_num_batched_tokens": 10}
    found = []
    for options in ({**SIZES, "max_num_seqs": 1, "enable_prefix_caching": False}, SIZES, small):
        with LLM(model=str(path), dtype="float32", batch_invariant=True, **options) as llm:
            for _ in range(2):  # the second time from the cache
                found.append(llm.generate(feeds, params, use_tqdm=False))
            if options is small:
                assert llm.stats()["preemptions"] > 0
    for outs in found:
        assert [out.tokens for out in outs] == want
        assert [out.outputs[0].cumulative_logprob for out in outs] == [
            out.outputs[0].cumulative_logprob for out in found[0]
        ]
