"""Approximate attention (the trait ``approximate``): which keys a back end selects, and the rules that this keeps to.

The answer of such a back end is held against exact attention over the keys that ``selected`` gives, in every test of
the suite.  So ``selected`` cannot say more or less than ``forward`` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import GraphKey

from .attention_world import World
from .base import since

LENGTHS = (1, 2, 17, 64, 300, 1000, 5000, 40_000)  # keys that a query may see
LONG = (700, 130, 300)  # tokens in the cache of the rows of a step


class AttentionApproximate:
    """The tests of the trait; part of ``AttentionConformance``."""

    if TYPE_CHECKING:
        build: Any
        context: Any
        plain: Any
        run: Any
        spec: Any

    def need_approximate(self) -> None:
        if not self.spec.approximate:
            pytest.skip("not declared: approximate")

    @since(1, 5)
    def test_the_number_of_selected_keys_is_declared_and_smaller_than_all(self) -> None:
        """``approximate``: ``most_keys`` is a whole number from 1 to what a query sees, never falls as more is seen,
        and leaves keys out in the end."""
        self.need_approximate()
        backend = self.build(*self.context())
        most = [backend.most_keys(n, 1) for n in LENGTHS]
        for n, m in zip(LENGTHS, most, strict=True):
            assert type(m) is int and 1 <= m <= n, f"most_keys({n}, 1) is {m!r}: want a whole number from 1 to {n}"
        assert most == sorted(most), f"most_keys falls: {dict(zip(LENGTHS, most, strict=True))}"
        assert most[-1] < LENGTHS[-1], f"all of {LENGTHS[-1]} keys are selected: that is exact, not approximate"

    @since(1, 5)
    def test_long_rows_are_exact_over_the_keys_that_are_selected(self) -> None:
        """``approximate``: decode rows and chunks over long contexts; no NaN, nothing beyond the declared number."""
        self.need_approximate()
        self.run(self.plain(), [(n, 1) for n in LONG])
        self.run(self.plain(), [(LONG[0], 1), (LONG[1], 40), (0, 90)])

    @since(1, 5)
    def test_a_selection_depends_on_its_own_row_alone(self) -> None:
        """``approximate``: what lies in blocks of nobody and in other rows changes no key that is selected."""
        self.need_approximate()
        found = [self._selected(poison, size) for poison, size in ((1e4, 1), (3.0, 1), (1e4, 9))]
        for other in found[1:]:
            same = all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
            assert same, "the first row selects other keys where other rows, or blocks of nobody, hold something else"

    def _selected(self, poison: float, others: int) -> list[Tensor]:
        """Return the selection of the first row of a step whose other row holds values ``others`` times as large."""
        world = World(self, self.plain(), 2, LONG[0] + 9, poison=poison)  # type: ignore[arg-type]
        first = world.add(LONG[0])
        beside = world.add(0)
        for x in (*beside.q, *beside.k, *beside.v):
            x.mul_(others)
        rows = [(first, 1), (beside, 1)]
        meta = world.meta(rows)
        with torch.inference_mode():
            world.backend.plan(meta, GraphKey())
            layer = world.layers[0]
            q = world.backend.write(layer, *world.inputs(layer, rows), meta, None)
            return [mask.cpu() for mask in world.backend.selected(layer, q, meta)][:1]
