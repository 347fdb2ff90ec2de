"""The documents as a site: each page has a place, links are right there, and nothing comes from other hosts."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CI = ROOT / ".ci"
pytestmark = pytest.mark.skipif(not CI.exists(), reason="an sdist has no .ci")


def script(name):
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_one_place_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\nplugins:\n")[0]
    shown = re.findall(r"(\S+\.md)$", nav, re.M)
    assert len(shown) == len(set(shown))
    assert {path for path in shown if (DOCS / path).exists()} == {
        p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")
    }
    hooks = (CI / "site_hooks.py").read_text(encoding="utf-8")
    patterns = ast.literal_eval(re.search(r"^BESIDE = (\(.*?\))", hooks, re.M)[1])
    beside = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    assert {path for path in shown if not (DOCS / path).exists()} == beside


def test_links_lead_to_the_pages_of_the_site():
    pytest.importorskip("mkdocs", reason='pip install "minivllm[docs]"')
    link = script("site_hooks").site_link
    assert link("../README.md#built-in", "docs/models.md", "models.md") == "README.md#built-in"
    assert link("../plugins.md", "docs/plugins/model.md", "plugins/model.md") == "../plugins.md"
    assert link("../../README.md", "docs/plugins/model.md", "plugins/model.md") == "../README.md"
    assert link("docs/bench.md", "README.md", "README.md") == "bench.md"
    assert link("../docs/bench.md#a", "contrib/README.md", "contrib/README.md") == "../bench.md#a"
    assert link("../contrib", "docs/plugins.md", "plugins.md") == "contrib/README.md"
    evictor = link("../../minivllm/core/interfaces/evictor.py", "docs/plugins/evictor.md", "plugins/evictor.md")
    assert evictor == "../api/minivllm.core.interfaces.evictor.md"
    spec = link("../../minivllm/registration/spec.py", "docs/plugins/executor.md", "plugins/executor.md")
    assert spec == "../minivllm/registration/spec.py"
    for same in ("#part", "https://example.org/docs/a.md", "mailto:a@example.org"):
        assert link(same, "docs/models.md", "models.md") == same


def test_files_that_pages_link_to_are_copied():
    pytest.importorskip("mkdocs", reason='pip install "minivllm[docs]"')
    copied = script("site_hooks").linked_files()
    assert "examples/evictor.ipynb" in copied and "minivllm/registration/spec.py" in copied
    assert "minivllm/core/interfaces/evictor.py" not in copied  # the link leads to its page of the reference
    assert not [path for path in copied if path.endswith(".md") or not (ROOT / path).is_file()]


def test_links_in_code_stay_as_they_are():
    pytest.importorskip("mkdocs", reason='pip install "minivllm[docs]"')
    text = "[a](x)\n\n```python\nd[k](x)\n```\n\n- [b](x)\n\n  ```\n  d[k](x)\n  ```\n[c](x)\n"
    changed = script("site_hooks").map_links(text, str.upper)
    assert changed == text.replace("[a](x)", "[a](X)").replace("[b](x)", "[b](X)").replace("[c](x)", "[c](X)")


def test_the_comment_of_a_field_is_found(tmp_path):
    pytest.importorskip("griffe", reason='pip install "minivllm[docs]"')
    file = tmp_path / "fields.py"
    file.write_text(
        "# of the first,\n# in two lines\na: int\nb: str = '#'  # behind\n\nc = 1  # noqa: E501\nd = (\n    1,\n)\n"
    )
    comment_of = script("site_comments").comment_of
    assert comment_of(file, 3, 3) == "of the first, in two lines"
    assert comment_of(file, 4, 4) == "behind"
    assert comment_of(file, 6, 6) == comment_of(file, 7, 9) == ""


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//cdn.example/a.css">',
        '<link rel="preconnect" href="https://fonts.example">',
        '<img src="http://img.example/a.png">',
        '<img srcset="a.png 1x, https://img.example/a.png 2x">',
        '<div style="background: url(https://img.example/a.png)"></div>',
        '<style>@import "https://fonts.example/a.css";</style>',
        '<script>fetch("https://stats.example/")</script>',
        '<svg><use href="https://img.example/a.svg#b"/></svg>',
    ],
)
def test_what_a_page_loads_from_another_host_is_found(page, tmp_path):
    (tmp_path / "index.html").write_text(f"<html><body>{page}</body></html>")
    (fault,) = script("site_check").faults(tmp_path)
    assert fault.startswith("index.html loads ") and ".example" in fault


def test_links_that_a_reader_follows_and_files_of_the_site_are_no_fault(tmp_path):
    (tmp_path / "index.html").write_text(
        '<link rel="canonical" href="https://here.example/"><link rel="stylesheet" href="a.css"><script src="/b.js">'
        '</script><a href="https://there.example">x</a><img src="data:image/png;base64,//8A"><code>https://x.example</code>'
    )
    (tmp_path / "a.css").write_text("a { background: url(b.png) } b { background: url(data:image/svg+xml,//a) }")
    (tmp_path / "b.js").write_text("/* https://license.example */ fetch('a.json')")
    assert list(script("site_check").faults(tmp_path)) == []


def test_addresses_in_style_sheets_and_scripts_are_found(tmp_path):
    (tmp_path / "index.html").write_text('<pre class="mermaid">graph</pre>')
    (tmp_path / "a.css").write_text("@font-face { src: url('//fonts.example/a.woff2') }")
    (tmp_path / "b.js").write_text(
        'load("https://stats.example/x"); load("https://unpkg.com/mermaid@11/dist/mermaid.min.js")'
    )
    found = list(script("site_check").faults(tmp_path))
    assert [fault.split(" loads ")[0] for fault in found] == ["a.css", "b.js", "b.js"]
    (tmp_path / "index.html").write_text("no diagram")
    assert len(list(script("site_check").faults(tmp_path))) == 2


def test_a_site_without_pages_is_a_fault(tmp_path):
    assert list(script("site_check").faults(tmp_path)) == ["there are no pages"]
