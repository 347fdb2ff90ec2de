"""The KV format seam: how one block of keys and values is stored, byte for byte.

The format names the tensors of a block (scales included), encodes what a layer writes and decodes what an attention
back end without a kernel of its own for the format reads.  Tiers, hashes and tensor parallelism read the same names.
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
    """Shape of the tensor *per block* and its torch dtype's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVLayout:
    """Named tensors of one block of ``block`` tokens of one layer."""

    block: int
    tensors: Mapping[str, TensorSpec]

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.tensors.values())


class KVFormat(ABC):
    """Storage of keys and values; stateless."""

    dtype: str  # torch dtype name of the stored elements

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def layout(self, spec: AttnSpec, block: int) -> KVLayout:
        """The plain layout: ``k`` [block, kv_heads, dim_qk], ``v`` [block, kv_heads, dim_v]."""
        tensors = {"k": TensorSpec((block, spec.kv_heads, spec.dim_qk), self.dtype)}
        if not spec.v_in_k:
            tensors["v"] = TensorSpec((block, spec.kv_heads, spec.dim_v), self.dtype)
        return KVLayout(block, tensors)

    @abstractmethod
    def store(self, cache: Mapping[str, Tensor], k: Tensor, v: Tensor, slot_map: Tensor) -> None:
        """Encode k [T, kv_heads, dim_qk] and v [T, kv_heads, dim_v] into the flat slots ``slot_map`` i64 [T]."""

    @abstractmethod
    def load(
        self, cache: Mapping[str, Tensor], blocks: Tensor, dtype: Any
    ) -> tuple[Tensor, Tensor]:
        """Decode blocks i64 [..., n] to k [..., n * block, kv_heads, dim_qk] and v likewise, in the torch ``dtype``.
        No later call writes to what it gave."""
