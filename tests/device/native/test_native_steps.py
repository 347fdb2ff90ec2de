"""A captured CPU step is the step that separate operations compute, whatever model, cache and plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_runs import FAMILIES, SIZES, ask, checkpoint, each_isa, engine, needs_library, prompt, watched

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import (
    AFTER,
    AROUND,
    HEAD,
    MLP,
    WIDTH,
    DecoderSpec,
    LayerSpec,
    Norm,
    Rope,
    WeightNames,
)
from minivllm.core.interfaces.model import ModelArch
from minivllm.device.layers.decoder import Decoder
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA
from minivllm.plugins.kvformat.plain import Fp32
from minivllm.plugins.model.llama import Llama
from minivllm.plugins.quantizer.int8 import Int8, Int8Weight
from minivllm.plugins.quantizer.spec import INT8
from minivllm.registration.spec import ANY, Spec

pytestmark = needs_library
__all__ = ["each_isa"]
torch.set_num_threads(1)  # on tiny tensors threads only wait for each other

MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "Qwen3_5Moe", "Qwen3Next", "Lfm2Moe")
SLOPES = ("Bloom", "Mpt")  # ALiBi
GROWING = ("Ministral3",)  # queries with a factor of their position
SEPARATE = (*MIXTURES, *SLOPES, *GROWING)
PROMPTS = [prompt(20), prompt(7, 1), prompt(1, 2)]


def compared(path, prompts=PROMPTS, bound=1e-4, same=True, params=None, **options):
    """Runs that draw natively, step by step beside separate operations, and alone: what the captured steps did."""
    params = params or {}
    with watched() as seen, engine(path, **options) as llm:
        assert not any("not captured" in note for note in llm.engine.capacity.notes), llm.engine.capacity.notes
        beside = ask(llm, prompts, **params)
    assert seen.steps >= 31, "the native part did not run"
    assert max(seen.hidden, seen.logits, seen.states) < bound
    if same:
        with watched(compare=False) as alone, engine(path, **options) as llm:
            got = ask(llm, prompts, **params)
        assert alone.steps >= 31
        with watched() as none, engine(path, **{**options, "graph": "off"}) as llm:
            assert ask(llm, prompts, **params) == got == beside
        assert not none.tokens
    return seen


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if not name.startswith(SEPARATE)])
def test_each_family_computes_what_its_separate_operations_do(architecture, tmp_path):
    compared(checkpoint(tmp_path, architecture))


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name.startswith(SEPARATE)])
def test_mixtures_slopes_and_growing_queries_run_as_separate_operations_and_say_so(architecture, tmp_path):
    path = checkpoint(tmp_path, architecture)
    reasons = {
        MIXTURES: "is a mixture of experts",
        SLOPES: "layer 0 has slopes of distance",
        GROWING: "layer 0 multiplies queries by a factor of their position",
    }
    (why,) = (reason for names, reason in reasons.items() if architecture.startswith(names))
    with watched() as seen, engine(path) as llm:
        assert any(why in note for note in llm.engine.capacity.notes)
        got = ask(llm, PROMPTS, max_tokens=6)
    assert not seen.tokens and seen.others
    with engine(path, graph="off") as llm:
        assert not llm.engine.capacity.notes
        assert ask(llm, PROMPTS, max_tokens=6) == got


ROPE = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 24, "factor": 4.0}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
VARIANTS = {
    "odd sizes": ("LlamaForCausalLM", {"intermediate_size": 37, "head_dim": 6, "vocab_size": 67}),
    "a hidden size that no vector divides": ("LlamaForCausalLM", {"hidden_size": 36, "head_dim": 10}),
    "biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "one KV head": ("Qwen3ForCausalLM", {"num_key_value_heads": 1}),
    "wide heads": ("Qwen3ForCausalLM", {"head_dim": 72}),
    "tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "a window from layer 1 on": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "a window of one token": ("MistralForCausalLM", {"sliding_window": 1}),
    "capped scores and logits": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "multipliers": (
        "GraniteForCausalLM",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.3},
    ),
    "half of each head rotates": ("Glm4ForCausalLM", {"partial_rotary_factor": 0.5}),
    "a parallel block": ("CohereForCausalLM", {"use_qk_norm": False, "attention_bias": True}),
    "gelu": ("LlamaForCausalLM", {"hidden_act": "gelu"}),
    "relu": ("OPTForCausalLM", {"activation_function": "relu", "enable_bias": True}),
    "one layer": ("LlamaForCausalLM", {"num_hidden_layers": 1}),
    "two rotary embeddings": (
        "Phi3ForCausalLM",
        {"rope_parameters": {**ROPE, **FACTORS}, "original_max_position_embeddings": 24},
    ),
}


@pytest.mark.parametrize(("architecture", "values"), VARIANTS.values(), ids=VARIANTS)
def test_each_kind_of_layer_is_computed_as_its_separate_operations(architecture, values, tmp_path, each_isa):
    compared(checkpoint(tmp_path, architecture, **values), [[i % 61 for i in p] for p in PROMPTS], same=False)


# ---- tables that no family has ---------------------------------------------------------------------------------------


NAMES = WeightNames(norms=("norm_1", "norm_2", "norm_3", "norm_4"))


def table(cfg, norms, qk_norm, rope, *, centered=False, parallel=False, positions=0, activation="silu", gated=True):
    norm = Norm(1e-5, centered=centered, bias=centered)
    attention = AttnSpec(6, 2, 20, 12, sinks=True, window=9, softcap=5.0, scale=0.3)
    full = AttnSpec(4, 4, 16, 24)
    layers = tuple(
        LayerSpec(a, MLP(43, activation, gated, bias=True), rope, norms, parallel, qk_norm, True, True, scale)
        for a, scale in ((attention, 0.7), (full, 1.0), (attention, 1.3))
    )
    return DecoderSpec(
        cfg.vocab_size,
        cfg.hidden_size,
        layers,
        norm,
        embed_scale=1.7,
        positions=positions,
        first_position=2 if positions else 0,
        logit_scale=0.4,
        logit_cap=2.5,
        names=NAMES,
    )


TABLES = {
    "norms before, heads are normed": (("before", HEAD, Rope(8, 100.0)), {}),
    "norms after, q and k are normed": ((AFTER, WIDTH, Rope(16, 100.0)), {}),
    "norms around": ((AROUND, None, Rope(10, 100.0)), {"activation": "gelu_tanh"}),
    "LayerNorm, learned positions": (
        ("before", WIDTH, None),
        {"centered": True, "positions": 160, "activation": "relu2", "gated": False},
    ),
    "LayerNorm, parallel": (("before", None, Rope(8, 100.0)), {"centered": True, "parallel": True}),
}


class Tabled(Llama):
    """A model with sinks, windows, soft caps, and values of another size than keys, of random weights."""

    spec = Spec(f"{__name__}:Tabled", (2, 0), "a table", limits=ANY)
    chosen = "norms around"

    def describe(self, cfg):
        args, more = TABLES[Tabled.chosen]
        return table(cfg, *args, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TABLES)
def test_each_word_of_a_table_is_computed_as_its_separate_operations(name, dtype, tmp_path, each_isa):
    path, Tabled.chosen = checkpoint(tmp_path, "LlamaForCausalLM"), name
    more = {"model_arch": f"{__name__}:Tabled", "allow_targets": [__name__], "load_format": "dummy"}
    bound = 1e-4 if dtype == "float32" else 0.15
    seen = compared(path, bound=bound, same=False, dtype=dtype, **more)
    assert dtype == "float32" or seen.hidden, "two dtypes of activations are not the same to the last bit"


# ---- storage ---------------------------------------------------------------------------------------------------------

BOUNDS = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.02}  # of what the separate operations round
FORMATS = {
    "none": {},
    "int8": {"quantizer": "int8"},
    "int8, the head too": {"quantizer": {"name": "int8", "options": {"lm_head": True}}},
    "int4": {"quantizer": "int4"},
    "int4, zero points": {"quantizer": {"name": "int4", "options": {"symmetric": False, "group_size": 64}}},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Create a Llama whose sizes groups of int4 divide."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    return checkpoint(tmp_path_factory.mktemp("wide"), "LlamaForCausalLM", **sizes)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("more", FORMATS.values(), ids=FORMATS)
def test_weights_of_each_dtype_and_quantizer_are_multiplied_as_their_scheme_does(wide, dtype, more, each_isa):
    compared(wide, bound=BOUNDS[dtype], same=False, dtype=dtype, **more)


@pytest.mark.parametrize("kv", ["fp32", "bf16", "fp16", "int8"])
def test_keys_and_values_are_read_and_written_in_each_format(wide, kv, each_isa):
    """What is rounded is rounded the same way, up to a last place where float32 differs."""
    bound = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2}[kv]
    compared(wide, bound=bound, same=False, kv_format=kv)


def test_weights_that_bfloat16_holds_are_read_as_such_and_give_the_same(tmp_path):
    """A float32 model of a bfloat16 checkpoint: half as much is read, and counted as memory."""
    from minivllm.testing.tiny import read_tensors, write_tensors

    path = checkpoint(tmp_path, "Qwen3ForCausalLM")
    with engine(path) as llm:
        before = llm.engine.capacity.weight_bytes
    write_tensors(tmp_path, {name: t.bfloat16() for name, t in read_tensors(tmp_path).items()})
    with engine(path) as llm:
        more = llm.engine.capacity.weight_bytes - before
    with engine(path, graph="off") as llm:
        assert 0 < more < llm.engine.capacity.weight_bytes / 2 <= before / 2
    compared(path)


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    values = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3}
    return checkpoint(tmp_path_factory.mktemp("qwen2"), "Qwen2ForCausalLM", **values)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Create a model of three layers with the delta rule and one with gated attention."""
    return checkpoint(tmp_path_factory.mktemp("qwen3_5"), "Qwen3_5ForCausalLM", num_hidden_layers=4)


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory):
    values = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    return checkpoint(tmp_path_factory.mktemp("lfm2"), "Lfm2ForCausalLM", **values)


