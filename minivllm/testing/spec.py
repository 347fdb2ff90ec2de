"""Tests of the spec and the options of any plug-in, which every suite contains."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from minivllm.core.interfaces.executor import Part
from minivllm.errors import MinivllmError
from minivllm.registration.spec import ANY, PluginQuery, Reason
from minivllm.registry import check_base, import_target

from .base import Conformance, since
from .claims import allows, outside, partly, served

HEAVY = ("torch", "transformers", "triton", "flash_attn", "bitsandbytes", "numpy", "pydantic")
IMPORT_MS = 50.0
IMPORT = """
import json, sys, time
import minivllm.registration.spec
for path in {paths!r}: sys.path.append(path)
start = time.perf_counter()
import {module}
ms = (time.perf_counter() - start) * 1e3
print(json.dumps([ms, [m for m in {heavy!r} if m in sys.modules]]))
"""


class SpecConformance(Conformance):
    """Tests that a spec is cheap to import, has all facts of the engine's queries, and refuses other queries."""

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        raise NotImplementedError

    def exercise(self, instance: Any) -> Any:
        """Use an instance, and return a comparable value that depends on its state."""
        raise NotImplementedError

    def _has_spec(self) -> None:
        """Skip the test if the plug-in is a class without a spec."""
        if self.spec.limits == ANY:
            pytest.skip("a class without a spec: nothing is claimed")

    @since(1, 0, spec_only=True)
    def test_the_spec_is_imported_in_50_ms_and_without_torch(self) -> None:
        """Check that the module of a spec is imported in 50 ms and imports no large package, as commands that list
        plug-ins import all specs."""
        self._has_spec()
        module = self.subject.entry.target.partition(":")[0]
        if hasattr(import_target(self.subject.entry.target), "spec"):
            pytest.skip("named by module:Class, so its module holds the implementation")
        code = IMPORT.format(module=module, paths=sys.path, heavy=HEAVY)
        times = []
        for _ in range(4):  # the fastest of four imports counts, because the machine may be busy
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"importing {module} failed:\n{done.stderr[-800:]}"
            ms, heavy = json.loads(done.stdout.splitlines()[-1])
            assert not heavy, f"importing {module} imports {', '.join(heavy)}: name targets as strings instead"
            times.append(ms)
        best = min(times)
        assert best < IMPORT_MS, f"importing {module} takes {best:.0f} ms: expected less than {IMPORT_MS:.0f}"

    @since(1, 0)
    def test_the_spec_names_an_implementation_of_the_seam(self) -> None:
        kind = self.subject.kind
        entry = self.subject.entry
        spec = self.spec
        assert spec.api[0] == kind.api[0] and tuple(spec.api) <= kind.api, (
            f"api={spec.api}: this engine's {kind.name} contract is {kind.api}"
        )
        check_base(kind, entry, import_target(spec.impl))
        if entry.dist != "local":
            assert spec.summary.strip(), "summary is empty: expected one line for `minivllm plugins`"
            line = "\n" not in spec.summary and len(spec.summary) <= 100
            assert line, "summary: expected one line of at most 100 characters"
        for needs in spec.needs:
            assert needs.install, f"needs {needs.module} without an install command: set install='pip install ...'"

    @since(1, 0, spec_only=True)
    def test_the_spec_speaks_of_every_fact_and_of_nothing_else(self) -> None:
        """Check that a spec has a limit for each fact of its seam (kind of plug-in), and no unknown names.

        A fact without a limit refuses every request, so that the plug-in would never be chosen.  A misspelt name is a
        claim that no code reads.
        """
        self._has_spec()
        kind = self.subject.kind
        spec = self.spec
        missing = [fact for fact in kind.facts if fact not in spec.limits]
        assert not missing, f"limits does not name {missing}, so every request that has this fact is refused"
        for field in ("limits", "features", "traits", "prefer"):
            if field in ("limits", "prefer"):
                known = kind.facts
            else:
                known = getattr(kind, field)
            wrong = sorted(set(getattr(spec, field)) - set(known))
            assert not wrong, f"{field} names {wrong}: {kind.name} has {sorted(known) or 'none'}"
        wrong_traits = spec.trait_faults(kind)
        assert not wrong_traits, f"traits: {'; '.join(map(str, wrong_traits))}"
        for fact, value in spec.prefer.items():
            assert allows(spec.limits[fact], value), f"prefer[{fact!r}]={value!r} is outside its own limit"

    @since(1, 0, spec_only=True)
    def test_a_request_inside_all_limits_is_served(self) -> None:
        """Check that a query inside all limits is not refused, except for a missing package."""
        installed = replace(self.spec, needs=())
        reasons = installed.refuse(self.request(), self.subject.kind)
        assert not reasons, f"refuses what it claims: {'; '.join(map(str, reasons))}"

    def request(self) -> PluginQuery:
        """Return a query inside every limit of the spec; override it if ``check`` refuses this combination."""
        return served(self.spec, self.subject.kind)

    @since(1, 0, spec_only=True)
    def test_a_request_just_outside_each_limit_is_refused_with_its_reason(self) -> None:
        self._has_spec()
        spec = replace(self.spec, needs=())
        inside = self.request()
        for fact, limit in spec.limits.items():
            for value in () if limit == ANY else outside(limit):
                facts = {**inside.facts, fact: value}
                reasons = spec.refuse(replace(inside, facts=facts), self.subject.kind)
                assert any(r.what == fact for r in reasons), f"{fact}={value!r} lies outside {limit} and is not refused"
                assert all(str(r).strip() for r in reasons), "a reason without text"

    @since(1, 0, spec_only=True)
    def test_a_feature_that_is_not_claimed_is_refused(self) -> None:
        spec = replace(self.spec, needs=())
        kind = self.subject.kind
        inside = self.request()
        for feature in [*sorted(set(kind.features) - spec.features), "a feature of a later version"]:
            reasons = spec.refuse(replace(inside, features=inside.features | {feature}), kind)
            assert any(feature in str(r) for r in reasons), f"feature {feature!r} is not claimed and not refused"

    @since(1, 0, spec_only=True)
    def test_check_answers_whatever_facts_it_is_asked_about(self) -> None:
        """Check that ``check`` returns Reasons for any query of the engine.

        ``sm``, ``block`` and ``holds`` may be missing from its facts, and sizes that differ between layers come as
        sets.
        """
        if self.spec.check is None:
            pytest.skip("no check function")
        for facts in partly(self.request().facts):
            request = PluginQuery(facts, self.spec.features)
            try:
                reasons = list(self.spec.check(request))
            except Exception as e:
                pytest.fail(f"check() raised {type(e).__name__}: {e} for {request}")
            valid = all(isinstance(r, Reason) for r in reasons)
            assert valid, f"check() returned {reasons} for {request}: expected Reason objects"

    @since(1, 0, spec_only=True)
    def test_options_are_described_closed_and_valid_by_default(self) -> None:
        if not self.spec.options:
            with pytest.raises(MinivllmError, match="takes no options"):
                self.subject.part({"surely_not_an_option": 1})
            return
        model = import_target(self.spec.options)
        fields = model.model_fields
        silent = []
        for name, f in fields.items():
            if not (f.description or "").strip():
                silent.append(name)
        assert not silent, f"options without a description: {silent}"
        required = []
        for name, f in fields.items():
            if f.is_required() and name not in self.options:
                required.append(name)
        assert not required, f"options without a default: {required}; add one, or set `options` in the test class"
        options = model(**self.options)
        values = json.loads(json.dumps(options.model_dump(mode="json")))
        assert model(**values) == options, "options change when they are written to JSON and read back"
        found = model.model_json_schema()["properties"].keys()
        assert found == fields.keys()
        with pytest.raises(MinivllmError, match="surely_not_an_option"):
            self.subject.part({**self.options, "surely_not_an_option": 1})

    @since(1, 0)
    def test_what_is_chosen_goes_through_json_and_is_built_from_it(self) -> None:
        """Check that an instance can be made from JSON.

        A worker process receives import targets and options as JSON, never as a pickle.
        """
        part = self.subject.part(self.options)
        found = Part(**json.loads(json.dumps(vars(part))))
        assert found == part
        instance = self.build(*self.context())
        assert isinstance(instance, import_target(self.subject.kind.base))
        assert type(instance) is import_target(part.target)

    @since(1, 0)
    def test_two_instances_share_no_state(self) -> None:
        """Check that two instances share no state.

        An engine may have several instances (one per KV group), and a process several engines.
        """
        cls = import_target(self.spec.impl)
        before = {}
        for k, v in vars(cls).items():
            if isinstance(v, (dict, list, set, bytearray)):
                before[k] = copy.deepcopy(v)
        first = self.build(*self.context())
        second = self.build(*self.context())
        want = self.exercise(first)
        assert self.exercise(second) == want, "a second instance behaves differently after the first was used"
        found = {k: getattr(cls, k) for k in before}
        assert found == before, "an instance changed an attribute of its class"
