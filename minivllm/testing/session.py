"""Run suites without a test file, and return the outcomes as data."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from minivllm.errors import PluginError
from minivllm.registration.discovery import BUILTIN
from minivllm.registration.spec import KINDS, Spec
from minivllm.registry import Catalog, import_target

from .base import PROFILE, SEED, SHRINK, find
from .suites import SUITES

FILE = "from minivllm.testing.session import pending\nglobals().update(pending())\n"
# folders of test tools; a frame in them is not shown as the place of a failure
TOOLS = {"_pytest", "pluggy", "hypothesis"}
_pending: dict[str, type] = {}
_numbers = itertools.count()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    ``status`` is passed, failed, skipped or xfailed; ``text`` is the reason or the message.
    """

    seam: str
    plugin: str
    test: str
    status: str
    seconds: float
    text: str = ""
    rule: str = ""  # the test's docstring
    where: str = ""  # file:line of the failure


@dataclass
class _Reporter:
    """A pytest plug-in that stores the outcome of each test."""

    classes: Mapping[str, tuple[str, str]]  # name of a test class -> (seam, plug-in)
    tell: Callable[[Outcome], None]
    outcomes: list[Outcome] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    only: Collection[str] = ()  # names of test functions to run; empty means all

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.only:
            items[:] = [item for item in items if item.function.__name__ in self.only]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        report = (yield).get_result()
        if report.when != "call" and report.passed:
            return
        status = report.outcome
        text = ""
        where = ""
        if hasattr(report, "wasxfail"):
            status = "xfailed"
            text = report.wasxfail
        elif report.skipped:
            text = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed and call.excinfo is None:  # a test of ``known_failures`` that passed
            text = str(report.longrepr) + "\nIt is among known_failures and passes now: remove it from the list."
        elif report.failed:
            text, where = _message(call.excinfo)
        parts = (item.function.__doc__ or "").split()
        doc = " ".join(parts)
        outcome = Outcome(*self.classes[item.cls.__name__], item.name, status, report.duration, text, doc, where)
        self.outcomes.append(outcome)
        self.tell(outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken.append(str(report.longrepr))


def _message(excinfo: Any) -> tuple[str, str]:
    """Return the message with hypothesis' falsifying example, and file:line of the last frame outside of test tools."""
    error = excinfo.value
    # without the notes about ``st.data()`` draws, which name no argument
    notes = []
    for n in getattr(error, "__notes__", ()):
        if not n.startswith("Draw "):
            notes.append(n)
    text = str(error)
    if not isinstance(error, (AssertionError, pytest.fail.Exception)):
        text = f"{excinfo.typename}: {text}"
    own = [entry for entry in excinfo.traceback if not TOOLS & set(Path(entry.path).parts)]
    if own:
        entry = own[-1]
    else:
        entry = excinfo.traceback[-1]
    lines = [text.rstrip() or excinfo.typename, *notes]
    return "\n".join(lines), f"{entry.path}:{entry.lineno + 1}"


def suite(seam: str) -> type:
    """Return the conformance suite of a seam (kind of plug-in)."""
    import minivllm.testing

    return getattr(minivllm.testing, SUITES[seam][1])


def seams_of(plugin: str) -> list[str]:
    """Return the seams (kinds of plug-ins) in which a plug-in of this name is installed.

    For ``module:Class`` they are the seams whose base class the class has.
    """
    allow_targets = [plugin.partition(":")[0]] if ":" in plugin else ()
    catalog = Catalog.discover(allow_targets=allow_targets)
    if ":" in plugin:
        try:
            found = import_target(plugin)
            if isinstance(found, Spec):
                found = import_target(found.impl)
        except Exception as exc:  # a module may raise an error of any type when it is imported
            raise PluginError(f"{plugin!r} could not be imported: {type(exc).__name__}: {exc}") from exc
        fits = []
        for k in KINDS:
            if isinstance(found, type) and issubclass(found, import_target(KINDS[k].base)):
                fits.append(k)
        return ["sampler"] if "sampler" in fits else fits  # a sampler has the base class of processors too
    return [k for k in KINDS if any(plugin in (e.name, e.label) for e in catalog[k].entries)]


def builtins() -> list[tuple[str, str]]:
    """Return (seam, name) of every plug-in of this package."""
    return [(e.kind, e.label) for e in Catalog.discover().entries if e.dist == BUILTIN]


def run(
    plugins: Sequence[tuple[str, str]],
    *,
    device: str = "",
    profile: str = "",
    seed: int | None = None,
    shrink: bool = True,
    select: str = "",
    only: Collection[str] = (),
    known: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run the suites of some plug-ins, (seam, plug-in) each, one after another in this process.

    ``select`` is a pytest ``-k`` expression.  ``only`` names test functions, and empty means all.  ``known`` maps
    tests to the reason why they fail.  ``overrides`` has attributes, by name, that a test class would override.
    ``tell`` is called with each outcome.  PluginError if a plug-in cannot be found or a suite cannot be collected.
    """
    _pending.clear()
    classes = {}
    for i, (seam, plugin) in enumerate(plugins):
        find(seam, plugin)
        name = f"Test{i}"
        attributes = {"plugin": plugin, "device": device, "known_failures": dict(known or {}), **(overrides or {})}
        _pending[name] = type(name, (suite(seam),), attributes)
        classes[name] = (seam, plugin)
    reporter = _Reporter(classes, tell, only=only)
    environ = {PROFILE: profile or None, SEED: None if seed is None else str(seed), SHRINK: None if shrink else "0"}
    with tempfile.TemporaryDirectory() as folder, _environment(environ):
        # a new name for each run, because pytest imports a name only once in a process
        path = Path(folder) / f"test_conformance_{next(_numbers)}.py"
        path.write_text(FILE, encoding="utf-8")
        ini = path.with_name("pytest.ini")
        ini.write_text("[pytest]\n", encoding="utf-8")
        args = [str(path), "-c", str(ini), "--rootdir", folder, "--import-mode=importlib"]
        args += ["-p", "no:cacheprovider", "-p", "no:terminal"]
        if select:
            args += ["-k", select]
        pytest.main(args, plugins=[reporter])
    if reporter.broken:
        raise PluginError("the suites could not be collected:\n" + "\n".join(reporter.broken))
    return reporter.outcomes


def pending() -> dict[str, type]:
    """Return the test classes of the current run; the file that pytest collects calls this."""
    return dict(_pending)


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in a block, except those whose value is None."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
