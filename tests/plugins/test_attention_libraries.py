"""The back ends over libraries, with stand-ins for the libraries: indexing, masks, scales and plans.

The stand-ins (``helpers/stand_ins``) accept and refuse the same arguments as the real functions.  Kernels are not
tested here; ``python -m minivllm.testing flash_attn --device cuda`` tests them with an installed library.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minivllm.plugins.attention.spec import DIMS, FLASH_ATTN, FLASH_ATTN2, FLASHINFER, plainly
from minivllm.registration.spec import KINDS, Needs, PluginQuery, describe
from minivllm.registry import Catalog
from minivllm.testing import AttentionConformance
from minivllm.testing.attention_world import World

STAND_INS = str(Path(__file__).parents[1] / "helpers" / "stand_ins")
OURS = tuple(f"minivllm.plugins.attention.{name}" for name in ("flash_attn", "flash_attn2", "flashinfer"))


def forget():
    """Remove the imported modules of a library, real or not."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("flash_attn", "flashinfer", "stand_in_math")]:
        del sys.modules[name]
    for name in OURS:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def waiting_stand_ins(monkeypatch):
    """Allow steps to wait for the device, because the stand-ins compute in torch, whose operations wait."""
    monkeypatch.setattr("minivllm.testing.attention_graph.no_wait", lambda found, where: None)


@pytest.fixture(scope="class")
def stand_ins():
    """The stand-ins' folder is searched first, and is forgotten afterwards."""
    forget()
    sys.path.insert(0, STAND_INS)
    yield
    sys.path.remove(STAND_INS)
    forget()


@pytest.mark.usefixtures("stand_ins")
class Glued(AttentionConformance):
    """In the fast suite each over its smallest sizes, because the stand-ins' work is the same in all of them."""

    device = "cpu"
    keep = {"dim_qk": {64}, "dim_v": {64}, "queries_per_kv": {1, 2}, "block": {16, 32}}

    def values(self, fact, *candidates):
        return [v for v in super().values(fact, *candidates) if v in self.keep.get(fact, [v])]


class TestFlashAttn(Glued):
    plugin = "flash_attn"


class TestFlashInfer(Glued):
    plugin = "flashinfer"


@pytest.mark.slow
class TestFlashAttn2(Glued):
    plugin = "flash_attn2"
    keep = {**Glued.keep, "block": {256}}


@pytest.mark.slow
class TestFlashAttnInAllSizes(Glued):
    plugin = "flash_attn"
    keep = {"dim_qk": {64, 96, 256}, "dim_v": {64, 96, 256}, "queries_per_kv": {2, 3, 16}}


@pytest.mark.slow
class TestFlashInferInAllSizes(Glued):
    plugin = "flashinfer"
    keep = {"dim_qk": {64, 256}, "dim_v": {64, 256}, "queries_per_kv": {2, 3, 16}}


# ---- what is refused when a back end is chosen -----------------------------------------------------------------------

FACTS = {"device": "cuda", "sm": 90, "dtype": "bfloat16", "kv_format": "bf16", "queries_per_kv": frozenset({2}),
         "dim_qk": frozenset({64}), "dim_v": frozenset({64})}  # fmt: skip


def refused(spec, features=(), **facts):
    kind = KINDS["attention"]
    return [r.what for r in replace(spec, needs=()).refuse(PluginQuery({**FACTS, **facts}, frozenset(features)), kind)]


@pytest.mark.parametrize("spec", [FLASH_ATTN, FLASH_ATTN2, FLASHINFER], ids=lambda s: s.impl.rpartition(":")[2])
def test_a_library_reads_only_one_size_and_one_dtype(spec):
    assert refused(spec) == []
    assert refused(spec, dim_v=frozenset({128})) == ["dim_v"]
    assert refused(spec, kv_format="fp16") == ["kv_format"]
    assert refused(spec, dtype="float16", kv_format="fp16") == []
    assert refused(spec, dtype="float32", kv_format="fp32") == ["dtype", "kv_format"]
    assert plainly(PluginQuery({"dtype": "bfloat16"})) == [] and plainly(PluginQuery({"dim_qk": frozenset({64})})) == []


