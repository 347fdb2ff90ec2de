"""``minivllm compare-hf``: a right model is within the bound, a fault is named where it is.

Models are tiny and random; a fault is planted in the table of a family, in the model that is built, or in a back end.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
import transformers

from minivllm import LLM
from minivllm.cli import main
from minivllm.core.interfaces.decoder import Router
from minivllm.device.layers.decoder import DecoderBlock
from minivllm.device.layers.expert_linear import RouterLinear
from minivllm.errors import ModelError
from minivllm.lab.compare_hf import reference
from minivllm.lab.compare_hf.compare import compare
from minivllm.lab.compare_hf.errors import DtypeComparison, EngineRun
from minivllm.lab.compare_hf.points import DERIVED, place
from minivllm.lab.compare_hf.reference import Reference
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA
from minivllm.plugins.model import spec as families
from minivllm.plugins.model.gemma import Gemma2, Gemma3
from minivllm.plugins.model.granite import Granite
from minivllm.plugins.model.llama import Llama
from minivllm.plugins.model.qwen2 import Qwen2
from minivllm.plugins.model.qwen3 import Qwen3
from minivllm.plugins.model.qwen3_5 import Qwen35
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.registration.spec import ANY, Spec
from minivllm.testing.tiny import quiet, save, small_config, tiny_model

IDS = [(7 * i * i + 3 * i + 5) % 61 for i in range(20)]
SIZES = {"max_num_seqs": 4, "num_kvcache_blocks": 64, "skip_tokenizer_init": True, "device": "cpu"}
NAMED = [s for s in vars(families).values() if isinstance(s, Spec) and s.listed("architecture")]
FAMILIES = {s.listed("architecture")[0]: s for s in NAMED}
HERE = __name__


def directory(path, architecture, **values):
    cls = getattr(transformers, architecture)
    with quiet():
        return save(tiny_model(small_config(cls.config_class, **values), 0, cls), path)


def compared(path, prompts=(IDS,), dtype="float32", max_tokens=6, **options):
    with LLM(model=str(path), dtype=dtype, allow_targets=[HERE], **SIZES, **options) as llm:
        return compare(llm, prompts, max_tokens)


# ---- what is right ---------------------------------------------------------------------------------------------------


STATES = ("Qwen3_5", "Qwen3Next", "Lfm2")  # families with recurrent states
MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "Qwen3_5Moe", "Qwen3Next", "Lfm2Moe")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_operation_of_each_family_is_that_of_transformers(architecture, tmp_path):
    """Prompts and decode steps; nothing is left out of the comparison."""
    found = compared(directory(tmp_path, architecture), [IDS, IDS[3:10]]).found
    unseen = {"q_rope", "k_rope"} if architecture.startswith("Falcon") else set()  # no hook of transformers sees them
    assert found.within and found.missing.keys() == unseen
    assert max(error.relative for error in found.errors.values()) < 1e-5
    found_in = lambda i: {p.partition(f"layers.{i}.")[2] for p in found.errors if p.startswith(f"layers.{i}.")}  # noqa: E731
    more = {"q_norm", "k_norm"} if architecture.startswith(("Qwen3", "Gemma3", "Olmo", "Lfm2")) else set()
    outer = {"input", "attention", "mlp", "residual"} | ({"router"} if architecture.startswith(MIXTURES) else set())
    inner = {"q", "k", "v", "q_rope", "k_rope"} - unseen | more
    if architecture.startswith(STATES):
        kinds = [found_in(i) - {"router"} for i in range(4) if found_in(i)]
        layers = outer - {"router"}
        assert layers in kinds and layers | inner in kinds  # layers with a state, and with attention
    else:
        assert found_in(1) == outer | inner
    assert {"embedding", "norm", "logits", "token", "fused"} < found.errors.keys() and found.tokens.same == 12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_within_the_bound_of_its_dtype_however_much_of_it_comes_along(dtype, tmp_path):
    """Granite's multipliers make much of a small error: the bound is one of each operation by itself."""
    found = compared(directory(tmp_path, "GraniteForCausalLM"), dtype=dtype).found
    assert found.within and found.dtype == dtype
    assert max(error.relative for error in found.along.values()) > 3 * max(e.relative for e in found.errors.values())


