"""``minivllm plugins check``: import a plug-in in a process of its own, and say what is wrong and how long it took.

The process may die, hang or print; here only a report comes back.
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
    """What importing a plug-in showed.  Milliseconds are None where it did not come that far.  ``impl_ms`` counts
    neither what the seam's base class imports nor the big libraries, which ``heavy_ms`` has."""

    entry: Entry
    faults: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # what must be installed first: no fault of the plug-in's
    outdated: tuple[str, ...] = ()  # old import paths that it uses, which still work: no fault either
    spec_ms: float | None = None
    impl_ms: float | None = None
    heavy_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def word(self) -> str:
        return "FAULTY" if self.faults else "missing" if self.missing else "ok"

    def as_dict(self) -> dict[str, Any]:
        e, found = self.entry, asdict(self)
        del found["entry"]
        return {"seam": e.kind, "name": e.label, "version": e.version, "target": e.target, "result": self.word, **found}


def check(entries: Sequence[Entry], timeout: float = TIMEOUT, jobs: int = 2) -> Iterable[Report]:
    """A report for each, in order, as they come."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda entry: check_one(entry, timeout), entries)


def check_one(entry: Entry, timeout: float = TIMEOUT) -> Report:
    argv = command("minivllm.cli.plugin_check:main", json.dumps(asdict(entry)))
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=timeout)
    except subprocess.TimeoutExpired:
        return Report(entry, (f"importing it had not ended after {timeout:g} s",))
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        found |= {name: tuple(found[name]) for name in ("faults", "missing", "outdated")}
        report = Report(entry, **found)
    except (ValueError, IndexError, KeyError):
        return Report(entry, (f"importing it {how_it_ended(done.returncode)}{_tail(done.stderr)}",))
    if hint := version_hint(entry):
        report = replace(report, faults=(*report.faults, hint))
    return report


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f" ({lines[-1].strip()[:200]})" if lines else ""


# ---- in the other process --------------------------------------------------------------------------------------------


@dataclass
class _Look:
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    spec_ms: float | None = None
    impl_ms: float | None = None
    heavy_ms: dict[str, float] = field(default_factory=dict)


def main(text: str) -> None:
    """Look at the entry in ``text`` and write what was found as the last line of standard output."""
    report = os.dup(1)
    os.dup2(2, 1)  # what the plug-in prints
    importing.on = False
    look = _Look()
    try:
        _look(Entry(**json.loads(text)), look)
    except PluginError as exc:
        look.faults.append(str(exc).partition("\n")[0])
    look.outdated += moved.used.values()
    os.write(report, (json.dumps(asdict(look)) + "\n").encode())
    sys.stdout.flush()
    os._exit(0)  # threads that a plug-in started do not keep the process


def _look(entry: Entry, look: _Look) -> None:
    kind = KINDS[entry.kind]
    registry = Registry(kind, [entry], [entry.target])
    spec, look.spec_ms = _timed(lambda: registry.spec(entry))
    heavy = [m for m in HEAVY if m in sys.modules]
    if heavy and entry.dist != "local":  # a target is a class: its module is the implementation
        look.faults.append(f"its spec imports {', '.join(heavy)}: keep the module of the spec, and its package, light")
    look.faults += spec_faults(spec, kind)
    look.missing += [str(reason) for needs in spec.needs if (reason := needs.missing())]
    if look.missing:
        return
    import_target(kind.base)
    clock = _Clock()
    sys.meta_path.insert(0, clock)
    _, ms = _timed(lambda: registry.load(Candidate(entry, spec)))
    look.heavy_ms = {name: round(ms, 1) for name, ms in clock.ms.items()}
    look.impl_ms = round(ms - sum(look.heavy_ms.values()), 1)
    if threading.active_count() > 1:
        look.faults.append("importing it starts threads: start them when an instance is made")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        look.faults.append("importing it initialises CUDA: a worker process could not be forked, and memory is taken")
    if spec.options:
        look.faults += _option_faults(registry.options_model(entry, spec))


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), round((time.perf_counter() - start) * 1e3, 1)


class _Clock:
    """A finder that times the import of big libraries; one that imports another counts for both."""

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
            start, self._inside = time.perf_counter(), True
            try:
                run(module)
            finally:
                self.ms[name], self._inside = (time.perf_counter() - start) * 1e3, False

        spec.loader.exec_module = timed  # type: ignore[method-assign]
        return spec


def spec_faults(spec: Spec, kind: Kind) -> list[str]:
    """What a spec says that nobody would read, or that no engine of this version would accept."""
    from minivllm.core.interfaces.params import is_own  # numpy with it, which counts against a spec that imports it

    faults = [str(r) for r in replace(spec, limits=ANY, needs=(), check=None).refuse(PluginQuery(), kind)]
    known: Mapping[str, Iterable[str]] = {
        "limits": kind.facts,
        "features": kind.features,
        "traits": kind.traits,
        "prefer": kind.open,
    }
    for name, words in known.items():
        said = getattr(spec, name)
        for word in sorted(set(said) - set(words)) if said != ANY else ():
            near = suggest(word, words) or f" There are: {', '.join(words) or 'none'}."
            faults.append(f"its spec's {name} name {word!r}, which {kind.name} does not know.{near}")
    faults += [
        f"its spec declares the parameter {param.name!r}{text}"
        for param in spec.params
        if (text := declared_params.fault(kind.name, param, is_own))
    ]
    if spec.limits != ANY:
        faults += [
            f"its spec's limits do not speak of {fact!r}: a request that asks for it is refused"
            for fact in kind.facts
            if fact not in spec.limits
        ]
        inside = {fact: value for fact, value in spec.prefer.items() if fact in spec.limits}
        alone = replace(spec, needs=(), check=None)
        faults += [f"its spec prefers what it refuses: {r}" for r in alone.refuse(PluginQuery(inside), kind)]
    return faults


def _option_faults(model: Any) -> list[str]:
    faults = [] if model.model_config.get("extra") == "forbid" else ['its options want extra="forbid"']
    silent = [name for name, f in model.model_fields.items() if not (f.description or "").strip()]
    return faults + ([f"options without a description: {', '.join(silent)}"] if silent else [])
