"""The hook plug-ins of one engine: registered and checked by pluggy, called so that none can harm a step.

pluggy keeps the markers, the check of arguments and the order.  The calls are made here, one plug-in at a time, because
each has its own time, its own failures, and must not take the others with it.
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
from minivllm.errors import MinivllmError, PluginError, describe_error, suggest
from minivllm.registration.discovery import BUILTIN, LOCAL
from minivllm.registration.importing import guarded_import
from minivllm.registry import build_part

from .contract import FIGURES, PROJECT, WRAPPERS, HookContracts, Hooks

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part

FAILURES = 3  # of a plug-in, and it is disabled
PREFIX = "minivllm_"
NAMES = tuple(name for name in vars(HookContracts) if name.startswith(PREFIX))
log = logging.getLogger("minivllm.hooks")


@dataclass(eq=False)
class Member:
    """A plug-in that is enabled."""

    name: str  # dist/name
    plugin: Hooks
    failures: int = 0

    def __str__(self) -> str:
        dist = self.name.partition("/")[0]
        return f"hooks {self.name!r} ({dist} {version_of(dist)})"

    @property
    def disabled(self) -> bool:
        return self.failures >= FAILURES


@dataclass(frozen=True)
class HookCall:
    """One plug-in's method for one hook."""

    member: Member
    hook: str
    function: Callable[..., Any]
    takes: tuple[str, ...]


def version_of(dist: str) -> str:
    if dist == BUILTIN:
        from minivllm import __version__

        return __version__
    try:
        return "-" if dist == LOCAL else importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return "-"


class HookManager:
    """(name, plug-in) in the order of the configuration.  PluginError names a plug-in and what is wrong with it."""

    def __init__(self, plugins: Iterable[tuple[str, Hooks]]) -> None:
        self.times = SeamTimes()
        self.members = [Member(name, plugin) for name, plugin in plugins]
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(HookContracts)
        for member in reversed(self.members):  # pluggy calls the last first
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
        """Make the plug-ins.  ``only``: those alone that have this hook, which is how first-result hooks are asked
        before there is an engine."""
        wanted = [p for p in parts if not only or hasattr(_class(p), only)]
        return cls((p.name, build_part("hooks", p)) for p in wanted)

    def listens(self, *names: str) -> bool:
        """Whether any plug-in has one of these hooks."""
        return any(self._calls[name] for name in names)

    def failures(self) -> dict[str, int]:
        """Times that each plug-in has raised; from ``FAILURES`` on it is disabled."""
        return {m.name: m.failures for m in self.members}

    def tell(self, name: str, **values: Any) -> None:
        """Call the observers of a hook.  Nothing of theirs comes back, no exception either."""
        for call in self._calls[name]:
            if not call.member.disabled:
                self._run(call, call.function, *[values[a] for a in call.takes])

    def start(self, **values: Any) -> None:
        """Tell the observers that the engine has started.  PluginError if one fails: it was asked for, and it cannot
        work."""
        for call in self._calls["minivllm_engine_started"]:
            self._strict(call, values)

    def _strict(self, call: HookCall, values: Mapping[str, Any]) -> Any:
        """A call whose error is that of who asked: PluginError, unless minivllm itself would raise it."""
        try:
            return call.function(*[values[a] for a in call.takes])
        except (MinivllmError, KeyboardInterrupt):
            raise
        except BaseException as exc:
            raise PluginError(f"{call.member} failed in {call.hook}: {describe_error(exc)}") from exc

    def ask(self, name: str, **values: Any) -> tuple[str, Any] | None:
        """(plug-in, answer) of the first one whose answer is not None; PluginError names a plug-in that raises."""
        for call in self._calls[name]:
            answer = self._strict(call, values)
            if answer is not None:
                return call.member.name, answer
        return None

    def figures(self) -> dict[str, dict[str, float]]:
        """Of each plug-in that has some; a fault counts as any of its hooks'."""
        found = {}
        for call in self._calls[FIGURES]:
            if not call.member.disabled and (figures := self._run(call, lambda f: checks.figures(f()), call.function)):
                found[f"hooks:{call.member.name}"] = figures
        return found

    def wrap(self, name: str, inner: Callable[[], Any], seen: Callable[[Any], Any], **values: Any) -> Any:
        """``inner()`` between the halves of the wrappers, which are sent ``seen`` of its result or thrown its
        exception.  Its outcome is the same whatever they do."""
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
        """A call whose fault is written down and goes no further (None then)."""
        member = call.member
        try:
            return self.times.run(f"hooks:{member.name}", function, *args)
        except Exception as exc:  # a SystemExit or a panic in Rust is one too by now: nothing of it ends the engine
            member.failures += 1
            how = f"{member} failed in {call.hook} ({member.failures} of {FAILURES}): {describe_error(exc)}"
            log.warning(how, exc_info=exc if log.isEnabledFor(logging.DEBUG) else None)
            if member.disabled:
                log.warning("%s is disabled: it failed %s times", member, FAILURES)
            return None


