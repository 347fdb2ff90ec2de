"""``minivllm plugins check``: import each plug-in in a new process, and report faults and import times.

The new process may crash, hang or print.  This process only receives its report.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from minivllm import moved
from minivllm.core import declared_params
from minivllm.errors import PluginError, suggest
from minivllm.registration import importing
from minivllm.registration.discovery import Entry, version_hint
from minivllm.registration.fresh import command
from minivllm.registration.importing import how_it_ended
from minivllm.registration.spec import ANY, KINDS, Kind, PluginQuery, Spec
from minivllm.registry import Candidate, Registry, import_target

HEAVY = ("torch", "transformers", "triton", "flash_attn", "bitsandbytes", "numpy", "pydantic")
TIMEOUT = 60.0


@dataclass(frozen=True)
class Report:
    """The result of importing a plug-in.

    Milliseconds are None if the import did not get that far.  ``heavy_ms`` has the imports of big libraries by name.
    ``impl_ms`` counts neither these nor the import of the base class for plug-ins of its kind."""

    entry: Entry
    faults: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # packages to install first; a missing one is no fault of the plug-in
    outdated: tuple[str, ...] = ()  # old import paths that the plug-in uses; they still work, so this is no fault
    spec_ms: float | None = None
    impl_ms: float | None = None
    heavy_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def word(self) -> str:
        """Return the verdict: FAULTY, missing or ok."""
        if self.faults:
            return "FAULTY"
        return "missing" if self.missing else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        entry = self.entry
        found = asdict(self)
        del found["entry"]
        return {
            "seam": entry.kind,
            "name": entry.label,
            "version": entry.version,
            "target": entry.target,
            "result": self.word,
            **found,
        }


def check(entries: Sequence[Entry], timeout: float = TIMEOUT, jobs: int = 2) -> Iterable[Report]:
    """Yield a report for each registry entry, in order.

    ``timeout`` is in seconds for each; ``jobs`` run at once.
    """
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda entry: check_one(entry, timeout), entries)


def check_one(entry: Entry, timeout: float = TIMEOUT) -> Report:
    """Import a plug-in in a new process and return its report.  A process that crashes or exceeds ``timeout`` seconds
    is a fault in the report."""
    argv = command("minivllm.cli.plugin_check:main", json.dumps(asdict(entry)))
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=timeout)
    except subprocess.TimeoutExpired:
        return Report(entry, (f"importing it had not ended after {timeout:g} s",))
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        for name in ("faults", "missing", "outdated"):
            found[name] = tuple(found[name])
        report = Report(entry, **found)
    except (ValueError, IndexError, KeyError):
        return Report(entry, (f"importing it {how_it_ended(done.returncode)}{_tail(done.stderr)}",))
    hint = version_hint(entry)
    return replace(report, faults=(*report.faults, hint)) if hint else report


def _tail(text: str) -> str:
    """Return the last line of an error output in parentheses, "" if there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return f" ({lines[-1].strip()[:200]})" if lines else ""


# ---- in the new process ----------------------------------------------------------------------------------------------


@dataclass
class _Findings:
    """The fields of a report, which the new process fills in while it imports the plug-in."""

    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    spec_ms: float | None = None
    impl_ms: float | None = None
    heavy_ms: dict[str, float] = field(default_factory=dict)


def main(text: str) -> None:
    """Import the entry in ``text`` (JSON) and write the findings as the last line of standard output."""
    report = os.dup(1)
    os.dup2(2, 1)  # redirects the plug-in's standard output to standard error
    importing.on = False
    found = _Findings()
    try:
        _import(Entry(**json.loads(text)), found)
    except PluginError as exc:
        found.faults.append(str(exc).partition("\n")[0])
    found.outdated += moved.used.values()
    os.write(report, (json.dumps(asdict(found)) + "\n").encode())
    sys.stdout.flush()
    os._exit(0)  # ends the process although threads of the plug-in may still run


