"""Hooks of mkdocs: pages of the site that are not below docs/, and the reference of the public modules.

The links of a page are right in the repository.  On the site the pages of docs/ are at the root, and other pages have
their paths in the repository, so links are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("*.md", "benchmarks/*.md", "contrib/**/*.md", "minivllm/pocket/*.md")  # pages outside of docs/
MODULES = ("minivllm", "minivllm.plugin", "minivllm.registry", "minivllm.config", "minivllm.testing")
INTERFACES = "minivllm.core.interfaces"
HOOKS = ("minivllm.runtime.hooks.contract", "minivllm.runtime.hooks.views")  # the interface of the seam hooks
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def modules() -> list[str]:
    """Return the modules that have a page each; the interfaces of the seams come last."""
    folder = ROOT.joinpath(*INTERFACES.split("."))
    seams = (path.stem for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_"))
    return [*MODULES, *(f"{INTERFACES}.{seam}" for seam in seams), *HOOKS]


def page_of(module: str) -> str:
    """Return the path of a module's page on the site."""
    return f"api/{module}.md"


def reference_of(path: str) -> str:
    """Return the path on the site of the page about a Python file of the repository, or "" if it has none."""
    module = path.removesuffix(".py").replace("/", ".")
    return page_of(module) if path.endswith(".py") and module in modules() else ""


def beside() -> list[str]:
    """Return the paths in the repository of the pages outside of docs/."""
    return sorted({path.relative_to(ROOT).as_posix() for pattern in BESIDE for path in ROOT.glob(pattern)})


def linked_files() -> list[str]:
    """Return the paths in the repository of the files outside of docs/ that pages link to and that are no pages."""
    pages = [*(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")), *beside()]
    found = {
        repository_path(link, source)
        for source in pages
        for link in LINK.findall(FENCE.sub("", (ROOT / source).read_text(encoding="utf-8")))
    }
    ours = (path for path in found if path and not path.startswith((".", "/", "docs/")) and not path.endswith(".md"))
    return sorted(path for path in ours if (ROOT / path).is_file() and not reference_of(path))


def on_config(config: Any) -> Any:
    """Add the pages of the public modules to the navigation."""
    pages = [{module.removeprefix(f"{INTERFACES}."): page_of(module)} for module in modules()]
    config.nav.append({"API": [*pages[: len(MODULES)], {"Interfaces": pages[len(MODULES) :]}]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/, copies of other files that pages link to, and the pages of the public modules."""
    for path in [*beside(), *linked_files()]:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.INCLUDED))
    for module in modules():
        files.append(File.generated(config, page_of(module), content=f"# {module}\n\n::: {module}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the text of a page with links that are right on the site."""
    here = page.file.src_uri
    source = here if here in beside() else f"docs/{here}"
    return map_links(markdown, lambda link: site_link(link, source, here))


def map_links(markdown: str, change: Callable[[str], str]) -> str:
    """Return Markdown with ``change`` applied to the target of each link; fenced code stays as it is."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(lambda link: change(link[1]), markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(lambda link: change(link[1]), markdown[end:])])


def repository_path(link: str, source: str) -> str:
    """Return the path in the repository of what the file ``source`` links to, or "" for an anchor or another site."""
    target = link.partition("#")[0]
    if not target or "://" in link or link.startswith("mailto:"):
        return ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def site_link(link: str, source: str, here: str) -> str:
    """Return a link of the file ``source`` of the repository as the page ``here`` of the site needs it."""
    path = repository_path(link, source)
    if not path:
        return link
    _, mark, anchor = link.partition("#")
    target = reference_of(path) or path.removeprefix("docs/")
    return posixpath.relpath(target, posixpath.dirname(here) or ".") + mark + anchor
