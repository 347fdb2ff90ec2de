"""The weights of an adapter, in the form in which a device stores them (``device.layers.adapters``).

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
                     └──────── name of the base model ──────┘
                        the rules of the architecture ──► module "layers.0.attn.qkv", part "q"

The rows of B are cut and reordered as the rows of the base weight are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.model import Rule
from minivllm.device.layers.linear import Linear
from minivllm.errors import RequestError, shown, suggest

from .adapter_files import WEIGHTS, AdapterSettings, read_settings
from .conversion import conversion_of, text_names
from .tensor_files import checkpoint_headers, opened
from .weights import Target, of_one_form, rule_pattern, several_forms

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.quantizer import ModuleInfo
    from minivllm.device.layers.adapters import AdapterMemory
    from minivllm.device.layers.parts import ModelParts

PREFIX = "base_model.model."
NAME = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
# other tensors of an adapter -> the feature that they belong to
OTHERS = {
    "lora_embedding_": "trained embeddings",
    "lora_magnitude_vector": "use_dora=true",
    "lora_B.bias": "lora_bias=true",
    "modules_to_save": "modules_to_save",
}
SOME = ("embedding", "lm_head", "router", "experts")  # kinds of modules that are not adapted


class Adapted(NamedTuple):
    """A linear layer of the base model, and its place in the model that is served."""

    module: str
    parts: tuple[str, ...]
    rule: Rule


class HostAdapter(NamedTuple):
    """An adapter in host memory: a row of the arena [size], and the rank of each layer i32 [layers]."""

    weights: Tensor
    ranks: Tensor


class _Pieces:
    """A collector with the method by which ``Target`` fills a module."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def load(self, part: str, param: str, tensor: Tensor) -> None:
        self.found[part] = tensor


