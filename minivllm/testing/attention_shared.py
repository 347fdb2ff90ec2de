"""Checks of decode steps whose rows share blocks at their start, with ``GraphKey.shared``.

A back end with ``shares_from`` may read such blocks once for all rows.  The rows, and how many blocks they share, are
in the block table on the device only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minivllm.core.interfaces.attention import GraphKey

from . import attention_graph
from .attention_world import Setting, World, WorldSeq
from .base import since

if TYPE_CHECKING:
    from .attention_cases import Space

# cached tokens of the rows in two groups; the rows of a group share blocks at their start
HEAD, OTHER = (300, 329, 310, 40, 305), (350, 333, 322, 9, 340)


class AttentionShared:
    """The tests of shared blocks, a base class of ``AttentionConformance``."""

    if TYPE_CHECKING:
        space: Space
        spec: Any
        claims: Any
        plain: Any

    def sharing(self, setting: Setting, **options: Any) -> tuple[World, list[WorldSeq]]:
        """Return a test cache and the sequences of two groups, each of which shares blocks at its start.

        Skip the test if the back end has no special path for shared blocks.  ``options`` has keyword arguments of
        ``World``.
        """
        world = World(self, setting, 13, 360, **options)  # type: ignore[arg-type]
        if world.backend.shares_from is None:
            pytest.skip("not claimed: shares_from")
        world.key = GraphKey(shared=True)
        first = world.add(HEAD[0])
        second = world.add(OTHER[0])
        seqs = [first, second]
        for head, other in zip(HEAD[1:], OTHER[1:], strict=True):
            seqs.append(world.add(head, like=first))
            seqs.append(world.add(other, like=second))
        seqs.append(world.add(first.length, like=first, ended=True))
        seqs.append(world.add_null())
        return world, seqs

    @since(1, 6)
    def test_rows_that_share_blocks_get_the_answer_of_rows_that_do_not(self) -> None:
        """Check that decode rows that share blocks get exact results, with garbage in all blocks that no row uses.

        The two groups have rows of several lengths, rows that have ended, and rows without a block.  The rows change
        their order, and some leave.
        """
        for poison in (1e4, float("nan")):
            world, seqs = self.sharing(self.plain(), poison=poison)
            rows = [(seq, 1) for seq in seqs]
            lse = self.claims("lse")
            world.check(rows, lse=lse)
            rest = [*rows[8:1:-1], (seqs[0], 3)]
            world.check(rest, lse=lse)

    @since(1, 6)
    def test_shared_blocks_with_each_feature(self) -> None:
        """Check rows that share blocks with a window, sinks and a soft cap, and with the most query heads per KV
        head."""
        ratio = self.space.facts["queries_per_kv"][-1]
        features: list[dict[str, Any]] = [{"window": 200}, {"sinks": True}, {"softcap": 1.5}]
        claimed = [more for more in features if self.claims(*more)]
        for more in ({"queries_per_kv": ratio}, *claimed):
            world, seqs = self.sharing(self.plain(**more))
            world.check([(seq, 1) for seq in seqs])

    @since(1, 6)
    def test_a_captured_step_finds_the_shared_blocks_of_its_rows(self) -> None:
        """Check captured decode steps with ``GraphKey.shared``, replayed for other rows, orders and lengths."""
        self.sharing(self.plain())
        if self.spec.traits.get("graph", "none") == "none":
            pytest.skip("not claimed: graph")
        attention_graph.check_shared(self, self.plain())  # type: ignore[arg-type]
