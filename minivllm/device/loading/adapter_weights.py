"""The folders of adapters, and the places of their linear layers in the served model.

    model.layers.0.self_attn.q_proj      name of a layer in the checkpoint, which an adapter names
         │ the rules of the architecture
         ▼
    module "layers.0.attn.qkv", part "q"

Rows of outputs are cut and reordered as the rows of the base weight are.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import AdapterSource, AdapterTarget, TensorCopy, adapter_refusal
from minivllm.core.interfaces.model import Rule
from minivllm.device.layers.linear import Linear
from minivllm.errors import shown, suggest

from .adapter_files import WEIGHTS, read_config
from .conversion import conversion_of, text_names
from .file_ranges import STORED, FileRange, header_of, memory_of, read_ranges
from .tensor_files import checkpoint_headers, opened
from .weights import Target, of_one_form, rule_pattern, several_forms

if TYPE_CHECKING:
    from collections.abc import Callable

    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.quantizer import ModuleInfo
    from minivllm.device.layers.parts import ModelParts

    from .tensor_names import TensorNames

SOME = ("embedding", "lm_head", "router", "experts")  # kinds of modules that are not adapted


class _Pieces:
    """A collector with the method by which ``Target`` fills a module."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        self.found[part] = tensor


@dataclass(frozen=True)
class TargetLayer:
    """An ``AdapterTarget``: a linear layer of the checkpoint in the served layer ``info``, by a rule of the model."""

    info: ModuleInfo
    parts: tuple[str, ...]
    rule: Rule

    @property
    def layer(self) -> str:
        return self.info.name

    @property
    def inputs(self) -> int:
        return self.info.in_features * (self.info.shard.size if self.info.split == "row" else 1)

    @property
    def outputs(self) -> int:
        return sum(self._rows(part) for part in self.parts)

    def _rows(self, part: str) -> int:
        """Return the outputs of a part over all processes."""
        rows = self.info.rows[part]
        return (rows.stop - rows.start) * (self.info.share(part).size if self.info.split == "column" else 1)

    def rows(self, values: Tensor) -> list[tuple[str, slice, Tensor]]:
        pieces, rule = _Pieces(), self.rule
        target = Target(
            pieces,  # type: ignore[arg-type]
            self.parts,
            "weight",
            None,
            tuple(self._rows(part) for part in self.parts),
            rule.pairs,
            interleaved=rule.interleaved,
            groups=rule.groups,
        )
        target.fill(values)
        found = []
        for part, piece in pieces.found.items():
            share = self.info.share(part)
            shard = piece.chunk(share.size)[share.rank] if self.info.split == "column" else piece
            found.append((part, self.info.rows[part], shard))
        return found

    def columns(self, values: Tensor) -> Tensor:
        if self.info.split != "row":
            return values
        return values.chunk(self.info.shard.size, dim=-1)[self.info.shard.rank]


class OpenFolder:
    """An ``AdapterSource``: the folder of an adapter, with its file of weights open."""

    def __init__(self, folder: str, file: Any, target: Callable[[str], AdapterTarget]) -> None:
        """Read the header of the file, which ``file``, a handle of safetensors, has checked."""
        self.folder, self.file, self._target = folder, file, target
        self.config: Mapping[str, Any] = read_config(folder)
        self.names: Sequence[str] = list(file.keys())
        self.layout = header_of(Path(folder) / WEIGHTS)
        self._headers: Mapping[str, Any] = json.loads(self.layout)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._headers[name]["shape"])

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(name)
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise adapter_refusal(self.folder, f"tensor {shown(name)} has the dtype {dtype}; expected a float dtype")
        return tensor

    def read(self, copies: Sequence[TensorCopy]) -> None:
        ranges = []
        for copy in copies:
            header, to = self._headers[copy.name], copy.to
            if header["dtype"] == STORED.get(to.dtype) and to.is_contiguous():
                size = to.element_size()
                begin = header["data_offsets"][0] + copy.first * size
                ranges.append(FileRange(begin, begin + to.numel() * size, memory_of(to)))
            else:
                values = self.tensor(copy.name).flatten()[copy.first : copy.first + to.numel()]
                to.copy_(values.view_as(to))
        try:
            read_ranges(Path(self.folder) / WEIGHTS, 8 + len(self.layout), ranges)
        except OSError as e:
            what = e.strerror or str(e)
            raise adapter_refusal(self.folder, f"{WEIGHTS} cannot be read: {what}") from None

    def target(self, module: str) -> AdapterTarget:
        return self._target(module)


