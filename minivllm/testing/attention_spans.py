"""Tests of the feature ``spans``: the tokens of an image, which see the later tokens of the same image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .attention_world import World
from .base import since

# (cached tokens, new tokens, spans) of each row; a span is (position of its first token, position after its last)
CASES: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...] = (
    (12, 1, ()),
    (0, 1, ()),
    (0, 10, ((3, 7),)),
    (5, 9, ((5, 8), (10, 13))),
    (6, 5, ((4, 9),)),  # cached tokens of this row include the first ones of its span
    (0, 6, ((0, 6),)),
    (13, 5, ()),
    (66, 12, ((70, 76),)),  # this row has more keys than a tile of a kernel
)
WINDOW = 9  # size of a sliding window in tokens, at least as long as each span


class AttentionSpans:
    """The tests of spans, a base class of ``AttentionConformance``."""

    if TYPE_CHECKING:
        claims: Any
        need: Any
        plain: Any

    @since(1, 7)
    def test_tokens_of_a_span_see_all_of_it(self) -> None:
        """Check that the tokens of a span see its later tokens and no other later ones (``AttnMeta.host_sees``).

        With a window too, the first visible position is that of the token's own window.
        """
        self.need("spans")
        for more in ({}, {"window": WINDOW}, {"sinks": True}, {"softcap": 2.0}, {"lse": True}):
            if not all(self.claims(feature) for feature in more):
                continue
            fields = {name: value for name, value in more.items() if name != "lse"}
            setting = self.plain(**({"window": 2} if "window" in fields else fields))
            if "window" in fields:
                specs = tuple(replace(spec, window=fields["window"]) for spec in setting.specs)
                setting = replace(setting, specs=specs)
            # other features do not change the choice of rows, and Triton's interpreter takes half a second for a row
            if not more:
                orders = [CASES, CASES[2:3], CASES[4:5]]
            else:
                orders = [CASES[3:5]]
            if "window" in more:
                orders = [CASES[:1] + CASES[:2:-1]]
            world = World(self, setting, sum(map(len, orders)), 80)
            for order in orders:
                rows = []
                for past, new, spans in order:
                    seq = world.add(past)
                    world.spans[seq.slot] = spans
                    rows.append((seq, new))
                world.check(rows, lse="lse" in more)
