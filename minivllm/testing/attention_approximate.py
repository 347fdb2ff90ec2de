"""Tests of an attention back end that reads only selected keys (the trait ``approximate``).

Each test of the attention suite compares such a back end with exact attention over the keys that its method
``selected`` returns.  So ``selected`` must return exactly the keys that ``forward`` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import GraphKey

from .attention_world import World
from .base import since

LENGTHS = (1, 2, 17, 64, 300, 1000, 5000, 40_000)  # numbers of keys that a query may attend to
LONG = (700, 130, 300)  # cached tokens of each row of a step


class AttentionApproximate:
    """The tests of the trait ``approximate``, a base class of ``AttentionConformance``."""

    if TYPE_CHECKING:
        build: Any
        context: Any
        plain: Any
        run: Any
        spec: Any

    def need_approximate(self) -> None:
        """Skip the test unless the spec declares that the back end is approximate."""
        if not self.spec.approximate:
            pytest.skip("not declared: approximate")

    @since(1, 5)
    def test_the_number_of_selected_keys_is_declared_and_smaller_than_all(self) -> None:
        """Check ``most_keys``, the largest number of keys that a query selects among a number of visible keys.

        It is an integer from 1 to the number of visible keys, does not fall as this number grows, and is smaller than
        it for long contexts.
        """
        self.need_approximate()
        backend = self.build(*self.context())
        bounds = {n: backend.most_keys(n, 1) for n in LENGTHS}
        for n, most in bounds.items():
            valid = type(most) is int and 1 <= most <= n
            assert valid, f"most_keys({n}, 1) is {most!r}: expected an integer from 1 to {n}"
        values = list(bounds.values())
        assert values == sorted(values), f"most_keys falls as more keys are visible: {bounds}"
        longest = LENGTHS[-1]
        assert bounds[longest] < longest, f"all of {longest} keys are selected: that is exact, not approximate"

    @since(1, 5)
    def test_long_rows_are_exact_over_the_keys_that_are_selected(self) -> None:
        """Check decode rows and chunks over long contexts, with the trait ``approximate``.

        The results are those of exact attention over the selected keys, without NaN.  No query selects more keys than
        ``most_keys`` allows.
        """
        self.need_approximate()
        self.run(self.plain(), [(n, 1) for n in LONG])
        self.run(self.plain(), [(LONG[0], 1), (LONG[1], 40), (0, 90)])

    @since(1, 5)
    def test_a_selection_depends_on_its_own_row_alone(self) -> None:
        """Check that the keys that a row selects do not depend on other rows or on the contents of free blocks."""
        self.need_approximate()
        expected = self._selected(1e4, 1)
        for poison, factor in ((3.0, 1), (1e4, 9)):
            assert torch.equal(expected, self._selected(poison, factor)), (
                "the first row selects other keys if other rows, or blocks that no sequence owns, have other contents"
            )

    def _selected(self, poison: float, factor: int) -> Tensor:
        """Return the keys that the first of two rows selects in a step, a bool mask.

        ``poison`` is the size of the numbers in free blocks.  The values of the second row are multiplied by
        ``factor``.
        """
        world = World(self, self.plain(), 2, LONG[0] + 9, poison=poison)  # type: ignore[arg-type]
        first = world.add(LONG[0])
        second = world.add(0)
        for x in (*second.q, *second.k, *second.v):
            x.mul_(factor)
        rows = [(first, 1), (second, 1)]
        meta = world.meta(rows)
        layer = world.layers[0]
        with torch.inference_mode():
            world.backend.plan(meta, GraphKey())
            inputs = world.inputs(layer, rows)
            q = world.backend.write(layer, *inputs, meta, None)
            return world.backend.selected(layer, q, meta)[0].cpu()
