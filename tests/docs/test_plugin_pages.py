"""docs/plugins/: the page of each seam agrees with its interface and the conformance kit."""

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


def test_the_rules_of_all_seams_are_up_to_date(make):
    assert make.OVERVIEW.read_text(encoding="utf-8") == make.overview(), "run `python docs/plugins/make.py`"


def test_a_page_without_a_table_is_an_error(make, tmp_path):
    path = tmp_path / "page.md"
    path.write_text("<!-- table: rules -->\nold\n<!-- end -->\ntext\n")
    assert make.filled(path, {"rules": ["new"]}) == "<!-- table: rules -->\nnew\n<!-- end -->\ntext\n"
    with pytest.raises(ValueError, match=r"page\.md has no table contract"):
        make.filled(path, {"contract": ["new"]})


def test_a_page_has_every_method(make):
    from minivllm.core.interfaces.evictor import Evictor

    text = "\n".join(make.tables(KINDS["evictor"])["contract"])
    required, optional = text.partition("A plug-in may define: ")[::2]
    for name in (n for n in vars(Evictor) if not n.startswith("_")):
        assert text.count(f"`{name}(") == 1, name
        assert f"`{name}(" in (required if name in Evictor.__abstractmethods__ else optional), name


def test_a_rule_is_named_once(make):
    text = "".join(make.pages().values())
    for name, _ in make.shared_rules():
        assert text.count(f"`{name}`") == 1, name


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
        ("scheduler", ("patience: float = 2000.0",)),
        ("strategy", ("def params(self, n: int) -> SamplingParams",)),
    ],
)
def test_a_page_has_the_signatures_of_what_a_test_class_overrides(make, seam, names):
    page = make.page(KINDS[seam])
    block = page.partition("A test class may override these names:\n")[2].partition("<!-- end -->")[0]
    assert all(name in block for name in names), block
    assert all(f"* `{name}" in make.overview() and f"{name}:" not in block for name in make.COMMON)
    compile(block.replace("```python", "from __future__ import annotations").replace("```", ""), seam, "exec")
