"""The model seam: an architecture says what its attention layers are, how to build it, and where its weights go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .attention import AttnMeta, AttnSpec, QKPre

API = (1, 1)  # 1.1: StepTensors.wanted, Model.picks


@dataclass(frozen=True)
class Rule:
    """Checkpoint name -> module, parameter and part.  ``{i}`` stands for one number, the same on both sides::

        Rule("model.layers.{i}.self_attn.q_proj", "layers.{i}.attn.qkv", part="q")

    matches ``model.layers.3.self_attn.q_proj.weight`` (and ``.bias``, ``.scales`` ...): what follows the source name is
    the parameter.  A name that no rule matches is an error, so is a parameter that nothing filled.  ``module=None``
    says that the tensor is known and not needed.
    """

    source: str
    module: str | None
    part: str = ""


@dataclass
class StepTensors:
    """What a model is called with: T tokens."""

    ids: Tensor  # i64 [T]
    position: Tensor  # i64 [T]
    meta: AttnMeta
    # i64 [N] numbers of the tokens whose hidden states are asked for; None: all
    wanted: Tensor | None = None


class LinearModule(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


class Attention(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors, pre: QKPre | None = None
    ) -> Tensor: ...


class Parts(Protocol):
    """The engine's building blocks, handed to ``build``: quantization, tensor parallelism and the attention back end
    are inside them, a model does not see them.  ``heads(n)`` is this process's share of n heads."""

    def heads(self, n: int) -> int: ...
    def linear(
        self,
        name: str,
        inp: int,
        parts: Sequence[tuple[str, int]],
        *,
        bias: bool = False,
        split: str | None = None,
    ) -> LinearModule: ...
    def embedding(self, name: str, rows: int, dim: int) -> Any: ...
    def lm_head(self, name: str, inp: int, vocab: int, tied: Any = None) -> Any: ...
    def norm(self, name: str, dim: int, eps: float) -> Any: ...
    # Pairs of layers that are one kernel where the rows are few; what passes between them is layers.fused.Normed.
    def normed_linear(self, linear: LinearModule) -> Callable[[Any], Tensor]: ...
    def gated_linear(self, linear: LinearModule) -> Callable[[Any], Tensor]: ...
    def linear_norm(
        self, linear: LinearModule, norm: Any, whole: bool = False
    ) -> Callable[[Tensor, Tensor], tuple[Any, Tensor]]: ...
    def attention(self, index: int, spec: AttnSpec) -> Attention: ...
    def rotary(self, cfg: Any, dim: int) -> tuple[Tensor, Tensor]: ...


class Model(Protocol):
    """``__call__`` gives hidden states [T, H] (final norm applied); ``logits`` maps [N, H] to [N, V].

    A class with ``picks = True`` beside its ``__call__`` gives those of ``step.wanted`` alone, [N, H] in that order,
    where it is not None: what follows the last attention is computed for no other token.  Keys and values of all T are
    written in every layer all the same.  ``wanted`` is on the device and not to be read by the host (the step may be
    captured); a token may be in it twice, and in any place.  Without the attribute a model gives all.
    """

    def __call__(self, step: StepTensors) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


def picks(model: Model) -> bool:
    """Whether the class that has the model's ``__call__`` says so: one that overrides it says it again, or does not."""
    owner = next((c for c in type(model).__mro__ if "__call__" in vars(c)), type(model))
    return bool(vars(owner).get("picks", False))


class ModelArch(ABC):
    """One architecture.  ``cfg`` is transformers' config object of the text model."""

    @abstractmethod
    def attention(self, cfg: Any) -> Sequence[AttnSpec]:
        """One spec per layer, for the whole model (not a process's share)."""

    @abstractmethod
    def build(self, cfg: Any, parts: Parts) -> Model: ...

    @abstractmethod
    def weights(self, cfg: Any) -> Sequence[Rule]: ...
