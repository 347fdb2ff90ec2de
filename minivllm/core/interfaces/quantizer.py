"""The quantizer seam: how the weight of one module is stored, loaded and multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

API = (1, 6)


@dataclass(frozen=True)
class Shard:
    """Place of this process in a tensor-parallel group."""

    rank: int = 0
    size: int = 1


class PartSource(NamedTuple):
    """What a checkpoint has for one part of a module."""

    name: str  # "model.layers.3.self_attn.q_proj"
    tensors: Mapping[str, tuple[tuple[int, ...], str]]  # parameter -> (shape, "F16", "I32" ...)


@dataclass(frozen=True)
class ModuleInfo:
    """A module that owns a weight.  Sizes are *this process's share* after tensor-parallel slicing.

    A merged linear (q, k, v in one matrix) has several ``parts``: (name, output rows) in the order they are stacked.
    One of kind "experts" has those of expert 0 first, then those of expert 1 ("0.gate", "0.up", "1.gate" ...), as many
    for each.  ``names`` has what a checkpoint calls a part, where that is known.
    """

    name: str  # "layers.3.attn.qkv"
    kind: str  # linear | embedding | lm_head | router | experts
    in_features: int
    parts: tuple[tuple[str, int], ...]
    dtype: str  # torch dtype name of the activations
    device: str
    bias: bool = False
    # None | "column" (outputs are split over processes) | "row" (inputs are)
    split: str | None = None
    shard: Shard = Shard()
    experts: int = 0  # of kind "experts": how many
    # of parts that are not cut as often as there are processes: neighbours that have the same share
    copies: Mapping[str, int] = field(default_factory=dict, compare=False)
    # by part, where there is any; None: nobody has looked
    sources: Mapping[str, PartSource] | None = field(default=None, compare=False)
    names: Mapping[str, str] = field(
        default_factory=dict,
        compare=False,
    )

    @property
    def out_features(self) -> int:
        return sum(n for _, n in self.parts)

    def share(self, part: str) -> Shard:
        """The place of this process's share of a part among those that differ."""
        copies = self.copies.get(part, 1)
        return Shard(self.shard.rank // copies, self.shard.size // copies)

    @cached_property
    def rows(self) -> Mapping[str, slice]:
        """Where the output rows of each part lie."""
        found, start = {}, 0
        for name, rows in self.parts:
            found[name] = slice(start, start + rows)
            start += rows
        return found


class StoredWeight(NamedTuple):
    """How the weight of a module lies in memory, row after row of outputs::

    float32, bfloat16, float16  [out, in]
    int8, float8 [out, in]      w = weight * scale[out]
    the same, or uint8          w = (weight - zero[out, group]) * scale[out, group]; zero None: 0
    uint8 [out, in / 2]         w = (q - zero[out, group]) * scale[out, group]; byte j of the 16 of
                                block b has input 32 b + j in its low nibble, 32 b + 16 + j in the other
    """

    weight: Tensor
    scale: Tensor | None = None  # f32
    zero: Tensor | None = None  # f32; None: 8 of nibbles, 0 of bytes
    group: int = 0  # inputs that share a scale; 0: all


class WeightScheme(ABC):
    """The weight of one module.  ``load`` is called once for each part of each parameter, then ``finish`` once.

    ``tensors`` holds what lives on the device; memory accounting and the state dict read it.
    """

    tensors: dict[str, Tensor]
    # apply(c * x) is c * apply(x), so that a norm may divide behind the product, not before it
    homogeneous = True

    @abstractmethod
    def params(self) -> Mapping[str, tuple[int, ...]]:
        """Checkpoint parameters that must come: name ("weight", "scales") -> full shape over all parts.

        ``bias`` is not among them: the linear layer keeps it.
        """

    def params_of(self, part: str) -> Mapping[str, tuple[int, ...]]:
        """Those of one part, where they differ."""
        return self.params()

    @abstractmethod
    def load(self, param: str, tensor: Tensor, part: str) -> None:
        """Take this process's slice of one part (see ``slice``); any floating dtype, any device, which stays as it is.
        ModelError on a wrong shape."""

    def slice(self, param: str, tensor: Tensor, split: str | None, shard: Shard) -> Tensor:
        """This process's share of a full checkpoint tensor.  Default: weight [out, in] cut by rows or columns."""
        if split is None or shard.size == 1:
            return tensor
        return tensor.chunk(shard.size, dim=0 if split == "column" else 1)[shard.rank]

    def finish(self) -> None:  # noqa: B027  (optional)
        """All parts are there: repack, free temporaries."""

    @abstractmethod
    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        """x [T, in] -> [T, out] (no bias, no reduction over processes)."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        """The product with the rows of expert ``e`` alone, x [T, in] -> [T, rows of an expert]; of kind "experts" it is
        called and ``apply`` is not.  A scheme without it cannot be given to experts: PluginError."""
        raise PluginError(
            f"{type(self).__name__} stores no experts: want scheme() to give None for kind 'experts'"
        )

    def gather(self, ids: Tensor, dtype: Any) -> Tensor:
        """Of kind "embedding": rows [T, in] by numbers i64 [T], in a torch dtype.  A tied head calls ``apply`` too."""
        raise PluginError(f"{type(self).__name__} gathers no rows: want None for kind 'embedding'")

    def stored(self) -> StoredWeight | None:
        """The weight of which ``apply`` is the plain product, if it lies in one of these forms: captured steps of a CPU
        read some of them there, and kernels of experts those that are quantized.  None: they do not.  A subclass does
        not inherit it, as its product may be another."""
        return None

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        """``apply`` in one kernel with what surrounds it, as ``device.kernels.products.Product``, whose modes these
        are; asked once all is loaded.  None: there is none.  A subclass does not inherit it, as its product may be
        another."""
        return None

    def served(self, device: str, sm: int) -> Mapping[str, str]:
        """For ``minivllm explain``: rows of x ("2 to 8") -> what multiplies so many on such a device;
        ``sm``: NVIDIA's compute capability as 90."""
        return {}

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Quantizer(ABC):
    """Chooses a scheme per module; None leaves the module unquantized."""

    def __init__(self, options: Any, checkpoint: Mapping[str, Any] | None = None) -> None:
        self.options = options
        self.checkpoint = checkpoint  # ``quantization_config`` of config.json, if any
        self.notes: list[str] = []  # what the user should know, read once all is loaded

    @abstractmethod
    def scheme(self, m: ModuleInfo) -> WeightScheme | None: ...

    def finish(self) -> None:  # noqa: B027  (optional)
        """All modules were asked.  OptionError if an option names a module that is not there."""
