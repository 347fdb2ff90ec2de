"""Tests of the memory that a quantizer holds, before and after products."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

from .base import since
from .quantizer_data import dtype_of, ones, storages

USED = (1, 3, 65, 300, 1)  # numbers of tokens of the products after which memory is measured
SLACK = 8192  # size in bytes of a workspace besides the tensors, which is too small for a copy
ELEMENTS = 512 * 256  # elements of the weight in the test of memory


def check_bits(bits: int, scale_bits: float, tensors: Mapping[str, Tensor], elements: int) -> None:
    """Fail unless a weight takes at most the claimed ``bits`` per element, and its scales at most ``scale_bits``.

    ``elements`` is the number of elements of the weight.  The largest tensors, until ``bits`` per element have come
    together, count as the weight, which may lie in two planes.  The remaining tensors are scales and zero points.  A
    single tensor may hold weights and scales together.
    """
    used = {}
    for name, t in tensors.items():
        used[name] = 8 * t.numel() * t.element_size() / elements
    total = sum(used.values())
    weights = 0.0
    for taken in sorted(used.values(), reverse=True):
        if weights < bits:
            weights += taken
    parts = (f"{name} {taken:.3f}" for name, taken in used.items())
    shown = ", ".join(parts)
    assert total >= bits, f"claims {bits} bits, an element takes {total:.3f} of memory ({shown})"
    separate = weights < bits + 1 or len(used) == 1
    assert total <= bits + scale_bits and separate, (
        f"claims {bits} bits, an element takes {total:.3f} of memory ({shown}): expected less than {bits} + 1 "
        f"of weights, and of scales and zero points {scale_bits} at most (a test class may override scale_bits)"
    )


class Memory:
    """The tests of memory, a base class of ``QuantizerConformance``."""

    if TYPE_CHECKING:
        spec: Any
        scale_bits: float
        loaded: Any
        quantized: Any

    @since(1, 0)
    def test_what_lives_on_the_device_is_told(self) -> None:
        """Check that ``tensors`` of a scheme has all memory that it holds, because the engine counts it by them.

        Neither the first product nor later ones may keep other memory on the host or the device.  ``bytes`` is the sum
        of the tensors before and after, and they take ``bits`` per element besides the scales.
        """
        torch.manual_seed(3)
        for info in self.quantized((((256, 128, 128), 256),)):
            weight = torch.randn(512, 256)
            self._use(self.loaded(info, weight), info)  # memory that is allocated once per process exists after this
            before = storages()
            scheme = self.loaded(info, weight)
            total = self._measure(scheme, info, before, "")
            for tokens in (USED[:1], USED[1:]):
                self._use(scheme, info, tokens)
                when = f" after products with {' and '.join(map(str, tokens))} tokens"
                now = self._measure(scheme, info, before, when)
                assert now == total, f"the tensors hold {now} bytes after some products, {total} before"
            if bits := self.spec.traits.get("bits"):
                check_bits(bits, self.scale_bits, scheme.tensors, ELEMENTS)
            tracemalloc.start()
            scheme = self.loaded(info, weight)
            self._use(scheme, info)
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert kept < ELEMENTS, f"{kept} bytes of Python's or numpy's are held beside tensors after some products"

    def _use(self, scheme: WeightScheme, info: ModuleInfo, tokens: Sequence[int] = USED) -> None:
        """Compute products with and without ``out``, in inference mode as a server does, and outside of it."""
        for n in tokens:
            for mode in (True, False):
                with torch.inference_mode(mode):
                    x = ones(n, info)
                    scheme.apply(x)
                    scheme.apply(x, x.new_empty(n, info.out_features))

    def _measure(self, scheme: WeightScheme, info: ModuleInfo, before: Mapping[int, int], when: str) -> int:
        """Return the bytes of a scheme's tensors, after a check that it holds no other memory.

        ``before`` is the memory that existed without the scheme, as address -> bytes.
        """
        tensors = scheme.tensors
        own = {t.untyped_storage().data_ptr() for t in tensors.values()}
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        found = sum(size for at, size in storages().items() if at not in before or at in own)
        assert found - total <= SLACK, (
            f"{found - total} bytes are held beside tensors{when}; a dense copy of the weight has "
            f"{ELEMENTS * dtype_of(info).itemsize} in {info.dtype}"
        )
        assert scheme.bytes == total, f"bytes says {scheme.bytes}{when}, the tensors hold {total}"
        place = info.device.split(":")[0]
        away = {}
        for name, t in tensors.items():
            if t.device.type != place:
                away[name] = str(t.device)
        assert not away, f"tensors that are not on {info.device}{when}: {away}"
        return total
