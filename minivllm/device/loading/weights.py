"""Load weights into a model, from safetensors files by the rules of its architecture, or as random numbers (``dummy``).

Every tensor of the checkpoint must be used exactly once or be known as unused, and every parameter must be filled.
Otherwise an error names the tensor.  Files are memory-mapped and read tensor by tensor.  Pickles are opened only with
``load_format = "pt"``, and no code of the model's directory is run.
"""

from __future__ import annotations

import copy
import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.core import progress
from minivllm.core.interfaces.model import Model, ModelArch, Rule
from minivllm.core.interfaces.quantizer import WeightScheme
from minivllm.device.layers.embedding import TiedLMHead
from minivllm.device.layers.module import Module
from minivllm.device.layers.parts import ModelParts
from minivllm.device.layers.rotary import order_of_halves
from minivllm.errors import MinivllmError, ModelError, PluginError, ResourceError, from_file, raised_at, shown

from .conversion import by_rules, conversion_of, text_names
from .tensor_files import Header, check_unchanged, checkpoint_headers, checkpoint_tensors, file_stamps, opened
from .tensor_names import BUFFERS, no_place

LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
DUMMY_STD = 0.02
Wanted = Mapping[tuple[str, str], tuple[int, ...] | None]  # ``Module.wanted``
PLAIN = ("weight", "bias")  # names of parameters of layers without quantization
WORDS = (".qweight", ".weight_packed")  # ends of the names of tensors with packed weights
ROWS_AT_ONCE = 4096  # two matrices are compared this many rows at a time
log = logging.getLogger("minivllm")


