"""Parameters of requests that samplers, processors and strategies declare in their specs, by name.

Looked up in three places, of which each costs more than the one before and is asked only if that had no answer::

    built-in    the specs of this package                      imported once
    chosen      the specs that a configuration has chosen      ``choose``, as the configuration is resolved
    installed   the specs of all other packages                imported once, again if packages came or went

The last is for a keyword that nobody knows yet, never for a name in a request that is served: an import takes time.

A name has one meaning in a process: what declares a name otherwise than it is known already cannot be chosen.
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
from minivllm.registration.spec import ASKED

if TYPE_CHECKING:
    from minivllm.registration.discovery import Entry
    from minivllm.registry import Candidate, Catalog


@dataclass(frozen=True)
class Declaration:
    """A parameter, and the plug-ins that read it, such as ``sampler 'mirostat'``."""

    param: Param
    by: tuple[str, ...]


_chosen: dict[str, Declaration] = {}
# the entries of other packages, and the parameters that they declare
_installed: tuple[tuple[Entry, ...], dict[str, Declaration]] | None = None


@cache
def builtin() -> Mapping[str, Declaration]:
    """Those of this package, in the order of its table of plug-ins."""
    from minivllm.plugins.specs import BUILTINS

    found: dict[str, Declaration] = {}
    for kind, name, target in BUILTINS:
        if kind in ASKED:
            module, _, attribute = target.partition(":")
            _add(
                found,
                getattr(importlib.import_module(module), attribute).params,
                f"{kind} {name!r}",
            )
    return found


def known(name: str) -> Param | None:
    """The parameter of a name, as far as it is known without importing another package."""
    return next((place[name].param for place in _known() if name in place), None)


def find(name: str) -> Param | None:
    """The parameter of a name, also of a package that nobody has looked at yet."""
    if (param := known(name)) is not None:
        return param
    found = installed().get(name)
    return None if found is None else found.param


def names() -> set[str]:
    """Those that are known without importing another package."""
    return {name for place in _known() for name in place}


def readers(name: str) -> list[str]:
    """The plug-ins that read a parameter, as far as they are known."""
    return list(dict.fromkeys(who for place in _known() if name in place for who in place[name].by))


def everything() -> dict[str, Declaration]:
    """All that are declared here; the built-in ones first."""
    found = dict(builtin())
    for place in (_chosen, installed()):
        found.update({name: one for name, one in place.items() if name not in found})
    return found


def offered(catalog: Catalog) -> dict[str, Declaration]:
    """All of a catalog; the built-in ones first."""
    return {
        **builtin(),
        **{name: one for name, one in _of(catalog).items() if name not in builtin()},
    }


def choose(kind: str, candidate: Candidate, taken: Callable[[str], bool]) -> None:
    """What a chosen plug-in declares is known from here on.  PluginError if it cannot be, see ``fault``."""
    if candidate.spec is None or candidate.entry.builtin:
        return
    for param in candidate.spec.params:
        if text := fault(kind, param, taken):
            raise PluginError(f"{candidate.entry} declares the parameter {param.name!r}{text}")
        _add(_chosen, (param,), f"{kind} {candidate.entry.label!r}")


def fault(kind: str, param: Param, taken: Callable[[str], bool]) -> str:
    """Why a plug-in cannot declare a parameter, "" if it can: requests ask nothing of its seam; the name is one of
    ``SamplingParams`` itself, as ``taken(name)`` says; or another plug-in means something else by it."""
    if kind not in ASKED:
        return f", but requests ask for nothing of a {kind}: want a {', '.join(ASKED)}"
    if taken(param.name):
        return ", which all requests have: want another name"
    if (other := known(param.name)) not in (None, param):
        return f" otherwise than {' and '.join(readers(param.name))}: want {other}, or another name"
    return ""


def _known() -> tuple[Mapping[str, Declaration], ...]:
    return builtin(), _chosen, {} if _installed is None else _installed[1]


def installed() -> Mapping[str, Declaration]:
    """Those of other packages that are installed and not shut out.  A spec that cannot be imported declares nothing: a
    configuration that chooses it says why."""
    global _installed
    from minivllm.registry import Catalog

    with contextlib.suppress(PluginError):  # of the environment: whoever makes an engine is told
        catalog = Catalog.discover()
        if _installed is None or _installed[0] != catalog.entries:
            _installed = (catalog.entries, _of(catalog))
    return {} if _installed is None else _installed[1]


def _of(catalog: Catalog) -> dict[str, Declaration]:
    found: dict[str, Declaration] = {}
    for kind in ASKED:
        registry = catalog[kind]
        for entry in registry.entries:
            if not entry.builtin and not entry.blocked:
                with contextlib.suppress(PluginError):
                    _add(found, registry.spec(entry).params, f"{kind} {entry.label!r}")
    return found


def _add(found: dict[str, Declaration], params: tuple[Param, ...], who: str) -> None:
    """The first that declares a name says what it means."""
    for param in params:
        before = found.setdefault(param.name, Declaration(param, ()))
        if who not in before.by and before.param == param:
            found[param.name] = Declaration(before.param, (*before.by, who))
