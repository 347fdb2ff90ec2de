"""``config show`` and ``schema``: their output is true, can be read again, and marks errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_helpers import discover, point, write_package

import minivllm
from minivllm import __version__
from minivllm.cli import main
from minivllm.config import EngineConfig, load_config
from minivllm.config.files import read_file
from minivllm.config.other_names import VARIABLES
from minivllm.config.schema import config_schema
from minivllm.config.show import leaves, to_toml
from minivllm.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
package = pytest.fixture(write_package)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reported(capsys, *args):
    code = main(list(args))
    return (code, *capsys.readouterr())


# ---------------------------------------------------------------- show


BASE = "seed = 7\n[scheduler]\nname = 'acme/quota'\noptions = { window = 4, weights = { a = 1.5 } }\n"
CHILD = """extends: base.toml
processors:
  - penalties
  - {name: x, options: {k: [1, {y: ä"}]}}
sampling: {stop: ["\\n", "\\x7f"], logit_bias: {5: 1}}
run: {prompts: [a, b]}
"""


def test_what_is_shown_can_be_read_again_and_means_the_same(here, capsys):
    (here / "base.toml").write_text(BASE)
    (here / "a.yaml").write_text(CHILD, encoding="utf-8")
    for flags in ([], ["--origin"]):
        code, out, err = reported(capsys, "config", "show", "a.yaml", "--set", "strategies=['single']", *flags)
        assert (code, err) == (0, "")
        (here / "again.toml").write_text(out, encoding="utf-8")
        first, again = load_config(["a.yaml"], ["strategies=['single']"]), load_config(["again.toml"])
        assert (again.engine, again.run, again.sampling) == (first.engine, first.run, first.sampling)


def test_each_value_is_shown_with_its_origin_and_a_plugin_with_its_version(here, capsys):
    (here / "base.toml").write_text(BASE)
    (here / "a.yaml").write_text(CHILD)
    _, out, _ = reported(capsys, "config", "show", "a.yaml", "--origin", "--set", "evictor=lru", "--model", "pocket")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "# base.toml",
        "# a.yaml",
        'model = "pocket" # command line',
        "seed = 7 # base.toml:1",
        "name = \"acme/quota\" # base.toml:3, No scheduler is called 'acme/quota'",
        "options.window = 4 # base.toml:4",
        "options.weights.a = 1.5 # base.toml:4",
        f'name = "lru" # --set, minivllm {__version__}',
        f'name = "penalties" # a.yaml:3, minivllm {__version__}',
        'options.k = [1, { y = "ä\\"" }] # a.yaml:4',
        "fuse = true # default",
        "# max_model_len: not set # default",
        f'name = "single" # default, minivllm {__version__}',
        'stop = ["\\n", "\\u007f"] # a.yaml:5',
    ):
        assert line in lines, (line, out)


def test_as_json_there_are_plain_values_or_an_object_for_each_option(here, capsys):
    (here / "base.toml").write_text(BASE)
    shown = json.loads(reported(capsys, "config", "show", "--config", "base.toml", "--format", "json")[1])
    assert (
        shown["seed"] == 7 and shown["scheduler"]["options"]["weights"] == {"a": 1.5} and shown["max_model_len"] is None
    )
    args = ("--config", "base.toml", "--format", "json", "--origin", "--set", "attention=sdpa")
    rows = json.loads(reported(capsys, "config", "show", *args)[1])
    assert rows["attention.name"] == {
        "value": "sdpa",
        "origin": "--set",
        "plugin": {"dist": "minivllm", "version": __version__},
    }
    assert rows["scheduler.name"]["plugin"] == {"missing": "No scheduler is called 'acme/quota'"}
    assert rows["seed"] == {"value": 7, "origin": "base.toml:1"} and rows["dtype"]["origin"] == "default"


def test_every_option_is_shown_once(here):
    shown = tomllib.loads(to_toml(leaves(load_config(environ={}))))
    unset = {name for name, value in EngineConfig() if value is None} | {"allow_targets"}
    assert set(EngineConfig.model_fields) - unset <= set(shown) <= {*EngineConfig.model_fields, "run", "sampling"}


def test_what_no_file_may_hold_is_shown_as_a_comment(here, capsys):
    loaded = load_config(
        keywords={"allow_targets": ["x"], "sampling": {"allowed_tokens_fn": print}, "max_model_len": None}, environ={}
    )
    text = to_toml(leaves(loaded))
    assert '# allow_targets = ["x"] (never from a file)' in text and "# allowed_tokens_fn = <built-in" in text
    assert "allow_targets" not in tomllib.loads(text)


def test_a_variable_with_one_underscore_is_told():
    loaded = load_config(environ={"MINIVLLM_SEED": "3", "MINIVLLM_PLUGINS": ""})
    assert loaded.notes == ("MINIVLLM_SEED is not read: write two underscores, MINIVLLM__SEED",)
    assert loaded.engine.seed == 0


def test_a_variable_with_nearly_the_name_of_one_is_told_and_others_are_not():
    loaded = load_config(environ={"MINIVLLM_NATVE": "0", "MINIVLLM_STRICT_PLUGIN": "1", "MINIVLLM_OF_MY_OWN": "1"})
    assert loaded.notes == (
        "MINIVLLM_NATVE is not read. Did you mean 'MINIVLLM_NATIVE'?",
        "MINIVLLM_STRICT_PLUGIN is not read. Did you mean 'MINIVLLM_STRICT_PLUGINS'?",
    )


def test_every_variable_that_the_package_reads_is_known():
    texts = (path.read_text() for path in Path(minivllm.__file__).parent.rglob("*.py"))
    found = {name for text in texts for name in re.findall(r"MINIVLLM_[A-Z]+(?:_[A-Z]+)*", text)}
    assert {name for name in found if not name.startswith("MINIVLLM_TEST_")} == set(VARIABLES)


def test_in_python_what_the_layers_say_is_a_warning(here):
    from minivllm.frontend.front_door import load

    (here / "base.toml").write_text(BASE)
    (here / "b.toml").write_text("max_num_seqs = 3")
    with pytest.warns(UserWarning, match=r"^scheduler is now 'fcfs'; options of 'acme/quota' dropped$"):
        loaded = load(["base.toml", "b.toml"], {"scheduler": "fcfs"})
    assert loaded.engine.max_num_seqs == 3 and loaded.files == ("base.toml", "b.toml")


@pytest.mark.parametrize("door", ["LLM", "AsyncLLM"])
def test_the_warning_names_the_line_that_made_the_front_door(here, door):
    import minivllm

    (here / "base.toml").write_text(BASE)
    with (
        pytest.warns(UserWarning, match="options of 'acme/quota' dropped") as seen,
        pytest.raises(minivllm.MinivllmError, match="nowhere"),
    ):
        getattr(minivllm, door)("./nowhere", config="base.toml", scheduler="fcfs")
    assert seen[0].filename == __file__


words = st.text("abAZ09_-.\"'\\ \n\t#=[]{}ä\x7f\x00", max_size=6)
value = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), words),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(words.filter(bool), value, max_size=4))
def test_any_options_survive_being_written_and_read(options):
    first = load_config(keywords={"scheduler": {"name": "x", "options": options}}, environ={})
    again = tomllib.loads(to_toml(leaves(first)))
    assert again["scheduler"].get("options", {}) == first.engine.scheduler.options


# ---------------------------------------------------------------- schema


OPTIONS = """
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
from minivllm.registration.spec import *
class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    depth: int = Field(1, ge=1, description="how deep")
class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    splits: int = Field(1, le=64, description="parts")
    mode: Literal["fast", "exact"] = "fast"
    inner: Inner = Inner()
class Needed(BaseModel):
    path: str
class Odd(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    thing: range
S = Spec(impl="acme:Flash", api=(1, 0), summary="fast", limits=ANY, options="acme_spec:Options")
T = Spec(impl="acme:Two", api=(1, 0), summary="needs a path", limits=ANY, options="acme_spec:Needed")
U = Spec(impl="acme:Three", api=(1, 0), summary="odd", limits=ANY, options="acme_spec:Odd")
V = Spec(impl="acme:Four", api=(1, 0), summary="no model", limits=ANY, options="acme_spec:ANY")
"""


@pytest.fixture
def schema(package):
    package("acme_spec", OPTIONS)
    points = [
        point("acme", name, f"acme_spec:{target}")
        for name, target in (("flash", "S"), ("pathed", "T"), ("odd", "U"), ("four", "V"), ("gone", "X"))
    ]
    points += [
        point("acme", "both", "acme_spec:S"),
        point("zz", "both", "acme_spec:S"),
        point("zz", "sdpa", "acme_spec:S"),
    ]
    return json.loads(json.dumps(config_schema(discover(*points))))


@pytest.fixture
def complaints(schema):
    """Return a function from values to an editor's marks: dotted places with their messages."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)

    def walk(error):
        inner = [leaf for part in error.context for leaf in walk(part)]
        return inner or [(".".join(map(str, error.absolute_path)), error.message)]

    return lambda values: [place for error in validator.iter_errors(values) for place in walk(error)]


@pytest.mark.parametrize(
    "text",
    [
        "", "config_version = 1\nextends = 'base.toml'\nseed = 1\n", "extends = ['a.toml', 'b.yaml']",
        "attention = 'sdpa'\nscheduler = 'my.module:Class'\n", "quantization = 'int8'\nkv_cache_dtype = 'bf16'",
        "attention = 'flash'", "attention = 'acme/flash'", "attention = 'zz/both'", "attention = 'zz/sdpa'",
        "[attention]\nname = 'acme/flash'\noptions = {splits = 4, mode = 'exact', inner = {depth = 2}}",
        "[attention]\nname = 'auto'\nprefer = ['absent/x', 'sdpa', 'm:C', 'acme/flash']",
        "[attention]\nprefer = ['sdpa']",
        "[attention]\noptions.splits = 5", "[attention]\nname = 'pathed'\noptions = {path = 'x'}", "[attention]",
        "[attention]\nname = 'odd'\noptions = {thing = 3}", "[evictor]\nname = 'a.b:C'\noptions = {x = 1}",
        "processors = ['penalties', {name = 'logit_bias'}, 'm:C']", "[[strategies]]\nname = 'single'",
        "[sampling]\ntemperature = 0\nstop = ['x']\nlogit_bias = {5 = 1.0}\n[sampling.extra]\nanything = 1",
        "[run]\nprompts = ['a']\nchat = true\n[requires]\nplugins = ['acme>=1.2']", "dtype = 'bf16'",
    ],
)  # fmt: skip
def test_the_schema_accepts_what_a_file_may_say(complaints, text):
    assert complaints(tomllib.loads(text)) == []


@pytest.mark.parametrize(
    "text, place, message",
    [
        ("max_num_seqs = 0", "max_num_seqs", "0 is less than the minimum of 1"),
        ("max_nums_seqs = 1", "", "'max_nums_seqs' was unexpected"),
        ("dtype = 'float8'", "dtype", "'float8' is not one of ['auto', 'float32'"),
        ("config_version = 2", "config_version", "1 was expected"),
        ("allow_targets = ['x']", "", "'allow_targets' was unexpected"),
        ("attention = 'spda'", "attention", "'spda' is not one of ['auto', "),
        ("attention = 'both'", "attention", "'both' is not one of"),
        ("attention = 'pathed'", "attention", "'pathed' is not one of"),  # it has an option that must be given
        ("attention = 'gone'", "attention", "'gone' is not one of"),
        ("[attention]\nname = 'acme/flash'\noptions = {split = 4}", "attention.options", "'split' was unexpected"),
        ("[attention]\nname = 'flash'\noptions = {splits = 65}", "attention.options.splits",
         "65 is greater than the maximum of 64"),
        ("[attention]\nname = 'flash'\noptions = {mode = 'x'}", "attention.options.mode",
         "'x' is not one of ['fast', 'exact']"),
        ("[attention]\nname = 'flash'\noptions = {inner = {depth = 0}}", "attention.options.inner.depth",
         "0 is less than the minimum of 1"),
        ("[attention]\nname = 'sdpa'\noptions = {x = 1}", "attention.options", "expected to be empty"),
        ("[attention]\nname = 'sdpa'\nprefer = ['flash']", "attention", "'prefer' was unexpected"),
        ("[attention]\nname = 'auto'\noptions = {x = 1}", "attention", "'options' was unexpected"),
        ("[attention]\nprefer = ['trition']", "attention.prefer.0", "'trition' is not one of"),
        ("[attention]\nname = 'pathed'", "attention", "'options' is a required property"),
        ("processors = ['auto']", "processors.0", "'auto' is not one of"),
        ("[sampling]\ntemprature = 1", "sampling", "'temprature' was unexpected"),
        ("[sampling]\ntop_k = 'x'", "sampling.top_k", "'x' is not of type 'integer'"),
        ("[run]\npromts = []", "run", "'promts' was unexpected"),
        ("[requires]\nplugins = 'x'", "requires.plugins", "'x' is not of type 'array'"),
    ],
)  # fmt: skip
def test_the_schema_marks_what_is_wrong_where_it_is(complaints, text, place, message):
    found = complaints(tomllib.loads(text))
    assert any(at == place and message in what for at, what in found), found


def test_the_schema_lists_what_an_editor_completes(schema):
    attention = schema["properties"]["attention"]["oneOf"]
    names = attention[0]["enum"]
    assert names[0] == "auto" and {"sdpa", "minivllm/sdpa", "triton", "minivllm/triton"} <= set(names)
    assert {"flash", "acme/flash", "acme/both", "zz/both", "zz/sdpa"} <= set(names)
    assert not {"both", "gone", "four", "pathed"} & set(names)
    flash = next(table for table in attention if table.get("title") == "flash")
    assert flash["properties"]["name"] == {"enum": ["flash", "acme/flash"], "description": "fast"}
    options = flash["properties"]["options"]["properties"]
    assert options["splits"] == {"default": 1, "description": "parts", "maximum": 64, "type": "integer"}
    assert options["mode"]["enum"] == ["fast", "exact"]
    int8 = next(t for t in schema["properties"]["quantizer"]["oneOf"] if t.get("title") == "int8")
    assert set(int8["properties"]["options"]["properties"]) == {"skip", "bits", "lm_head", "embedding"}
    assert schema["properties"]["sampling"]["properties"]["max_tokens"]["default"] == 64


def test_a_broken_or_blocked_plugin_is_a_comment_of_the_schema(schema):
    comment = schema["properties"]["attention"]["$comment"]
    gone = "attention 'acme/gone' (acme 1.0, entry point 'acme_spec:X') could not be imported: AttributeError"
    four = "(acme 1.0, entry point 'acme_spec:V'): Spec.options names 'acme_spec:ANY', which is not a class of pydantic"
    assert gone in comment and four in comment
    assert "$comment" not in schema["properties"]["scheduler"]
    blocked = config_schema(discover(point("acme", "x", "no:X"), environ={"MINIVLLM_PLUGINS": ""}))
    assert blocked["properties"]["attention"]["$comment"] == (
        "attention 'acme/x' (acme 1.0, entry point 'no:X') is blocked by MINIVLLM_PLUGINS"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.*ml")), ids=lambda path: path.name)
def test_the_examples_fit_the_schema(complaints, path):
    assert complaints(read_file(path).values) == []


def test_the_default_configuration_fits_its_schema(complaints):
    assert complaints(tomllib.loads(to_toml(leaves(load_config(environ={}))))) == []


def test_the_schema_is_written_to_a_file_or_to_standard_output(here, capsys):
    code, out, err = reported(capsys, "schema")
    assert (code, err) == (0, "") and json.loads(out)["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert reported(capsys, "schema", "-o", "s.json") == (
        0,
        "",
        "written; the first line of a TOML file beside it names it: #:schema ./s.json\n",
    )
    assert json.loads((here / "s.json").read_text()) == json.loads(out)
    assert reported(capsys, "schema", "-o", "no/s.json") == (
        2,
        "",
        "minivllm: error: no/s.json: No such file or directory\n",
    )


# ---------------------------------------------------------------- targets


def test_a_target_runs_only_where_the_command_line_or_python_allows_it(here, package, capsys):
    code = "from minivllm.core.interfaces.scheduler import SchedulerPolicy\nclass Mine(SchedulerPolicy):\n    'mine'\n"
    package("my_policy", code)
    (here / "a.toml").write_text("scheduler = 'my_policy:Mine'\n")
    code, out, _ = reported(capsys, "config", "show", "a.toml", "--origin")
    assert code == 0 and "# a.toml:1, scheduler: 'my_policy:Mine' is a target, and a target runs code" in out
    assert "my_policy" not in sys.modules
    _, out, _ = reported(capsys, "config", "show", "a.toml", "--origin", "--allow-target", "my_policy")
    assert "# a.toml:1, local -" in out
    with pytest.raises(ConfigError, match="a file that names code must not allow it"):
        (here / "b.toml").write_text("extends = 'a.toml'\nallow_targets = ['my_policy']\n")
        load_config(["b.toml"], environ={})