@dataclass(frozen=True)
class Target:
    """The module and its parts that a tensor of the checkpoint fills, and how its rows are divided."""

    module: Module
    # the module's parts in the tensor, in order; with ``experts`` those of each expert, such as "{e}.up"
    parts: tuple[str, ...]
    param: str
    # shape of the tensor in the checkpoint, before it is sliced for tensor parallelism; None if the scheme checks it
    shape: tuple[int, ...] | None
    rows: tuple[int, ...] = ()  # number of rows of each part, if the tensor has several
    pairs: tuple[int, int] | None = None  # see ``Rule``
    transposed: bool = False  # whether the checkpoint stores [in, out]; ``shape`` is then also [in, out]
    interleaved: bool = False  # whether rows of the parts alternate in the tensor
    experts: int = 0  # number of experts on the tensor's first axis, 0 if it has no axis of experts
    whole: bool = False  # whether each part gets the whole tensor, because only its weight scheme can find its rows
    groups: int = 1  # see ``Rule``

    def fill(self, tensor: Tensor) -> None:
        if self.transposed:
            tensor = tensor.transpose(-2, -1)
        if not self.experts:
            self._fill(tensor, self.parts)
        if self.experts and (not tensor.dim() or len(tensor) != self.experts):
            raise ModelError(f"shape {list(tensor.shape)}, expected {self.experts} experts first")
        for e in range(self.experts):
            parts = [part.replace("{e}", str(e)) for part in self.parts]
            self._fill(tensor[e], parts)

    def _fill(self, tensor: Tensor, parts: Sequence[str]) -> None:
        if len(parts) == 1 or self.whole:
            pieces: Sequence[Tensor] = [tensor] * len(parts)
        elif self.interleaved:
            pieces = [tensor[n :: len(parts)] for n in range(len(parts))]
        elif self.groups > 1:
            grouped = tensor.unflatten(0, (self.groups, -1))
            rows = [n // self.groups for n in self.rows]  # number of rows of each part in a group
            pieces = [piece.flatten(0, 1) for piece in grouped.split(rows, dim=1)]
        else:
            pieces = tensor.split(list(self.rows))
        for part, piece in zip(parts, pieces, strict=True):
            if self.pairs is not None and part != "v":
                piece = as_halves(piece, *self.pairs)
            self.module.load(part, self.param, piece)


@dataclass(frozen=True)
class LoadedRules:
    """The folder, rules and targets with which a model was loaded, for later updates of its weights."""

    folder: str
    cfg: Any
    rules: Sequence[Rule]
    targets: dict[str, Target]


def as_halves(x: Tensor, dim: int, turned: int) -> Tensor:
    """Reorder rows of heads [heads * dim, ...] whose first ``turned`` rows are pairs (0, 1), (2, 3) ... to halves.

    The even rows come first, then the odd rows, then the rows that are not rotated.
    """
    return x.unflatten(0, (-1, dim))[:, order_of_halves(dim, turned)].flatten(0, 1)


def build_model(arch: ModelArch, cfg: Any, parts: ModelParts, where: str | Path = "") -> Model:
    """Build the model with uninitialized weights.  ``where`` is its folder, for messages.

    Raise ModelError for a config value that is not implemented and for sizes that no tensor can have, ResourceError if
    memory is too small, and PluginError if the result is not a model.
    """
    try:
        model = arch.build(cfg, parts)
    except torch.OutOfMemoryError as e:
        raise ResourceError(f"no memory for the model's weights: {str(e).splitlines()[0]}") from e
    except (RuntimeError, TypeError) as e:
        if isinstance(e, MinivllmError):
            raise
        raise ModelError(
            f"{where}/config.json: the model cannot be built: {str(e).splitlines()[0]}{raised_at(e)}"
        ) from e
    if not callable(model) or not callable(getattr(model, "logits", None)):
        who = f"model {type(arch).__name__}{from_file(arch)}"
        raise PluginError(f"{who}: build() gave {shown(model)}; expected a Model, which is called and has logits()")
    return model


def load_weights(
    model_dir: str | Path, arch: ModelArch, cfg: Any, parts: ModelParts, load_format: str = "auto", seed: int = 0
) -> list[str]:
    """Load the weights of every module that was built from ``parts``.

    ``load_format`` "auto" and "safetensors" read the safetensors of ``model_dir``, "pt" its files of ``torch.save``, of
    which no code is run; "dummy" draws random weights on the device from ``seed`` and reads no file.  Return sentences
    for the user: tensors that are left out, a head that is not tied.  ModelError if anything is missing, left over or
    broken.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format={shown(load_format)}: expected one of {', '.join(LOAD_FORMATS)}")
    read = load_format != "dummy"
    pickled = load_format == "pt"
    rules = arch.weights(cfg)
    notes: list[str] = []
    stamps = file_stamps(Path(model_dir), pickled) if read else {}
    headers = checkpoint_headers(Path(model_dir), pickled) if read else {}
    conversion, names = conversion_of(arch, cfg, headers)
    placed = by_rules(headers, conversion)
    if read:
        rules, notes = tie(Path(model_dir), arch, cfg, parts, rules, placed)
        for note in names.notes():
            notes.append(note)
            log.info("%s: %s", model_dir, note)
    several = several_forms(rules, load_format)
    rules = of_one_form(rules, text_names(headers, names) if several else ())
    targets = find_targets(rules, parts)
    parts.loaded = LoadedRules(str(model_dir), cfg, rules, targets)
    # a conversion of the architecture may build a tensor from several others
    if read and arch.conversion(cfg) is None:
        _check_there(placed, targets, str(model_dir))
    with torch.no_grad():
        if not read:
            tensors = dummy_tensors(targets, parts, seed)
        else:
            total = sum(size for size, *_ in stamps.values())
            tensors = reported(checkpoint_tensors(Path(model_dir), pickled), total)
            if conversion is not None:
                tensors = conversion.tensors(tensors)
        _fill(tensors, targets, rules, str(model_dir))
        check_unchanged(stamps)
        for module in parts.modules.values():
            module.finish()
    return [*notes, *getattr(parts.quantizer, "notes", ())]


def reported(tensors: Iterator[tuple[str, Tensor]], total: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, and report the progress of reading them, of ``total`` bytes."""
    done = 0
    for name, tensor in tensors:
        progress.report(progress.WEIGHTS, min(done, total), total)
        yield name, tensor
        done += tensor.nbytes
    progress.report(progress.WEIGHTS, total, total)


def tie(
    folder: Path,
    arch: ModelArch,
    cfg: Any,
    parts: ModelParts,
    rules: Sequence[Rule],
    headers: Mapping[str, Header],
) -> tuple[Sequence[Rule], list[str]]:
    """Return the rules for a model whose head shares the embedding's weight (``tie_word_embeddings``), and notes for
    the user.

    The checkpoint's tensors decide, as in transformers 5.  If it has both tensors and they differ, the head gets its
    own weight.  If it has only the head's, both share that, and otherwise both share the embedding's.  The notes report
    a difference to config.json.  ``headers`` have the names of the rules.
    """
    heads = own_names(arch, cfg, parts)
    notes: list[str] = []
    for head, own in heads.items():
        untied = _untied(arch, cfg)
        # a head with a packed weight cannot share the embedding's weight
        if head.scheme is not None and set(head.scheme.params()) != {"weight"}:
            head.untie()
            rules = untied
            continue
        shared = next((rule.source for rule in rules if rule.module == head.tied.name), None)
        mine = headers.get(f"{own}.weight")
        theirs = headers.get(f"{shared}.weight")
        if mine is None:
            continue
        if theirs is None:
            rules = [replace(r, source=own) if r.module == head.tied.name else r for r in rules if r.source != own]
            notes.append(f"the embedding is the checkpoint's {own}.weight: it has no {shared}.weight")
        elif not _same(mine, theirs, parts.dtype):
            head.untie()
            rules = untied
            notes.append(
                f"{own}.weight is used and differs from {shared}.weight, though config.json says "
                "tie_word_embeddings=true, as transformers does; set it to false there to silence this"
            )
            log.warning("%s: %s", folder, notes[-1])
    return rules, notes


def own_names(arch: ModelArch, cfg: Any, parts: ModelParts) -> dict[TiedLMHead, str]:
    """Return the output heads that share the embedding's weight.

    The values are the names that checkpoints use for the weight of a head that does not share it.
    """
    heads = [module for module in parts.modules.values() if isinstance(module, TiedLMHead)]
    if not heads:
        return {}
    sources = {rule.module: rule.source for rule in _untied(arch, cfg)}
    return {head: sources[head.name] for head in heads if head.name in sources}


def _untied(arch: ModelArch, cfg: Any) -> Sequence[Rule]:
    """Return the loading rules of the model as if its output head did not share the embedding's weight."""
    apart = copy.copy(cfg)
    apart.tie_word_embeddings = False
    return arch.weights(apart)


def _same(mine: Header, theirs: Header, dtype: torch.dtype) -> bool:
    """Return whether two tensors of a checkpoint are equal after a cast to ``dtype``, in which the model runs."""
    if mine.shape != theirs.shape:
        return False
    with opened(mine.path) as left, opened(theirs.path) as right:
        a = left.get_tensor(mine.name)  # maps the file; the numbers are read piece by piece below
        b = right.get_tensor(theirs.name)
        pieces = zip(a.split(ROWS_AT_ONCE), b.split(ROWS_AT_ONCE), strict=True)
        return all(torch.equal(x.to(dtype), y.to(dtype)) for x, y in pieces)


def weight_bytes(parts: ModelParts) -> int:
    """Return the bytes of all parameters on this process's device.  Shared parameters count once."""
    sizes = {}
    for module in parts.modules.values():
        for tensor in module.tensors.values():
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def several_forms(rules: Sequence[Rule], load_format: str) -> bool:
    """Return whether the rules are for several forms of checkpoints, so that the tensors' names must select one."""
    return load_format != "dummy" and len({rule.form for rule in rules} - {""}) > 1


def of_one_form(rules: Sequence[Rule], names: Iterable[str]) -> list[Rule]:
    """Return the rules for one form of checkpoint, and the rules for all forms.

    An architecture may have rules for several forms of its checkpoints.  The form is the first with a tensor among
    ``names`` that the other forms lack, else the first form.
    """
    forms = list(dict.fromkeys(rule.form for rule in rules if rule.form))
    if len(forms) < 2:
        return list(rules)
    sources = {form: {rule.source for rule in rules if rule.form == form} for form in forms}
    there = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}
    there |= {name.rpartition(".")[0] for name in there}
    for form in forms:
        others = set().union(*(sources[other] for other in forms if other != form))
        only_here = sources[form] - others
        if any(re.sub(r"\{[ie]\}|(?<=\.)\d+(?=\.)", "*", source) in there for source in only_here):
            break
    else:
        form = forms[0]
    return [rule for rule in rules if rule.form in ("", form)]


