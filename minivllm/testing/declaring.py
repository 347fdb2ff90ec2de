"""Tests of declared request parameters: the spec of a plug-in declares each own parameter that its class reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from minivllm.core import declared_params
from minivllm.core.interfaces.params import NAMES, SamplingParams, is_own
from minivllm.errors import RequestError
from minivllm.registration.parameters import Param

from .base import since
from .sampling_data import Noted
from .sampling_rows import some_prompt

if TYPE_CHECKING:
    from .spec import SpecConformance
else:
    SpecConformance = object

LONGEST_SUMMARY = 100  # longest summary of a parameter, in characters, as for the summary of a spec


class Declaring(SpecConformance):
    """Checks of declared parameters, for the suites of processors, samplers and strategies."""

    def check_declarations(self, reads: Collection[str]) -> None:
        """Fail unless the spec declares exactly the names in ``reads`` that are not fields of SamplingParams.

        Each declaration must be valid, and its summary must be a single line.
        """
        self._has_spec()
        own = set(reads) - NAMES
        undeclared = sorted(own - self.spec.reads)
        unread = sorted(self.spec.reads - own)
        assert not undeclared, (
            f"reads has {', '.join(undeclared)}, which the spec does not declare: write params=(Param("
            f"{undeclared[0]!r}, ...),), so that the engine checks its value and requests can set it by its name"
        )
        assert not unread, (
            f"the spec declares {', '.join(unread)}, which reads does not name, so a request that sets it is refused: "
            "write reads = SPEC.reads"
        )
        for param in self.spec.params:
            text = declared_params.fault(self.subject.kind.name, param, is_own)
            assert not text, f"it declares the parameter {param.name!r}{text}"
            summary = param.summary
            valid = summary.strip() and "\n" not in summary and len(summary) <= LONGEST_SUMMARY
            assert valid, (
                f"the summary of {param.name!r} is {summary!r}: expected one line of at most {LONGEST_SUMMARY} "
                "characters"
            )

    def check_looked_for(self, requests: Collection[SamplingParams], look: Callable[[SamplingParams], Any]) -> None:
        """Fail unless the plug-in reads every parameter that its spec declares.

        ``look`` calls the method of the plug-in that reads the parameters of a request.  It is called for each of
        ``requests`` and for requests with values that the declarations allow.
        """
        if not self.spec.params:
            pytest.skip("it declares no parameters of its own")
        names: set[str] = set()
        declared = []
        for param in self.spec.params:
            for value in values_of_own(param):
                declared.append(SamplingParams(extra={param.name: value}))
        for params in (*requests, *declared):
            noted = Noted(params.extra)
            # a value may be refused here because it is valid only together with other parameters
            with contextlib.suppress(RequestError):
                look(replace(params, extra=noted))
            names |= noted.names
        missed = sorted(self.spec.reads - names)
        assert not missed, f"it declares {', '.join(missed)} but never reads it, so a request that sets it is ignored"


class DeclaringOnRows(Declaring):
    """The tests of declared parameters, a base class of ``SamplingConformance``."""

    if TYPE_CHECKING:
        reads: frozenset[str]
        vocab: int
        make: Any
        params: Any

    def bound(self, made: Any, params: SamplingParams, n: int = 3) -> Any:
        """Return the row that an instance of the plug-in creates for a request with a prompt of ``n`` tokens."""
        return made.bind_prompt(params, some_prompt(n, self.vocab))

    @since(1, 2)
    def test_its_spec_declares_the_parameters_that_are_its_own(self) -> None:
        """Check that the spec declares exactly the names in ``reads`` that are not fields of SamplingParams.

        A declaration has a type, a range and a summary.
        """
        self.check_declarations(self.reads)

    @since(1, 2)
    def test_it_looks_for_every_parameter_that_it_declares(self) -> None:
        """Check that the plug-in reads each parameter that its spec declares, rather than ignore it."""
        instance = self.make(self.vocab)
        requests = []
        for values in ({}, *self.params(self.vocab)):
            requests.append(SamplingParams.make(**values))
        self.check_looked_for(requests, lambda params: self.bound(instance, params))


def values_of_own(param: Param) -> Iterator[Any]:
    """Yield some values that the declaration of a parameter allows, except its default."""
    if param.ge is None:
        low = param.gt
    else:
        low = param.ge
    if param.le is None:
        high = param.lt
    else:
        high = param.le
    numbers = [x for x in (low, high) if x is not None]
    if low is not None and high is not None:
        numbers.append((low + high) / 2)
    numbers += [0, 1, 2, 0.5]
    kinds = {
        bool: (True, False),
        str: param.choices or ("a", "b"),
        list: ([1],),
        dict: ({"a": 1},),
        int: map(int, numbers),
        float: numbers,
    }
    for value in kinds[param.kind]:
        try:
            if param.check(value) != param.default:
                yield value
        except RequestError:
            continue
