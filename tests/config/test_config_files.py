"""Configuration files: line numbers of values, YAML's words, families by ``extends``, and required packages."""

from __future__ import annotations

import importlib.metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import __version__
from minivllm.config import load_config
from minivllm.config.files import ConfigFile, read_chain, read_file
from minivllm.config.lines import toml_lines
from minivllm.errors import ConfigError, PluginError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file into an empty working directory.

    The file's name is relative, as users write it.
    """
    monkeypatch.chdir(tmp_path)

    def make(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return make


def refusal(*files, error=ConfigError, **sources):
    with pytest.raises(error) as info:
        load_config(files, environ={}, **sources)
    assert "\n" not in str(info.value)
    return str(info.value)


# ---------------------------------------------------------------- lines


TOML = '''# seed = 0
seed = 1 # seed = 2
"quoted key"."a.b" = """
seed = 3
\\""""
lists = [
  1, # ]
  { x = 1, y = "]}" },
  [2,
   3]]
[scheduler]
options.window = 'q#'
[sampling.extra]
z = 1e3
[[processors]]
name = "a"
[[processors]]
name = "b"
[processors.options]
w = 2
[[processors.options.deep]]
when = 1979-05-27 07:32:00
'''


def test_every_value_of_a_toml_file_has_its_line():
    lines = toml_lines(TOML)
    assert lines == {
        ("lists",): 6,
        ("seed",): 2,
        ("quoted key",): 3,
        ("quoted key", "a.b"): 3,
        ("lists", 0): 7,
        ("lists", 1): 8,
        ("lists", 1, "x"): 8,
        ("lists", 1, "y"): 8,
        ("lists", 2): 9,
        ("lists", 2, 0): 9,
        ("lists", 2, 1): 10,
        ("scheduler",): 11,
        ("scheduler", "options"): 12,
        ("scheduler", "options", "window"): 12,
        ("sampling", "extra"): 13,
        ("sampling", "extra", "z"): 14,
        ("processors",): 15,
        ("processors", 0): 15,
        ("processors", 0, "name"): 16,
        ("processors", 1): 17,
        ("processors", 1, "name"): 18,
        ("processors", 1, "options"): 19,
        ("processors", 1, "options", "w"): 20,
        ("processors", 1, "options", "deep"): 21,
        ("processors", 1, "options", "deep", 0): 21,
        ("processors", 1, "options", "deep", 0, "when"): 22,
    }
    assert toml_lines(TOML.replace("\n", "\r\n")) == lines


def test_the_lines_of_a_yaml_file_count_aliases_where_they_were_written(write):
    name = write("a.yaml", "seed: 1\nscheduler: &s\n  name: x\n  options: {a: 1,\n    b: 2}\nprocessors:\n- *s\n- y\n")
    lines = read_file(name).lines
    assert lines[("scheduler", "options", "b")] == 5 and lines[("processors", 1)] == 8
    assert lines[("processors", 0, "name")] == 3


def test_a_place_without_a_line_has_that_of_what_holds_it():
    file = ConfigFile("x.toml", {}, {("a",): 3})
    assert [file.where(path) for path in [("a",), ("a", "b", 0), ("c",)]] == ["x.toml:3", "x.toml:3", "x.toml"]


leaf = st.one_of(st.integers(-9, 9), st.booleans(), st.text(max_size=5), st.floats(allow_nan=False, width=16))
tree = st.recursive(
    leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner), max_leaves=9
)


@given(st.dictionaries(st.text(max_size=4), tree, max_size=4))
def test_the_lines_are_those_that_were_written(values):
    from minivllm.config.show import toml_key, toml_value

    text = "".join(f"{toml_key(key)} = {toml_value(value)}\n" for key, value in values.items())
    lines = toml_lines(text)
    for number, (key, value) in enumerate(values.items(), 1):
        assert lines[(key,)] == number
        for place in places(value):
            assert lines[(key, *place)] == number


def places(value):
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (key,)
        yield from ((key, *rest) for rest in places(inner))


def test_a_list_of_plugins_keeps_the_line_of_each_option(write):
    name = write("a.toml", "[[processors]]\nname = 'x'\n[[processors]]\nname = 'y'\noptions.k = 1\n")
    assert load_config([name], environ={}).origins == {
        "processors": "a.toml:1",
        "processors.0.name": "a.toml:2",
        "processors.1.name": "a.toml:4",
        "processors.1.options.k": "a.toml:5",
    }
    write("a.toml", "strategies = ['single']\nprocessors = [\n  'x',\n  { nam = 'y' },\n]\n")
    assert refusal(name) == ("a.toml:4: unknown option 'processors.1.nam'. Did you mean 'name'?")


def test_each_of_several_faults_has_its_own_place(write):
    write("a.toml", "seed = 'x'\n")
    write("b.yaml", "\nmax_num_seqs: 0\n")
    assert refusal("a.toml", "b.yaml", sets=["dtype=auo"]) == (
        "--set: dtype='auo': expected 'auto', 'float32', 'bfloat16' or 'float16'. Did you mean 'auto'?; "
        "a.toml:1: seed='x': expected a whole number; b.yaml:2: max_num_seqs=0: expected a whole number from 1"
    )


# ---------------------------------------------------------------- YAML


def test_yaml_has_the_words_and_numbers_of_yaml_1_2(write):
    text = "graph: off\nmodel: no\nseed: 010\ngpu_memory_utilization: 5e-1\ntokenizer: 2020-01-01\nfuse: True\n"
    text += "max_model_len: ~\nmax_num_seqs: 0x10\nrun_ahead:\nscheduler: {name: '1', options: {t: 12:30}}\n"
    name = write("a.yaml", text)
    config = load_config([name], environ={}).engine
    assert (config.graph, config.model, config.seed, config.gpu_memory_utilization) == ("off", "no", 10, 0.5)
    assert (config.tokenizer, config.fuse, config.max_model_len, config.max_num_seqs) == ("2020-01-01", True, None, 16)
    assert config.run_ahead is None and config.scheduler.options == {"t": "12:30"}
    write("a.yaml", "fuse: yes")
    assert refusal(name) == "a.yaml:1: fuse='yes': expected true or false"


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: &x\n  b: *x\n", "a.yaml:1: an alias (*NAME) is inside the value that it stands for; remove the alias"),
        ("a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)),
         "a.yaml: its aliases expand to more than 1000000 values; write fewer values"),
        ("seed: 1\n---\nseed: 2\n", "a.yaml:2:1: expected a single document in the stream, but found another document"),
        ("x: " + "[" * 3000, "a.yaml: lists or tables are nested deeper than Python can parse; use fewer levels"),
        ("scheduler: {name: a, options: {1: 2}}", "a.yaml:1: the key 1 is no text (int): put it in quotes"),
        ("base: &b {name: x}\nscheduler:\n  <<: *b\n  name: y\n  name: z\n",
         "a.yaml:5:3: the key 'name' is there twice"),
    ],
)  # fmt: skip
def test_a_trap_in_a_yaml_file_is_told(write, text, message):
    assert refusal(write("a.yaml", text)) == message


def test_a_table_of_comments_only_says_nothing(write):
    loaded = load_config([write("a.yaml", "sampling:\n  # top_k: 3\nrun:\nscheduler:\n")], environ={})
    assert loaded.sampling == {} and loaded.engine.scheduler.name == "auto"


def test_a_merge_key_of_yaml_is_overridden_by_what_stands_beside_it(write):
    text = "scheduler: &s\n  name: x\n  options: {a: 1}\nevictor:\n  <<: *s\n  name: y\n"
    config = load_config([write("a.yaml", text)], environ={}).engine
    assert (config.evictor.name, config.evictor.options) == ("y", {"a": 1})


# ---------------------------------------------------------------- extends


def test_a_file_lies_over_the_one_that_it_extends_and_origins_name_both(write):
    write("base/gpu.yaml", "max_num_seqs: 64\nseed: 1\nmodel: ./m\n")
    write("base/all.toml", "extends = 'gpu.yaml'\nseed = 2\ndtype = 'float32'\n[sampling]\ntop_k = 5\ntop_p = 0.5\n")
    name = write("exp/a.toml", "extends = '../base/all.toml'\ndtype = 'bfloat16'\n[sampling]\ntop_k = 7\n")
    loaded = load_config([name], environ={})
    assert loaded.files == ("base/gpu.yaml", "base/all.toml", "exp/a.toml")
    assert (loaded.engine.max_num_seqs, loaded.engine.seed, loaded.engine.dtype) == (64, 2, "bfloat16")
    assert loaded.sampling == {"top_k": 7, "top_p": 0.5}
    assert loaded.engine.model.endswith("base/m")
    assert loaded.origins == {
        "max_num_seqs": "base/gpu.yaml:1",
        "model": "base/gpu.yaml:3",
        "seed": "base/all.toml:2",
        "dtype": "exp/a.toml:2",
        "sampling.top_p": "base/all.toml:6",
        "sampling.top_k": "exp/a.toml:4",
    }


def test_of_several_bases_the_later_wins_and_one_may_come_by_two_ways(write):
    write("root.toml", "seed = 1\nmax_num_seqs = 1\n")
    write("a.toml", "extends = 'root.toml'\nseed = 2\n")
    write("b.toml", "extends = 'root.toml'\nmax_num_seqs = 3\n")
    config = load_config([write("c.yaml", "extends: [a.toml, b.toml]\n")], environ={}).engine
    assert (config.seed, config.max_num_seqs) == (1, 3)


def test_another_plugin_in_a_family_drops_the_options_of_the_bases_and_says_where(write):
    write("base.toml", "[scheduler]\nname = 'fair'\noptions = { window = 4 }\n[attention]\nprefer = ['x', 'y']\n")
    name = write("a.toml", "extends = 'base.toml'\nscheduler = 'fcfs'\n[attention]\nname = 'sdpa'\n")
    loaded = load_config([name], environ={})
    assert loaded.engine.scheduler.options == {} and loaded.engine.attention.prefer == []
    assert loaded.notes == (
        "a.toml:2: scheduler is now 'fcfs'; options of 'fair' dropped",
        "a.toml:4: attention is now 'sdpa'; prefer of 'auto' dropped",
    )
    assert set(loaded.origins) == {"scheduler.name", "attention.name"}


def test_an_empty_table_takes_nothing_away_but_empty_options_do(write):
    write("base.toml", "[scheduler]\nname = 'fair'\noptions = { window = 4 }\n[sampling]\ntop_k = 3\n")
    name = write("a.toml", "extends = 'base.toml'\n[scheduler]\n[sampling]\n")
    loaded = load_config([name], environ={})
    assert loaded.engine.scheduler.options == {"window": 4} and loaded.sampling == {"top_k": 3}
    write("a.toml", "extends = 'base.toml'\n[scheduler]\noptions = {}\n")
    assert load_config([name], environ={}).engine.scheduler.options == {}


@pytest.mark.parametrize(
    "files, message",
    [
        ({"a.toml": "extends = 'a.toml'"}, "a.toml: a file cannot extend itself: a.toml -> a.toml"),
        ({"a.toml": "extends = './d/b.yaml'", "d/b.yaml": "extends: ../c.toml", "c.toml": "extends = 'd/b.yaml'"},
         "d/b.yaml: a file cannot extend itself: b.yaml -> c.toml -> b.yaml"),
        ({"a.toml": "seed = 1\nextends = 'no.toml'"}, "a.toml:2: extends 'no.toml': the file no.toml does not exist"),
        ({"a.toml": "extends = 3"}, "a.toml:1: extends: expected a file, or a list of files"),
        ({"a.toml": "extends = ['b.toml', 3]", "b.toml": ""}, "a.toml:1: extends: expected a file, or a list of files"),
        ({"a.toml": "extends = 'b.toml'", "b.toml": "config_version = 2"},
         "b.toml:1: config_version=2: this minivllm reads version 1; it was written for a newer one: upgrade minivllm"),
        ({"a.toml": "extends = 'b.toml'", "b.toml": "[schedular]\nname = 'x'"},
         "b.toml:1: unknown option 'schedular'. Did you mean 'scheduler'?"),
        ({"a.toml": "extends = 'b.toml'", "b.toml": "allow_targets = ['x']"},
         "b.toml:1: allow_targets may come from the command line (--allow-target) or from Python only: a file that "
         "names code must not allow it"),
    ],
)  # fmt: skip
def test_a_fault_in_a_family_is_told_with_its_place(write, files, message):
    for name, text in files.items():
        write(name, text)
    assert refusal("a.toml") == message


def test_extends_belongs_into_a_file(write):
    reported = "extends is for files only; here, pass both files with --config"
    assert refusal(sets=["extends=a.toml"]) == f"--set: {reported}"
    assert refusal(keywords={"extends": "a.toml"}) == reported
    assert len(read_chain(write("a.toml", "extends = []\n"))) == 1


# ---------------------------------------------------------------- requires


def test_what_is_required_and_there_is_accepted(write):
    numpy = importlib.metadata.version("numpy")
    names = ["numpy>=1", f"minivllm=={__version__}", "absent; python_version < '3'", f"NumPy=={numpy}"]
    text = f"[requires]\nplugins = {names}"
    loaded = load_config([write("a.toml", text)], environ={})
    assert loaded.requires[0] == "numpy>=1" and loaded.origins["requires.plugins.0"] == "a.toml:2"


def test_what_is_missing_is_told_at_once_with_the_command(write):
    numpy = importlib.metadata.version("numpy")
    write("base.toml", "[requires]\nplugins = ['acme-attn>=1.2']\n")
    name = write(
        "a.toml", "extends = 'base.toml'\nscheduler = 'acme/x'\n[requires]\nplugins = ['numpy>=999', 'numpy']\n"
    )
    assert refusal(name, error=PluginError) == (
        "base.toml:2: requires 'acme-attn>=1.2', which is not installed; "
        f"a.toml:4: requires 'numpy>=999', and numpy {numpy} is installed. "
        "Do: pip install 'acme-attn>=1.2' 'numpy>=999'"
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("plugins = ['acme >> 1']", "a.toml:2: requires.plugins: 'acme >> 1': Expected semicolon (after name with no "
         "version specifier) or end; expected a package, as in 'acme-attn>=1.2'"),
        ("plugins = ['x @ file:///x']", "a.toml:2: requires.plugins: 'x @ file:///x': expected a package and its "
         "versions, without a URL"),
        ("plugins = 'acme'", "a.toml:2: requires.plugins='acme': expected a list (each: text)"),
        ("plugins = [3]", "a.toml:2: requires.plugins.0=3: expected text"),
        ("plugin = []", "a.toml:2: unknown option 'requires.plugin'. Did you mean 'plugins'?"),
    ],
)  # fmt: skip
def test_a_requirement_that_cannot_be_read_is_refused(write, text, message):
    assert refusal(write("a.toml", f"[requires]\n{text}\n")) == message