class AdapterReader:
    """Reads the folders of adapters for one model and one process.

    ``zeros(size, dtype)`` allocates host memory, pinned for a GPU."""

    def __init__(
        self,
        wiring: Wiring,
        cfg: Any,
        parts: ModelParts,
        memory: AdapterMemory,
        zeros: Callable[[int, torch.dtype], Tensor],
    ) -> None:
        self.wiring, self.cfg, self.parts, self.memory, self.zeros = wiring, cfg, parts, memory, zeros
        self._rules: list[tuple[re.Pattern[str], Rule]] = []
        self._conversion: Any = None

    def read(self, folder: str) -> HostAdapter:
        """Return the adapter of a folder.  RequestError if it is malformed, or does not fit the model."""
        path = Path(folder)
        settings = read_settings(path, self.wiring.adapters.max_lora_rank)
        weights = self.zeros(self.memory.arena.shape[1], self.memory.arena.dtype)
        ranks = self.zeros(len(self.memory.places), torch.int32)
        with opened(path / WEIGHTS) as file, torch.inference_mode():
            pairs = _pairs(folder, list(file.keys()))
            for name, (a, b) in pairs.items():
                adapted = self._adapted(folder, name)
                self._check(folder, name, adapted, settings, *(file.get_slice(one).get_shape() for one in (a, b)))
                scale = settings.scale_of(name)
                self._fill(adapted, file.get_tensor(a), file.get_tensor(b), scale, weights, ranks)
            if not torch.isfinite(weights).all():  # products of all adapters of a step share their sums
                dtype = str(weights.dtype).removeprefix("torch.")
                raise _refusal(folder, f"its weights, with their scale, are not all finite numbers in {dtype}")
        return HostAdapter(weights, ranks)

    def _open(self) -> None:
        """Read the names of the base model's checkpoint, by which names of modules are understood."""
        wiring, arch = self.wiring, self.parts.arch
        dummy, pickled = wiring.load_format == "dummy", wiring.load_format == "pt"
        headers: Mapping[str, Any] = {} if dummy else checkpoint_headers(Path(wiring.model_dir), pickled)
        self._conversion, names = conversion_of(arch, self.cfg, headers)
        rules: Sequence[Rule] = arch.weights(self.cfg)
        forms = several_forms(rules, wiring.load_format)
        chosen = of_one_form(rules, text_names(headers, names) if forms else ())
        self._rules = [(rule_pattern(r.source), r) for r in chosen if r.module is not None and not r.param]

    def _adapted(self, folder: str, name: str) -> Adapted:
        """Return the place of a linear layer of the base model.  RequestError if it has none."""
        if not self._rules:
            self._open()
        weight = f"{name}.weight"
        renamed = weight if self._conversion is None else self._conversion.name(weight)
        stems = [name] if renamed is None else [renamed.removesuffix(".weight"), name]
        roots = sorted({rule.source.partition(".")[0] + "." for _, rule in self._rules if "." in rule.source})
        stems += [root + name for root in roots]
        for stem in stems:
            for pattern, rule in self._rules:
                if match := pattern.fullmatch(stem):
                    return self._place(folder, name, rule, match)
        known = [rule.source for _, rule in self._rules]
        raise _refusal(folder, f"its target {shown(name)} is no layer of this model.{suggest(name, known)}")

    def _place(self, folder: str, name: str, rule: Rule, match: re.Match[str]) -> Adapted:
        numbers = match.groupdict()
        layer, expert = numbers.get("i", ""), numbers.get("e", "")
        module = str(rule.module).replace("{i}", layer)
        parts = (rule.part,) if isinstance(rule.part, str) else rule.part
        found = self.parts.modules.get(module)
        if found is None:
            raise _refusal(folder, f"its target {shown(name)} is no layer of this model")
        kind = getattr(getattr(found, "info", None), "kind", "layer")
        if type(found) is not Linear:
            kind = kind if kind in SOME else "layer"
            raise _refusal(folder, f"its target {shown(name)} is of the kind {kind}, which is not adapted")
        return Adapted(module, tuple(part.replace("{e}", expert) for part in parts), rule)

    def _check(
        self, folder: str, name: str, adapted: Adapted, settings: AdapterSettings, a: list[int], b: list[int]
    ) -> None:
        """Compare the shapes of A and B with the layer.  RequestError if they differ."""
        info, rank = self.memory.modules[adapted.module].info, settings.rank_of(name)
        inputs = info.in_features * (info.shard.size if info.split == "row" else 1)
        outputs = sum(_rows(info, part) for part in adapted.parts)
        for which, shape, expected in (("A", a, [rank, inputs]), ("B", b, [outputs, rank])):
            if list(shape) != expected:
                raise _refusal(
                    folder,
                    f"{name}.lora_{which} has shape {list(shape)}, expected {expected}; it was trained on another "
                    "model, or adapter_config.json belongs to other weights",
                )

    def _fill(self, adapted: Adapted, a: Tensor, b: Tensor, scale: float, weights: Tensor, ranks: Tensor) -> None:
        """Write this process's share of A [rank, in] and of B [out, rank] times ``scale`` to a row of the arena."""
        place, rule = self.memory.places[adapted.module], adapted.rule
        info, rank = self.memory.modules[adapted.module].info, len(a)
        pieces = _Pieces()
        rows = tuple(_rows(info, part) for part in adapted.parts)
        target = Target(
            pieces,  # type: ignore[arg-type]
            adapted.parts,
            "weight",
            None,
            rows,
            rule.pairs,
            interleaved=rule.interleaved,
            groups=rule.groups,
        )
        target.fill(b.float() * scale)
        if info.split == "row":
            a = a.chunk(info.shard.size, dim=1)[info.shard.rank]
        to_a, to_b = place.views(weights)
        numbers = [part for part, _ in info.parts]
        for part, piece in pieces.found.items():
            share = info.share(part)
            shard = piece.chunk(share.size)[share.rank] if info.split == "column" else piece
            to_a[numbers.index(part), :rank] = a
            to_b[info.rows[part], :rank] = shard
        ranks[place.number] = max(int(ranks[place.number]), rank)


def _rows(info: ModuleInfo, part: str) -> int:
    """Return the outputs of a part over all processes."""
    rows = info.rows[part]
    return (rows.stop - rows.start) * (info.share(part).size if info.split == "column" else 1)


def _pairs(folder: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each adapted module, by the module's name in the base model."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = NAME.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            what = next((what for part, what in OTHERS.items() if part in name), "")
            raise _refusal(folder, f"tensor {shown(name)} is not adapted{what and f' ({what})'}")
        found.setdefault(match["module"], {})[match["which"]] = name
    if not found:
        raise _refusal(folder, f"{WEIGHTS} has no tensors")
    for module, pair in found.items():
        if len(pair) < 2:
            raise _refusal(folder, f"{module} has lora_{next(iter(pair))} alone; expected lora_A and lora_B")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _refusal(folder: str, what: str) -> RequestError:
    return RequestError(f"adapter {shown(folder)}: {what}", "lora_request")