def find_targets(rules: Sequence[Rule], parts: ModelParts) -> dict[str, Target]:
    """Return the target of each checkpoint name, for every parameter of every module.

    Raise ModelError if no rule or two rules fill a parameter.
    """
    targets: dict[str, Target] = {}
    wanted = {name: module.wanted() for name, module in parts.modules.items()}
    filled: set[tuple[str, str, str]] = set()
    for rule in rules:
        if rule.module is None:
            continue
        pattern = rule_pattern(rule.module)
        names = wanted if "{i}" in rule.module else [rule.module]
        for name in names:
            match = pattern.fullmatch(name)
            if match and name in wanted:
                number = match.groupdict().get("i", "")
                _targets_of(rule, number, parts.modules[name], wanted[name], targets, filled)
    for name, module in wanted.items():
        for part, param in module:
            if (name, part, param) in filled:
                continue
            packed = "" if param in PLAIN else ", or load a checkpoint that is quantized as config.json says"
            raise ModelError(
                f"no rule of the architecture fills {name}.{param} {shown(part)}: add one to its weights(){packed}"
            )
    return targets


def _targets_of(
    rule: Rule,
    number: str,
    module: Module,
    wanted: Wanted,
    targets: dict[str, Target],
    filled: set[tuple[str, str, str]],
) -> None:
    """Add the targets of the parameters of ``module`` that ``rule`` fills to ``targets``, and mark these in ``filled``.

    ``number`` is the index of the module's layer as a text.  Raise ModelError for a parameter that is filled twice."""
    parts_of = (rule.part,) if isinstance(rule.part, str) else rule.part
    first = rule_pattern(parts_of[0])
    stacked = "{e}" in parts_of[0] and "{e}" not in rule.source
    experts: dict[str, int] = {}  # parameter -> number of experts that have it

    def source_of(param: str, expert: str) -> str:
        stem = rule.source.replace("{i}", number).replace("{e}", expert)
        return stem if rule.param else f"{stem}.{param}"

    for part, param in wanted:
        match = first.fullmatch(part)
        if not match or (rule.param and rule.param != param):
            continue
        e = match.groupdict().get("e", "")
        mine = tuple(one.replace("{e}", e) for one in parts_of)
        for one in mine:
            place = (module.name, one, param)
            if place in filled:
                raise ModelError(
                    f"the architecture's rules fill {module.name}.{param} {shown(one)} twice: fix its weights()"
                )
            filled.add(place)
        experts[param] = experts.get(param, 0) + 1
        if stacked and experts[param] > 1:
            continue
        whole = source_of(param, e)
        shapes = [wanted[one, param] for one in mine]
        named = parts_of if stacked else mine
        targets[whole] = _target(whole, module, named, param, shapes, rule)
    if not stacked:
        return
    for param, count in experts.items():
        whole = source_of(param, "")
        target = targets[whole]
        shape = None if target.shape is None else (count, *target.shape)
        targets[whole] = replace(target, shape=shape, experts=count)


