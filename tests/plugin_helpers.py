"""Packages that offer plug-ins, without installing them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from minivllm.registry import Catalog


class Points(list):
    """What importlib.metadata.entry_points() returns, as far as it is used."""

    def select(self, group):
        return [p for p in self if p.group == group]


def point(dist, name, value, kind="attention", version="1.0"):
    found = SimpleNamespace(name=dist, version=version)
    return SimpleNamespace(group=f"minivllm.{kind}", name=name, value=value, dist=found)


def discover(*points, environ=None):
    return Catalog.discover(environ=environ or {}, entry_points=Points(points))


def write_package(tmp_path, monkeypatch):
    """Writes modules that third parties could have; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


SPEC = """
from minivllm.spec import *
S = Spec("{impl}", {api}, "for a test", priority={priority}, limits=ANY, features=frozenset({features}))
"""


def spec_text(impl="acme:Flash", api=(1, 0), priority=0, features=()):
    return SPEC.format(impl=impl, api=api, priority=priority, features=list(features))
