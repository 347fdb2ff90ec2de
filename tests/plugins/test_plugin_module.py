"""``minivllm.plugin``, from which authors import.  Its names are pinned, and old documented paths lead to new ones."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from plugin_helpers import install, spec_text

import minivllm.plugin
from minivllm import __version__, moved
from minivllm.cli import main
from minivllm.cli.plugin_check import check_one
from minivllm.registration.spec import KINDS
from minivllm.registry import Catalog

ROOT = Path(__file__).resolve().parents[2]
# A name is removed only with a new major version of its seam's contract, as docs/compatibility.md promises.
PINNED = """
AdaptedLayer AdaptedModel AdapterContext AdapterMemory AdapterMethod AdapterSource AdapterTarget LowRank adapter_refusal
ANY Ask AtLeast AtMost Attention AttentionBackend AttentionContext AttnLayer AttnMeta AttnSpec BlockInfo BlocksView
Branch BranchEnd CacheWiring Capacity Channel ChannelClosed CodecError Column Compiled ConfigError Conversion
DecoderSpec DecodingStrategy Delta DeltaNames DraftModel DraftWiring Drafter DrafterContext Draw EngineView Evictor
EvictorContext Executor ExpertNames Experts ExtendedWeight FinishedStep GatedDelta NeededRows
Grammar GrammarContext GrammarSource GraphKey Grown Guide
Compressor CompressorContext StoredTokens EncoderContext ImageEncoder ImageFacts ImageValues
Head HeadFiles KVStore StoreContext
HookContracts Hooks Join KVFormat KVLayout LateInputs LayerSpec LinearModule Load LogProbs MLP MinivllmError Model
ModelArch ModelError Module ModuleInfo Moves MultipleOf NULL_BLOCK Needs Norm OptionError ParallelWiring Param Part
PartSource Parts Pick PlannedStep PluginError PluginQuery PreemptionView Processor QKPre Quantizer QueueView Range
Reason RequestEnd RequestError RequestView ResourceError Rope Router Row Rows Rule Runner Sampler SamplingContext
SamplingParams SchedulerContext SchedulerPolicy Search Session SessionTurn Shard Spec SpeculationWiring StepError
StepForm StepPlan StepResult StepShape StepTaps StepTensors StepWatch StepWiring StoredWeight StructuredOutputsParams
Tap TensorCopy TensorSpec Tensors WeightNames WeightScheme Wiring ConvNames ShortConv Begun Calls Channels
DescribedParser Ended Pairs Reasoning Reply ReplyContext AdapterWiring ImageWiring
ReplyFormat ReplyParser Said Thought Written ReplicaLoad ReplicaRouter RoutedRequest RouterContext
TokenizerBackend TokenizerContext
Predictor PredictorContext RequestFacts StepWork
build_worker check_shape decode_late decode_plan decode_result decoder_rules encode_late
encode_plan encode_result fields gumbel hookimpl no_adapter noise noise_bits part_rows route wiring_from_json
wiring_to_json worker_command
"""
NAMES = PINNED.split()
LIGHT = ["ANY", "AtLeast", "MultipleOf", "Needs", "Param", "Range", "Reason", "Spec", "PluginError", "RequestError"]
WITHOUT_TENSORS = ["Evictor", "SchedulerPolicy", "BlockInfo", "QueueView", "StepPlan", "hookimpl"]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr
    return done.stdout + done.stderr


def test_no_name_leaves_the_module_for_authors():
    assert sorted(minivllm.plugin.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(minivllm.plugin))


def test_every_name_is_what_its_module_defines():
    for name in NAMES:
        module, attribute = minivllm.plugin._FOUND[name]
        home = importlib.import_module(module)
        there = getattr(home, attribute)
        assert getattr(minivllm.plugin, name) is there, name


def test_type_checkers_see_the_same_names_from_the_same_modules():
    tree = ast.parse(Path(minivllm.plugin.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    static = {(a.asname or a.name): (i.module, a.name) for i in block.body for a in i.names}
    assert static == minivllm.plugin._FOUND


def test_every_base_class_of_a_seam_is_a_name_of_it():
    for kind in KINDS.values():
        module, _, name = kind.base.partition(":")
        assert getattr(minivllm.plugin, name) is getattr(importlib.import_module(module), name)


def test_the_classes_on_the_pages_of_the_seams_are_names_of_it():
    for seam in KINDS:
        page = (ROOT / "docs" / "plugins" / f"{seam}.md").read_text()
        base = re.search(r"^Base class `(\w+)`", page, re.M)
        others = page.partition("\nOther names:\n")[2].partition("<!-- end -->")[0]
        shown = {base[1], *re.findall(r"(?<=[:,] )`(\w+)[(`]", others)}
        assert len(shown) > 1 and not shown - set(NAMES), f"{seam}: {shown - set(NAMES)}"


@pytest.mark.parametrize("names", [LIGHT, WITHOUT_TENSORS])
def test_names_without_tensors_cost_no_torch(names):
    code = f"import sys; from minivllm.plugin import {', '.join(names)}; print('torch' in sys.modules)"
    assert python(code).strip() == "False"


def test_the_module_itself_imports_neither_torch_nor_numpy_nor_pydantic():
    code = (
        "import sys, minivllm.plugin; print([m for m in ('torch', 'numpy', 'pydantic', 'pluggy') if m in sys.modules])"
    )
    assert python(code).strip() == "[]"


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(AttributeError, match=r"no attribute 'gumbl'. Did you mean 'gumbel'\?"):
        minivllm.plugin.gumbl  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Smapler'"):
        exec("from minivllm.plugin import Smapler")


# ---- old paths ---------------------------------------------------------------------------------------------------


OLD = [
    ("minivllm.core.sampling", "gumbel"),
    ("minivllm.core.sampling", "noise_bits"),
    ("minivllm.core.runner", "Runner"),
    ("minivllm.core.request", "SamplingParams"),
    ("minivllm.core.layers.module", "check_shape"),
    ("minivllm.core.layers.linear", "no_adapter"),
    ("minivllm.core.layers.rotary", "prepare_qk"),
    ("minivllm.core.kernels", "norm"),
    ("minivllm.config_files", "tomllib"),
    ("minivllm.fresh", "command"),
    ("minivllm.worker", "build"),
    ("minivllm.server.calls", "Said"),
    ("minivllm.server.tools", "register"),
]


def forget(*names: str) -> None:
    """Drop modules that earlier tests imported by old paths."""
    for name in [m for m in sys.modules if any(m == n or m.startswith(n + ".") for n in names)]:
        del sys.modules[name]


@pytest.mark.parametrize(("old", "name"), OLD)
def test_a_path_that_was_documented_once_gives_the_same_object_and_one_warning_with_the_new_path(old, name):
    forget(*moved.MOVED)
    if old == "minivllm.core.kernels":
        pytest.importorskip("triton")
    with pytest.warns(DeprecationWarning) as caught:
        found = getattr(importlib.import_module(old), name, None) or importlib.import_module(f"{old}.{name}")
    new, until = moved.new_path(old)
    mine = [str(w.message) for w in caught if str(w.message).startswith(f"{old} is {new} now")]
    assert len(mine) == 1 and f"minivllm {until} drops the old path" in mine[0]
    home = importlib.import_module(new)
    assert found is (getattr(home, name, None) or importlib.import_module(f"{new}.{name}"))
    assert importlib.import_module(new) is sys.modules[new] and home.__spec__.name == new


def test_the_warning_points_at_the_line_of_the_import(tmp_path, monkeypatch):
    forget(*moved.MOVED)
    (tmp_path / "old_author.py").write_text("import os\nfrom minivllm.core.sampling import gumbel\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(DeprecationWarning) as caught:
        importlib.import_module("old_author")
    assert {(Path(w.filename).name, w.lineno) for w in caught} == {("old_author.py", 2)}


def test_every_way_to_write_the_import_works():
    code = (
        "import minivllm.core.sampling; import minivllm.core.layers.linear as a\n"
        "from minivllm.core import sampling as b; from minivllm.core.layers import linear as c\n"
        "import minivllm.device.layers.linear as d\n"
        "assert a is c is d and b is minivllm.core.sampling and minivllm.core.layers.linear is d; print(b.__name__)"
    )
    assert python(code).splitlines()[0] == "minivllm.device.worker.sampling"


def test_no_old_path_hides_a_module_and_every_new_one_is_there():
    for old in moved.MOVED:
        path = ROOT / old.replace(".", "/")
        assert not path.with_suffix(".py").exists() and not path.exists(), f"{old} is there again"
        new, _ = moved.new_path(old)
        assert new not in moved.MOVED and importlib.util.find_spec(new) is not None


def test_an_old_path_is_dropped_in_the_version_that_says_so():
    here = tuple(map(int, __version__.split(".")[:2]))
    late = [old for old, (_, until) in moved.MOVED.items() if tuple(map(int, until.split("."))) <= here]
    assert not late, f"take these lines out of minivllm/moved.py: {late}"


def test_a_target_that_moved_again_is_followed_and_a_circle_is_an_error(monkeypatch):
    table = {
        "minivllm.a": ("minivllm.b", "0.2"),
        "minivllm.b": ("minivllm.c.d", "0.3"),
        "minivllm.a.x": ("minivllm.y", "0.4"),
    }
    monkeypatch.setattr(moved, "MOVED", table)
    assert moved.new_path("minivllm.a.one.two") == ("minivllm.c.d.one.two", "0.2")
    assert moved.new_path("minivllm.a.x.deep") == ("minivllm.y.deep", "0.4")
    assert moved.new_path("minivllm.b") == ("minivllm.c.d", "0.3")
    assert moved.new_path("minivllm.abc") is None and moved.new_path("minivllm") is None
    monkeypatch.setattr(moved, "MOVED", {"minivllm.a": ("minivllm.b", "0.2"), "minivllm.b": ("minivllm.a", "0.2")})
    with pytest.raises(RuntimeError, match="leads back"):
        moved.new_path("minivllm.a")


def test_minivllm_itself_uses_no_old_path():
    old = re.compile(r"\b(" + "|".join(re.escape(name) for name in moved.MOVED) + r")\b(?![./]\w*\.(py|md))")
    for path in [
        *(ROOT / "minivllm").rglob("*.py"),
        *(ROOT / "contrib").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]:
        if path.name != "moved.py":
            text = re.sub(r"(getLogger\(\"|``|\.)minivllm\.hooks\b", "", path.read_text())  # a logger, a group
            used = [w for w in old.findall(text) if w]
            assert not used, f"{path}: {used}"


# ---- what an author is shown ---------------------------------------------------------------------------------------


@pytest.fixture
def outdated(tmp_path, monkeypatch):
    """Install evictors of a package ``acme`` that were written for an older minivllm."""
    monkeypatch.syspath_prepend(tmp_path)
    base = (
        "\nfrom minivllm.plugin import Evictor\nclass E(Evictor):\n    add = hold = free = victims = drop = hit = len\n"
    )
    modules = {
        "old_path": "from minivllm.core.sampling import gumbel" + base,
        "gone_path": "from minivllm.core.nowhere import gumbel" + base,
        "gone_name": "from minivllm.device.worker.sampling import gone" + base,
        "other": "import acme_kernels_that_are_not_here" + base,
    }
    specs = {f"spec_{name}": spec_text(impl=f"impl_{name}:E") for name in modules}
    points = {"minivllm.evictor": {name: f"spec_{name}:S" for name in modules}}
    install(tmp_path, "acme", points, **specs, **{f"impl_{name}": text for name, text in modules.items()})
    return {e.name: e for e in Catalog.discover(environ={})["evictor"].entries}


def test_plugins_check_lists_the_old_paths_of_a_package_that_still_works(outdated, capsys, monkeypatch):
    report = check_one(outdated["old_path"])
    assert report.word == "ok" and len(report.outdated) == 1
    assert report.outdated[0].startswith("minivllm.core.sampling is minivllm.device.worker.sampling now")
    assert main(["plugins", "check", "acme/old_path"]) == 0
    assert "minivllm.core.sampling is minivllm.device.worker.sampling now" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gone_path", "gone_name"])
def test_a_path_that_is_gone_says_that_the_package_was_written_for_another_minivllm(outdated, name):
    (fault,) = check_one(outdated[name]).faults
    assert "It was written for another minivllm: upgrade it; plug-ins import from minivllm.plugin" in fault


def test_a_module_of_somebody_else_that_is_missing_is_not_called_another_minivllm(outdated):
    (fault,) = check_one(outdated["other"]).faults
    assert "acme_kernels_that_are_not_here" in fault and "another minivllm" not in fault


def test_an_import_of_minivllm_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            python("import warnings; warnings.simplefilter('error'); import minivllm; print('fine')").strip() == "fine"
        )
