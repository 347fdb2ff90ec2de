"""The base class of all conformance suites: the plug-in under test, the device, the examples and the known failures.

    class TestFlash(AttentionConformance):
        plugin = "acme/flash"                       # a name, dist/name, or module:Class
        options = {"num_splits": 4}                 # optional: its options
        device = "cuda"                             # optional: default is the first claimed device of this machine
        known_failures = {"test_sinks": "issue 12"} # optional and strict: a listed test that passes is an error

A test class may override the methods of a suite whose names do not start with ``test_``.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
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
# name of a variable with the seed of the examples; when it is unset, every run draws the same ones
SEED = "MINIVLLM_TEST_SEED"
# name of a variable; with the value "0", hypothesis does not simplify an example that fails
SHRINK = "MINIVLLM_TEST_SHRINK"
# tests that also run, and fail, for a plug-in that cannot be used at all; all other tests are skipped for it
REPORTING = ("test_the_spec_names_an_implementation_of_the_seam", "test_known_failures_name_tests_of_this_suite")
# BUILDING is the test that fails if the constructor of the plug-in raises.  CHECKING is the test of the function
# ``check`` of the spec; it can run, and fail, although the constructor raises.
BUILDING = "test_what_is_chosen_goes_through_json_and_is_built_from_it"
CHECKING = "test_check_answers_whatever_facts_it_is_asked_about"
NOT_RUN = "not run"
UNMADE = "no instance can be made"
# plug-in, options and device -> the reason why most tests are skipped, or an empty string
_BROKEN: dict[tuple[str, ...], str] = {}
TURNS = 4  # a property test is repeated with other examples at most TURNS - 1 times, see ``Conformance.meet``
LONG = 12  # factor on the number of drawn examples in the long profile
Test = TypeVar("Test", bound=Callable[..., Any])


def since(major: int, minor: int, spec_only: bool = False) -> Callable[[Test], Test]:
    """Mark a test with the first version of the plug-in contract that requires it.

    The test is skipped for a plug-in whose spec names an older version.  A test marked ``spec_only`` also runs if a
    package that the implementation needs is not installed.
    """

    def mark(test: Test) -> Test:
        test.since, test.spec_only = (major, minor), spec_only  # type: ignore[attr-defined]
        return test

    return mark


@dataclass(frozen=True)
class Subject:
    """The plug-in under test: its seam (kind of plug-in), its registry entry and its spec."""

    kind: Kind
    entry: Entry
    spec: Spec
    registry: Registry

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.entry, self.spec)

    def part(self, values: Mapping[str, Any]) -> Part:
        """Return the plug-in and its option ``values`` as plain data, in the form that is sent to a worker process."""
        options = self.registry.options(self.candidate, values)
        if options is None:
            plain = {}
        else:
            plain = options.model_dump(mode="json")
        features = tuple(sorted(self.spec.features))
        return Part(self.entry.label, self.spec.impl, plain, self.spec.options, features, self.spec.plain_traits)


def allowed_targets(plugin: str) -> list[str]:
    """Return the module of a plug-in that is named by module:Class, which must be allowed; none for other names."""
    module, colon, _ = plugin.partition(":")
    return [module] if colon else []


@lru_cache(maxsize=64)
def find(kind: str, plugin: str) -> Subject:
    """Find the plug-in of a seam (kind of plug-in) by its name, ``dist/name`` or ``module:Class``.

    Raise PluginError if no such plug-in exists or its spec cannot be imported.
    """
    if not isinstance(plugin, str):
        target = f", here '{plugin.__module__}:{plugin.__qualname__}'" if isinstance(plugin, type) else ""
        raise PluginError(f"plugin={shown(plugin)}: expected a name, dist/name or module:Class{target}")
    catalog = Catalog.discover(allow_targets=allowed_targets(plugin))
    registry = catalog[kind]
    entry = registry.find(plugin)
    spec = registry.spec(entry)
    with contextlib.suppress(PluginError):  # a spec that cannot be imported is reported by a test of its own
        declared_params.choose(kind, Candidate(entry, spec), is_own)
    return Subject(KINDS[kind], entry, spec, registry)


def same_figures(read: Callable[[], Any]) -> None:
    """Call ``read``, which returns the metrics of a plug-in, twice; fail unless both results are valid and equal."""
    first = checks.figures(read())
    second = checks.figures(read())
    assert second == first, (
        f"two calls in a row return the figures {shown(first)} and then {shown(second)}: reading them must not change "
        "them"
    )


def token_logprobs(output: Any) -> list[float]:
    """Return the log-probability of each generated token of an output that was requested with ``logprobs=0``."""
    found = []
    for of_position in output.logprobs:
        (token,) = of_position.values()
        found.append(token.logprob)
    return found


class Seen(Counter):
    """Counts, by name, of the difficult cases that the drawn examples of a test contained.

    A test whose examples never contain a case proves nothing about that case.
    """

    def weak(self, **least: int) -> dict[str, int]:
        """Return the counts of the named cases that were counted less often than the given number of times."""
        return {name: self[name] for name, minimum in least.items() if self[name] < minimum}

    def require(self, **least: int) -> None:
        """Fail unless each named case was counted at least the given number of times."""
        weak = self.weak(**least)
        required = {name: least[name] for name in weak}
        assert not weak, f"the test itself is too weak: met {weak}, expected at least {required}"


def _seeded(test: Any, named: Any, turn: int = 0) -> Any:
    """Return a property test or a state machine with a seed: that of ``SEED``, or a number from the name of ``named``.

    ``turn`` is added to the seed.
    hypothesis itself would derive a seed from the source text, so that every edit of a test would draw other examples.
    """
    if SEED in os.environ:
        number = int(os.environ[SEED])
    else:
        name = f"{named.__module__}.{named.__qualname__}"
        number = zlib.crc32(name.encode())
    return seed(number + turn)(test)


class Conformance:
    """The base class of all suites.  The module's docstring lists the attributes that an author sets."""

    kind: str = ""
    plugin: str = ""
    options: Mapping[str, Any] = {}  # options of the plug-in, by name
    device: str = ""  # cpu or cuda; empty means the first claimed device of this machine
    profile: str = ""  # fast or long; empty means the value of MINIVLLM_TEST_PROFILE, else fast
    known_failures: Mapping[str, str] = {}  # test -> reason of its failure; a listed test that passes is an error
    _draw: Callable[[int], None]  # draws examples of the last property test, other ones in each turn

    # ---- the plug-in ---------------------------------------------------------------------------------------------

    @property
    def subject(self) -> Subject:
        if not self.plugin:
            message = f"{type(self).__name__}.plugin is not set: expected a name such as 'acme/flash'"
            pytest.fail(message, pytrace=False)
        return find(self.kind, self.plugin)

    @property
    def spec(self) -> Spec:
        return self.subject.spec

    def build(self, *context: Any, options: Mapping[str, Any] | None = None) -> Any:
        """Create an instance of the plug-in from JSON data, as a worker process does.

        ``context`` has the arguments of the constructor after the options.  ``options`` replaces the options of the
        suite; None keeps them.
        """
        part = self.subject.part(self.options if options is None else options)
        received = json.loads(json.dumps(vars(part)))
        return build_part(self.kind, Part(**received), *context)

    def choice(self) -> dict[str, Any]:
        """Return the plug-in and its options in the form of an engine's option."""
        return {"name": self.plugin, "options": dict(self.options)}

    def own_targets(self) -> list[str]:
        """Return the module that an engine must allow; none if the plug-in is not named by module:Class."""
        return allowed_targets(self.plugin)

    def claims(self, feature: str) -> bool:
        """Return whether the plug-in claims a feature on the device of the test.

        The ``check`` function of a spec may refuse a listed feature on some devices.
        """
        if feature not in self.spec.features:
            return False
        return self.spec.check is None or self._refusals(feature) <= self._refusals()

    def _refusals(self, *features: str) -> int:
        """Return how many reasons the spec's ``check`` function gives to refuse features on the test's device."""
        assert self.spec.check is not None
        query = PluginQuery(facts={"device": self.place()}, features=frozenset(features))
        return len(list(self.spec.check(query) or ()))

    def need(self, feature: str) -> None:
        """Skip the test unless the plug-in claims the feature."""
        if not self.claims(feature):
            pytest.skip(f"not claimed: {feature}")

    def values(self, fact: str, *candidates: Any) -> list[Any]:
        """Return the candidates for a fact (such as "dtype") that lie within the limits of the plug-in's spec."""
        return claimed(self.spec, fact, candidates)

    def place(self) -> str:
        """Return the device of the test: ``device``, or else the first claimed device that this machine has.

        Skip the test if this machine has no claimed device.
        """
        if self.device:
            return self.device
        import torch

        if "device" in self.subject.kind.facts:
            devices = self.values("device", "cpu", "cuda")
        else:
            devices = ["cpu"]
        available = [device for device in devices if device == "cpu" or torch.cuda.is_available()]
        if not available:
            pytest.skip(f"no device here: the plug-in claims {', '.join(devices) or 'none'}")
        return available[0]

    # ---- how much ------------------------------------------------------------------------------------------------

    @property
    def long(self) -> bool:
        return (self.profile or os.environ.get(PROFILE, "fast")) == "long"

    def settings(self, n: int, steps: int = 50) -> settings:
        """Return hypothesis settings for ``n`` examples in the fast profile and twelve times as many in the long one.

        Every run draws the same examples unless a seed is set.  ``steps`` limits the rules of a state machine.
        """
        phases = [Phase.explicit, Phase.generate]
        if os.environ.get(SHRINK) != "0":
            phases.append(Phase.shrink)
        return settings(
            max_examples=n * LONG if self.long else n,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )

    def for_all(self, n: int, *strategies: Any, **named: Any) -> Callable[[Callable[..., None]], None]:
        """Return a decorator that runs a property test at once, over ``n`` examples drawn from the strategies.

        ``n`` is the number of examples in the fast profile.
        """

        def run(test: Callable[..., None]) -> None:
            def draw(turn: int) -> None:
                property_test = self.settings(n)(given(*strategies, **named)(test))
                _seeded(property_test, test, turn)()

            self._draw = draw
            draw(0)

        return run

    def meet(self, seen: Seen, **least: int) -> None:
        """Draw other examples of the last property test or state machine until ``seen`` has the ``least`` counts.

        The limits of a spec may make a case rare.  Fail if ``TURNS`` turns do not meet it.
        """
        for turn in range(1, TURNS):
            if not seen.weak(**least):
                return
            self._draw(turn)
        seen.require(**least)

    def run_machine(self, machine: type[RuleBasedStateMachine], n: int, steps: int = 50) -> None:
        """Run a hypothesis state machine ``n`` times (in the fast profile), up to ``steps`` rules each time."""

        def draw(turn: int) -> None:
            run_state_machine_as_test(_seeded(machine, machine, turn), settings=self.settings(n, steps))

        self._draw = draw
        draw(0)

    # ---- bookkeeping of each test --------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _contract(self, request: Any) -> None:
        test = request.function
        name = request.node.name
        if name not in REPORTING:
            needed = getattr(test, "since", (1, 0))
            self._skip_unless_usable(name, needed)
        absent = [needs.missing() for needs in self.spec.needs]
        missing = [str(reason) for reason in absent if reason is not None]
        if missing and not getattr(test, "spec_only", False):
            pytest.skip("; ".join(missing))
        known = self.known_failures.get(name) or self.known_failures.get(name.partition("[")[0])
        if known:
            request.applymarker(pytest.mark.xfail(reason=known, strict=True))

    def _skip_unless_usable(self, name: str, needed: tuple[int, int]) -> None:
        """Skip the named test if the plug-in is broken or its spec is older than the ``needed`` contract version."""
        broken = self._broken()
        if broken and not (name in (BUILDING, CHECKING) and broken.startswith(UNMADE)):
            pytest.skip(f"{NOT_RUN}: {broken}")
        if self.spec.api < needed:
            pytest.skip(f"the contract demands this since {version(needed)}, the spec is for {version(self.spec.api)}")

    def _broken(self) -> str:
        """Return the reason why the plug-in cannot be used at all, or an empty string.

        Its spec may be for another version of the contract, its implementation may not be importable or have another
        base class, or its constructor may raise.  A test of ``REPORTING``, or the test ``BUILDING``, fails for this
        reason, so that the other tests can be skipped.
        """
        kind = self.subject.kind
        spec = self.spec
        options = json.dumps(dict(self.options), default=repr, sort_keys=True)
        key = (kind.name, self.plugin, options, self.device)
        if key not in _BROKEN:
            _BROKEN[key] = ""
            if spec.api[0] != kind.api[0] or tuple(spec.api) > kind.api:
                _BROKEN[key] = f"api={tuple(spec.api)}, and this engine's {kind.name} contract is {kind.api}"
            elif not any(needs.missing() for needs in spec.needs):
                _BROKEN[key] = self._unusable(kind, self.subject.entry)
        return _BROKEN[key]

    def _unusable(self, kind: Kind, entry: Entry) -> str:
        """Return why the implementation cannot be imported or instantiated, or an empty string.

        The result is empty too if the suite cannot provide the constructor's arguments on this machine.
        """
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
        """Check that each name in ``known_failures`` is a test of the suite, so that a renamed test is noticed."""
        wrong = []
        for name in self.known_failures:
            if not hasattr(self, name.partition("[")[0]):
                wrong.append(name)
        assert not wrong, f"known_failures names {wrong}: this suite has no such test"