class AdapterReader:
    """Opens the folders of adapters for one model and one process.  Several threads may use it."""

    def __init__(self, wiring: Wiring, cfg: Any, parts: ModelParts) -> None:
        self.wiring, self.cfg, self.parts = wiring, cfg, parts
        self._rules: list[tuple[re.Pattern[str], Rule]] = []
        self._conversion: Any = None
        self._names: TensorNames | None = None
        self._opening = threading.Lock()

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[AdapterSource]:
        """Open the folder of an adapter.  RequestError if it is malformed."""
        with opened(Path(folder) / WEIGHTS) as file, torch.inference_mode():
            yield OpenFolder(folder, file, partial(self._target, folder))

    def _open(self) -> None:
        """Read the names of the base model's checkpoint, by which names of modules are understood."""
        with self._opening:
            if not self._rules:
                self._read_rules()

    def _read_rules(self) -> None:
        """Set the rules for names of linear layers, and the conversion of names."""
        wiring, arch = self.wiring, self.parts.arch
        dummy, pickled = wiring.load_format == "dummy", wiring.load_format == "pt"
        headers: Mapping[str, Any] = {} if dummy else checkpoint_headers(Path(wiring.model_dir), pickled)
        self._conversion, self._names = conversion_of(arch, self.cfg, headers)
        names = self._names
        rules: Sequence[Rule] = arch.weights(self.cfg)
        forms = several_forms(rules, wiring.load_format)
        chosen = of_one_form(rules, text_names(headers, names) if forms else ())
        self._rules = [(rule_pattern(r.source), r) for r in chosen if r.module is not None and not r.param]

    def _target(self, folder: str, name: str) -> AdapterTarget:
        """Return the place of a linear layer of the base model.  RequestError if it has none."""
        if not self._rules:
            self._open()
        weight = f"{name}.weight"
        renamed = weight if self._conversion is None else self._conversion.name(weight)
        stems = [name] if renamed is None else [renamed.removesuffix(".weight"), name]
        roots = sorted({rule.source.partition(".")[0] + "." for _, rule in self._rules if "." in rule.source})
        assert self._names is not None
        inner = self._names.in_text_model(name)
        stems += [root + one for root in roots for one in dict.fromkeys((name, inner))]
        for stem in stems:
            for pattern, rule in self._rules:
                if match := pattern.fullmatch(stem):
                    return self._place(folder, name, rule, match)
        if other := self._names.of_other_model(name):
            raise adapter_refusal(
                folder, f"its target {shown(name)} is of {other}; expected layers of the text model, not of an encoder"
            )
        known = [rule.source for _, rule in self._rules]
        raise adapter_refusal(folder, f"its target {shown(name)} is no layer of this model.{suggest(name, known)}")

    def _place(self, folder: str, name: str, rule: Rule, match: re.Match[str]) -> AdapterTarget:
        numbers = match.groupdict()
        layer, expert = numbers.get("i", ""), numbers.get("e", "")
        module = str(rule.module).replace("{i}", layer)
        parts = (rule.part,) if isinstance(rule.part, str) else rule.part
        found = self.parts.modules.get(module)
        if found is None:
            raise adapter_refusal(folder, f"its target {shown(name)} is no layer of this model")
        if type(found) is not Linear:
            kind = getattr(getattr(found, "info", None), "kind", "layer")
            kind = kind if kind in SOME else "layer"
            raise adapter_refusal(folder, f"its target {shown(name)} is of the kind {kind}, which is not adapted")
        return TargetLayer(found.info, tuple(part.replace("{e}", expert) for part in parts), rule)
