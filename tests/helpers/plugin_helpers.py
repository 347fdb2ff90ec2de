"""Packages that offer plug-ins, without installing them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from minivllm.registry import Catalog


class Points(list):
    """A replacement for the result of importlib.metadata.entry_points(), with the methods that are used."""

    @property
    def groups(self):
        return {p.group for p in self}

    def select(self, group):
        return [p for p in self if p.group == group]


class Dist:
    def __init__(self, name, version):
        self.text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not this one\n"

    def read_text(self, file):
        return self.text if file == "METADATA" else None


def point(dist, name, value, kind="attention", version="1.0", group=None):
    group = group or f"minivllm.{kind}"
    return SimpleNamespace(group=group, name=name, value=value, dist=Dist(dist, version))


def install(folder, name, points, version="1.0", metadata="", **modules):
    """Write a distribution into ``folder`` as pip does, with metadata and modules by name.

    ``points`` is the text of entry_points.txt, or group -> {name: target}.
    """
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
    if not isinstance(points, str):
        groups = ([f"[{g}]", *(f"{n} = {t}" for n, t in named.items())] for g, named in points.items())
        points = "\n".join(line for lines in groups for line in lines)
    (info / "entry_points.txt").write_text(points + "\n")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return folder


def discover(*points, environ=None):
    return Catalog.discover(environ=environ or {}, entry_points=Points(points))


def write_package(tmp_path, monkeypatch):
    """Return a function that writes modules as third parties do; they are removed from sys.modules afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


SPEC = """
from minivllm.registration.spec import *
S = Spec("{impl}", {api}, "for a test", priority={priority}, limits=ANY, features=frozenset({features}))
"""


def spec_text(impl="acme:Flash", api=(1, 0), priority=0, features=()):
    return SPEC.format(impl=impl, api=api, priority=priority, features=list(features))