HYBRIDS = ("hybrid", "convolutions")
MANY = [prompt(n, i) for i, n in enumerate((40, 3, 17, 33, 1, 26, 50, 9))]


@pytest.mark.parametrize("model", ["folder", "windowed", *HYBRIDS])
def test_chunks_run_beside_decodes(model, request):
    seen = compared(request.getfixturevalue(model), MANY, max_num_batched_tokens=24)
    assert seen.mixed > 5 and max(seen.tokens) > 16


def test_layers_with_a_window_have_a_table_of_blocks_of_their_own(windowed):
    """Blocks come back to the two groups at different times, so that soon the same piece lies elsewhere in each."""
    with watched() as seen, engine(windowed, num_kvcache_blocks=24, max_num_batched_tokens=24) as llm:
        got = ask(llm, MANY)
        full, near = llm.engine.executor.runner.state.table
        assert ((full != near) & (near > 0)).any(), "the test has no power"
    assert seen.hidden < 1e-4 and seen.draws
    with engine(windowed, graph="off") as llm:
        assert ask(llm, MANY) == got


@pytest.mark.parametrize("model", ["folder", *HYBRIDS])
def test_steps_of_more_tokens_run_as_separate_operations_on_the_same_cache(model, request):
    folder = request.getfixturevalue(model)
    long = [prompt(100, i) for i in range(4)]
    seen = compared(folder, long, max_num_batched_tokens=90, max_model_len=160, num_kvcache_blocks=96)
    assert seen.others and max(seen.tokens) <= 64


