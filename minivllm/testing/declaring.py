"""Parameters of requests: what a spec declares against what the class reads and looks for."""

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

MOST = 100  # characters of a summary, as of a spec's


class Declaring(SpecConformance):
    """Part of the suites of processors, samplers and strategies."""

    def check_declarations(self, reads: Collection[str]) -> None:
        """Of the spec against ``reads`` of the class: each has the names of the other, fields not counted."""
        self._has_spec()
        own = set(reads) - NAMES
        undeclared, unread = sorted(own - self.spec.reads), sorted(self.spec.reads - own)
        assert not undeclared, (
            f"reads has {', '.join(undeclared)}, which the spec does not declare: say params=(Param({undeclared[0]!r}, "
            "...),), so that a value is checked before it comes here, and requests can set it by its name"
        )
        assert not unread, (
            f"the spec declares {', '.join(unread)}, which reads does not name: a request that sets it is refused; say "
            "reads = SPEC.reads"
        )
        for param in self.spec.params:
            text = declared_params.fault(self.subject.kind.name, param, is_own)
            assert not text, f"it declares the parameter {param.name!r}{text}"
            line = param.summary.strip() and "\n" not in param.summary and len(param.summary) <= MOST
            assert line, f"the summary of {param.name!r} is {param.summary!r}: want one line of at most {MOST}"

    def check_looked_for(self, asked: Collection[SamplingParams], look: Callable[[SamplingParams], Any]) -> None:
        """``look`` has the plug-in decide on a request: over all of ``asked``, and the values that the declarations
        allow, it has to look for every parameter that it declares."""
        if not self.spec.params:
            pytest.skip("it declares no parameters of its own")
        names: set[str] = set()
        values = [SamplingParams(extra={p.name: value}) for p in self.spec.params for value in values_of_own(p)]
        for params in (*asked, *values):
            noted = Noted(params.extra)
            with contextlib.suppress(RequestError):  # it wants another beside it
                look(replace(params, extra=noted))
            names |= noted.names
        missed = sorted(self.spec.reads - names)
        assert not missed, f"it declares {', '.join(missed)} and never looks for it: a request that sets it is ignored"


class DeclaringOnRows(Declaring):
    """Part of ``SamplingConformance``."""

    if TYPE_CHECKING:
        reads: frozenset[str]
        vocab: int
        make: Any
        params: Any

    def bound(self, made: Any, params: SamplingParams, n: int = 3) -> Any:
        """The row that an instance gives for a prompt of n tokens."""
        return made.bind_prompt(params, some_prompt(n, self.vocab))

    @since(1, 2)
    def test_its_spec_declares_the_parameters_that_are_its_own(self) -> None:
        """With kind, range and meaning; what is in ``reads`` and no field of SamplingParams is declared, and what is
        declared is in ``reads``."""
        self.check_declarations(self.reads)

    @since(1, 2)
    def test_it_looks_for_every_parameter_that_it_declares(self) -> None:
        """A request that sets one reaches the plug-in, which must not ignore it."""
        made, asked = self.make(self.vocab), [SamplingParams.make(**p) for p in ({}, *self.params(self.vocab))]
        self.check_looked_for(asked, lambda params: self.bound(made, params))


def values_of_own(param: Param) -> Iterator[Any]:
    """Some values that a declaration allows, its default not among them."""
    ends = [getattr(param, name) for name in ("ge", "gt", "le", "lt")]
    low, high = (next((x for x in pair if x is not None), None) for pair in (ends[:2], ends[2:]))
    middle = [(low + high) / 2] if low is not None and high is not None else []
    texts = param.choices or ("a", "b")
    tried = [x for x in (low, high, *middle, 0, 1, 2, 0.5) if x is not None]
    kinds = {bool: (True, False), str: texts, list: ([1],), dict: ({"a": 1},), int: map(int, tried), float: tried}
    for value in kinds[param.kind]:
        try:
            if param.check(value) != param.default:
                yield value
        except RequestError:
            continue