def test_what_a_library_cannot_do_is_refused_before_it_is_asked():
    assert refused(FLASH_ATTN, ["sinks", "softcap", "window", "lse"]) == []
    reasons = FLASHINFER.refuse(PluginQuery(FACTS, frozenset({"sinks", "softcap"})), KINDS["attention"])[:2]
    assert [r.what for r in reasons] == ["feature 'sinks' not declared", "feature 'softcap' not declared"]
    assert [r.fix for r in reasons] == [KINDS["attention"].features[name] for name in ("sinks", "softcap")]
    assert refused(FLASH_ATTN, block=128) == refused(FLASH_ATTN2, block=128) == ["block"]
    assert refused(FLASHINFER, block=256) == ["block"] and refused(FLASH_ATTN2, block=512) == []
    assert refused(FLASH_ATTN, sm=80) == refused(FLASHINFER, sm=80) == ["sm"] and refused(FLASH_ATTN2, sm=80) == []


def test_the_document_shows_what_each_back_end_claims():
    registry = Catalog.discover()["attention"]
    text = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    table = text.partition("<!-- table: back ends -->\n")[2].partition("<!-- end -->")[0].splitlines()[2:]
    rows = []
    for entry in (e for e in registry.entries if e.builtin):
        spec = registry.spec(entry)
        assert spec.limits["dim_qk"] == spec.limits["dim_v"]
        sizes = "8, 16 ... 256" if spec.limits["dim_qk"] == DIMS else describe(spec.limits["dim_qk"])
        cells = [
            f"`{entry.name}`",
            *(describe(spec.limits[fact]) for fact in ("sm", "dtype")),
            sizes,
            describe(spec.limits["queries_per_kv"]),
            f"{describe(spec.limits['block'])}, default {spec.prefer['block']}",
            ", ".join(sorted(spec.features)),
            spec.traits["graph"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    assert table == rows


# ---- whether a library is there --------------------------------------------------------------------------------------


def test_a_library_is_found_without_importing_it(stand_ins):
    """The package of FlashAttention-2 imports torch, and the package of FlashAttention-4 lies inside it."""
    for spec in (FLASH_ATTN, FLASH_ATTN2, FLASHINFER):
        assert [needs.missing() for needs in spec.needs] == [None]
    assert not {"flash_attn", "flashinfer"} & sys.modules.keys()


def test_the_version_of_the_named_distribution_counts(stand_ins):
    """Two distributions fill the package ``flash_attn``."""
    want = Needs("flash_attn.cute", "5", "pip install it", dist="flash-attn-4").missing()
    assert want is not None and str(want) == "flash_attn.cute: expected at least 5, supports 4.0.0b36  (pip install it)"
    assert Needs("flash_attn.flash_attn_interface", "2.8", "", dist="flash-attn").missing() is None
    missing = Needs("flash_attn.nothing", "1", "pip install it", dist="flash-attn").missing()
    assert str(missing) == "needs flash_attn.nothing, which is not installed  (pip install it)"


# ---- plans that are made ahead of the device -------------------------------------------------------------------------


class Event:
    """A CUDA event that the device reaches when somebody waits for it."""

    def __init__(self):
        self.log = []

    def record(self):
        self.log.append("record")

    def synchronize(self):
        self.log.append("wait")


def test_a_plan_is_not_written_over_before_the_device_has_copied_it(stand_ins, monkeypatch):
    """``plan`` fills memory that the device copies later: it is filled again only after a wait for that copy."""
    glue = importlib.import_module("minivllm.plugins.attention.flashinfer")
    suite = TestFlashInfer()
    world = World(suite, suite.plain(), 2, 40)
    backend, made = world.backend, []
    mark = glue.Planned.mark

    def record(planned, device):
        if planned.copied is None:
            planned.copied = Event()
            made.append(planned)
        planned.copied.record()
        mark(planned, device)

    monkeypatch.setattr(glue.Planned, "mark", record)
    seq = world.add(3)
    for _ in range(glue.PLANS + 2):
        world.check([(seq, 4)])
    assert isinstance(backend, glue.FlashInfer) and len(made) == glue.PLANS
    waits = [["record", "wait", "record"]] * 2 + [["record"]] * (glue.PLANS - 2)
    assert [planned.copied.log for planned in made] == waits, "the oldest plan's memory is taken again first"
    assert [planned.wrapper.plans for planned in made] == [2, 2, 1]
