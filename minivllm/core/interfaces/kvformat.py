"""The KV format seam (plug-in interface): the byte layout of a block of keys and values.

A format names the tensors of a block (its scales included).  It encodes the keys and values that a layer writes.  It
also decodes blocks for attention back ends that have no kernel for the format.  Cache tiers, content hashes and tensor
parallelism use the same tensor names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .attnspec import AttnSpec

API = (1, 0)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class TensorSpec:
    """The shape of a tensor within one block, and the name of its torch dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Return the size in bytes of the tensor within one block."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVLayout:
    """The named tensors of one block of one layer.  ``block`` is the number of tokens in a block."""

    block: int
    tensors: Mapping[str, TensorSpec]

    @property
    def bytes(self) -> int:
        """Return the size of a block in bytes."""
        return sum(t.bytes for t in self.tensors.values())


class KVFormat(ABC):
    """Encodes and decodes keys and values.  It keeps no state."""

    dtype: str  # name of the torch dtype of the stored elements

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def layout(self, spec: AttnSpec, block: int) -> KVLayout:
        """Return the tensors of a block of ``block`` tokens for a layer.

        The default is ``k`` [block, kv_heads, dim_qk] and ``v`` [block, kv_heads, dim_v], without ``v`` if
        ``spec.v_in_k``.
        """
        tensors = {"k": TensorSpec((block, spec.kv_heads, spec.dim_qk), self.dtype)}
        if not spec.v_in_k:
            tensors["v"] = TensorSpec((block, spec.kv_heads, spec.dim_v), self.dtype)
        return KVLayout(block, tensors)

    @abstractmethod
    def store(self, cache: Mapping[str, Tensor], k: Tensor, v: Tensor, slot_map: Tensor) -> None:
        """Encode k [T, kv_heads, dim_qk] and v [T, kv_heads, dim_v], and write them to the flat slots ``slot_map`` i64
        [T].

        A flat slot is block number * tokens per block + offset in the block.
        """

    @abstractmethod
    def load(
        self, cache: Mapping[str, Tensor], blocks: Tensor, dtype: Any
    ) -> tuple[Tensor, Tensor]:
        """Decode the blocks i64 [..., n] into k [..., n * block, kv_heads, dim_qk] and v [..., n * block, kv_heads,
        dim_v].

        Both have the torch ``dtype``.  Later calls must not overwrite the returned tensors.
        """
