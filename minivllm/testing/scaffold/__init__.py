"""Write a package with a working plug-in that passes the conformance kit, for ``minivllm plugins new``.

``templates/`` has one package for each seam, and ``templates/common`` the files that all packages share.  These are
ordinary files, except for four names, which are replaced by those of the new package::

    my-plugin   the distribution and the plug-in     my_plugin   the Python package
    MyPlugin    the class                            MY_PLUGIN   its spec

``about.toml`` describes the plug-in of a template in one line, and shows how to use it.  This module imports no large
package.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minivllm import __version__
from minivllm.errors import ConfigError, PluginError
from minivllm.registration.spec import KINDS, check_seam

TEMPLATES = Path(__file__).parent / "templates"
COMMON = {"pyproject.toml.in": "pyproject.toml", "README.md": "README.md", "gitignore": ".gitignore"}
# names that PEP 503 normalizes, and names with several '-' in a row
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class Names:
    """The four spellings of a plug-in's name: the distribution, the Python package, the class and the spec."""

    dist: str

    @property
    def module(self) -> str:
        return self.dist.replace("-", "_")

    @property
    def cls(self) -> str:
        parts = (part.capitalize() for part in self.dist.split("-"))
        return "".join(parts)

    def put(self, text: str) -> str:
        """Replace the four names of a template's text by these names."""
        text = text.replace("my-plugin", self.dist).replace("my_plugin", self.module)
        return text.replace("MyPlugin", self.cls).replace("MY_PLUGIN", self.module.upper())


def check_name(name: str) -> Names:
    """Return the spellings of a name; PluginError if a distribution, a package or a plug-in may not have it."""
    from minivllm.plugins.specs import BUILTINS

    normal = re.sub(r"[-_.]+", "-", name).lower()
    if not NAME.fullmatch(normal):
        raise PluginError(f"{name!r} is no name for a package: use letters, digits and '-', such as 'my-attention'")
    if normal != name:
        raise PluginError(f"{name!r}: use the normalised form of the name (PEP 503), {normal!r}")
    names = Names(name)
    if not names.module.isidentifier() or keyword.iskeyword(names.module):
        raise PluginError(f"{name!r}: no Python package can have the name {names.module!r}; start with a letter")
    taken = next((kind for kind, builtin, _ in BUILTINS if builtin == name), None)
    if taken is not None:
        raise PluginError(f"{name!r} is the name of a built-in {taken}; choose another")
    if name in KINDS:
        raise PluginError(f"{name!r} is the name of a seam; choose another, such as 'my-{name}'")
    if names.module in sys.stdlib_module_names or importlib.util.find_spec(names.module) is not None:
        raise PluginError(f"a Python module {names.module!r} exists already; choose another name than {name!r}")
    return names


def about(seam: str) -> dict[str, str]:
    """Read the description of a seam's template: ``summary``, ``use``, and perhaps ``more`` (for pyproject.toml)."""
    from minivllm.config.files import tomllib

    return tomllib.loads((TEMPLATES / seam / "about.toml").read_text(encoding="utf-8"))


def files(name: str, seam: str) -> Iterator[tuple[str, str]]:
    """Yield (path in the package, text) of each file of a new package."""
    names = Names(name)
    description = about(seam)
    major, minor = map(int, __version__.split(".")[:2])
    words = {"SEAM": seam, "SUMMARY": description["summary"], "USE": description["use"].strip()}
    words["MORE"] = description.get("more", "")
    words["BASE"] = KINDS[seam].base.rpartition(":")[2]
    words["SINCE"] = f"{major}.{minor}"
    words["BEFORE"] = f"0.{minor + 1}" if major == 0 else str(major + 1)

    def common(file: str) -> str:
        text = (TEMPLATES / "common" / file).read_text(encoding="utf-8")
        for word, value in words.items():
            text = re.sub(rf"\b{word}\b", lambda _, v=value: v, text)
        return names.put(text)

    for source, target in COMMON.items():
        yield target, re.sub(r"\n{3,}", "\n\n", common(source))
    yield f"src/{names.module}/__init__.py", common("init.py")
    folder = TEMPLATES / seam
    for path in sorted(folder.rglob("*.py")):
        target = path.relative_to(folder).as_posix()
        text = path.read_text(encoding="utf-8")
        yield names.put(target), names.put(text)


def write(name: str, seam: str, where: str | Path = ".") -> Path:
    """Write the package ``name`` into the folder ``where`` and return its path.

    PluginError if the name is not valid, ConfigError if the folder exists or cannot be written.
    """
    kind = check_seam(seam)
    assert kind is not None
    check_name(name)
    folder = Path(where) / name
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already and is not overwritten; choose another name, or --dir")
    try:
        for path, text in files(name, kind):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{exc.filename}: {exc.strerror}") from None
    return folder
