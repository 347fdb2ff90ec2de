"""docs/plugins/: the page of each seam is what its interface and the conformance kit say today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from minivllm.registration.spec import KINDS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "plugins"


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


@pytest.mark.parametrize(
    ("seam", "names"),
    [
        ("attention", ("def load(", "def formats(")),
        ("kvformat", ("def allowed(self, fmt: KVFormat, x: Tensor) -> Tensor", "dims:", "blocks:", "kv_heads:")),
        ("processor", ("def params(self, vocab: int)", "def wrong_params(", "def reference(")),
        (
            "quantizer",
            ("def step(self, weight: Tensor, info: ModuleInfo) -> Tensor", "def grid(", "scale_bits:", "ins:"),
        ),
        ("sampler", ("def params(", "def probabilities(")),
        ("scheduler", ("patience: float = 2000.0", "known_failures:")),
        ("strategy", ("def params(self, n: int) -> SamplingParams",)),
    ],
)
def test_a_page_has_the_signatures_of_what_a_test_class_overrides(make, seam, names):
    page = make.page(KINDS[seam])
    block = page.partition("A test class may override:")[2].partition("Every rule")[0]
    assert all(name in block for name in (*names, "options:", "device:")), block
    compile(block.replace("```python", "from __future__ import annotations").replace("```", ""), seam, "exec")
