"""What a quantizer holds in memory: what it says, before it was used and afterwards."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

from .base import since
from .quantizer_data import storages

USED = (1, 3, 65, 300, 1)  # tokens of the products after which memory is looked at
SLACK = 8192  # bytes that may lie beside the tensors: a workspace, never a copy


def check_bits(bits: int, scale_bits: float, tensors: Mapping[str, Tensor], elements: int) -> None:
    """That the weights take what is claimed and the scales what is allowed; ``elements`` of the weight.

    The weights are the largest tensors, until ``bits`` an element have come together (they may lie in two planes); what
    remains are scales and zero points.  Scales that lie among the weights are in one tensor with them."""
    each = sorted((8 * t.numel() * t.element_size() / elements for t in tensors.values()), reverse=True)
    total, weights, parts = sum(each), 0.0, list(each)
    while parts and weights < bits:
        weights += parts.pop(0)
    shown = ", ".join(f"{n} {8 * t.numel() * t.element_size() / elements:.3f}" for n, t in tensors.items())
    assert total >= bits, f"claims {bits} bits, an element takes {total:.3f} of memory ({shown})"
    assert total <= bits + scale_bits and (weights < bits + 1 or len(each) == 1), (
        f"claims {bits} bits, an element takes {total:.3f} of memory ({shown}): want less than {bits} + 1 "
        f"of weights, and of scales and zero points {scale_bits} at most (a test class may override scale_bits)"
    )


class Memory:
    """The tests of memory; part of ``QuantizerConformance``."""

    if TYPE_CHECKING:
        spec: Any
        scale_bits: float
        loaded: Any
        quantized: Any

    @since(1, 0)
    def test_what_lives_on_the_device_is_told(self) -> None:
        """Memory accounting reads ``tensors``: nothing is kept beside them, in the first product or later either, on
        the host or the device; ``bytes`` is their sum, then as before, and ``bits`` is true but for the scales."""
        torch.manual_seed(3)
        for info in self.quantized((((256, 128, 128), 256),)):
            weight, dtype = torch.randn(512, 256), getattr(torch, info.dtype)
            self._used(self.loaded(info, weight), info, dtype)  # what is made once in a process is there now
            before = storages()
            scheme = self.loaded(info, weight)
            assert scheme is not None
            total = self._told(scheme, info, before, "")
            for tokens in (USED[:1], USED[1:]):
                self._used(scheme, info, dtype, tokens)
                now = self._told(scheme, info, before, f" after products with {' and '.join(map(str, tokens))} tokens")
                assert now == total, f"the tensors hold {now} bytes after some products, {total} before"
            if bits := self.spec.traits.get("bits"):
                check_bits(bits, self.scale_bits, scheme.tensors, 512 * 256)
            tracemalloc.start()
            self._used(scheme := self.loaded(info, weight), info, dtype)
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert kept < 512 * 256, f"{kept} bytes of Python's or numpy's are held beside tensors after some products"

    def _used(self, scheme: Any, info: ModuleInfo, dtype: torch.dtype, tokens: Sequence[int] = USED) -> None:
        """Products with and without ``out``, as a server has them, in inference mode and not."""
        for n in tokens:
            for mode in (True, False):
                with torch.inference_mode(mode):
                    x = torch.ones(n, info.in_features, dtype=dtype, device=info.device)
                    scheme.apply(x)
                    scheme.apply(x, torch.empty(n, info.out_features, dtype=dtype, device=info.device))

    def _told(self, scheme: WeightScheme, info: ModuleInfo, before: Mapping[int, int], when: str) -> int:
        """Bytes of the tensors of a scheme, all of which is told; ``before``: what there was without it."""
        own = {t.untyped_storage().data_ptr() for t in scheme.tensors.values()}
        total = sum(t.numel() * t.element_size() for t in scheme.tensors.values())
        found = {at: n for at, n in storages().items() if at not in before or at in own}
        beside = sum(found.values()) - total
        dense = 512 * 256 * getattr(torch, info.dtype).itemsize
        assert beside <= SLACK, (
            f"{beside} bytes are held beside tensors{when}; a dense copy of the weight has {dense} in {info.dtype}"
        )
        assert scheme.bytes == total, f"bytes says {scheme.bytes}{when}, the tensors hold {total}"
        away = {k: str(t.device) for k, t in scheme.tensors.items() if t.device.type != info.device.split(":")[0]}
        assert not away, f"tensors that are not on {info.device}{when}: {away}"
        return total
