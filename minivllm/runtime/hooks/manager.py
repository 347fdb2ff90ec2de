"""The hook plug-ins of one engine.  pluggy registers and checks them, and ``HookManager`` calls them.

pluggy handles the markers, the check of arguments and the order.  The calls are made here, one plug-in at a time, to
measure the time and count the errors of each plug-in, and because an error must neither stop the others nor the step.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from minivllm.core import checks
from minivllm.core.timing import SeamTimes
from minivllm.errors import MinivllmError, PluginError, describe_error, from_signal, suggest
from minivllm.registration.discovery import BUILTIN, LOCAL
from minivllm.registration.importing import guarded_import
from minivllm.registry import build_part

from .contract import FIGURES, PROJECT, WRAPPERS, HookContracts, Hooks

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part

FAILURES = 3  # number of errors after which a plug-in is disabled
PREFIX = "minivllm_"
NAMES = tuple(name for name in vars(HookContracts) if name.startswith(PREFIX))
log = logging.getLogger("minivllm.hooks")


@dataclass(eq=False)
class Member:
    """An enabled plug-in, and the number of its errors."""

    name: str  # dist/name
    plugin: Hooks
    failures: int = 0

    def __str__(self) -> str:
        dist = self.name.partition("/")[0]
        return f"hooks {self.name!r} ({dist} {version_of(dist)})"

    @property
    def disabled(self) -> bool:
        """Return whether the plug-in is disabled because of its errors."""
        return self.failures >= FAILURES


@dataclass(frozen=True)
class HookCall:
    """One plug-in's method for one hook."""

    member: Member
    hook: str
    function: Callable[..., Any]
    takes: tuple[str, ...]


def version_of(dist: str) -> str:
    """Return the version of a package, or "-" if it is unknown."""
    if dist == BUILTIN:
        from minivllm import __version__

        return __version__
    try:
        return "-" if dist == LOCAL else importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return "-"


class HookManager:
    """The hook plug-ins of an engine, each with its name, in the order of the configuration; it calls their hooks.

    The constructor raises PluginError for a plug-in that does not follow the contract."""

    def __init__(self, plugins: Iterable[tuple[str, Hooks]]) -> None:
        self.times = SeamTimes()
        self.members = [Member(name, plugin) for name, plugin in plugins]
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(HookContracts)
        for member in reversed(self.members):  # pluggy calls the last registered plug-in first
            _check(manager, member)
            try:
                manager.register(member.plugin, member.name)
            except pluggy.PluginValidationError as exc:
                raise PluginError(f"{member}: {_words(exc)}") from exc
        by_plugin = {id(m.plugin): m for m in self.members}
        self._calls: dict[str, tuple[HookCall, ...]] = {}
        for name in NAMES:
            found = reversed(getattr(manager.hook, name).get_hookimpls())
            self._calls[name] = tuple(
                HookCall(by_plugin[id(i.plugin)], name, i.function, tuple(i.argnames)) for i in found
            )

    @classmethod
    def make(cls, parts: Sequence[Part], only: str = "") -> HookManager:
        """Return a manager of new instances of the plug-ins, or only of those with the hook ``only``.

        First-result hooks are called in this way before there is an engine."""
        wanted = [p for p in parts if not only or hasattr(_class(p), only)]
        return cls((p.name, build_part("hooks", p)) for p in wanted)

    def listens(self, *names: str) -> bool:
        """Return whether any plug-in has one of these hooks."""
        return any(self._calls[name] for name in names)

    def failures(self) -> dict[str, int]:
        """Return the number of errors of each plug-in.  A plug-in with ``FAILURES`` errors is disabled."""
        return {m.name: m.failures for m in self.members}

    def notify(self, name: str, **values: Any) -> None:
        """Call the observers of a hook.  Their errors are logged, not raised."""
        for call in self._calls[name]:
            if not call.member.disabled:
                self._run(call, call.function, *[values[a] for a in call.takes])

    def start(self, **values: Any) -> None:
        """Call the observers of the engine's start.

        PluginError if an observer fails, because the configuration requires it."""
        for call in self._calls["minivllm_engine_started"]:
            self._strict(call, values)

    def _strict(self, call: HookCall, values: Mapping[str, Any]) -> Any:
        """Call a plug-in and raise its errors, as PluginError unless they are errors of minivllm."""
        try:
            return call.function(*[values[a] for a in call.takes])
        except MinivllmError:
            raise
        except BaseException as exc:
            if from_signal(exc):
                raise
            raise PluginError(f"{call.member} failed in {call.hook}: {describe_error(exc)}") from exc

    def first_result(self, name: str, **values: Any) -> tuple[str, Any] | None:
        """Return the first answer that is not None, with the name of its plug-in.  PluginError if a plug-in raises."""
        for call in self._calls[name]:
            answer = self._strict(call, values)
            if answer is not None:
                return call.member.name, answer
        return None

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the figures of each plug-in that has some.  Errors count as errors of a hook."""
        found = {}
        for call in self._calls[FIGURES]:
            if call.member.disabled:
                continue
            figures = self._run(call, lambda f: checks.figures(f()), call.function)
            if figures:
                found[f"hooks:{call.member.name}"] = figures
        return found

    def wrap(self, name: str, inner: Callable[[], Any], seen: Callable[[Any], Any], **values: Any) -> Any:
        """Run ``inner()`` inside the wrappers of a hook, and return its result or raise its exception.

        The wrappers receive ``seen(result)`` or the exception at their yield.  They cannot change the outcome."""
        begun = []
        for call in self._calls[name]:
            if not call.member.disabled:
                generator = call.function(*[values[a] for a in call.takes])
                if self._run(call, _begin, generator):
                    begun.append((call, generator))
        try:
            result = inner()
        except BaseException as exc:
            for call, generator in reversed(begun):
                self._run(call, _throw, generator, exc)
            raise
        view = seen(result) if begun else None
        for call, generator in reversed(begun):
            self._run(call, _send, generator, view)
        return result

    def _run(self, call: HookCall, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a plug-in and return its result, or log its error and return None."""
        member = call.member
        try:
            return self.times.run(f"hooks:{member.name}", function, *args)
        # ``run`` converts SystemExit and panics of Rust to exceptions, so that they do not end the engine
        except Exception as exc:
            member.failures += 1
            how = f"{member} failed in {call.hook} ({member.failures} of {FAILURES}): {describe_error(exc)}"
            log.warning(how, exc_info=exc if log.isEnabledFor(logging.DEBUG) else None)
            if member.disabled:
                log.warning("%s is disabled: it failed %s times", member, FAILURES)
            return None