def _import(entry: Entry, found: _Findings) -> None:
    """Import the spec and the implementation of an entry, and add the faults to ``found``."""
    kind = KINDS[entry.kind]
    registry = Registry(kind, [entry], [entry.target])
    spec, found.spec_ms = _timed(lambda: registry.spec(entry))
    heavy = [module for module in HEAVY if module in sys.modules]
    # a local entry names a class, so its spec is in the module of the class
    if heavy and entry.dist != "local":
        found.faults.append(f"its spec imports {', '.join(heavy)}: keep the module of the spec, and its package, light")
    found.faults += spec_faults(spec, kind)
    reasons = [needs.missing() for needs in spec.needs]
    found.missing += [str(reason) for reason in reasons if reason]
    if found.missing:
        return
    import_target(kind.base)
    clock = _Clock()
    sys.meta_path.insert(0, clock)
    _, ms = _timed(lambda: registry.load(Candidate(entry, spec)))
    found.heavy_ms = {name: round(ms, 1) for name, ms in clock.ms.items()}
    found.impl_ms = round(ms - sum(found.heavy_ms.values()), 1)
    if threading.active_count() > 1:
        found.faults.append("importing it starts threads: start them when an instance is made")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.faults.append("importing it initialises CUDA: a worker process could not be forked, and memory is taken")
    if spec.options:
        found.faults += _option_faults(registry.options_model(entry, spec))


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call and its time in milliseconds."""
    start = time.perf_counter()
    result = work()
    return result, round((time.perf_counter() - start) * 1e3, 1)


class _Clock:
    """An import finder that times the import of big libraries.

    A library that imports another one counts the time of both.
    """

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._inside = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in HEAVY or self._inside:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def timed(module: Any) -> None:
            start = time.perf_counter()
            self._inside = True
            try:
                run(module)
            finally:
                self.ms[name] = (time.perf_counter() - start) * 1e3
                self._inside = False

        spec.loader.exec_module = timed  # type: ignore[method-assign]
        return spec


def spec_faults(spec: Spec, kind: Kind) -> list[str]:
    """Return the faults of a plug-in's spec: names that its kind of plug-in does not declare, and limits that refuse
    every query."""
    from minivllm.core.interfaces.params import is_own  # imports numpy, which must not count as the spec's import

    accepting = replace(spec, limits=ANY, needs=(), check=None)
    faults = [str(reason) for reason in accepting.refuse(PluginQuery(), kind)]
    known: Mapping[str, Iterable[str]] = {
        "limits": kind.facts,
        "features": kind.features,
        "traits": kind.traits,
        "prefer": kind.open,
    }
    for name, words in known.items():
        declared = getattr(spec, name)
        unknown = set() if declared == ANY else set(declared) - set(words)
        for word in sorted(unknown):
            near = suggest(word, words) or f" There are: {', '.join(words) or 'none'}."
            faults.append(f"its spec's {name} name {word!r}, which {kind.name} does not have.{near}")
    for param in spec.params:
        text = declared_params.fault(kind.name, param, is_own)
        if text:
            faults.append(f"its spec declares the parameter {param.name!r}{text}")
    if spec.limits == ANY:
        return faults
    for fact in kind.facts:
        if fact not in spec.limits:
            faults.append(f"its spec's limits do not speak of {fact!r}: a request that asks for it is refused")
    preferred = {fact: value for fact, value in spec.prefer.items() if fact in spec.limits}
    limited = replace(spec, needs=(), check=None)
    refusals = limited.refuse(PluginQuery(preferred), kind)
    return faults + [f"its spec prefers what it refuses: {reason}" for reason in refusals]


def _option_faults(model: Any) -> list[str]:
    """Return the faults of a plug-in's options model: unknown options are not forbidden, or an option has no
    description."""
    faults = []
    if model.model_config.get("extra") != "forbid":
        faults.append('its options must be declared with extra="forbid"')
    silent = [name for name, option in model.model_fields.items() if not (option.description or "").strip()]
    if silent:
        faults.append(f"options without a description: {', '.join(silent)}")
    return faults
