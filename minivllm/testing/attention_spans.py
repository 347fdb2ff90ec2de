"""Tests of ``spans``: tokens of an image that see the later tokens of the image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .attention_world import World
from .base import since

# (tokens in the cache, new tokens, spans as first position and end), rows of one token first
CASES: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...] = (
    (30, 1, ()),
    (0, 1, ()),
    (0, 20, ((3, 11),)),
    (7, 14, ((7, 12), (15, 21))),
    (9, 8, ((5, 14),)),  # the first tokens of the span are cached
    (0, 9, ((0, 9),)),
    (33, 12, ()),
    (40, 30, ((44, 60),)),
)


class AttentionSpans:
    """The tests of ``spans`` in ``AttentionConformance``."""

    if TYPE_CHECKING:
        claims: Any
        need: Any
        plain: Any

    @since(1, 7)
    def test_tokens_of_a_span_see_all_of_it(self) -> None:
        """Check that ``AttnMeta.host_sees`` lets the tokens of a span see its later tokens, and no other ones, with a
        window too, whose first position stays that of the token."""
        self.need("spans")
        for more in ({}, {"window": 17}, {"sinks": True}, {"softcap": 2.0}, {"lse": True}):
            if not all(self.claims(feature) for feature in more):
                continue
            fields = {name: value for name, value in more.items() if name != "lse"}
            setting = self.plain(**({"window": 2} if "window" in fields else fields))
            if "window" in fields:
                specs = tuple(replace(spec, window=fields["window"]) for spec in setting.specs)
                setting = replace(setting, specs=specs)
            for order in (CASES, CASES[:2] + CASES[:1:-1], CASES[2:3], CASES[4:5]):
                world = World(self, setting, len(order), 80)
                rows = []
                for past, new, spans in order:
                    seq = world.add(past)
                    world.spans[seq.slot] = spans
                    rows.append((seq, new))
                world.check(rows, lse="lse" in more)