def test_steps_with_prompts_run_as_separate_operations_if_decodes_alone_are_captured(folder):
    with watched() as seen, engine(folder, graph="decode", max_num_batched_tokens=24) as llm:
        got = ask(llm, MANY)
    assert seen.draws and seen.others and not seen.mixed and max(seen.tokens) <= SIZES["max_num_seqs"]
    with engine(folder, graph="off") as llm:
        assert ask(llm, MANY) == got


@pytest.mark.parametrize("model", ["folder", *HYBRIDS])
def test_preempted_sequences_come_back(model, request):
    folder = request.getfixturevalue(model)
    with watched() as seen, engine(folder, num_kvcache_blocks=14, max_num_batched_tokens=24) as llm:
        got = ask(llm, MANY)
        assert llm.engine.planner.preemptions, "the test has no power"
    assert seen.hidden < 1e-4 and seen.draws
    with engine(folder, graph="off") as llm:
        assert ask(llm, MANY) == got


BRANCHES = {
    "samples": ({"n": 3, "temperature": 1.0, "seed": 7}, {}),
    "beams": ({"beam_width": 3, "max_tokens": 12}, {}),
    "a guide": ({"guidance_scale": 2.0, "max_tokens": 12}, {"strategies": ["guidance"]}),
}


@pytest.mark.parametrize("model", ["folder", *HYBRIDS])
@pytest.mark.parametrize(("params", "options"), BRANCHES.values(), ids=BRANCHES)
def test_branches_share_what_their_parent_computed(model, params, options, request):
    folder = request.getfixturevalue(model)
    prompts = [prompt(n, i) for i, n in enumerate((24, 13, 3))]
    with watched() as seen, engine(folder, **options) as llm:
        got = ask(llm, prompts, **params)
    assert seen.hidden < 1e-4 and seen.steps
    with engine(folder, graph="off", **options) as llm:
        assert ask(llm, prompts, **params) == got


