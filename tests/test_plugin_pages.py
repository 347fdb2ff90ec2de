"""docs/plugins/: the page of each seam is what its interface and the conformance kit say today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from minivllm.spec import KINDS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "plugins"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("make_pages", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seam", KINDS)
def test_the_page_of_a_seam_is_up_to_date(make, seam):
    written = (FOLDER / f"{seam}.md").read_text(encoding="utf-8")
    assert written == make.page(KINDS[seam]), "run `python docs/plugins/make.py`"


def test_a_page_has_every_method_and_every_test_of_the_kit(make):
    import minivllm.testing
    from minivllm.core.interfaces.evictor import Evictor

    page = make.page(KINDS["evictor"])
    assert all(f"def {name}(" in page for name in vars(Evictor) if not name.startswith("_"))
    suite = minivllm.testing.EvictorConformance
    for name in (n for n in dir(suite) if n.startswith("test_")):
        assert f"**{name.removeprefix('test_').replace('_', ' ')}**" in page


def test_every_fact_is_explained(make):
    assert set(make.FACTS) == {fact for kind in KINDS.values() for fact in kind.facts}
