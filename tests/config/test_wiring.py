"""From a configuration to targets: each choice with its facts, and the exact words of every refusal."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from minivllm.config import PROCESSORS, EngineConfig, load_config
from minivllm.config.explanation import Explanation
from minivllm.config.kv_groups import group_layers
from minivllm.config.resolve import resolve
from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.scheduler import SchedulerContext
from minivllm.core.wiring import wiring_from_json, wiring_to_json
from minivllm.device.hardware import Device
from minivllm.device.loading.hf_config import find_model, open_checkpoint
from minivllm.errors import ConfigError, ModelError, PluginError
from minivllm.registry import Catalog, build_part

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
CATALOG = Catalog.discover(environ={}, entry_points=SimpleNamespace(groups=()))


def save(path, family="qwen3", **values):
    architecture = f"{family.capitalize()}ForCausalLM"
    FAMILIES[family](**{"architectures": [architecture], "dtype": "float32", **SHAPE, **values}).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("qwen3"))


def wire(model, catalog=CATALOG, **options):
    return resolve(EngineConfig(model=model, device="cpu", **options), catalog)


# ---------------------------------------------------------------- the fold


def test_every_seam_is_filled_in_the_order_of_the_design(model):
    found = wire(model)
    assert [s.kind for s in found.selections] == [
        "tokenizer",
        "executor",
        "model",
        "drafter",
        "quantizer",
        "kvformat",
        *["processor"] * len(PROCESSORS),  # a processor may have a model, whose attention layers count
        "attention",
        "evictor",
        "scheduler",
        "predictor",
        "sampler",
        "strategy",
        "strategy",
        "strategy",
        "grammar",
        "compressor",
    ]
    w = found.wiring
    assert {seam: part.target for seam, part in w.parts.items()} == {
        "model": "minivllm.plugins.model.qwen3:Qwen3",
        "quantizer": "minivllm.plugins.quantizer.none:Unquantized",
        "kvformat": "minivllm.plugins.kvformat.plain:Fp32",
        "attention": "minivllm.plugins.attention.sdpa:Sdpa",
        "sampler": "minivllm.plugins.sampler.default:DefaultSampler",
        "drafter": "minivllm.plugins.drafter.none:NoDrafts",
        "compressor": "minivllm.plugins.compressor.none:NoCompression",
    }
    assert set(found.parts) == set(w.parts) | {"tokenizer", "executor", "evictor", "scheduler", "predictor", "grammar"}
    assert [p.name for p in w.processors] == [f"minivllm/{name}" for name in PROCESSORS]
    assert [p.name for p in found.strategies] == ["minivllm/single", "minivllm/parallel", "minivllm/beam"]
    assert (w.model_dir, w.device, w.dtype, w.block, w.max_model_len) == (
        model,
        "cpu",
        "float32",
        16,
        128,
    )
    assert found.groups == w.cache.groups == ((0, 1, 2),) and found.windows == (None,)
    assert found.hf_config.num_hidden_layers == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_architecture_in_the_file_chooses_the_model(tmp_path, family):
    assert wire(save(tmp_path, family)).parts["model"].name == f"minivllm/{family}"


def test_options_of_the_user_reach_the_wiring(model):
    w = wire(
        model,
        dtype="float32",
        kvcache_block_size=32,
        max_model_len=100,
        max_num_seqs=3,
        seed=7,
        run_ahead=2,
        num_kvcache_blocks=9,
        gpu_memory_utilization=0.5,
        load_format="dummy",
        kv_format="bf16",
        processors=[],
        quantization={"name": "int8", "options": {"skip": ["layers.0.*"]}},
    ).wiring
    assert (
        w.block,
        w.max_model_len,
        w.max_num_seqs,
        w.seed,
        w.steps.run_ahead,
        w.cache.num_kvcache_blocks,
    ) == (32, 100, 3, 7, 2, 9)
    assert (w.cache.gpu_memory_utilization, w.load_format, w.processors) == (0.5, "dummy", ())
    assert w.parts["kvformat"].name == "minivllm/bf16"
    chosen = {"skip": ["layers.0.*"], "bits": {}, "lm_head": False, "embedding": False}
    assert w.parts["quantizer"].options == chosen


def test_the_kv_format_left_open_holds_what_the_model_computes(tmp_path):
    for dtype, name in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")):
        found = wire(save(tmp_path / dtype), dtype=dtype)
        assert found.parts["kvformat"].name == f"minivllm/{name}" and found.facts["kv_format"] == name


def test_a_wiring_survives_json(model):
    w = wire(model, quantization="int8").wiring
    assert wiring_from_json(wiring_to_json(w)) == w


def test_max_model_len_left_open_is_the_models_and_at_most_4096(tmp_path):
    assert wire(save(tmp_path / "a", max_position_embeddings=5000)).wiring.max_model_len == 4096
    assert wire(save(tmp_path / "b", max_position_embeddings=4095)).wiring.max_model_len == 4095


def test_layers_of_one_geometry_share_a_group_and_full_attention_comes_first():
    full, near, far = AttnSpec(4, 2, 8, 8), AttnSpec(4, 2, 8, 8, window=16), AttnSpec(4, 1, 8, 8, window=16)
    assert group_layers([near, full, far, near, full]) == ((1, 4), (0, 3), (2,))


def test_a_window_is_a_feature_that_the_back_end_must_have(tmp_path):
    path = save(tmp_path, "qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)
    found = wire(path)
    selection = next(s for s in found.selections if s.kind == "attention")
    assert selection.request.features == {"window"} and found.groups == ((0,), (1, 2)) and found.windows == (None, 16)


# ---------------------------------------------------------------- explain


def test_explain_tells_the_facts_and_the_choices(model):
    text = wire(model, max_model_len=64).explain()
    assert text.startswith("device         cpu: ")
    for line in (
        "dtype          float32 (the checkpoint's)",
        f"model          {model} (Qwen3ForCausalLM)",
        "max_model_len  64 (asked for)",
        "block          16 (supplied by minivllm/sdpa)",
        "attention -> minivllm/sdpa   (asked: auto)",
        "  for device=cpu, dtype=float32, kv_format=fp32, dim_qk=8, dim_v=8, queries_per_kv=2",
        "  x minivllm/llama         architecture: expected Qwen3ForCausalLM, supports {LlamaForCausalLM}; "
        "model_type: expected qwen3, supports {llama}",
    ):
        assert line in text.splitlines()


def test_processes_share_the_heads_of_the_served_model_and_not_those_of_a_draft_model(tmp_path):
    for name, heads, kv_heads in (("served", 4, 2), ("draft", 2, 1)):
        (tmp_path / name).mkdir()
        save(tmp_path / name, num_attention_heads=heads, num_key_value_heads=kv_heads)
    draft = {"name": "model", "options": {"model": str(tmp_path / "draft")}}
    found = wire(str(tmp_path / "served"), drafter=draft, tensor_parallel_size=4)
    selection = next(s for s in found.selections if s.kind == "attention")
    assert selection.request.facts["queries_per_kv"] == {1, 2}  # a process has one head of four, or both of the draft


def test_explain_of_one_seam_is_its_selection(model):
    found = wire(model)
    first, facts, *others = found.explain("scheduler").splitlines()
    assert (first, facts) == ("scheduler -> minivllm/fcfs   (asked: auto)", "  for anything")
    assert [line.split() for line in others if line.startswith("  >")] == [[">", "minivllm/fcfs", "priority", "10"]]
    assert "  - minivllm/fair           priority 0: suitable, not needed" in others
    assert found.explain("processors").count("asked: ") == len(PROCESSORS)
    with pytest.raises(PluginError, match=r"^No seam is called 'schedular'\. Did you mean 'scheduler'\?"):
        found.explain("schedular")


def test_a_failed_choice_carries_what_was_chosen_before_it(tmp_path):
    with pytest.raises(PluginError) as info:
        wire(save(tmp_path, quantization_config={"quant_method": "gptq"}), batch_invariant=True)
    assert [s.kind for s in info.value.selections] == ["tokenizer", "executor", "model", "drafter", "quantizer"]
    text = Explanation(info.value.selections, info.value.notes, CATALOG).text("quantizer")
    assert text == str(info.value)
    lines = text.splitlines()
    assert lines[:2] == [
        "quantizer -> nothing suitable   (asked: auto)",
        "  for device=cpu, dtype=float32, checkpoint=gptq, features={batch_invariant}",
    ]
    reported = [" ".join(line.split()) for line in lines]
    assert "x minivllm/none checkpoint: expected gptq, supports {none}" in reported
    invariant = "feature 'batch_invariant' not declared (the bits of a row depend neither on the other rows of the step"
    invariant += " nor on its split into chunks)"
    assert f"x minivllm/gptq {invariant}" in reported
    why = f"checkpoint: expected gptq, supports {{none}}; {invariant}"
    assert f"x minivllm/int8 {why}" in reported


# ---------------------------------------------------------------- batch_invariant

GPU = Device("cuda", "a GPU", 90, 1 << 36, "a test")


def test_batch_invariant_is_asked_of_model_quantizer_and_attention_and_closed_by_default(model):
    found = wire(model, batch_invariant=True)
    assert found.wiring.batch_invariant and found.parts["attention"].name == "minivllm/sdpa"
    requested = {s.kind for s in found.selections if "batch_invariant" in s.request.features}
    assert requested == {"model", "quantizer", "attention"}
    assert not any("batch_invariant" in s.request.features for s in wire(model).selections)
    with pytest.raises(PluginError, match=r"'minivllm/int8' does not fit: feature 'batch_invariant' not declared"):
        wire(model, batch_invariant=True, quantizer="int8")


@pytest.mark.parametrize("device, options, message", [
    (replace(GPU, sm=89), {}, "its matrix product needs a GPU of compute capability 9.0 to 11, and a GPU has 8.9"),
    (replace(GPU, sm=120), {}, "its matrix product needs a GPU of compute capability 9.0 to 11, and a GPU has 12.0"),
    (replace(GPU, sm=0), {}, "and a GPU has none; use such a GPU, or device=cpu"),
    (GPU, {"fuse": False}, "batch_invariant=true with fuse=false: torch's products depend on the number of rows"),
    (GPU, {"tensor_parallel_size": 2}, "batch_invariant=true with tensor_parallel_size=2: .* set tensor_parallel"),
])  # fmt: skip
def test_batch_invariant_says_what_of_a_gpu_or_an_option_does_not_fit(model, monkeypatch, device, options, message):
    monkeypatch.setattr("minivllm.config.resolve.find_device", lambda requested: device)
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(model=model, batch_invariant=True, **options), CATALOG)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the mode is refused before: needs triton")
def test_sdpa_is_batch_invariant_on_a_cpu_only(model, monkeypatch):
    monkeypatch.setattr("minivllm.config.resolve.find_device", lambda requested: GPU)
    with pytest.raises(PluginError, match=r"device with batch_invariant: expected cuda, supports {cpu}"):
        resolve(EngineConfig(model=model, batch_invariant=True, attention="sdpa", dtype="float32"), CATALOG)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"max_model_len": 129}, ConfigError,
         "max_model_len=129: the model has max_position_embeddings=128; expected at most that"),
        ({"executor": "local", "tensor_parallel_size": 2}, PluginError,
         "executor 'minivllm/local' does not fit: tensor_parallel_size: expected 2, supports {1}"),
        ({"model_arch": "llama"}, PluginError,
         "model 'minivllm/llama' does not fit: architecture: expected Qwen3ForCausalLM, supports {LlamaForCausalLM}; "
         "model_type: expected qwen3, supports {llama}"),
        ({"processors": ["penalty"]}, PluginError,
         "No processor is called 'penalty'. Did you mean 'penalties'?\n"
         "  Installed: allowed_tokens, bad_words, logit_bias, no_repeat_ngram, "
         "penalties, prompt_penalty, temperature_schedule, thinking_budget\n"
         "  A package adds one with the entry-point group 'minivllm.processor'; an experiment can say 'module:Class'."),
        ({"quantizer": {"name": "int8", "options": {"skp": []}}}, PluginError,
         "Wrong options for minivllm/int8:\n  unknown option 'quantizer.options.skp'. Did you mean 'skip'?"),
        ({"processors": ["penalties", "minivllm/penalties"]}, ConfigError,
         "processors: 'minivllm/penalties' is there twice; remove one of them"),
        ({"processors": [{"name": "penalties", "options": {"a": 1}}]}, PluginError,
         "minivllm/penalties takes no options: processors.0.options has 'a'"),
    ],
)  # fmt: skip
def test_what_cannot_be_wired_is_refused(model, options, error, message):
    with pytest.raises(error) as info:
        wire(model, **options)
    assert str(info.value) == message


def test_a_name_that_the_config_gives_is_refused_with_its_place(model):
    loaded = load_config(sets=["scheduler=fcf"], keywords={"model": model, "device": "cpu"}, environ={})
    with pytest.raises(PluginError, match=r"^--set: No scheduler is called 'fcf'"):
        resolve(loaded.engine, CATALOG, loaded.origins)


def test_what_is_preferred_and_not_installed_is_a_note(model, caplog):
    sets = ["attention.prefer=['acme/flash','sdpa']"]
    loaded = load_config(sets=sets, keywords={"model": model, "device": "cpu"}, environ={})
    found = resolve(loaded.engine, CATALOG, loaded.origins)
    assert ("attention.prefer", "'acme/flash' is not installed, and is skipped") in found.notes
    assert caplog.messages == ["--set: attention.prefer: 'acme/flash' is not installed, and is skipped"]


def write(path, text):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "{dir}: holds no config.json; expected a Hugging Face model directory"),
        ('{"a": 1,\n]', "{dir}/config.json:2:1: broken JSON: Expecting property name enclosed in double quotes"),
        ("[]", "{dir}/config.json: expected a JSON object, got a list"),
        ("{}", '{dir}/config.json: names no architecture; expected "architectures": ["..."]'),
        ('{"architectures": ["FooForCausalLM"], "model_type": "foo", "auto_map": {"AutoConfig": "evil.Evil"}}',
         "{dir}/config.json: no plug-in serves the architecture 'FooForCausalLM', and transformers "),
        (json.dumps({**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "sin"}),
         "{dir}/config.json: hidden_act='sin': expected one of gelu, "),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_read_is_refused(tmp_path, text, message):
    if text is not None:
        write(tmp_path, text)
    with pytest.raises(ModelError) as info:
        wire(str(tmp_path))
    assert str(info.value).startswith(message.replace("{dir}", str(tmp_path)))


def test_a_field_of_the_wrong_type_is_one_line(tmp_path):
    write(
        tmp_path, json.dumps({**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": []})
    )
    with pytest.raises(ModelError) as info:
        wire(str(tmp_path))
    assert str(info.value).startswith(f"{tmp_path}/config.json: ") and "vocab_size" in str(info.value)
    assert "\n" not in str(info.value)


def test_a_model_that_is_nowhere_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for name, message in (
        (f"{tmp_path}/no", f"{tmp_path}/no: no such directory"),
        ("./no", "./no: no such directory"),
        ("a/b/c", "a/b/c: no such directory, and no Hugging Face id, which is OWNER/NAME"),
        ("some/model/", "some/model/: no such directory, and no Hugging Face id, which is OWNER/NAME"),
        ("some/mo--del", "some/mo--del: no such directory, and no Hugging Face model id"),
        (f"{tmp_path}/file", f"{tmp_path}/file: is a file; expected a model directory, or a GGUF file"),
    ):
        with pytest.raises(ModelError) as info:
            find_model(name)
        assert str(info.value) == message


def test_the_facts_of_a_checkpoint_are_read_from_either_spelling(tmp_path):
    text = {"architectures": ["X"], "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "gptq"}}
    write(tmp_path, json.dumps(text))
    found = open_checkpoint(str(tmp_path))
    assert (found.dtype, found.quantization, found.architecture) == ("bfloat16", "gptq", "X")
    write(tmp_path, '{"text_config": {"dtype": "float16"}}')
    assert open_checkpoint(str(tmp_path)).dtype == "float16"


def test_a_quantized_checkpoint_that_nobody_reads_is_refused(tmp_path):
    path = save(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, json.dumps({**raw, "quantization_config": {"quant_method": "hqq", "bits": 4}}))
    with pytest.raises(ModelError, match=r"quant_method='hqq': no quantizer reads it; use awq, "):
        wire(path)


def test_the_config_object_is_that_of_transformers(model):
    assert isinstance(open_checkpoint(model).from_transformers(), Qwen3Config)
    assert open_checkpoint(model).hf_config().hidden_size == SHAPE["hidden_size"]


# ---------------------------------------------------------------- building


def test_a_part_is_built_with_its_options_and_context(model):
    context = SchedulerContext(4, 16, 16)
    made = build_part("scheduler", wire(model).parts["scheduler"], context)
    assert type(made).__name__ == "Fcfs" and made.ctx is context and made.options is None
    quantizer = build_part("quantizer", wire(model, quantization="int8").parts["quantizer"], None)
    assert quantizer.options.skip == []


@pytest.mark.parametrize(
    "target, message",
    [
        ("no_such.module:X", "scheduler 'a/x' could not be imported from 'no_such.module:X': ModuleNotFoundError: "
         "No module named 'no_such'"),
        ("json:JSONDecoder", "scheduler 'a/x': JSONDecoder is not a subclass of "
         "minivllm.core.interfaces.scheduler.SchedulerPolicy"),
    ],
)  # fmt: skip
def test_a_part_that_cannot_be_built_names_the_plugin(target, message):
    with pytest.raises(PluginError) as info:
        build_part("scheduler", Part("a/x", target))
    assert str(info.value) == message


def test_a_target_of_an_experiment_is_wired_where_it_is_allowed(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "from minivllm.plugins.scheduler.fcfs import Fcfs\nclass Mine(Fcfs):\n    'Mine.'\n"
    (tmp_path / "wiring_exp.py").write_text(text)
    part = wire(model, scheduler="wiring_exp:Mine", allow_targets=["wiring_exp"]).parts["scheduler"]
    assert part == Part("local/wiring_exp:Mine", "wiring_exp:Mine", source="target 'wiring_exp:Mine'")
    with pytest.raises(PluginError, match="Add --allow-target wiring_exp if you trust it"):
        wire(model, scheduler="wiring_exp:Mine")
