"""New weights for a loaded model: checked, then written in place, and taken back if writing fails.

    tensors ──conversion, names──► WeightUpdate (checks) ──► write ──► weights of the model ──► numbers (GPU)
                                                              └─ old tensors ──► spare memory ──► restore

A GPU checks the numbers of tensors from host memory once they are written, because each transfer takes longer than all
other work of an update together.

Every tensor keeps its storage, so that captured steps stay valid.  A layer that was quantized while it was loaded is
quantized again as a whole, and its new tensors are copied to the old ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import WeightScheme
from minivllm.device.layers.embedding import Embedding, TiedLMHead
from minivllm.device.layers.expert_linear import DenseExperts
from minivllm.device.layers.linear import Dense
from minivllm.device.layers.module import Module, all_finite, check_shape
from minivllm.device.layers.parts import ModelParts
from minivllm.errors import ModelError, shown

from .conversion import conversion_of
from .pickled_files import pickled_names
from .tensor_files import Header, check_unchanged, checkpoint_tensors, file_stamps
from .tensor_names import BUFFERS, no_place
from .weights import PLAIN, LoadedRules, Target, dummy_tensors, needless, roots_of, whole_name
from .weights import own_names as names_of_heads

TESTED_ROWS = (1, 16)  # numbers of input rows with which two quantized layers are compared
WHERE = "update_weights"
ALIGNED = 16  # the copies in spare memory begin at multiples of this many bytes


class SpareMemory:
    """Memory of a device for copies of tensors, such as the memory of a KV cache whose content is not needed.

    A large tensor is divided over several pieces of this memory.  Tensors that do not fit are copied to host memory,
    which takes a hundred times as long on a GPU.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), room: int = 0) -> None:
        """Use the memory of the contiguous ``tensors``, which are overwritten, and then up to ``room`` bytes of new
        memory."""
        self._free = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        self._used: list[Tensor] = []
        self._room = room
        self.added = False  # whether memory besides the given tensors was allocated

    def keep(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Copy a tensor to spare memory, and return its parts, each with its copy.

        A tensor that is not contiguous is copied to host memory."""
        if not tensor.is_contiguous():
            return [(tensor, tensor.to("cpu", copy=True))]
        kept = []
        rest = tensor.view(-1)
        while len(rest):
            memory = self._take(rest)
            if memory is None:
                kept.append((rest, rest.to("cpu", copy=True)))
                break
            kept.append((rest[: len(memory)], memory.copy_(rest[: len(memory)])))
            rest = rest[len(memory) :]
        return kept

    def _take(self, tensor: Tensor) -> Tensor | None:
        """Return spare memory for a tensor [n], or for its first elements if a piece is smaller; None if no memory is
        left."""
        size = tensor.element_size()
        for i, free in enumerate(self._free):
            count = min(len(tensor), len(free) // size)
            if not count or free.device != tensor.device:
                continue
            taken = -(-count * size // ALIGNED) * ALIGNED
            self._free[i] = free[taken:]
            self._used.append(free[:taken])
            return free[: count * size].view(tensor.dtype)
        if tensor.nbytes > self._room:
            return None
        self._room -= tensor.nbytes
        self.added = True
        return torch.empty_like(tensor)

    def clear(self) -> None:
        """Fill the memory of all copies with zeros, and forget the copies."""
        for piece in self._used:
            piece.zero_()
        self._used.clear()


class WeightUpdate:
    """An update of a model's weights: the checked new tensors, and copies of the old ones while the new ones are
    written."""

    def __init__(
        self,
        parts: ModelParts,
        found: Iterable[tuple[str, Tensor]],
        partial: bool = False,
        finite: bool = True,
        once: bool = True,
    ) -> None:
        """Check the new tensors ``found``, which have the names of a checkpoint, without writing them.

        ``partial`` allows missing tensors.  ``finite`` refuses infinite numbers and NaN; with ``once``, tensors in host
        memory for a model on a GPU are checked for these only after ``write`` has copied them.  Raise ModelError for a
        tensor that does not fit."""
        self.parts = parts
        self.loaded = parts.loaded
        self.finite = finite
        self.once = once
        refuse_packed(self.loaded, parts)
        tensors = self._named(list(found))
        # of each checked tensor: name in the checkpoint, dtype, and whether all numbers are finite (bool on the device)
        self._finite: list[tuple[str, torch.dtype, Tensor]] = []
        # name in the checkpoint -> name of the target, of tensors that are checked for NaN after they are on the device
        self._unread: dict[str, str] = {}
        self.given = self._placed(tensors)
        self._check_complete(partial)
        self._check_finite()
        self._old: list[tuple[Tensor, Tensor]] = []
        self._spare: SpareMemory | None = None
        self._stamps: Mapping[Path, tuple[int, int, int]] = {}

    @classmethod
    def of_folder(
        cls,
        parts: ModelParts,
        folder: str,
        pickled: bool,
        partial: bool = False,
        finite: bool = True,
        once: bool = True,
    ) -> WeightUpdate:
        """Check the files of weights in a folder, which are mapped into memory.

        They must not change until ``write`` returns.  ``pickled`` allows files of ``torch.save``, which a folder of
        safetensors need not have.  ``partial``, ``finite`` and ``once`` are as in the constructor.
        """
        pickled = pickled and not safetensors_alone(Path(folder))
        stamps = file_stamps(Path(folder), pickled)
        update = cls(parts, checkpoint_tensors(Path(folder), pickled), partial, finite, once)
        update._stamps = stamps
        return update

    # ---- checks --------------------------------------------------------------------------------------------------

    def _named(self, found: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the tensors under the names that the rules of the architecture use, after its conversion.

        ModelError for an item that is no pair of a name and a tensor."""
        for item in found:
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
                raise ModelError(f"{WHERE}: found {shown(item)}; expected pairs of a name and a tensor")
            if not isinstance(item[1], Tensor):
                kind = type(item[1]).__name__
                raise ModelError(f"{WHERE}: {shown(item[0])} is a {kind}; expected a tensor")
            if item[1].is_meta or item[1].layout is not torch.strided:
                kind = "has no values (device meta)" if item[1].is_meta else f"has the layout {item[1].layout}"
                raise ModelError(f"{WHERE}: {shown(item[0])} {kind}; expected a dense tensor on a CPU or GPU")
        if not found:
            raise ModelError(f"{WHERE}: no tensors were given; expected the weights of the model")
        headers = {name: Header(Path(), tuple(tensor.shape), name, "") for name, tensor in found}
        conversion, _ = conversion_of(self.parts.arch, self.loaded.cfg, headers)
        return found if conversion is None else list(conversion.tensors(iter(found)))

    def _placed(self, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return target name -> new tensor.  ModelError for a tensor without a target, of a wrong shape, or given
        twice."""
        targets = self.loaded.targets
        rules = self.loaded.rules
        known = needless(rules)
        roots = roots_of(targets)
        same = self._same_as(targets)
        given: dict[str, Tensor] = {}
        copies: list[tuple[str, str, Tensor]] = []
        for source, tensor in tensors:
            name = whole_name(source, targets, roots)
            if name in same:
                copies.append((source, same[name], tensor))
                continue
            if name not in targets:
                if BUFFERS.fullmatch(name) or any(pattern.fullmatch(name) for pattern in known):
                    continue
                raise no_place(WHERE, name, targets)
            if name in given:
                raise ModelError(f"{WHERE}: tensor {shown(name)} was given twice; expected each tensor once")
            self._check(name, tensor, name)
            given[name] = tensor
        for source, name, tensor in copies:
            if name not in given:
                self._check(source, tensor, name)
                given[name] = tensor
            elif tensor is not given[name] and not torch.equal(tensor.cpu(), given[name].cpu()):
                what = f"tensor {shown(source)} differs from {shown(name)}, and the model shares one weight for both"
                raise ModelError(f"{WHERE}: {what}; expected equal tensors, or only one of them")
        return given

    def _same_as(self, targets: Mapping[str, Target]) -> dict[str, str]:
        """Return alias -> name of the target, for weights that the embedding and the output head share.

        A checkpoint may give such a weight under either name."""
        found: dict[str, str] = {}
        for head, own in names_of_heads(self.parts.arch, self.loaded.cfg, self.parts).items():
            shared = next((name for name, target in targets.items() if target.module is head.tied), None)
            if head.own is not None or shared is None:
                continue
            embedding = self._embedding_name(head)
            found |= {f"{stem}.weight": shared for stem in (own, embedding) if f"{stem}.weight" != shared}
        return found

    def _embedding_name(self, head: TiedLMHead) -> str:
        """Return the name of the embedding's module in a checkpoint whose output head has a separate weight."""
        rules = self.parts.arch.weights(self.loaded.cfg)
        return next(rule.source for rule in rules if rule.module == head.tied.name)

    def _check(self, name: str, tensor: Tensor, own: str) -> None:
        """Raise ModelError unless a tensor has the shape of the target ``own``; queue the check for infinite numbers
        and NaN.

        ``name`` is the tensor's name in the checkpoint."""
        target = self.loaded.targets[own]
        assert target.shape is not None  # see ``refuse_packed``
        try:
            check_shape(tensor, target.shape)
        except ModelError as e:
            raise ModelError(f"{WHERE}: tensor {shown(name)}: {e}") from None
        if not self.finite:
            return
        if self.once and read_once(tensor, torch.device(self.parts.device)):
            self._unread[name] = own
            return
        dtype = dtype_of(target) or tensor.dtype
        self._finite.append((name, dtype, all_finite(tensor, dtype)))

    def _check_finite(self) -> None:
        """Raise ModelError for the first tensor with infinite numbers or NaN.  It waits for the device once."""
        if not self._finite or bool(torch.stack([found for *_, found in self._finite]).all()):
            return
        raise not_finite(*next((name, dtype) for name, dtype, found in self._finite if not found))

    def _check_written(self) -> None:
        """Raise ModelError if a tensor that ``write`` has just copied to the device has infinite numbers or NaN.

        It waits for the device once."""
        modules = {self.loaded.targets[own].module for own in self._unread.values()}
        found = [all_finite(tensor, tensor.dtype) for module in modules for tensor in module.tensors.values()]
        if not found or bool(torch.stack(found).all()):
            return
        # Other weights may have NaN from an earlier update with finite=False, so the given tensors are checked again.
        for name, own in self._unread.items():
            tensor = self.given[own]
            dtype = dtype_of(self.loaded.targets[own]) or tensor.dtype
            if not all_finite(tensor, dtype):
                raise not_finite(name, dtype)

    def _check_complete(self, partial: bool) -> None:
        """Raise ModelError if new tensors are missing.

        With ``partial`` only a quantized layer that gets some of its tensors needs all of them."""
        missing = [name for name in self.loaded.targets if name not in self.given]
        if not partial and missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            what = f"{', '.join(missing[:3])}{more} are missing"
            raise ModelError(f"{WHERE}: {what}; give all weights, or set partial=True")
        touched = {self.loaded.targets[name].module for name in self.given}
        for name in missing:
            module = self.loaded.targets[name].module
            if module in touched and quantized(module):
                what = f"{module.name} is quantized as a whole, and {name} is missing"
                raise ModelError(f"{WHERE}: {what}; give all of its tensors")

    # ---- writing -------------------------------------------------------------------------------------------------

    def write(self, spare: SpareMemory | None = None) -> None:
        """Write the new weights in place.  If this raises, the weights are undefined until ``restore``.

        ``spare`` is memory for copies of the old weights; None means that ``restore`` will not be called."""
        self._spare = spare
        check_unchanged(self._stamps)
        before = addresses(self.parts)
        by_module: dict[Module, dict[str, Target]] = {}
        for name in self.given:
            target = self.loaded.targets[name]
            by_module.setdefault(target.module, {})[name] = target
        for module in self.parts.modules.values():
            if module in by_module:
                self._write(module, by_module[module])
            elif isinstance(module, TiedLMHead) and module.tied in by_module and quantized(module):
                self._write_copy(module)
        self._check_written()
        for module in self.parts.modules.values():
            module.refresh({target.param for target in by_module.get(module, {}).values()})
        if addresses(self.parts) != before:
            raise ModelError(f"{WHERE}: a layer has moved its weights to other memory, so they cannot change in place")
        check_unchanged(self._stamps)

    def _write(self, module: Module, targets: Mapping[str, Target]) -> None:
        """Write the given tensors of a module; its old tensors are stored first, for ``restore``.

        The weight of a quantized module is quantized again from the given tensors.
        """
        replacement = replacement_of(module, self.parts) if quantized(module) else None
        if replacement is None:
            self._keep(module)
        for name, target in targets.items():
            filled = target if replacement is None else replace(target, module=replacement)
            filled.fill(self.given[name])
        if replacement is not None:
            replacement.finish()
            self._take(module, replacement)

    def _write_copy(self, head: TiedLMHead) -> None:
        """Quantize the new weight of the embedding again for the output head ``head``, which has a quantized copy of
        it."""
        replacement = copy.copy(head)
        replacement.scheme = head.scheme_of(head.info)
        replacement.finish()
        self._take(head, replacement)

    def _keep(self, module: Module) -> None:
        """Copy a module's tensors to spare memory, so that ``restore`` can write them back."""
        if self._spare is not None:
            self._old += [pair for tensor in module.tensors.values() for pair in self._spare.keep(tensor)]

    def _take(self, module: Module, replacement: Any) -> None:
        """Copy the tensors of a newly quantized layer ``replacement`` to ``module``.

        Raise ModelError if both then multiply differently."""
        if shapes(module.tensors) != shapes(replacement.tensors):
            raise ModelError(f"{WHERE}: {module.name} has other tensors after it was quantized again")
        self._keep(module)
        for name, tensor in module.tensors.items():
            tensor.copy_(replacement.tensors[name])
        layer: Any = layer_of(module)
        layer.refresh(())
        if not multiplies_equally(layer.scheme, replacement.scheme, layer):
            kind = type(layer.scheme).__name__
            what = f"the scheme {kind} of {module.name} keeps a copy of its weight outside of its tensors"
            raise ModelError(f"{WHERE}: {what}; its weights cannot change in place")

    def restore(self) -> None:
        """Write the weights from before the update back."""
        for tensor, old in reversed(self._old):
            tensor.copy_(old)
        for module in self.parts.modules.values():
            module.refresh(())
        self._old.clear()


def read_once(tensor: Tensor, device: torch.device) -> bool:
    """Return whether the numbers of a tensor are checked after they were written to the device.

    This is the case for a tensor in host memory and a model on a GPU, because a check before the write would transfer
    the tensor twice.
    """
    return device.type != "cpu" and tensor.device.type == "cpu"


def not_finite(name: str, dtype: torch.dtype) -> ModelError:
    """Return the error for a tensor with infinite numbers or NaN."""
    what = f"has infinite numbers or NaN in {str(dtype).removeprefix('torch.')}"
    return ModelError(f"{WHERE}: tensor {shown(name)} {what}; give finite numbers, or set finite=False")


def initial_tensors(parts: ModelParts, load_format: str, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the weights with which the model was loaded: from its files, or random ones as at its
    start."""
    if load_format == "dummy":
        return dummy_tensors(parts.loaded.targets, parts, seed)
    return checkpoint_tensors(Path(parts.loaded.folder), load_format == "pt")


def refuse_packed(loaded: LoadedRules, parts: ModelParts) -> None:
    """Raise ModelError for a model whose weights cannot be replaced by floating-point weights in place."""
    kind = type(parts.quantizer).__name__
    for name, target in loaded.targets.items():
        packed = target.param not in PLAIN and quantized(target.module)
        if target.shape is None or packed:
            what = f"{name} comes quantized in the checkpoint ({kind})"
            raise ModelError(f"{WHERE}: {what}; load the model in a floating dtype, or quantize it while it is loaded")
    if parts.device != "cpu" and any(quantized(module) for module in parts.modules.values()):
        raise ModelError(f"{WHERE}: weights that are quantized ({kind}) cannot change on a GPU; use quantizer=none")


def check_writable(parts: ModelParts) -> None:
    """Raise ModelError unless all weights of a model can be written again after their memory was freed."""
    refuse_packed(parts.loaded, parts)
    for module in parts.modules.values():
        if quantized(module):
            replacement_of(module, parts)


def layer_of(module: Module) -> Module:
    """Return the layer that stores the weights of a module: the module itself, or the separate layer of an output head
    that does not share the embedding's weight."""
    own = module.own if isinstance(module, TiedLMHead) else None
    return module if own is None else own


def dtype_of(target: Target) -> torch.dtype | None:
    """Return the dtype to which a new tensor for this target is cast; None if it is not cast."""
    if quantized(target.module):
        layer: Any = layer_of(target.module)
        dtype: torch.dtype = getattr(torch, layer.info.dtype)
        return dtype
    kept = layer_of(target.module).tensors.get(target.param)
    return None if kept is None else kept.dtype


def safetensors_alone(folder: Path) -> bool:
    """Return whether a folder has safetensors files and no files of ``torch.save``."""
    return any(folder.glob("*.safetensors")) and not pickled_names(folder)


def quantized(module: Module) -> bool:
    """Return whether a module stores its weight in another form than a plain matrix."""
    scheme = getattr(layer_of(module), "scheme", None)
    return scheme is not None and type(scheme) not in (Dense, DenseExperts)


def replacement_of(module: Module, parts: ModelParts) -> Any:
    """Return a copy of a quantized layer with an empty weight.  ModelError if the quantizer makes none."""
    layer: Any = layer_of(module)
    scheme = parts._scheme(layer.info)
    old: Any = layer.scheme
    if type(scheme) is not type(old):
        kind = type(parts.quantizer).__name__
        raise ModelError(f"{WHERE}: the quantizer {kind} now treats {module.name} differently")
    assert scheme is not None
    replacement = copy.copy(layer)
    others = {name: t.clone() for name, t in layer.tensors.items() if name not in layer.scheme.tensors}
    for attribute, value in vars(layer).items():
        for name, tensor in others.items():
            if value is layer.tensors[name]:
                setattr(replacement, attribute, tensor)
    replacement.scheme = scheme
    replacement.tensors = {**scheme.tensors, **others}
    return replacement


def multiplies_equally(left: WeightScheme, right: WeightScheme, layer: Any) -> bool:
    """Return whether two weights of a layer give equal bits for random inputs."""
    info = layer.info
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, Embedding):
        ids = torch.randint(layer.range.rows, (TESTED_ROWS[-1],), generator=generator)
        return torch.equal(left.gather(ids, layer.dtype), right.gather(ids, layer.dtype))
    for rows in TESTED_ROWS:
        x = torch.randn(rows, info.in_features, generator=generator).to(getattr(torch, info.dtype))
        if info.kind == "experts":
            equal = all(torch.equal(left.expert(x, e), right.expert(x, e)) for e in range(info.experts))
        else:
            equal = torch.equal(left.apply(x), right.apply(x))
        if not equal:
            return False
    return True


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the shape and dtype of each tensor."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def addresses(parts: ModelParts) -> list[int]:
    """Return the addresses of all weights."""
    return [tensor.data_ptr() for module in parts.modules.values() for tensor in module.tensors.values()]
