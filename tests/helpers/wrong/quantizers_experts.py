"""Wrong quantizers of experts."""

from __future__ import annotations

from dataclasses import replace

from minivllm.plugins.quantizer.int8 import Int8, Int8Weight
from minivllm.plugins.quantizer.spec import INT8

SEAM = "quantizer"
EACH = "test_each_expert_multiplies_by_its_own_rows"
FAULTS = {"OneForAll": (EACH,), "TwiceAsManyRows": (EACH,)}
RIGHT = ()


class _One(Int8Weight):
    def expert(self, x, e):
        return super().expert(x, 0)


class _Wide(Int8Weight):
    def expert(self, x, e):
        rows = self.info.out_features // self.info.experts
        return self._product(x, slice(e * rows, (e + 2) * rows))


class Other(Int8):
    scheme_of: type

    def scheme(self, m):
        made = super().scheme(m)
        return made if made is None or m.kind != "experts" else self.scheme_of(m)


class OneForAll(Other):
    """The first expert serves all."""

    spec = replace(INT8, impl=f"{__name__}:OneForAll")
    scheme_of = _One


class TwiceAsManyRows(Other):
    """Gives the rows of the next expert too."""

    spec = replace(INT8, impl=f"{__name__}:TwiceAsManyRows")
    scheme_of = _Wide