@pytest.mark.parametrize("model", ["folder", "windowed", *HYBRIDS])
def test_drafts_are_computed_as_tokens_of_their_row(model, request):
    options = {"drafter": {"name": "ngram", "options": {"prompt_lookup_min": 1}}, "speculate": "always"}
    seen = compared(request.getfixturevalue(model), MANY[:4], **options)
    assert seen.drafted > 3


@pytest.mark.parametrize("model", ["folder", *HYBRIDS])
def test_cached_prefixes_are_read(model, request):
    folder = request.getfixturevalue(model)
    with watched() as seen, engine(folder) as llm:
        first = ask(llm, MANY[:4])
        assert ask(llm, MANY[:4]) == first
    assert seen.hidden < 1e-4 and seen.draws


@pytest.mark.parametrize("block", [1, 5, 64])
def test_blocks_may_have_any_size(folder, block):
    compared(folder, MANY[:3], kvcache_block_size=block, num_kvcache_blocks=640 // block, max_num_batched_tokens=24)


@pytest.mark.parametrize("model", ["folder", *HYBRIDS])
@pytest.mark.parametrize("depth", [0, 2])
def test_steps_that_run_ahead_of_an_end_write_nothing(model, depth, request):
    """Rows that met their end on the device, while the host could not know."""
    folder = request.getfixturevalue(model)
    ends = {"stop_token_ids": list(range(0, 60, 4)), "ignore_eos": True, "max_tokens": 20}
    with engine(folder, graph="off", run_ahead=0) as llm:
        want = ask(llm, MANY, **ends)
    with watched(compare=False) as seen, engine(folder, run_ahead=depth) as llm:
        assert ask(llm, MANY, **ends) == want
    assert seen.draws and any(len(tokens[0]) < 20 for tokens in want)


# ---- what is not replaced --------------------------------------------------------------------------------------------


class Doubled(Sdpa):
    """Another attention, which does not say that it is one of the layer's spec."""

    spec = Spec(
        f"{__name__}:Doubled",
        (1, 3),
        "twice",
        limits=SDPA.limits,
        features=SDPA.features,
        prefer=SDPA.prefer,
        traits={"graph": "none", "plan": "host"},
    )

    def forward(self, layer, q, meta, out, lse=None):
        super().forward(layer, q, meta, out, lse)
        out *= 2


class Negated(Fp32):
    """Another format, of the same dtype."""

    spec = Spec(f"{__name__}:Negated", (1, 0), "negated", limits=ANY)

    def store(self, cache, k, v, slot_map):
        super().store(cache, -k, -v, slot_map)

    def load(self, cache, blocks, dtype):
        k, v = super().load(cache, blocks, dtype)
        return -k, -v


class AnyFormat(Sdpa):
    """The same attention over any format."""

    spec = replace(SDPA, impl=f"{__name__}:AnyFormat", limits={**SDPA.limits, "kv_format": ANY})
    native = True


class Edited(Llama):
    """A model that is built of its table, and changed behind it."""

    spec = Spec(f"{__name__}:Edited", (2, 0), "edited", limits=ANY)

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        assert type(model) is Decoder and Edited.build is not ModelArch.build
        model.blocks[0].up = lambda h, up=model.blocks[0].up: up(h) * 3
        return model


class Halved(Int8Weight):
    """Weights that lie as int8's do, and another product."""

    def apply(self, x, out=None, adapter=None):
        return super().apply(x, out, adapter) / 2


class Halving(Int8):
    """Gives such weights."""

    spec = replace(INT8, impl=f"{__name__}:Halving")

    def scheme(self, m):
        return super().scheme(m) and Halved(m)


TARGETS = {"allow_targets": [__name__]}
REASONS = {
    "batch_invariant": ({"batch_invariant": True}, "batch_invariant=true"),
    "attention": ({"attention": f"{__name__}:Doubled", **TARGETS}, "(attention)"),
    "kv_format": (
        {"kv_format": f"{__name__}:Negated", "attention": f"{__name__}:AnyFormat", **TARGETS},
        "(kvformat)",
    ),
    "quantizer": ({"quantizer": f"{__name__}:Halving", **TARGETS}, "native code does not read"),
    "a model with a build() of its own": ({"model_arch": f"{__name__}:Edited", **TARGETS}, "a build() of its own"),
}


@pytest.mark.parametrize(("options", "reason"), REASONS.values(), ids=REASONS)
def test_what_was_chosen_runs_and_why_nothing_is_captured_is_said(options, reason, tmp_path):
    path = checkpoint(tmp_path, "LlamaForCausalLM")
    with watched() as seen, engine(path, **options) as llm:
        notes = [note for note in llm.engine.capacity.notes if "steps are not captured" in note]
        assert len(notes) == 1 and reason in notes[0]
        got = ask(llm, PROMPTS)
    assert not seen.tokens and seen.others
    with engine(path, **options, graph="off") as llm:
        assert ask(llm, PROMPTS) == got


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_weights_are_copied_to_bfloat16_where_there_is_room_and_the_tokens_are_the_same(room, monkeypatch):
    monkeypatch.setattr("minivllm.device.worker.runner.free_ram", lambda: 4 * room)
    with engine("pocket", dtype="float32") as llm, engine("pocket", dtype="float32", graph="off") as plain:
        copied = llm.engine.executor.runner.native.copied
        weights = llm.engine.capacity.weight_bytes - copied
        assert weights == plain.engine.capacity.weight_bytes
        assert copied == 0 if room == 0 else 0.4 * weights < copied <= 0.5 * weights
        assert ask(llm, [[3, 4, 5]], max_tokens=6) == ask(plain, [[3, 4, 5]], max_tokens=6)