def _target(
    whole_name: str,
    module: Module,
    parts: tuple[str, ...],
    param: str,
    shapes: Sequence[tuple[int, ...] | None],
    rule: Rule,
) -> Target:
    """Return the target of the checkpoint's tensor ``whole_name``.

    ``shapes`` are those of the module's parts that the tensor holds; None is a shape that only the weight scheme has.
    Raise ModelError for a tensor that cannot be divided into the parts."""
    known = [shape for shape in shapes if shape is not None]
    scheme: WeightScheme | None = getattr(module, "scheme", None)
    able = "cuts_groups" if rule.groups > 1 else "cuts_parts"
    packed = scheme is not None and param in scheme.params()
    if packed and getattr(scheme, able, False) and rule.pairs is None:
        return Target(module, parts, param, None, whole=True)
    change = ""  # verb for a needed change of the rows, which is impossible for a quantized tensor
    if len(parts) > 1 and not rule.interleaved:
        change = "cut"
    elif rule.transposed:
        change = "transposed"
    elif rule.pairs is not None:
        change = "put in order"
    if change and len(known) < len(shapes):
        raise ModelError(
            f"{whole_name} is quantized, but its rows must be {change}: "
            "that is not implemented; use the model in a floating dtype"
        )
    rows = tuple(shape[0] for shape in known if shape)
    shape: tuple[int, ...] | None = known[0] if known else None
    if shape is not None and len(parts) > 1:
        shape = (sum(rows), *shape[1:])
    turned = rule.transposed and shape is not None and len(shape) == 2
    if shape and turned:
        shape = shape[::-1]
    uneven = sorted({n for n in rows if n % rule.groups})
    if uneven:
        raise ModelError(
            f"{whole_name}: {uneven[0]} rows of a part do not divide into {rule.groups} groups: fix its weights()"
        )
    return Target(module, parts, param, shape, rows, rule.pairs, turned, rule.interleaved, groups=rule.groups)