def test_a_request_with_the_other_rotary_embedding_is_compared_with_it(tmp_path):
    """LongRoPE beyond its trained length."""
    scaling = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    more = {"rope_parameters": {**scaling, **factors}, "original_max_position_embeddings": 16}
    assert compared(directory(tmp_path, "Phi3ForCausalLM", **more), [IDS]).found.within


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_kernels_of_a_gpu_compute_what_transformers_does(dtype, tmp_path):
    """Eager, by parts, and as captured steps with fused kernels."""
    with LLM(model="pocket", dtype=dtype, device="cuda", max_num_seqs=4, num_kvcache_blocks=64) as llm:
        report = compare(llm, [], 8)
    assert report.found.within and not report.found.missing, report.text()


# ---- what is wrong ---------------------------------------------------------------------------------------------------


class Planted:
    """Before a family: ``table`` changes its description, ``edit`` the model that was built of it."""

    @staticmethod
    def table(made):
        return made

    @staticmethod
    def edit(model):
        pass

    def describe(self, cfg):
        return self.table(super().describe(cfg))

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        self.edit(model)
        return model


def planted(name, family, **methods):
    """Make a model plug-in with a planted fault in this module, and return its import target."""
    spec = Spec(f"{HERE}:{name}", (2, 0), "a planted fault", limits=ANY)
    methods = {key: staticmethod(value) for key, value in methods.items()}
    setattr(sys.modules[HERE], name, type(name, (Planted, family), {"spec": spec, "__module__": HERE, **methods}))
    return f"{HERE}:{name}"


def in_layer(number, change):
    """Return a function that applies ``change`` to one layer of a table."""
    return lambda made: replace(
        made, layers=tuple(change(layer) if i == number else layer for i, layer in enumerate(made.layers))
    )


def pre(number, **values):
    """Return an edit that replaces values of the block before q and k of one layer."""

    def edit(model):
        block = model.blocks[number]
        block.pre = replace(block.pre, **{k: v(block.pre) if callable(v) else v for k, v in values.items()})

    return edit


SWAP = {"q_norm": lambda p: p.k_norm, "k_norm": lambda p: p.q_norm}
OTHER_THETA = in_layer(1, lambda layer: replace(layer, rope=replace(layer.rope, theta=37.0)))
OTHER_SCALE = in_layer(1, lambda layer: replace(layer, attention=replace(layer.attention, scale=0.9)))
OTHER_MLP = in_layer(1, lambda layer: replace(layer, mlp=replace(layer.mlp, activation="relu")))
OTHER_CHOICE = in_layer(1, lambda layer: replace(layer, mlp=replace(layer.mlp, router=Router())))
NO_WINDOW = in_layer(0, lambda layer: replace(layer, attention=replace(layer.attention, window=None)))
OTHER_EPS = in_layer(0, lambda layer: replace(layer, attention=replace(layer.attention, eps=0.3)))
NO_MULTIPLIER = in_layer(1, lambda layer: replace(layer, residual_scale=1.0))
K_AS_V = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj")
NEAR = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}


class Halves(RouterLinear):
    def __call__(self, x):
        return super().__call__(x) / 2


def halve(model):
    model.blocks[1].experts.router.__class__ = Halves


class LosesSome(DecoderBlock):
    """Where it is not taken apart, a part of the stream is lost."""

    def __call__(self, h, residual, step):
        h, residual = super().__call__(h, residual, step)
        return h, residual * 0.9


