"""What every suite shares: which plug-in, which device, how many examples, known failures, and that no test is vacuous.

    class TestFlash(AttentionConformance):
        plugin = "acme/flash"                       # a name, dist/name, or module:Class
        options = {"num_splits": 4}                 # optional: its options
        device = "cuda"                             # optional: default is the first claimed one that is here
        known_failures = {"test_sinks": "issue 12"} # optional and strict: one that passes is an error

A suite's methods whose names do not start with ``test_`` may be overridden.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from minivllm.core import checks, declared_params
from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.params import is_own
from minivllm.errors import PluginError, describe_error, shown
from minivllm.registration.spec import KINDS, Kind, PluginQuery, Spec, version
from minivllm.registry import Candidate, Catalog, Entry, Registry, build_part, check_base, import_target

from .claims import claimed

PROFILE = "MINIVLLM_TEST_PROFILE"  # fast | long
SEED = "MINIVLLM_TEST_SEED"  # unset: the same examples every time
SHRINK = "MINIVLLM_TEST_SHRINK"  # 0: a failing example is shown as it was found
REPORTING = ("test_the_spec_names_an_implementation_of_the_seam", "test_known_failures_name_tests_of_this_suite")
TELLS_MADE = "test_what_is_chosen_goes_through_json_and_is_built_from_it"
NOT_RUN, UNMADE = "not run", "no instance can be made"
_BROKEN: dict[tuple[str, ...], str] = {}  # plug-in -> why its other tests mean nothing
LONG = 12  # times as many examples in the long profile
Test = TypeVar("Test", bound=Callable[..., Any])


def since(major: int, minor: int, spec_only: bool = False) -> Callable[[Test], Test]:
    """Mark a test with the version of the seam's contract that first demanded it; specs written against less skip.
    ``spec_only``: it runs although a package that the implementation needs is not installed here."""

    def mark(test: Test) -> Test:
        test.since, test.spec_only = (major, minor), spec_only  # type: ignore[attr-defined]
        return test

    return mark


@dataclass(frozen=True)
class Subject:
    """The plug-in under test."""

    kind: Kind
    entry: Entry
    spec: Spec
    registry: Registry

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.entry, self.spec)

    def part(self, values: Mapping[str, Any]) -> Part:
        """The choice as data, as it travels to a worker process."""
        options = self.registry.options(self.candidate, values)
        plain = {} if options is None else options.model_dump(mode="json")
        spec = self.spec
        return Part(self.entry.label, spec.impl, plain, spec.options, tuple(sorted(spec.features)), spec.plain_traits)


@lru_cache(maxsize=64)
def find(kind: str, plugin: str) -> Subject:
    """PluginError if there is no such plug-in or its spec cannot be imported."""
    if not isinstance(plugin, str):
        target = f", here '{plugin.__module__}:{plugin.__qualname__}'" if isinstance(plugin, type) else ""
        raise PluginError(f"plugin={shown(plugin)}: want a name, dist/name or module:Class{target}")
    catalog = Catalog.discover(allow_targets=[plugin.partition(":")[0]] if ":" in plugin else ())
    registry = catalog[kind]
    entry = registry.find(plugin)
    spec = registry.spec(entry)
    with contextlib.suppress(PluginError):  # a test of the spec says what is wrong
        declared_params.choose(kind, Candidate(entry, spec), is_own)
    return Subject(KINDS[kind], entry, spec, registry)


def same_figures(ask: Callable[[], Any]) -> None:
    """Ask for the figures of a plug-in twice, and check them."""
    first = checks.figures(ask())
    again = checks.figures(ask())
    assert again == first, f"asked twice, its figures are {shown(first)} and then {shown(again)}: asking changes them"


class Seen(Counter):
    """How often a property met its hard cases.  A test that never met one proves nothing about it."""

    def require(self, **least: int) -> None:
        """Fail unless each case was met at least so often."""
        weak = {name: self[name] for name, n in least.items() if self[name] < n}
        assert not weak, f"the test itself is too weak: met {weak}, want at least { ({k: least[k] for k in weak}) }"


def _seeded(test: Any) -> Any:
    return seed(int(os.environ[SEED]))(test) if SEED in os.environ else test


class Conformance:
    """Base of all suites; see the module's docstring for what an author sets."""

    kind: str = ""
    plugin: str = ""
    options: Mapping[str, Any] = {}  # the plug-in's
    device: str = ""  # cpu or cuda; empty: the first claimed one that is here
    profile: str = ""  # fast or long; empty: what the environment says
    known_failures: Mapping[str, str] = {}  # test -> why it fails; one that passes is an error

    # ---- the plug-in ---------------------------------------------------------------------------------------------

    @property
    def subject(self) -> Subject:
        if not self.plugin:
            pytest.fail(f"{type(self).__name__}.plugin is not set: want a name such as 'acme/flash'", pytrace=False)
        return find(self.kind, self.plugin)

    @property
    def spec(self) -> Spec:
        return self.subject.spec

    def build(self, *context: Any, options: Mapping[str, Any] | None = None) -> Any:
        """An instance, made as a worker process makes it: from JSON."""
        part = self.subject.part(self.options if options is None else options)
        return build_part(self.kind, Part(**json.loads(json.dumps(vars(part)))), *context)

    def claims(self, feature: str) -> bool:
        """Whether the plug-in claims a feature on the device of the test: its spec's ``check`` may refuse it there."""
        if feature not in self.spec.features or self.spec.check is None:
            return feature in self.spec.features
        facts = {"device": self.place()}
        plain, asked = (PluginQuery(facts=facts, features=frozenset(some)) for some in ((), (feature,)))
        return len(list(self.spec.check(asked) or ())) <= len(list(self.spec.check(plain) or ()))

    def need(self, feature: str) -> None:
        """Skip the test unless the plug-in claims the feature."""
        if not self.claims(feature):
            pytest.skip(f"not claimed: {feature}")

    def values(self, fact: str, *candidates: Any) -> list[Any]:
        """Those of the candidates that the plug-in claims for a fact."""
        return claimed(self.spec, fact, candidates)

    def place(self) -> str:
        """The device to compute on: the one asked for, else the first claimed one that is here."""
        if self.device:
            return self.device
        import torch

        devices = self.values("device", "cpu", "cuda") if "device" in self.subject.kind.facts else ["cpu"]
        here = [d for d in devices if d == "cpu" or torch.cuda.is_available()]
        if not here:
            pytest.skip(f"no device here: the plug-in claims {', '.join(devices) or 'none'}")
        return here[0]

    # ---- how much ------------------------------------------------------------------------------------------------

    @property
    def long(self) -> bool:
        return (self.profile or os.environ.get(PROFILE, "fast")) == "long"

    def settings(self, n: int, steps: int = 50) -> settings:
        """Hypothesis settings for ``n`` examples in the fast profile; the same examples every time unless a seed is
        set."""
        phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if os.environ.get(SHRINK) != "0" else [])]
        return settings(
            max_examples=n * LONG if self.long else n,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=SEED not in os.environ,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )

    def for_all(self, n: int, *strategies: Any, **named: Any) -> Callable[[Callable[..., None]], None]:
        """Decorator that runs a property at once, over ``n`` examples (in the fast profile) drawn from strategies."""
        return lambda test: _seeded(self.settings(n)(given(*strategies, **named)(test)))()

    def run_machine(self, machine: type[RuleBasedStateMachine], n: int, steps: int = 50) -> None:
        """Run a hypothesis state machine ``n`` times (in the fast profile) for up to ``steps`` rules."""
        run_state_machine_as_test(_seeded(machine), settings=self.settings(n, steps))

    # ---- bookkeeping of each test --------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _contract(self, request: Any) -> None:
        test, name = request.function, request.node.name
        need = getattr(test, "since", (1, 0))
        broken = "" if name in REPORTING else self._broken()
        if broken and not (name == TELLS_MADE and broken.startswith(UNMADE)):
            pytest.skip(f"{NOT_RUN}: {broken}")
        if self.spec.api < need and name not in REPORTING:
            pytest.skip(f"the contract demands this since {version(need)}, the spec is for {version(self.spec.api)}")
        missing = [str(reason) for needs in self.spec.needs if (reason := needs.missing()) is not None]
        if missing and not getattr(test, "spec_only", False):
            pytest.skip("; ".join(missing))
        known = self.known_failures.get(name) or self.known_failures.get(name.partition("[")[0])
        if known:
            request.applymarker(pytest.mark.xfail(reason=known, strict=True))

    def _broken(self) -> str:
        """Return why no other test means anything, or nothing: the contract's version, the implementation's import and
        base class, or an instance that cannot be made.  A test of ``REPORTING``, or ``TELLS_MADE``, fails for it."""
        kind, entry, spec = self.subject.kind, self.subject.entry, self.spec
        key = (kind.name, self.plugin, json.dumps(dict(self.options), default=repr, sort_keys=True), self.device)
        if key not in _BROKEN:
            _BROKEN[key] = ""
            if spec.api[0] != kind.api[0] or tuple(spec.api) > kind.api:
                _BROKEN[key] = f"api={tuple(spec.api)}, and this engine's {kind.name} contract is {kind.api}"
            elif not any(needs.missing() for needs in spec.needs):
                _BROKEN[key] = self._unusable(kind, entry)
        return _BROKEN[key]

    def _unusable(self, kind: Kind, entry: Entry) -> str:
        """Return why the implementation cannot be imported or made, or nothing; a test that cannot run here says so."""
        try:
            check_base(kind, entry, import_target(self.spec.impl))
        except Exception as exc:
            return f"the implementation cannot be used: {describe_error(exc)}"
        try:
            self.build(*self.context())  # type: ignore[attr-defined]
        except (pytest.skip.Exception, pytest.fail.Exception, NotImplementedError, AttributeError):
            return ""
        except Exception as exc:
            return f"{UNMADE}: {describe_error(exc)}"
        return ""

    @since(1, 0)
    def test_known_failures_name_tests_of_this_suite(self) -> None:
        """A list that names what is not there would hide that a test was renamed."""
        wrong = [name for name in self.known_failures if not hasattr(self, name.partition("[")[0])]
        assert not wrong, f"known_failures names {wrong}: this suite has no such test"
