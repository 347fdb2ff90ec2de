"""Configuration: layers, origins, and the exact text of every refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import PROCESSORS, SEAMS, EngineConfig, load_config
from minivllm.config.files import parse_value
from minivllm.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def make(text, name="exp.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return make


def refusal(**sources):
    sources.setdefault("environ", {})
    with pytest.raises(ConfigError) as info:
        load_config(**sources)
    assert "\n" not in str(info.value)
    return str(info.value)


# ---------------------------------------------------------------- layers


def test_the_defaults_are_those_of_the_design():
    config = EngineConfig()
    wanted = {
        "model": "pocket", "max_num_seqs": 512, "max_num_batched_tokens": 16384, "max_model_len": None, "seed": 0,
        "gpu_memory_utilization": 0.9, "num_kvcache_blocks": -1, "kvcache_block_size": None, "load_format": "auto",
        "dtype": "auto", "device": "auto", "enable_prefix_caching": True, "partial_prefix_hits": True,
        "tensor_parallel_size": 1,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert [c.name for c in config.processors] == list(PROCESSORS)
    assert [c.name for c in config.strategies] == ["single", "parallel", "beam"]
    assert {getattr(config, seam).name for seam in SEAMS} == {"auto"}


def test_each_layer_wins_over_the_one_before_and_its_origin_is_kept(write):
    first = write(
        "seed = 1\nmax_num_seqs = 1\ndtype = 'float32'\nmax_model_len = 1\nmodel = 'a/b'\n[scheduler]\nname='fcfs'"
    )
    second = write("max_num_seqs: 2\nmax_model_len: 2\ndtype: bfloat16\nmodel: c/d\n", "b.yaml")
    environ = {"MINIVLLM__MAX_NUM_SEQS": "3", "MINIVLLM__DTYPE": "float16", "MINIVLLM__MODEL": "e/f", "PATH": "x"}
    sets, keywords = ["max_num_seqs=4", "model=g/h"], {"max_num_seqs": 5}
    loaded = load_config([first, second], sets, keywords, environ)
    config = loaded.engine
    assert (config.seed, config.max_model_len, config.dtype) == (1, 2, "float16")
    assert (config.model, config.max_num_seqs) == ("g/h", 5)
    assert loaded.origins == {
        "seed": f"{first}:1",
        "max_model_len": f"{second}:2",
        "dtype": "MINIVLLM__DTYPE",
        "model": "--set",
        "max_num_seqs": "keyword",
        "scheduler.name": f"{first}:7",
    }


def test_a_seam_takes_a_name_or_a_table_from_every_layer(write):
    path = write("attention = 'sdpa'\n[scheduler]\nname = 'acme/fair'\noptions = {window = 4, weights = {a = 1}}")
    environ = {"MINIVLLM__EVICTOR": "lru", "MINIVLLM__SCHEDULER__OPTIONS__WINDOW": "5"}
    sets = ["quantization=int8", "scheduler.options.weights.b=2", 'sampler={name="x", options={y=[1]}}']
    config = load_config([path], sets, {"kv_cache_dtype": "bf16", "executor": None}, environ).engine
    assert (config.attention.name, config.evictor.name, config.quantizer.name) == ("sdpa", "lru", "int8")
    assert config.kv_format.name == "bf16" and config.executor.name == "auto"
    assert config.scheduler.options == {"window": 5, "weights": {"a": 1, "b": 2}}
    assert config.sampler.options == {"y": [1]}


def test_another_name_drops_the_options_of_the_old_one_and_says_so(write):
    path = write("[scheduler]\nname = 'fair'\noptions = {window = 4}")
    loaded = load_config([path], ["scheduler.options.cap=1", "scheduler=fcfs"], environ={})
    assert loaded.engine.scheduler.options == {"cap": 1}
    assert loaded.notes == ("--set: scheduler is now 'fcfs'; options of 'fair' dropped",)
    assert loaded.origins == {"scheduler.name": "--set", "scheduler.options.cap": "--set"}
    same = load_config([path], ["scheduler=fair"], environ={})
    assert same.engine.scheduler.options == {"window": 4} and not same.notes


def test_paths_in_a_file_are_relative_to_it(write, tmp_path):
    (tmp_path / "models").mkdir()
    path = write("model = 'models'\ntokenizer = './t'\n[run]\nprompts_file = 'p.txt'\noutput = '../o.jsonl'")
    loaded = load_config([path], environ={})
    assert loaded.engine.model == str(tmp_path / "models") and loaded.engine.tokenizer == str(tmp_path / "t")
    assert loaded.run.prompts_file == str(tmp_path / "p.txt")
    assert loaded.run.output == str(tmp_path.parent / "o.jsonl")
    (tmp_path / "pocket").mkdir()
    for name in ("pocket", "Qwen/Qwen3-0.6B"):
        assert load_config([write(f"model = '{name}'")], environ={}).engine.model == name


def test_sampling_and_run_tables_are_read(write):
    path = write("[sampling]\ntemperature = 0\nlogit_bias = {5 = 1.5}\n[run]\nprompts = ['a', 'b']\nchat = true")
    loaded = load_config([path], ["sampling.max_tokens=3"], environ={})
    assert loaded.sampling == {"temperature": 0, "logit_bias": {5: 1.5}, "max_tokens": 3}
    assert loaded.run.prompts == ["a", "b"] and loaded.run.chat


def test_an_engine_config_survives_a_round_trip():
    config = EngineConfig(quantization="int8", scheduler={"name": "x", "options": {"a": 1}}, processors=["penalties"])
    assert EngineConfig(**config.model_dump()) == config


def test_other_spellings_of_dtypes_are_welcome():
    import torch

    for spelling in (torch.bfloat16, "bf16", "torch.bfloat16", "bfloat16"):
        assert EngineConfig(dtype=spelling).dtype == "bfloat16"


@given(st.one_of(st.integers(), st.booleans(), st.text("abcXYZ /.-_", min_size=1).filter(lambda s: s == s.strip())))
def test_a_value_on_the_command_line_means_itself(value):
    text = str(value).lower() if isinstance(value, bool) else str(value)
    again = parse_value(text)
    if not isinstance(value, str):
        if abs(int(value)) < 2**63:
            assert again == value and type(again) is type(value)
    elif again != value:
        assert isinstance(again, (int, float)) and float(value.replace("_", "")) == again


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "text, name, message",
    [
        ("a = [1,\nb", "x.toml", "{path}:2:1: Invalid value"),
        ("seed = 1\nseed = 2\n", "x.toml", "{path}:2:9: the key of this value is there twice"),
        ("seed: 1\nseed: 2\n", "x.yaml", "{path}:2:1: the key 'seed' is there twice"),
        ("scheduler:\n  name: a\n  name: b\n", "x.yml", "{path}:3:3: the key 'name' is there twice"),
        ("sampling:\n  logit_bias: {5: 1, 0x5: 2}\n", "x.yaml", "{path}:2:22: the key '0x5' is there twice"),
        ("seed: [1\n", "x.yaml", "{path}:2:1: expected ',' or ']', but got '<stream end>'"),
        ("a: !!python/object/apply:os.system [x]", "x.yaml", "{path}:1:4: could not determine a constructor for the "
         "tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("- 1\n", "x.yaml", "{path}: expected a table of options at the top, got a list"),
        ("1: 2\n", "x.yaml", "{path}:1: the key 1 is no text (int): put it in quotes"),
        (b"seed = '\xff'", "x.toml", "{path}: not UTF-8 (byte 8); save it as UTF-8"),
        ("{}", "x.ini", "{path}: expected a file that ends in .toml, .yaml, .yml or .json"),
        ("max_nums_seqs = 1", "x.toml", "{path}:1: unknown option 'max_nums_seqs'. Did you mean 'max_num_seqs'?"),
        ("model = ''", "x.toml", "{path}:1: model='': expected text that is not empty"),
        ("attention = {prefer = ['sdpa', 'auto']}", "x.toml",
         "{path}:1: attention: prefer: expected names of plug-ins, not 'auto'"),
        ("max_num_seqs = 'many'", "x.toml", "{path}:1: max_num_seqs='many': expected a whole number from 1"),
        ("max_num_seqs = true", "x.toml", "{path}:1: max_num_seqs=True: expected a whole number from 1"),
        ("[scheduler]\nnam = 'x'", "x.toml", "{path}:2: unknown option 'scheduler.nam'. Did you mean 'name'?"),
        ("[sampling]\ntemprature = 1", "x.toml",
         "{path}:2: sampling: unknown sampling parameter 'temprature'. Did you mean 'temperature'?"),
        ("[sampling]\ntop_p = 7", "x.toml", "{path}:2: sampling: top_p=7: expected a number in (0, 1]"),
        ("[sampling]\nlogit_bias = {a = 1}", "x.toml",
         "{path}:2: sampling: logit_bias={'a': 1}: expected a table with token ids as keys"),
        ("[run]\npromts = ['x']", "x.toml", "{path}:2: unknown option 'run.promts'. Did you mean 'prompts'?"),
        ("[sampling]\nlogit_bias = [1]", "x.toml",
         "{path}:2: sampling: logit_bias=[1]: expected a table with token ids as keys"),
        ("processors = 'penalties'", "x.toml",
         "{path}:1: processors: 'penalties' is not a list: expected names, or tables with name and options"),
        ("processors = ['x', 3]", "x.toml",
         "{path}:1: processors: 3 is not a plug-in: expected a name, or a table with name and options"),
        ("attention: [sdpa]", "x.yaml",
         "{path}:1: attention: ['sdpa'] is not a plug-in: expected a name, or a table with name and options"),
        ("seed: {}", "x.yaml", "{path}:1: seed is a table: expected a whole number"),
        ("processors: {a: 1}", "x.yaml", "{path}:1: processors.a: 'processors' is a list: set the whole list"),
        ("config_version: true", "x.yaml", "{path}:1: config_version=True: this minivllm reads version 1; expected 1"),
        ("run = 3", "x.toml", "{path}:1: run=3: expected a table"),
        ("config_version = 2", "x.toml", "{path}:1: config_version=2: this minivllm reads version 1; it was "
         "written for a newer one: upgrade minivllm"),
        ("allow_targets = ['x']", "x.toml", "{path}:1: allow_targets may come from the command line (--allow-target) "
         "or from Python only: a file that names code must not allow it"),
        ("quantization = 'a'\nquantizer = 'b'", "x.toml",
         "{path}:2: quantizer is given twice, as 'quantization' and as 'quantizer'; remove one of them"),
        ("[scheduler]\noptions = {a = 1}", "x.toml",
         "{path}:2: scheduler: options without name: set name to the plug-in that the options are for"),
        ("[scheduler]\nname = 'x'\nprefer = ['y']", "x.toml",
         "{path}:2: scheduler: prefer is only for name = 'auto', and the name is 'x'"),
    ],
)  # fmt: skip
def test_a_fault_in_a_file_is_told_with_its_place(write, text, name, message):
    path = write(text, name)
    reported = refusal(files=[path])
    # the column is the parser's business
    if message.endswith((":1: Invalid value", "the key of this value is there twice")):
        place, _, what = message.rpartition(": ")
        assert reported.startswith(place.replace("{path}", path).rpartition(":")[0]) and reported.endswith(what)
    else:
        assert reported == message.replace("{path}", path)


def test_a_missing_file_is_told(tmp_path):
    assert refusal(files=[tmp_path / "no.toml"]) == f"{tmp_path}/no.toml: no such file"
    (tmp_path / "dir.toml").mkdir()
    assert refusal(files=[tmp_path / "dir.toml"]) == f"{tmp_path}/dir.toml: is a directory; expected a regular file"


@pytest.mark.parametrize(
    "sources, message",
    [
        ({"sets": ["schedular=fcfs"]}, "--set: unknown option 'schedular'. Did you mean 'scheduler'?"),
        ({"sets": ["seed"]}, "--set 'seed': expected key=value, for example --set scheduler.name=fcfs"),
        ({"sets": ["seed.x=1"]}, "--set: seed.x: 'seed' is a value, not a table: expected seed = VALUE"),
        ({"sets": ["max_num_seqs=0"]}, "--set: max_num_seqs=0: expected a whole number from 1"),
        ({"sets": ["scheduler.options.a=1", "scheduler.options.a.b=1"]},
         "--set: scheduler.options.a.b: scheduler.options.a is 1 from --set, not a table; remove one of the two"),
        ({"environ": {"MINIVLLM__SEDE": "1"}}, "MINIVLLM__SEDE: unknown option 'sede'. Did you mean 'seed'?"),
        ({"environ": {"MINIVLLM__SEED": "x"}}, "MINIVLLM__SEED: seed='x': expected a whole number"),
        ({"environ": {"MINIVLLM__QUANTIZATION": "int8", "MINIVLLM__QUANTIZER": "none"}},
         "quantizer is given twice, as MINIVLLM__QUANTIZATION and as MINIVLLM__QUANTIZER; unset one of them"),
        ({"environ": {"MINIVLLM__SEED": "1", "MINIVLLM__seed": "2"}},
         "seed is given twice, as MINIVLLM__SEED and as MINIVLLM__seed; unset one of them"),
        ({"environ": {"MINIVLLM__ALLOW_TARGETS": "['x']"}}, "MINIVLLM__ALLOW_TARGETS: allow_targets may come from the "
         "command line (--allow-target) or from Python only: a file that names code must not allow it"),
        ({"keywords": {"max_seqs": 1}}, "unknown option 'max_seqs'. Did you mean 'max_num_seqs'?"),
        ({"keywords": {"dtype": "float8"}},
         "dtype='float8': expected 'auto', 'float32', 'bfloat16' or 'float16'. Did you mean 'float32'?"),
        ({"keywords": {"processors": ["a", "a"]}}, "processors: 'a' is there twice"),
        ({"keywords": {"processors": ["auto"]}},
         "processors: each needs a name; 'auto' is for seams that take one plug-in"),
        ({"keywords": {"strategies": []}}, "strategies: expected at least one"),
        ({"keywords": {"num_kvcache_blocks": 0}},
         "num_kvcache_blocks=0: expected -1 (as many as fit) or a positive number"),
        ({"keywords": {"max_num_batched_tokens": 100}},
         "max_num_batched_tokens=100 is less than max_num_seqs=512: a decode step would not fit; raise the former or "
         "lower the latter"),
    ],
)  # fmt: skip
def test_a_fault_elsewhere_is_told_with_its_source(sources, message):
    assert refusal(**sources) == message


def test_a_wrong_keyword_of_the_class_is_refused_in_the_same_words():
    with pytest.raises(ConfigError) as info:
        EngineConfig(max_seqs=1)
    assert str(info.value) == "unknown option 'max_seqs'. Did you mean 'max_num_seqs'?"
    with pytest.raises(ConfigError, match="quantizer is given twice, as 'quantizer' and as 'quantization'"):
        EngineConfig(quantizer="x", quantization="y")