# name -> (architecture, its plug-in, fields of config.json, what is planted, first place, words that say it)
FAULTS = {
    "NormOfQ": ("Qwen3", Qwen3, {}, {"edit": pre(1, **SWAP)}, "layers.1.q_norm", "norm of q"),
    "ForgottenNorm": ("Qwen3", Qwen3, {}, {"edit": pre(1, q_norm=None, k_norm=None)}, "layers.1.q_norm", "norm of q"),
    "OneNormMore": ("Llama", Llama, {}, {"edit": pre(1, q_norm=torch.ones(8))}, "layers.1.q_norm", "norm of q"),
    "EpsOfHeads": ("Qwen3", Qwen3, {}, {"edit": pre(1, eps=0.3)}, "layers.1.q_norm", "eps"),
    "EpsOfAll": (
        "Llama", Llama, {}, {"table": lambda made: replace(made, norm=replace(made.norm, eps=0.3))}, "layers.0.q",
        "norm before attention",
    ),
    "Theta": ("Qwen3", Qwen3, {}, {"table": OTHER_THETA}, "layers.1.q_rope", "rotary embedding of q"),
    "NoRope": ("Llama", Llama, {}, {"edit": pre(1, cos=None, sin=None)}, "layers.1.q_rope", "rotary embedding of q"),
    "Scale": ("Llama", Llama, {}, {"table": OTHER_SCALE}, "layers.1.attention", "softmax scale"),
    "Window": ("Qwen2", Qwen2, NEAR, {"table": NO_WINDOW}, "layers.0.attention", "window"),
    "Activation": ("Llama", Llama, {}, {"table": OTHER_MLP}, "layers.1.mlp", "activation"),
    "Choice": (
        "Qwen3Moe", Qwen3Moe, {"norm_topk_prob": True}, {"table": OTHER_CHOICE}, "layers.1.mlp", "choice",
    ),
    "Router": ("Qwen3Moe", Qwen3Moe, {}, {"edit": halve}, "layers.1.router", "router: norm"),
    "Multiplier": (
        "Granite", Granite, {"residual_multiplier": 0.5}, {"table": NO_MULTIPLIER}, "layers.1.attention", "multiplier",
    ),
    "KAndV": (
        "Llama", Llama, {}, {"table": lambda made: replace(made, names=replace(made.names, qkv=K_AS_V))}, "layers.0.k",
        "projection of k",
    ),
    "EmbeddingScale": (
        "Gemma3", Gemma3, {}, {"table": lambda made: replace(made, embed_scale=1.0)}, "embedding", "scale",
    ),
    "FinalNorm": ("Llama", Llama, {}, {"edit": lambda model: setattr(model.norm, "eps", 0.3)}, "norm", "final norm"),
    "Cap": (
        "Gemma2", Gemma2, {"final_logit_softcapping": 3.0}, {"table": lambda made: replace(made, logit_cap=None)},
        "logits", "cap",
    ),
    "DeltaRule": (
        "Qwen3_5", Qwen35, {"num_hidden_layers": 4}, {"table": OTHER_EPS}, "layers.0.attention", "layer with a state",
    ),
    "Fused": (
        "Llama", Llama, {}, {"edit": lambda model: setattr(model.blocks[0], "__class__", LosesSome)}, "fused",
        "fused kernels",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_place_that_is_named_is_where_the_fault_is(name, tmp_path):
    """And what comes after it is judged by itself: another layer is not called wrong for it."""
    architecture, family, values, methods, point, words = FAULTS[name]
    path = directory(tmp_path, f"{architecture}ForCausalLM", **{"num_hidden_layers": 3, **values})
    report = compared(path, model_arch=planted(name, family, **methods))
    first = report.found.beyond[0]
    assert first.point == point and not report.found.within
    text = report.text()
    assert (
        f"first difference at {point}: " in text
        and words in text.partition("first difference at ")[2].partition("\n")[0]
    )
    if name not in ("EpsOfAll", "KAndV"):  # planted in one place
        assert {error.point.rpartition(".")[0] for error in report.found.beyond} == {point.rpartition(".")[0]}
    if name == "Window":
        assert first.position == values["sliding_window"]  # the first token whose window leaves one out
    if name in ("Theta", "NoRope"):
        assert first.position == 1  # nothing turns at position 0
    if name == "Fused":
        assert first.position == len(IDS) - 1  # of which the first token is drawn


class LargeWhenAlone(Sdpa):
    """A query that comes by itself gets half as much again."""

    spec = replace(SDPA, impl=f"{HERE}:LargeWhenAlone")

    def forward(self, layer, q, meta, out, lse=None):
        super().forward(layer, q, meta, out, lse)
        if len(q) == 1:
            out.mul_(1.5)


def test_a_wrong_kernel_of_decode_steps_is_named_from_the_first_of_them_on(tmp_path):
    report = compared(directory(tmp_path, "LlamaForCausalLM"), attention=f"{HERE}:LargeWhenAlone")
    first = report.found.beyond[0]
    assert (first.point, first.position) == ("layers.0.attention", len(IDS))
    assert {error.point for error in report.found.beyond} == {"layers.0.attention", "layers.1.attention"}
    assert report.parts["attention"] == f"local/{HERE}:LargeWhenAlone"


def test_what_another_process_computes_is_compared_as_far_as_taps_go(tmp_path):
    """Between the projections and attention nothing is known of it, which is said."""
    path = directory(tmp_path, "Qwen3ForCausalLM")
    report = compared(path, executor="process")
    assert report.found.within and "layers.0.attention" in report.found.errors
    assert (
        set(report.found.missing) == set(DERIVED) and "not compared: q_norm, k_norm, q_rope, k_rope (" in report.text()
    )


# ---- what cannot be compared -----------------------------------------------------------------------------------------


def test_what_transformers_calls_otherwise_is_named_and_the_rest_is_found(tmp_path, monkeypatch):
    """GPT-NeoX has one projection in which q, k and v of a head lie together, here under a name that is unknown."""
    monkeypatch.setattr(reference, "GROUPED", "no_such_projection")
    config = transformers.GPTNeoXConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    with quiet():
        path = save(transformers.GPTNeoXForCausalLM(config).eval(), tmp_path)
        made = Reference(path, "float32", "cpu", 2)
    assert {"q", "k", "v"} <= made.missing.keys() and "has none of q_proj" in made.missing["q"]
    found = made.run(IDS)
    assert {"embedding", "layers.1.attention", "layers.1.mlp", "layers.1.residual", "norm", "logits"} <= found.keys()


def test_a_norm_under_another_name_is_not_taken_for_none(tmp_path):
    """HunYuan has norms of q and k behind the rotary embedding."""
    made = Reference(directory(tmp_path, "HunYuanDenseV1ForCausalLM"), "float32", "cpu", 2)
    assert set(made.missing) == {"q_norm", "k_norm"} and "has none of q_norm" in made.missing["q_norm"]
    assert "layers.0.q_norm" not in made.run(IDS)


def test_another_number_of_layers_and_a_directory_that_is_not_loaded_are_refused(tmp_path):
    path = directory(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ModelError, match=r"expected a list of 3 layers.*its lists are: model.layers of 2"):
        Reference(path, "float32", "cpu", 3)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="transformers cannot load"):
        Reference(path, "float32", "cpu", 2)


def test_values_of_another_width_take_no_place_and_are_apart(tmp_path):
    """As those of a model with heads of another size."""
    made = Reference(directory(tmp_path, "Qwen3ForCausalLM"), "float32", "cpu", 2)
    plain = made.run(IDS)
    given = {**plain, "layers.0.q": plain["layers.0.q"][:, :16], "logits": plain["logits"][-1:]}
    own = made.run(IDS, given)
    found = DtypeComparison("float32", 1e-4)
    found.take(0, EngineRun(IDS, [int(plain["logits"][-1].argmax())], given), own, plain)
    assert [error.point for error in found.beyond] == ["layers.0.q"]


def test_a_prompt_that_transformers_fails_on_is_an_error_of_its_model(tmp_path):
    made = Reference(directory(tmp_path, "LlamaForCausalLM"), "float32", "cpu", 2)
    with pytest.raises(ModelError, match="transformers failed on a prompt of 2 tokens"):
        made.run([1, 61])


def test_values_that_are_not_finite_are_beyond_every_bound():
    found = DtypeComparison("float32", 1e-4)
    ours = {"norm": torch.tensor([[1.0, 2.0], [float("nan"), 2.0]])}
    theirs = {"norm": torch.ones(2, 2), "logits": torch.zeros(2, 3)}
    found.take(0, EngineRun([1, 2], [0], ours), {"norm": torch.tensor([[1.0, 2.0], [1.0, 2.0]])}, theirs)
    assert [(e.point, e.position) for e in found.beyond] == [("norm", 1)]
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["first"]["relative"] is None


def test_tokens_that_are_not_the_best_of_their_own_logits_are_a_place_of_their_own():
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    found = DtypeComparison("float32", 1e-4)
    found.take(0, EngineRun([1], [2], {"logits": logits}), {"logits": logits}, {"logits": logits})
    assert [error.point for error in found.beyond] == ["token"]
    assert found.tokens.differing == [(0, 0, 2, 1, 4.0)]


def test_places_are_in_the_order_of_the_computation():
    points = ["embedding", "layers.0.input", "layers.0.q", *(f"layers.0.{name}" for name in DERIVED)]
    points += ["layers.0.attention", "layers.0.mlp", "layers.0.residual", "layers.1.input", "norm", "logits", "token"]
    points.append("fused")
    mixed = points[::-1]
    assert sorted(mixed, key=place) == points


# ---- the command -----------------------------------------------------------------------------------------------------


def command(path, *more):
    options = [text for name, value in SIZES.items() for text in ("--set", f"{name}={json.dumps(value)}")]
    return main(["compare-hf", str(path), *options, "--ids", ",".join(map(str, IDS)), "--max-tokens", "3", *more])


def test_the_command_ends_with_5_where_models_part_and_with_0_where_not(tmp_path, capsys):
    path = directory(tmp_path, "Qwen3ForCausalLM")
    assert command(path, "--dtype", "float32", "--dtype", "bfloat16") == 0
    out = capsys.readouterr().out
    assert "float32: every operation is within the bound" in out and "bfloat16: every operation is within" in out
    wrong = planted("WrongTheta", Qwen3, table=OTHER_THETA)
    assert command(path, "--allow-target", HERE, "--set", f"model_arch={wrong}") == 5
    assert "first difference at layers.1.q_rope: the rotary embedding of q" in capsys.readouterr().out
    assert command(path, "--bound", "1e-9", "--json") == 5
    report = json.loads(capsys.readouterr().out)
    (one,) = report["comparisons"]
    assert not report["within"] and one["bound"] == 1e-9 and one["first"]["point"] == "layers.0.q"
    assert {error["point"] for error in one["errors"]} >= {"layers.0.q", "logits"} and one["not_compared"] == {}


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--bound", "0"], 2, "--bound 0: expected a positive number"),
        (["--bound", "nan"], 2, "expected a positive number"),
        (["--max-tokens", "0"], 2, "--max-tokens 0: expected at least 1"),
        (["--ids", "1,two"], 2, "--ids 1,two: expected whole numbers"),
        (["--ids", "1,99"], 2, "99"),
        (["--dtype", "int4"], 2, "invalid choice"),
        (["--set", "load_format=dummy"], 2, "load_format=dummy"),
        (["--set", "executor=sim"], 3, "names no tap points"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_code_of_its_kind(more, code, words, tmp_path, capsys):
    path = directory(tmp_path, "LlamaForCausalLM")
    try:
        found = command(path, *more)
    except SystemExit as end:  # of the parser
        found = end.code
    assert found == code and words in capsys.readouterr().err


def test_a_model_that_is_not_there_is_a_fault_of_the_model(capsys):
    assert main(["compare-hf", "./nowhere"]) == 3
    assert "no such directory" in capsys.readouterr().err
