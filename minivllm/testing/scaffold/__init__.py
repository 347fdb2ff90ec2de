"""``minivllm plugins new``: write a package that is a plug-in already, works, and passes the conformance kit.

``templates/`` holds one package a seam, ``templates/common`` what is the same for all.  They are real files, and
nothing in them is special but four names, which become those of the new package::

    my-plugin   the distribution and the plug-in     my_plugin   the Python package
    MyPlugin    the class                            MY_PLUGIN   its spec

``about.toml`` says in a line what the template does, and how its plug-in is used.  This module imports nothing heavy.
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
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")  # as PEP 503 normalises names, runs of '-' excepted


@dataclass(frozen=True)
class Names:
    """The four spellings of a name."""

    dist: str

    @property
    def module(self) -> str:
        return self.dist.replace("-", "_")

    @property
    def cls(self) -> str:
        return "".join(part.capitalize() for part in self.dist.split("-"))

    def put(self, text: str) -> str:
        """A template's text with these names."""
        spellings = {
            "my-plugin": self.dist,
            "my_plugin": self.module,
            "MyPlugin": self.cls,
            "MY_PLUGIN": self.module.upper(),
        }
        for old, new in spellings.items():
            text = text.replace(old, new)
        return text


def check_name(name: str) -> Names:
    """PluginError unless a distribution, a Python package and a plug-in may have this name."""
    from minivllm.plugins.specs import BUILTINS

    normal = re.sub(r"[-_.]+", "-", name).lower()
    if not NAME.fullmatch(normal):
        raise PluginError(f"{name!r} is no name for a package: want letters, digits and '-', such as 'my-attention'")
    if normal != name:
        raise PluginError(f"{name!r}: want the normalised form of the name (PEP 503), {normal!r}")
    names = Names(name)
    if not names.module.isidentifier() or keyword.iskeyword(names.module):
        raise PluginError(f"{name!r}: no Python package can be called {names.module!r}; start with a letter")
    taken = next((kind for kind, builtin, _ in BUILTINS if builtin == name), None)
    if taken is not None:
        raise PluginError(f"{name!r} is a built-in {taken}, whose name cannot be taken over; choose another")
    if name in KINDS:
        raise PluginError(f"{name!r} is the name of a seam; choose another, such as 'my-{name}'")
    if names.module in sys.stdlib_module_names or importlib.util.find_spec(names.module) is not None:
        raise PluginError(f"a Python module {names.module!r} is there already; choose another name than {name!r}")
    return names


def about(seam: str) -> dict[str, str]:
    """What a template says of itself: ``summary``, ``use`` and perhaps ``more`` for the pyproject.toml."""
    from minivllm.config.files import tomllib

    return tomllib.loads((TEMPLATES / seam / "about.toml").read_text(encoding="utf-8"))


def files(name: str, seam: str) -> Iterator[tuple[str, str]]:
    """(path in the package, text) of everything that the package of a plug-in consists of."""
    names, said = Names(name), about(seam)
    major, minor = __version__.split(".")[:2]
    words = {
        "SEAM": seam,
        "SUMMARY": said["summary"],
        "USE": said["use"].strip(),
        "MORE": said.get("more", ""),
        "BASE": KINDS[seam].base.rpartition(":")[2],
        "SINCE": f"{major}.{minor}",
        "BEFORE": f"{major}.{int(minor) + 1}" if major == "0" else str(int(major) + 1),
    }

    def common(file: str) -> str:
        text = (TEMPLATES / "common" / file).read_text(encoding="utf-8")
        for word, value in words.items():
            text = re.sub(rf"\b{word}\b", lambda _, v=value: v, text)
        return names.put(text)

    for source, target in COMMON.items():
        yield target, re.sub(r"\n{3,}", "\n\n", common(source))
    yield f"src/{names.module}/__init__.py", common("init.py")
    for path in sorted((TEMPLATES / seam).rglob("*.py")):
        yield names.put(path.relative_to(TEMPLATES / seam).as_posix()), names.put(path.read_text(encoding="utf-8"))


def write(name: str, seam: str, where: str | Path = ".") -> Path:
    """Write the package ``name`` into the folder ``where`` and return its path.

    PluginError for a name that cannot be, ConfigError if the folder exists or cannot be written.
    """
    kind = check_seam(seam)
    assert kind is not None
    check_name(name)
    folder = Path(where) / name
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already: nothing is overwritten; choose another name, or --dir")
    try:
        for path, text in files(name, kind):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{exc.filename}: {exc.strerror}") from None
    return folder
