"""Rules of quantizers by module: ``skip`` and ``bits``, the head and the embedding by choice, and bad ones."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from minivllm import LLM
from minivllm.cli import main
from minivllm.core.interfaces.quantizer import ModuleInfo, Shard
from minivllm.device.layers.linear import Dense, Linear
from minivllm.device.loading.weights import weight_bytes
from minivllm.errors import ConfigError, OptionError, PluginError, error_from
from minivllm.plugins.model.gpt2 import GPT2
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.plugins.quantizer.eight import Fp8, Fp8Both, Fp8Weight, Int8Both, Int8W8A8, LlmInt8, LlmInt8Weight
from minivllm.plugins.quantizer.int4 import Int4, Int4Weight
from minivllm.plugins.quantizer.int8 import Int8, Int8Weight
from minivllm.plugins.quantizer.nf4 import Nf4, Nf4Weight
from minivllm.plugins.quantizer.online import MADE_BY, SplitWeight
from minivllm.plugins.quantizer.options import WeightOnlyOptions
from minivllm.testing.harness import Harness, play, seats
from minivllm.testing.quantizer_data import by_part, dequantized
from minivllm.testing.tiny import ARCHS, tiny_dir

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
KINDS = {
    "fp8": Fp8Both, "fp8-weight": Fp8Weight, "int4": Int4Weight, "int8": Int8Weight, "int8-w8a8": Int8Both,
    "llm-int8": LlmInt8Weight, "nf4": Nf4Weight,
}  # fmt: skip
QUANTIZERS = (Fp8, Int4, Int8, Int8W8A8, LlmInt8, Nf4)
ON_CPU = ["--set", "device=cpu", "--set", "dtype=float32"]


def made(quantizer, **options):
    return quantizer(quantizer.options_type(**options))


def info(name="layers.3.mlp.down", inp=64, parts=(("", 32),), **more) -> ModuleInfo:
    return ModuleInfo(name, more.pop("kind", "linear"), inp, parts, "float32", "cpu", **more)


def logits_of(hf) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([PROMPT])).logits[0]


def model(tmp_path, quantizer, kind="llama", **fields) -> Harness:
    path, cfg, _ = tiny_dir(tmp_path, kind, **SIZES, **fields)
    return Harness(path, ARCHS[kind](), cfg, quantizer=quantizer)


# ---- which weight a module gets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_quantizer_takes_rules_that_give_modules_any_of_the_others(tmp_path, quantizer):
    assert set(KINDS) == set(MADE_BY)
    names = [f"layers.{i}.mlp.down" for i in range(len(KINDS))]
    chosen = made(quantizer, bits=dict(zip(names, KINDS, strict=True)))
    for name, kind in zip(names, KINDS.values(), strict=True):
        assert type(chosen.scheme(info(name))) is kind
    chosen.finish()
    by_number = made(quantizer, bits={"*.0": 4, "*.1": 8, "*.2": 16, "*.3": "none"})
    types = [type(by_number.scheme(info(f"mlp.{i}"))) for i in range(5)]
    assert types == [Int4Weight, Int8Weight, type(None), type(None), KINDS[quantizer.name]]


def test_the_first_rule_that_fits_counts_and_skip_before_all():
    chosen = made(Int8, skip=["layers.0.*"], bits={"*.down": 4, "*": "nf4"})
    kinds = [type(chosen.scheme(info(f"layers.{name}"))) for name in ("0.mlp.down", "1.mlp.down", "1.attn.o")]
    assert kinds == [type(None), Int4Weight, Nf4Weight]


def test_a_rule_for_the_quantizer_itself_keeps_its_settings():
    chosen = made(Int4, group_size=64, symmetric=False, bits={"*.down": "int4", "*": 8})
    scheme = chosen.scheme(info())
    assert scheme.group == 64 and scheme.zero is not None
    assert type(chosen.scheme(info("layers.0.attn.o"))) is Int8Weight


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("rule", [r"re:.*\.down_proj", "model.layers.*.mlp.down_proj", "layers.*.mlp.down"])
def test_modules_are_named_as_here_or_as_in_the_checkpoint(tmp_path, rule, load_format):
    path, cfg, _ = tiny_dir(tmp_path, "llama", **SIZES)
    chosen = made(Int8, bits={rule: "int4"})
    harness = Harness(path, ARCHS["llama"](), cfg, quantizer=chosen, load_format=load_format)
    chosen.finish()
    kinds = {name: type(m.scheme) for name, m in harness.parts.modules.items() if isinstance(m, Linear)}
    assert kinds.pop("lm_head") is Dense
    assert {kind for name, kind in kinds.items() if name.endswith("down")} == {Int4Weight}
    assert {kind for name, kind in kinds.items() if not name.endswith("down")} == {Int8Weight}


# ---- parts of one product --------------------------------------------------------------------------------------------


def test_parts_of_one_product_with_different_rules_are_products_of_their_own(tmp_path):
    rules = {"*.v_proj": "fp8-weight", "*.up_proj": 16, "layers.1.attn.qkv.q": 4}
    harness = model(tmp_path, made(Int8, bits=rules))
    qkv, later = (harness.parts.modules[f"layers.{i}.attn.qkv"].scheme for i in (0, 1))
    assert [type(one) for one in qkv.schemes] == [Int8Weight, Fp8Weight]
    assert [one.info.parts[0][0] for one in qkv.schemes] == ["q", "v"], "q and k stay one product"
    assert [type(one) for one in later.schemes] == [Int4Weight, Int8Weight, Fp8Weight]
    gate = harness.parts.modules["layers.0.mlp.gate_up"].scheme
    assert [type(one) for one in gate.schemes] == [Int8Weight, Dense]
    assert set(qkv.tensors) == {"q.weight", "q.scale", "v.weight", "v.scale"}
    torch.manual_seed(0)
    plain = torch.randn(96, 64)
    parts = (("q", 64), ("k", 16), ("v", 16))
    split = made(Int8, bits={"*.v": "fp8-weight"}).scheme(info("attn.qkv", parts=parts))
    for part, rows in by_part(plain, split.info).items():
        split.load("weight", rows, part)
    split.finish()
    alone = {}
    for part, kind in (("q", Int8), ("k", Int8), ("v", Fp8)):
        rows = by_part(plain, split.info)[part]
        scheme = made(Int8, bits={"*": "fp8-weight"} if kind is Fp8 else {}).scheme(info(parts=(("", len(rows)),)))
        scheme.load("weight", rows, "")
        scheme.finish()
        alone[part] = dequantized(scheme, scheme.info)
    torch.testing.assert_close(dequantized(split, split.info), torch.cat(list(alone.values())), rtol=0, atol=0)
    x, out = torch.randn(5, 64), torch.empty(5, 96)
    assert torch.equal(split.apply(x, out), out) and torch.equal(split.apply(x), out)


def test_a_model_with_split_products_computes_what_transformers_does_with_the_held_weights(tmp_path):
    path, cfg, hf = tiny_dir(tmp_path, "llama", **SIZES)
    rules = {"*.q_proj": "nf4", "*.k_proj": 16, "*.up_proj": "fp8-weight"}
    harness = Harness(path, ARCHS["llama"](), cfg, quantizer=made(Int8, bits=rules))
    state, plain = hf.state_dict(), logits_of(hf)
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "gate": "mlp.gate_proj"}
    names |= {"up": "mlp.up_proj"}
    for i in range(cfg.num_hidden_layers):
        for module in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down"):
            scheme = harness.parts.modules[f"layers.{i}.{module}"].scheme
            for part, rows in by_part(dequantized(scheme, scheme.info), scheme.info).items():
                source = names.get(part, {"attn.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}.get(module))
                state[f"model.layers.{i}.{source}.weight"].copy_(rows)
    want, got = logits_of(hf), harness.step({0: PROMPT})[0]
    assert (got - want).abs().max() < 1e-4 < (want - plain).abs().max()


def test_slices_of_a_split_product_are_those_of_the_whole():
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
    parts = (("q", 64), ("k", 16), ("v", 16))
    rules = {"*.v": "fp8-weight", "*.k": 16}
    whole = Linear(info("attn.qkv", parts=parts), made(Int8, bits=rules).scheme(info("attn.qkv", parts=parts)))
    shares = []
    for rank in range(2):
        own = tuple((part, rows // 2) for part, rows in parts)
        mine = info("attn.qkv", parts=own, split="column", shard=Shard(rank, 2))
        shares.append(Linear(mine, made(Int8, bits=rules).scheme(mine)))
    for linear in (whole, *shares):
        assert set(linear.wanted().values()) == {(64, 64), (16, 64)}
        for part, rows in by_part(weight, whole.info).items():
            linear.load(part, "weight", rows)
        linear.finish()
    x = torch.randn(3, 64)
    want = whole(x).split([64, 16, 16], dim=1)
    got = [one(x).split([32, 8, 8], dim=1) for one in shares]
    for part, rows in enumerate(want):
        torch.testing.assert_close(torch.cat([one[part] for one in got], 1), rows, rtol=1e-6, atol=1e-6)


def test_experts_of_a_layer_are_in_one_form_and_rules_for_some_are_refused(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, "qwen3_moe", moe_intermediate_size=32)

    def of(**options):
        return Harness(path, Qwen3Moe(), cfg, quantizer=made(Int8, **options)).model.blocks[0].experts

    experts = of(bits={"*.experts.*.down_proj": "nf4" if cfg.moe_intermediate_size % 64 == 0 else 4})
    assert type(experts.down.scheme) is Int4Weight and type(experts.gate_up.scheme) is Int8Weight
    for options in ({"bits": {"*.experts.*.up_proj": 4}}, {"skip": ["*.experts.2.*"]}):
        with pytest.raises(OptionError, match=r"experts\.(gate_up|down) is \w+ and \w+ by part: experts of a layer"):
            of(**options)


# ---- head and embedding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", [Int8, Int4, Nf4, Fp8])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_quantized_embedding_are_made_numbers_of_as_they_are_looked_up(tmp_path, quantizer, tied):
    options = {"embedding": True, "skip": ["layers.*"]}
    harness = model(tmp_path, made(quantizer, **options), tie_word_embeddings=tied)
    embed, head = (harness.parts.modules[name] for name in ("embed", "lm_head"))
    ids = torch.tensor([3, 3, 0, 60, 17])
    eye = torch.eye(64)
    held = Int8Weight.apply(embed.scheme, eye).T if quantizer is Fp8 else dequantized(embed.scheme, embed.info)
    torch.testing.assert_close(embed(ids).double(), held.double()[ids], rtol=1e-6, atol=1e-7)
    assert embed(ids).dtype == torch.float32 and not hasattr(embed, "weight")
    if tied:
        assert head.shared is embed.scheme and not head.tensors, "one packed form for both"
        x = torch.randn(4, 64)
        torch.testing.assert_close(head(x), embed.scheme.apply(x), rtol=0, atol=0)
        plain = model(tmp_path / "plain", None, tie_word_embeddings=True).parts
        saved = weight_bytes(plain) - weight_bytes(harness.parts)
        assert saved == embed.info.out_features * 64 * 4 - embed.scheme.bytes
    _, _, hf = tiny_dir(tmp_path / "hf", "llama", **SIZES, tie_word_embeddings=tied)
    plain = logits_of(hf)
    hf.state_dict()["model.embed_tokens.weight"].copy_(held)
    if quantizer is not Fp8:  # which rounds x too
        want = logits_of(hf)
        assert (harness.step({0: PROMPT})[0] - want).abs().max() < 1e-4 < (want - plain).abs().max()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_look_up_rows_of_a_quantized_embedding_and_share_its_head(tmp_path, size):
    """Of 61 tokens the last rank has fewer."""
    path, cfg, _ = tiny_dir(tmp_path, "qwen3", **SIZES, num_key_value_heads=4, tie_word_embeddings=True)

    def harness(group=None):
        options = {"embedding": True, "skip": ["layers.*"]}
        return Harness(path, ARCHS["qwen3"](), cfg, quantizer=made(Int8, **options), group=group)

    want = harness().step({0: PROMPT})[0]
    group = seats(size)
    shares = [harness(seat) for seat in group]
    got = play(group, [partial(one.step, {0: PROMPT}) for one in shares])
    torch.testing.assert_close(got[0][0], want, rtol=1e-5, atol=1e-5)
    assert {share.parts.modules["embed"].scheme.tensors["weight"].dtype for share in shares} == {torch.int8}


def test_a_tied_head_that_was_saved_with_a_weight_of_its_own_is_quantized_by_its_own_rule(tmp_path):
    from minivllm.testing.tiny import read_tensors, write_tensors

    path, cfg, _ = tiny_dir(tmp_path, "llama", **SIZES, tie_word_embeddings=True)
    tensors = read_tensors(path)
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    write_tensors(path, tensors)
    for requested, kind in ((False, Dense), (True, Int8Weight)):
        options = {"embedding": True, "lm_head": requested}
        head = Harness(path, ARCHS["llama"](), cfg, quantizer=made(Int8, **options)).parts.modules["lm_head"]
        assert type(head.own.scheme) is kind and head.shared is None


def test_a_tied_head_and_its_embedding_in_two_forms_are_refused(tmp_path):
    options = {"embedding": True, "lm_head": True, "bits": {"lm_head": "int8"}}
    with pytest.raises(OptionError, match=r"lm_head shares the weight of embed, and they are to be quantized in two"):
        model(tmp_path, made(Int4, **options), tie_word_embeddings=True)
    untied = model(tmp_path / "untied", made(Int4, **options), tie_word_embeddings=False)
    assert type(untied.parts.modules["lm_head"].scheme) is Int8Weight


def test_only_the_token_embedding_is_quantized_not_learned_positions(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, "gpt2", num_attention_heads=4, num_key_value_heads=4)
    parts = Harness(path, GPT2(), cfg, quantizer=made(Int8, embedding=True)).parts
    assert parts.modules["embed"].scheme is not None and parts.modules["positions"].scheme is None


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"lm_head": True, "bits": {"*.v_proj": 4}}])
def test_pocket_does_its_tasks_with_its_embedding_in_8_bits(options):
    from minivllm.pocket.evaluate import Minivllm, evaluate
    from minivllm.pocket.tasks import cases

    requested = [case for task in ("copy", "sums", "json") for case in cases(task, 4)]
    chosen = {"name": "int8", "options": {"embedding": True, **options}}
    with LLM(model="pocket", quantizer=chosen, device="cpu", dtype="float32", num_kvcache_blocks=400) as llm:
        rows = evaluate(Minivllm(llm).generate, requested)
    assert [right for _, _, right in rows] == [1.0] * 4, rows


# ---- bad rules -------------------------------------------------------------------------------------------------------

WRONG = [
    ("int8", {"skip": ["layer.*"]}, "int8: skip=['layer.*'] names no module; names look like 'layers.0.attn.qkv'"),
    ("nf4", {"skip": ["re:("]}, "skip: 're:(': missing ), unterminated subpattern"),
    ("int4", {"bits": {"*.dwn": 8}}, "int4: bits=['*.dwn'] names no module that is quantized"),
    ("int8", {"bits": {"lm_head": 4}}, "(more are with lm_head=true and embedding=true)"),
    ("fp8", {"bits": {"re:[": 8}}, "bits: 're:['"),
    ("int4", {"bits": {"*.down": 3}}, "bits.*.down=3: expected 4, 8, 16"),
    ("int4", {"bits": {"*.down": "int5"}}, "expected 4, 8, 16, 'fp8', "),
    ("int4", {"group_size": 48}, "group_size=48: expected 32, 64 or 128"),
    ("int8", {"skipp": ["*"]}, "unknown option 'quantizer.options.skipp'. Did you mean 'skip'?"),
    ("llm-int8", {"threshold": 0}, "threshold"),
    ("none", {"skip": ["*"]}, "takes no options"),
    ("gptq", {}, "checkpoint: expected none, supports {gptq}"),
]


@pytest.mark.parametrize(("name", "options", "words"), WRONG)
def test_a_bad_rule_is_one_line_and_exit_code_2(name, options, words, capsys):
    given = ["--set", f"quantizer.name={name}"]
    if options:
        given += ["--set", "quantizer.options=" + json.dumps(options).replace('": ', '"=')]
    assert main(["explain", "quantizer", *given, *ON_CPU]) == 2
    reported = capsys.readouterr()
    assert words in reported.err + reported.out and reported.err.count("\n") <= 1


def test_groups_that_do_not_divide_are_refused_as_options(tmp_path, capsys):
    tiny_dir(tmp_path, "llama", intermediate_size=80)
    for options, words in (
        (
            "{name='int4'}",
            "layers.0.mlp.down has 80 inputs here, which group_size=32 does not divide: expected a multiple",
        ),
        ("{name='nf4'}", "which group_size=64 does not divide"),
        ("{name='int8',options={bits={'*.down_proj'=4}}}", "int4: layers.0.mlp.down has 80 inputs"),
        ("{name='int4',options={embedding=true,group_size=128,skip=['layers.*']}}", "int4: embed has 32 inputs"),
    ):
        given = ["--model", str(tmp_path), "--set", f"quantizer={options}", "--set", "skip_tokenizer_init=true"]
        assert main(["explain", "quantizer", *given, *ON_CPU]) == 2
        assert words in capsys.readouterr().err


def test_an_embedding_that_other_code_looks_up_is_refused(tmp_path):
    tiny_dir(tmp_path, "llama", **SIZES)
    chosen = {"name": "int8", "options": {"embedding": True}}
    with pytest.raises(OptionError, match="transformers looks up the tokens of this model; set embedding=false"):
        LLM(model=str(tmp_path), model_impl="transformers", quantizer=chosen, skip_tokenizer_init=True, device="cpu")


def test_a_rule_for_float8_is_refused_on_a_gpu_that_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    m = ModuleInfo("layers.0.mlp.down", "linear", 64, (("", 32),), "bfloat16", "cuda:0")
    for kind in ("fp8", "fp8-weight"):
        with pytest.raises(OptionError, match=r"has no float8 \(compute capability 8\.0, expected 8\.9 or more\)"):
            made(Int8, bits={"*.down": kind}).scheme(m)


def test_what_users_get_wrong_is_an_error_of_plug_ins_and_of_configurations_and_stays_so_across_processes():
    assert issubclass(OptionError, PluginError) and issubclass(OptionError, ConfigError)
    assert OptionError.exit_code == 2 and PluginError.exit_code == 4
    again = error_from("OptionError", "words")
    assert type(again) is OptionError and again.exit_code == 2


def test_rules_are_one_set_of_options_for_all():
    for quantizer in QUANTIZERS:
        assert {"skip", "bits", "lm_head", "embedding"} <= set(quantizer.options_type.model_fields)
    assert isinstance(made(Int8, bits={"*.v": 4}).scheme(info("qkv", parts=(("q", 32), ("v", 32)))), SplitWeight)
    assert WeightOnlyOptions().bits == {}