def roots_of(targets: Mapping[str, Target]) -> list[str]:
    """Return the first parts of the names of a model's tensors, such as "model." of
    "model.layers.0.mlp.up_proj.weight".
    """
    return sorted({name.partition(".")[0] + "." for name in targets})


def whole_name(name: str, targets: Mapping[str, Target], roots: Sequence[str]) -> str:
    """Return the name of the target of a checkpoint's tensor.

    Checkpoints that were saved from a model without its head, such as GPT-2's on the hub, lack the first part of names
    ("layers.0..."). transformers accepts them too.
    """
    found = (root + name for root in roots if root + name in targets)
    return name if name in targets else next(found, name)


def rule_pattern(text: str) -> re.Pattern:
    """Compile a name in a rule to a pattern.  ``{i}`` matches a number, which is equal wherever it occurs; ``{e}``
    matches another one."""
    met: set[str] = set()

    def number(match: re.Match) -> str:
        name = match[1]
        again = name in met
        met.add(name)
        return f"(?P={name})" if again else rf"(?P<{name}>\d+)"

    return re.compile(re.sub(r"\\\{([ie])\\\}", number, re.escape(text)))


def needless(rules: Sequence[Rule]) -> list[re.Pattern]:
    """Return patterns of the names of tensors that rules list as unused."""
    return [re.compile(rule_pattern(rule.source).pattern + r"\..+") for rule in rules if rule.module is None]


def _fill(tensors: Iterator[tuple[str, Tensor]], targets: dict[str, Target], rules: Sequence[Rule], where: str) -> None:
    known = needless(rules)
    done: set[str] = set()
    roots = roots_of(targets)
    for name, tensor in tensors:
        name = whole_name(name, targets, roots)
        target = targets.get(name)
        if target is None:
            if BUFFERS.fullmatch(name) or any(pattern.fullmatch(name) for pattern in known):
                continue
            raise no_place(where, name, targets)
        if name in done:
            raise ModelError(f"{where}: tensor {shown(name)} occurs twice; expected each tensor in one shard")
        if target.shape is not None and tuple(tensor.shape) != target.shape:
            raise ModelError(
                f"{where}: tensor {shown(name)} has shape {list(tensor.shape)}, expected {list(target.shape)}; "
                "config.json and the weights do not belong together"
            )
        try:
            target.fill(tensor)
        except ModelError as e:
            raise ModelError(f"{where}: tensor {shown(name)}: {e}") from None
        done.add(name)
    _refuse_missing([name for name in targets if name not in done], where)


def _check_there(names: Iterable[str], targets: Mapping[str, Target], where: str) -> None:
    """Raise ModelError if the checkpoint lacks tensors, before any tensor is read.  ``names`` are those of its
    tensors."""
    roots = roots_of(targets)
    there = {whole_name(name, targets, roots) for name in names}
    for name in there - targets.keys():
        weight = f"{name.rpartition('.')[0]}.weight"
        if weight in targets and weight not in there and name.endswith(WORDS):
            raise ModelError(
                f"{where}: the checkpoint has {name} but lacks {weight}, which cannot be quantized here; "
                "expected a floating dtype"
            )
    _refuse_missing([name for name in targets if name not in there], where)


def _refuse_missing(missing: Sequence[str], where: str) -> None:
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{where}: the checkpoint lacks {', '.join(missing[:3])}{more}; download it again or check config.json"
        )


def dummy_tensors(targets: dict[str, Target], parts: ModelParts, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield normal weights of standard deviation 0.02, norms of one and biases of zero.

    Each tensor depends on ``seed`` and its name only, so the number of processes that share the model has no effect.
    """
    generator = torch.Generator(parts.device)
    for name, target in targets.items():
        if target.shape is None:
            raise ModelError(f"load_format='dummy' cannot make {name}: use a quantizer that starts from plain weights")
        tensor = torch.empty(target.shape, dtype=parts.dtype, device=parts.device)
        if target.param == "bias":
            tensor.zero_()
        elif tensor.dim() == 1:
            tensor.fill_(1 - getattr(target.module, "offset", 0.0))
        else:
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # seeds of a CPU generator have 32 bits
            tensor.normal_(0, DUMMY_STD, generator=generator)
        yield name, tensor
