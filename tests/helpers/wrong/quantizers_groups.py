"""Wrong quantizers: ``Int4`` with one fault each, of groups and of halves of bytes."""

from __future__ import annotations

from dataclasses import replace

from minivllm.plugins.quantizer.int4 import Int4, Int4Weight
from minivllm.plugins.quantizer.spec import INT4

SEAM = "quantizer"
HELD = "test_each_element_is_held_within_half_a_step"
GRID = "test_weights_that_the_format_has_come_back_exactly"
OVERFLOW = "test_a_product_that_the_dtype_can_hold_does_not_overflow"
FAULTS = {
    "ScaleOfTheNextGroup": (HELD,),
    "LosesTheSign": (HELD, OVERFLOW),
    "HalvesTheWrongWay": (HELD, GRID),
    "LosesTheLastTile": (HELD,),
}
RIGHT = ()


class Faulty(Int4):
    made: type = Int4Weight

    def scheme(self, m):
        found = super().scheme(m)
        return found if type(found) is not Int4Weight else self.made(m)


class ScaleOfTheNextGroup(Faulty):
    spec = replace(INT4, impl=f"{__name__}:ScaleOfTheNextGroup")

    class made(Int4Weight):
        def finish(self):
            self.scale.copy_(self.scale.roll(1, dims=1))


class LosesTheSign(Faulty):
    """Keeps the size of a scale that is negative."""

    spec = replace(INT4, impl=f"{__name__}:LosesTheSign")

    class made(Int4Weight):
        def finish(self):
            self.scale.abs_()


class HalvesTheWrongWay(Faulty):
    """The first 16 inputs of 32 lie in the high halves."""

    spec = replace(INT4, impl=f"{__name__}:HalvesTheWrongWay")

    class made(Int4Weight):
        def finish(self):
            self.weight.copy_(self.weight >> 4 | self.weight << 4)


class LosesTheLastTile(Faulty):
    """Multiplies by whole tiles of 16 rows and by none that are left over."""

    spec = replace(INT4, impl=f"{__name__}:LosesTheLastTile")

    class made(Int4Weight):
        def _product(self, x, rows, out=None):
            y = super()._product(x, rows, out)
            y[:, (rows.stop - rows.start) // 16 * 16 :] = 0
            return y