def _begin(generator: Any) -> bool:
    """Run a wrapper (a generator with one yield) up to its yield and return True.  RuntimeError if it ends without a
    yield."""
    try:
        next(generator)
    except StopIteration:
        raise RuntimeError("the wrapper ended without a yield; expected exactly one yield") from None
    return True


def _send(generator: Any, value: Any) -> None:
    """Run a wrapper (a generator with one yield) from its yield to its end; ``value`` is the result of the yield.
    RuntimeError if it yields again."""
    try:
        generator.send(value)
    except StopIteration:
        return
    generator.close()
    raise RuntimeError("the wrapper yielded twice; expected exactly one yield")


def _throw(generator: Any, exc: BaseException) -> None:
    """Run a wrapper from its yield to its end.  The yield raises an exception."""
    try:
        generator.throw(exc)
    except StopIteration:
        return
    except BaseException as raised:
        if raised is not exc:
            raise
        return
    generator.close()
    raise RuntimeError("the wrapper yielded twice; expected exactly one yield")


# ---- checks at registration ------------------------------------------------------------------------------------------


def _class(part: Part) -> Any:
    """Return the class of a plug-in, or None if it cannot be imported.  ``build_part`` raises that error later."""
    try:
        return guarded_import(part.name, part.target, part.source)
    except PluginError:
        return None


def _check(manager: pluggy.PluginManager, member: Member) -> None:
    """Raise PluginError for mistakes that pluggy accepts or reports less clearly, such as an unknown hook or a method
    without ``@hookimpl``."""
    for attribute in dir(member.plugin):
        opts = manager.parse_hookimpl_opts(member.plugin, attribute)
        if opts is None:
            if attribute.startswith(PREFIX):
                raise PluginError(
                    f"{member}: {attribute} is not marked: put @hookimpl above it (minivllm.runtime.hooks)"
                )
            continue
        name = opts.get("specname") or attribute
        if name not in NAMES:
            if opts["optionalhook"]:
                continue
            raise PluginError(
                f"{member}: there is no hook {name!r}.{suggest(name, NAMES)} There are: {', '.join(NAMES)}"
            )
        if opts["hookwrapper"]:
            raise PluginError(f"{member}: {name} is an old-style wrapper: use @hookimpl(wrapper=True)")
        if opts["wrapper"] and name not in WRAPPERS:
            raise PluginError(f"{member}: {name} cannot be wrapped: use @hookimpl without wrapper=True")
        if not opts["wrapper"] and name in WRAPPERS:
            raise PluginError(f"{member}: {name} is a wrapper: use @hookimpl(wrapper=True) and a yield")
        deferred = "" if opts["wrapper"] else _deferred(getattr(member.plugin, attribute))
        if deferred:
            raise PluginError(f"{member}: {name} is {deferred}, and a call would not run it: use a plain function")


def _deferred(function: Callable[..., Any]) -> str:
    """Return the kind of a function whose call does not run its body, such as an async function, or "" for a plain
    function."""
    if inspect.iscoroutinefunction(function):
        return "an async function"
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return "a generator (it has a yield)" if generates else ""


def _words(exc: pluggy.PluginValidationError) -> str:
    """Return pluggy's description of a wrong method, without the name of the plug-in."""
    hook = next((name for name in NAMES if f"'{name}'" in str(exc)), "")
    last = str(exc).splitlines()[-1].strip()
    if not hook:
        return last
    parameters = [p for p in inspect.signature(getattr(HookContracts, hook)).parameters if p != "self"]
    return f"{hook}: {last[:1].lower()}{last[1:]}; its parameters are: {', '.join(parameters)}"


def resolve_model(parts: Sequence[Part], model: str) -> tuple[str, str] | None:
    """Return the first hook's directory or id for a model name, with the name of the plug-in, or None."""
    return _first_result(parts, "minivllm_resolve_model", str, "a path or an id", model=model)


def read_config(parts: Sequence[Part], path: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the first hook's options in a configuration file, with the name of the plug-in, or None."""
    return _first_result(parts, "minivllm_read_config", Mapping, "a mapping of options", path=path)


def _first_result(parts: Sequence[Part], hook: str, kind: Any, expected: str, **values: Any) -> tuple[str, Any] | None:
    """Return (name of the plug-in, answer) of the first plug-in that answers the hook ``hook``, None if none does.
    PluginError if the answer does not have the type ``kind``."""
    found = HookManager.make(parts, hook).first_result(hook, **values) if parts else None
    if found is not None and not isinstance(found[1], kind):
        name, answer = found
        raise PluginError(f"hooks {name!r}: {hook} returned a {type(answer).__name__}; expected {expected}")
    return found