def _begin(generator: Any) -> bool:
    try:
        next(generator)
    except StopIteration:
        raise RuntimeError("the wrapper ended without a yield; want exactly one") from None
    return True


def _send(generator: Any, value: Any) -> None:
    try:
        generator.send(value)
    except StopIteration:
        return
    generator.close()
    raise RuntimeError("the wrapper yielded twice; want exactly one yield")


def _throw(generator: Any, exc: BaseException) -> None:
    try:
        generator.throw(exc)
    except StopIteration:
        return
    except BaseException as raised:
        if raised is not exc:
            raise
        return
    generator.close()
    raise RuntimeError("the wrapper yielded twice; want exactly one yield")


# ---- checks at registration ------------------------------------------------------------------------------------------


def _class(part: Part) -> Any:
    """The class of a plug-in, or None if it cannot be imported: ``build_part`` then says so where it is used."""
    try:
        return guarded_import(part.name, part.target, part.source)
    except PluginError:
        return None


def _check(manager: pluggy.PluginManager, member: Member) -> None:
    """What pluggy would take in silence, or refuse in words of its own."""
    for attribute in dir(member.plugin):
        opts = manager.parse_hookimpl_opts(member.plugin, attribute)
        if opts is None:
            if attribute.startswith(PREFIX):
                raise PluginError(
                    f"{member}: {attribute} is not marked: want @hookimpl above it (minivllm.runtime.hooks)"
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
            raise PluginError(f"{member}: {name} is an old-style wrapper: want @hookimpl(wrapper=True)")
        if opts["wrapper"] and name not in WRAPPERS:
            raise PluginError(f"{member}: {name} cannot be wrapped: want @hookimpl without wrapper=True")
        if not opts["wrapper"] and name in WRAPPERS:
            raise PluginError(f"{member}: {name} is a wrapper: want @hookimpl(wrapper=True) and a yield")
        if not opts["wrapper"] and (what := _deferred(getattr(member.plugin, attribute))):
            raise PluginError(f"{member}: {name} is {what}, and nothing of it would run: want a plain function")


def _deferred(function: Callable[..., Any]) -> str:
    """What a function is whose call does not run it."""
    if inspect.iscoroutinefunction(function):
        return "an async function"
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return "a generator (it has a yield)" if generates else ""


def _words(exc: pluggy.PluginValidationError) -> str:
    """What is wrong with a method, without the name of the plug-in, which pluggy puts first."""
    hook = next((name for name in NAMES if f"'{name}'" in str(exc)), "")
    last = str(exc).splitlines()[-1].strip()
    if not hook:
        return last
    parameters = [p for p in inspect.signature(getattr(HookContracts, hook)).parameters if p != "self"]
    return f"{hook}: {last[:1].lower()}{last[1:]}; its parameters are: {', '.join(parameters)}"


def ask_model(parts: Sequence[Part], model: str) -> tuple[str, str] | None:
    """(plug-in, directory or id) of the hook that knows what ``model`` stands for."""
    return _ask_first(parts, "minivllm_resolve_model", str, "a path or an id", model=model)


def ask_config(parts: Sequence[Part], path: str) -> tuple[str, Mapping[str, Any]] | None:
    """(plug-in, table) of the hook that reads a configuration file."""
    return _ask_first(parts, "minivllm_read_config", Mapping, "a mapping of options", path=path)


def _ask_first(parts: Sequence[Part], hook: str, kind: Any, want: str, **values: Any) -> tuple[str, Any] | None:
    found = HookManager.make(parts, hook).ask(hook, **values) if parts else None
    if found is not None and not isinstance(found[1], kind):
        raise PluginError(f"hooks {found[0]!r} answered {hook} with a {type(found[1]).__name__}; want {want}")
    return found
