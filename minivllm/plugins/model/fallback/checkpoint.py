"""The tensors of a checkpoint, with the names and in the form of transformers' model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from minivllm.core.interfaces.model import Conversion
from minivllm.errors import ModelError

from .blank import one_line


class HFConversion(Conversion):
    """The conversion of tensors by transformers' own tables, which rename tensors and stack experts into one tensor."""

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model) or []
        self.model = model
        self.renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self.converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self.by_pattern = {p: one for one in self.converters for p in one.source_patterns}
        self.known = model.state_dict()
        needless = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self.needless = [re.compile(pattern) for pattern in needless]

    def _renamed(self, source: str) -> tuple[str, str | None]:
        prefix = self.model.base_model_prefix
        name, pattern = rename_source_key(source, self.renamings, self.converters, prefix, self.known)
        if name not in self.known and source in self.known:
            return source, None
        return name, pattern

    def name(self, source: str) -> str | None:
        name, pattern = self._renamed(source)
        if pattern is not None:
            return None
        if name not in self.known and any(one.search(name) for one in self.needless):
            return None
        return name

    def tensors(self, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        several: dict[str, list[tuple[str, str, Tensor]]] = {}
        for source, tensor in found:
            name, pattern = self._renamed(source)
            if pattern is not None:
                several.setdefault(name, []).append((source, pattern, tensor))
            elif (kept := self.name(source)) is not None:
                yield kept, tensor
        for name in list(several):
            yield from self._converted(name, several.pop(name))

    def _converted(self, name: str, pieces: list[tuple[str, str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors that are combined from several tensors of a checkpoint with numbers in their names."""
        pattern = pieces[0][1]
        converter = copy.deepcopy(self.by_pattern[pattern])
        for source, pattern, tensor in sorted(pieces, key=lambda piece: dot_natural_key(piece[0])):
            converter.add_tensor(name, source, pattern, tensor)
        try:
            made = converter.convert(name, model=self.model, config=self.model.config)
        except Exception as exc:  # any error, for instance because a tensor is missing
            first = min(source for source, _, _ in pieces)
            problem = f"{name} cannot be computed from {len(pieces)} tensors of the checkpoint ({first} and others)"
            raise ModelError(f"{problem}: {one_line(exc)}; download it again") from exc
        for target, tensor in made.items():
            whole = tensor[0] if isinstance(tensor, list) else tensor
            yield target, whole
