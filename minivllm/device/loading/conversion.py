"""The steps between the tensors of a checkpoint and the rules of an architecture, which rename, convert and leave out
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from minivllm.core.interfaces.model import Conversion, ModelArch

from .tensor_files import Header
from .tensor_names import TensorNames

DOWN = "down_proj"


class TextConversion(Conversion):
    """Converts the tensors of a text model in a larger checkpoint.

    It leaves out the tensors of other models, transposes experts that are stored as [in, out], and then applies the
    conversion of the architecture.
    """

    def __init__(self, names: TensorNames, cfg: Any, inner: Conversion | None) -> None:
        self.names = names
        self.hidden = cfg.hidden_size
        self.inner = inner

    def name(self, source: str) -> str | None:
        new = self.names.of(source)
        return new if new is None or self.inner is None else self.inner.name(new)

    def header(self, source: str, header: Header) -> Header:
        """Return the header with the shape that the tensor has after the conversion of this class."""
        shape = header.shape
        return replace(header, shape=(shape[0], shape[2], shape[1])) if self._turns(source, shape) else header

    def tensors(self, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        mine = self._mine(found)
        return mine if self.inner is None else self.inner.tensors(mine)

    def _mine(self, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for source, tensor in found:
            name = self.names.of(source)
            if name is not None:
                yield name, tensor.transpose(1, 2) if self._turns(source, tuple(tensor.shape)) else tensor

    def _turns(self, source: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of all experts is stored as [in, out], which is the case if its shape is not [out,
        in]."""
        if len(shape) != 3 or not source.endswith(self.names.turned or ("\0",)):
            return False
        return shape[1 if source.endswith(DOWN) else 2] != self.hidden


def conversion_of(arch: ModelArch, cfg: Any, headers: Mapping[str, Header]) -> tuple[Conversion | None, TensorNames]:
    """Return the conversion of a checkpoint with these tensors, and the names of the tensors after it.

    The conversion is None if the files use the names of the rules.
    """
    names = TensorNames(headers, arch.weights(cfg), cfg)
    inner = arch.conversion(cfg)
    return (TextConversion(names, cfg, inner) if names.changes else inner), names


def by_rules(headers: Mapping[str, Header], conversion: Conversion | None) -> Mapping[str, Header]:
    """Return headers under the names that the rules of the architecture have.

    Headers of tensors that are left out or converted to others are missing.
    """
    if conversion is None:
        return headers
    found: dict[str, Header] = {}
    for source, header in headers.items():
        name = conversion.name(source)
        if name is not None:
            found[name] = conversion.header(source, header) if isinstance(conversion, TextConversion) else header
    return found


def text_names(headers: Mapping[str, Header], names: TensorNames) -> list[str]:
    """Return the names that tensors have in the text model, before the architecture's own conversion."""
    return [new for name in headers if (new := names.of(name)) is not None]
