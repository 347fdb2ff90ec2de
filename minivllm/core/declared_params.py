"""Request parameters that samplers, processors and strategies declare in their specs, by name.

There are three sources.  Each is slower than the one before it, and is used only if the name was not found earlier::

    built-in    the specs of this package                      imported once
    chosen      the specs of the chosen plug-ins               added by ``choose`` when a configuration is resolved
    installed   the specs of all other packages                imported once, and again if packages change

The last source serves unknown keywords in Python, never a request that is being served, because importing takes time.

A name has one meaning in a process.  A plug-in that declares a known name differently cannot be chosen.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from minivllm.errors import PluginError
from minivllm.registration.parameters import Param
from minivllm.registration.spec import REQUESTED

if TYPE_CHECKING:
    from minivllm.registration.discovery import Entry
    from minivllm.registry import Candidate, Catalog


@dataclass(frozen=True)
class Declaration:
    """A parameter, and the plug-ins that read it, such as ``sampler 'mirostat'``."""

    param: Param
    by: tuple[str, ...]


_chosen: dict[str, Declaration] = {}
# What the last reading found: the entry points of all installed packages, and the request
# parameters that external packages declare.
_installed: tuple[tuple[Entry, ...], dict[str, Declaration]] | None = None


@cache
def builtin() -> Mapping[str, Declaration]:
    """Return the parameters of the plug-ins of this package, in the order of its table of plug-ins."""
    from minivllm.plugins.specs import BUILTINS

    found: dict[str, Declaration] = {}
    for kind, name, target in BUILTINS:
        if kind in REQUESTED:
            module, _, attribute = target.partition(":")
            spec = getattr(importlib.import_module(module), attribute)
            _add(found, spec.params, f"{kind} {name!r}")
    return found


def known(name: str) -> Param | None:
    """Return the parameter with a name, or None if it is unknown without importing another package."""
    return next((place[name].param for place in _known() if name in place), None)


def find(name: str) -> Param | None:
    """Return the parameter with a name, also from packages that were not imported yet, or None."""
    param = known(name)
    if param is not None:
        return param
    declaration = installed().get(name)
    return declaration.param if declaration else None


def names() -> set[str]:
    """Return the names of all parameters that are known without importing another package."""
    return {name for place in _known() for name in place}


def readers(name: str) -> list[str]:
    """Return the names of the known plug-ins that read a request parameter."""
    plugins = (plugin for place in _known() if name in place for plugin in place[name].by)
    return list(dict.fromkeys(plugins))


def of_processor(name: str) -> bool:
    """Return whether a known processor declares the request parameter."""
    return any(plugin.startswith("processor ") for plugin in readers(name))


def everything() -> dict[str, Declaration]:
    """Return all declared parameters by name, the built-in ones first."""
    # A merge keeps the first position of a key and its last value.
    return {**builtin(), **_chosen, **installed(), **_chosen, **builtin()}


def offered(catalog: Catalog) -> dict[str, Declaration]:
    """Return all parameters of a catalog by name, the built-in ones first."""
    return {**builtin(), **_of(catalog), **builtin()}


def choose(kind: str, candidate: Candidate, taken: Callable[[str], bool]) -> None:
    """Register the request parameters of a chosen plug-in.

    PluginError if a parameter cannot be declared (see ``fault``).
    """
    if candidate.spec is None or candidate.entry.builtin:
        return
    for param in candidate.spec.params:
        problem = fault(kind, param, taken)
        if problem:
            raise PluginError(f"{candidate.entry} declares the parameter {param.name!r}{problem}")
        _add(_chosen, (param,), f"{kind} {candidate.entry.label!r}")


def fault(kind: str, param: Param, taken: Callable[[str], bool]) -> str:
    """Return why a plug-in cannot declare a parameter, as the end of a sentence, or "".

    Either requests have no parameters for its seam, or the name is a field of ``SamplingParams`` (``taken(name)``), or
    another plug-in declares the name differently.
    """
    if kind not in REQUESTED:
        return f", but a {kind} has no request parameters: expected a {', '.join(REQUESTED)}"
    if taken(param.name):
        return ", which all requests have: choose another name"
    other = known(param.name)
    if other not in (None, param):
        return f" otherwise than {' and '.join(readers(param.name))}: declare {other}, or choose another name"
    return ""


def _known() -> tuple[Mapping[str, Declaration], ...]:
    """Return the request parameters that are known without importing another package, one mapping for each source."""
    return builtin(), _chosen, {} if _installed is None else _installed[1]


def installed() -> Mapping[str, Declaration]:
    """Return the parameters of installed external packages that are not blocked.

    A spec that cannot be imported declares nothing.  A configuration that chooses it reports the error.
    """
    global _installed
    from minivllm.registry import Catalog

    with contextlib.suppress(
        PluginError
    ):  # a wrong environment variable is an error when an engine is created
        catalog = Catalog.discover()
        if _installed is None or _installed[0] != catalog.entries:
            _installed = (catalog.entries, _of(catalog))
    return {} if _installed is None else _installed[1]


def _of(catalog: Catalog) -> dict[str, Declaration]:
    """Return the parameters of the external plug-ins of a catalog."""
    found: dict[str, Declaration] = {}
    for kind in REQUESTED:
        registry = catalog[kind]
        for entry in registry.entries:
            if not entry.builtin and not entry.blocked:
                with contextlib.suppress(PluginError):
                    _add(found, registry.spec(entry).params, f"{kind} {entry.label!r}")
    return found


def _add(found: dict[str, Declaration], params: tuple[Param, ...], plugin: str) -> None:
    """Add the parameters of a plug-in.  The first declaration of a name counts."""
    for param in params:
        first = found.setdefault(param.name, Declaration(param, ()))
        if plugin not in first.by and first.param == param:
            found[param.name] = Declaration(param, (*first.by, plugin))
