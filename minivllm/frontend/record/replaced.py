"""Functions that are others than their files say, because a program has replaced them at run time.

A module's compiled file has the code of each function that it defines.  The function of that name which is loaded must
have that code, be wrapped around it (a decorator), or be reached from it; else it was replaced.  A function of a class
that its file does not define, and that comes from another file, was added.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

ENGINE = ("core", "device", "frontend", "plugins", "runtime")
TORCH = ("torch", "torch.nn.functional", "torch.linalg", "torch.special")
FUNCTION = 0x1  # CO_OPTIMIZED: code of a function, not of a class body
WRAPPED = ("__wrapped__", "__func__", "fget", "func", "fn", "function", "_function", "python_impl")
DEEPEST = 5  # decorators around a function


def of_modules(names: Iterable[str]) -> dict[str, str]:
    """Return the replaced functions of loaded modules: ``{"own.helper()": "script.mine (digest)"}``."""
    found: dict[str, str] = {}
    for name in names:
        module = sys.modules.get(name)
        code = _file_code(name) if module is not None else None
        if module is not None and code is not None:
            found |= {f"{name}.{path}()": text for path, text in _of_module(module, code)}
    return found


def engine_modules() -> list[str]:
    """Return the loaded modules of minivllm that compute."""
    mine = [name for name in list(sys.modules) if name.startswith(tuple(f"minivllm.{one}." for one in ENGINE))]
    return sorted(mine)


def of_torch() -> dict[str, str]:
    """Return the functions of torch that are defined in a file outside of torch."""
    torch = sys.modules.get("torch")
    folder = str(getattr(torch, "__path__", [""])[0])
    found = {}
    for name in TORCH if folder else ():
        for key, value in list(vars(sys.modules.get(name) or types.SimpleNamespace()).items()):
            if isinstance(value, types.FunctionType) and _outside(value, folder):
                found[f"{name}.{key}()"] = described(value)
    return found


def _outside(function: types.FunctionType, folder: str) -> bool:
    """Return whether a function comes from a file that is neither of torch nor of Python's own library."""
    file, top = function.__code__.co_filename, (function.__module__ or "").partition(".")[0]
    return not file.startswith((folder, "<frozen")) and top not in sys.stdlib_module_names and top != "torch"


def described(thing: Any) -> str:
    """Return a name and a digest of the code of what is there instead."""
    code = next(_codes(thing), None)
    module = getattr(thing, "__module__", None) or type(thing).__module__
    name = f"{module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
    return f"{name} ({_digest(code)})" if code is not None else f"{name}, whose code is not known"


def _digest(code: types.CodeType) -> str:
    inner = [_digest(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    text = repr((code.co_code, [one for one in inner if not one.startswith("frozenset")], code.co_names))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _file_code(name: str) -> dict[str, list[types.CodeType]] | None:
    """Return the code of each function that a module's file defines, by its qualified name; None if that is unknown."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    try:
        code = spec.loader.get_code(name)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):
        return None
    found: dict[str, list[types.CodeType]] = {}

    def add(outer: types.CodeType, prefix: str) -> None:
        for one in outer.co_consts:
            if isinstance(one, types.CodeType):
                path = f"{prefix}{one.co_name}"
                if one.co_flags & FUNCTION:
                    found.setdefault(path, []).append(one)
                else:
                    add(one, f"{path}.")

    if code is None:
        return None
    add(code, "")
    return found


def _of_module(module: types.ModuleType, code: dict[str, list[types.CodeType]]) -> Iterator[tuple[str, str]]:
    for path, own in code.items():
        *classes, name = path.split(".")
        place: Any = module
        for one in classes:
            place = vars(place).get(one) if isinstance(place, (type, types.ModuleType)) else None
        if not isinstance(place, (type, types.ModuleType)) or name not in vars(place) or name.startswith("<"):
            continue  # deleted, or of a class that only a function makes
        loaded = vars(place)[name]
        if not any(there == one for there in _codes(loaded) for one in own):
            yield path, described(loaded)
    for name, cls in list(vars(module).items()):
        plain = type(cls) in (type, abc.ABCMeta)  # other metaclasses, as pydantic's, make functions themselves
        if plain and cls.__module__ == module.__name__ and cls.__name__ == name:
            yield from _added(module, cls, code)


def _added(module: types.ModuleType, cls: type, code: dict[str, list[types.CodeType]]) -> Iterator[tuple[str, str]]:
    for name, thing in list(vars(cls).items()):
        if isinstance(thing, types.FunctionType) and f"{cls.__qualname__}.{name}" not in code:
            of = thing.__module__
            if thing.__code__.co_filename.startswith("<") or of == module.__name__ or of in sys.stdlib_module_names:
                continue  # generated, as by dataclasses, or assigned by the module itself
            if of.partition(".")[0] != module.__name__.partition(".")[0]:
                yield f"{cls.__qualname__}.{name}", described(thing)


def _codes(thing: Any, depth: int = 0) -> Iterator[types.CodeType]:
    """Yield the code of a function and of all that it wraps."""
    if isinstance(thing, types.FunctionType):
        yield thing.__code__
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
        if depth < DEEPEST:
            for one in (*cells, getattr(thing, "__wrapped__", None)):
                if callable(one) or isinstance(one, (staticmethod, classmethod, property)):
                    yield from _codes(one, depth + 1)
    elif depth < DEEPEST and thing is not None and not isinstance(thing, (type, types.ModuleType)):
        for name in WRAPPED:
            inner = getattr(thing, name, None) if not isinstance(thing, types.BuiltinFunctionType) else None
            if inner is not None and inner is not thing:
                yield from _codes(inner, depth + 1)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
