"""A model directory, layer after layer, to one whose linear layers are packed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from minivllm.device.loading.hf_config import longest_context, open_checkpoint
from minivllm.errors import ConfigError, ModelError, ResourceError, describe_error

from . import awq, gptq
from .calibration import read_samples
from .folding import find_fold, find_uses, fold_in
from .grid import Coded, Grid
from .layers import Inputs, LayerModel, LayerWeights, watch
from .layouts import PackedFormat
from .options import QuantizeOptions
from .work import WorkFolder, check_free

UNCUT = ("q_proj", "k_proj")  # of AWQ: an error of theirs is squared by attention
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of the calibration


@dataclass
class WrittenModel:
    """``errors``: of each layer, the squared error of its linear modules' outputs as a share of what they are; none of
    rounding, which looks at no inputs.  ``unscaled``: modules that AWQ found nothing to put scales of inputs into."""

    out: Path
    bytes: int
    seconds: float
    resumed: int  # layers that were there
    errors: list[float] = field(default_factory=list)
    unscaled: list[str] = field(default_factory=list)


class Quantizing:
    """``device`` "cpu" or "cuda".  Everything is checked when it is made, before minutes are spent: ConfigError for
    what does not fit, ModelError for files."""

    def __init__(
        self, model: str, out: str | Path, options: QuantizeOptions, calibration: str | None, device: str
    ) -> None:
        self.out, self.options = Path(out), options
        check_free(self.out)
        if options.calibrated and calibration is None:
            raise ConfigError(
                f"--method {options.method}: want --calibration FILE, a text of the kind it will be given"
            )
        if not options.calibrated and calibration is not None:
            raise ConfigError("--calibration: --method rtn looks at no text; want it left out, or gptq or awq")
        self.checkpoint = open_checkpoint(model)
        if self.checkpoint.folder.is_file():
            raise ModelError(f"{self.checkpoint.folder}: is a GGUF file; want a Hugging Face directory or id")
        if self.checkpoint.quantization != "none":
            raise ModelError(
                f"{self.checkpoint.folder}: is quantized already ({self.checkpoint.quantization}); want its model in "
                "floating numbers"
            )
        self.model = LayerModel(self.checkpoint, device, DTYPES[device])
        self.wanted, self.plain = self._modules()
        self.samples, checksum = self._read_samples(calibration)
        dtype = getattr(torch, self.checkpoint.dtype)
        self.layout = PackedFormat.of(options, dtype)
        self.grid = Grid(options, self.layout.stored)
        self.heads = getattr(self.model.model.config, "num_key_value_heads", None) or 1
        plan = {
            "model": str(self.checkpoint.folder.resolve()),
            "weights": [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in self._files()],
            "device": device,
            "calibration": checksum,
            **options.as_dict(),
        }
        self.work = WorkFolder(self.out, plan, len(self.model.layers) + 1)

    def _files(self) -> list[Path]:
        return sorted({header.path for header in self.model.headers.values()})

    def _modules(self) -> tuple[list[list[str]], list[str]]:
        """Of each layer the linear modules that are packed; the names of all that are left out."""
        wanted, plain, sizes = [], [], []
        layers = range(len(self.model.layers))
        self.options.check_skips([self.model.name(i, name) for i in layers for name in self.model.linears(i)])
        for number in layers:
            mine = []
            for name, module in self.model.linears(number).items():
                whole = self.model.name(number, name)
                if self.options.left_out(whole):
                    plain.append(whole)
                    continue
                mine.append(name)
                sizes.append((whole, module.out_features, module.in_features))
            wanted.append(mine)
        if not sizes:
            raise ConfigError("--skip: leaves no linear module to quantize")
        self.options.check_sizes(sizes)
        return wanted, plain

    def _read_samples(self, calibration: str | None) -> tuple[Tensor | None, str]:
        if calibration is None:
            return None, ""
        options, most = self.options, longest_context(self.model.model.config)
        if most is not None and options.sample_length > most:
            raise ConfigError(f"--length {options.sample_length}: the model reads at most {most} tokens")
        folder = self.checkpoint.folder
        return read_samples(calibration, folder, self.model.vocabulary, options.sample_count, options.sample_length)

    def run(self, progress: Callable[[int, str], None] = lambda done, what: None) -> WrittenModel:
        """``progress`` is given how many samples, or layers where there are none, have been done since it was last
        called, and what is being done."""
        began, report = time.monotonic(), WrittenModel(self.out, 0, 0.0, 0)
        with self.work.held(), torch.no_grad(), self._memory():
            self.work.need(self._bytes())
            hidden = [] if self.samples is None else self.model.embedded(self.samples)
            for number in range(len(self.model.layers)):
                tensors = self.work.read(number)
                if tensors is None:
                    self.work.write(number, self._layer(number, hidden, report, progress))
                else:
                    report.resumed += 1
                    self._again(number, tensors, hidden, progress)
            self.work.write(len(self.model.layers), self._rest())
            report.bytes = sum(path.stat().st_size for path in self.work.folder.glob("*.safetensors"))
            config = dict(self.checkpoint.raw) | {"quantization_config": self.layout.settings(self.plain)}
            self.work.finish(self.checkpoint.folder, config)
        report.seconds = time.monotonic() - began
        return report

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as e:
            less = "--device cpu or a smaller --length" if self.options.calibrated else "--device cpu"
            raise ResourceError(
                f"{self.model.device} has too little memory for a layer: {describe_error(e)}; finished layers are in "
                f"{self.work.folder}, from which the same command goes on when memory is free; {less} takes less of "
                "it, and begins anew when that directory is removed"
            ) from e

    @property
    def steps(self) -> int:
        """What ``progress`` is told of, altogether."""
        return len(self.model.layers) * (1 if self.samples is None else 2 * len(self.samples))

    def _bytes(self) -> int:
        """About what the packed model takes."""
        packed = {f"{self.model.name(i, name)}.weight" for i, names in enumerate(self.wanted) for name in names}
        total = 0
        sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
        for name, header in self.model.headers.items():
            numbers = 1
            for n in header.shape:
                numbers *= n
            group = self.grid.size(header.shape[-1]) if header.shape else 1
            bits = self.options.bits + (16 + self.options.bits) / group
            total += int(numbers * bits / 8) if name in packed else numbers * sizes.get(header.dtype, 1)
        return total

    def _rest(self) -> dict[str, Tensor]:
        """What is in no layer."""
        inside = tuple(f"{self.model.name(number)}." for number in range(len(self.model.layers)))
        return {name: self.model.tensor(name) for name in self.model.headers if not name.startswith(inside)}

    def _layer(
        self, number: int, hidden: list[Tensor], report: WrittenModel, progress: Callable[[int, str], None]
    ) -> dict[str, Tensor]:
        """The tensors of a layer, packed; ``hidden`` becomes what the next one is given."""
        what = f"layer {number}"
        weights, coded = LayerWeights(self.model, number), dict[str, Coded]()
        if not hidden:
            coded = {name: self.grid.coded(weights.get(f"{name}.weight")) for name in self.wanted[number]}
            progress(1, what)
            return self._packed(number, weights, coded)
        with self.model.filled(number) as layer:
            if self.wanted[number]:
                found = watch(layer, self.wanted[number], weights.run, hidden, lambda: progress(1, what))
                if self.options.method == "awq":
                    self._scale(number, weights, found, hidden[0], report)
                coded, share = self._solved(weights, found)
                report.errors.append(share)
                weights.set({f"{name}.weight": one.weight() for name, one in coded.items()})
            self._onwards(number, hidden, progress, what)
        return self._packed(number, weights, coded)

    def _onwards(self, number: int, hidden: list[Tensor], progress: Callable[[int, str], None], what: str) -> None:
        for i, x in enumerate(hidden):
            hidden[i] = self.model.run(number, x)
            progress(1, what)

    def _again(
        self, number: int, tensors: Mapping[str, Tensor], hidden: list[Tensor], progress: Callable[[int, str], None]
    ) -> None:
        """A layer that is there: what it makes of the samples."""
        what = f"layer {number}, done before"
        if not hidden:
            progress(1, what)
            return
        progress(len(hidden), what)
        with self.model.filled(number):
            weights, stem = LayerWeights(self.model, number), self.model.name(number)
            own = {name.removeprefix(f"{stem}."): t for name, t in tensors.items()}
            values = {name: own[name] for name, _ in weights.layer.named_parameters() if name in own}
            for name in self.wanted[number]:
                mine = {key.removeprefix(f"{name}."): t for key, t in own.items() if key.startswith(f"{name}.")}
                values[f"{name}.weight"] = self.layout.coded(mine).weight()
            weights.set({name: value.to(self.model.device, torch.float32) for name, value in values.items()})
            self._onwards(number, hidden, progress, what)

    def _scale(
        self, number: int, weights: LayerWeights, found: Sequence[Inputs], sample: Tensor, report: WrittenModel
    ) -> None:
        """AWQ's scales, wherever they can be put; ``found`` becomes what modules are given then."""
        before, packed = weights.run(sample), set(self.wanted[number])
        uses = find_uses(weights.layer, weights.run, sample)
        for inputs in found:
            fold = find_fold(weights.layer, inputs, self.heads, uses)
            if fold is not None:
                mine = [weights.get(f"{name}.weight") for name in inputs.names]
                s = awq.find_scales(mine, fold.tied(inputs.means), inputs.moments, self.grid)
                if fold_in(weights, inputs.names, fold, s, sample, before, packed):
                    inputs.moments /= s[:, None] * s
                    continue
            report.unscaled += [self.model.name(number, name) for name in inputs.names]

    def _solved(self, weights: LayerWeights, found: Sequence[Inputs]) -> tuple[dict[str, Coded], float]:
        """The codes of each module, and what of their outputs is lost."""
        made: dict[str, Coded] = {}
        lost = whole = 0.0
        for inputs in found:
            own = [weights.get(f"{name}.weight") for name in inputs.names]
            coded: list[Coded] = []
            if self.options.method == "gptq":
                options, rows = self.options, [len(w) for w in own]
                one = gptq.solve(torch.cat(own), inputs.moments, self.grid, options.damping, options.act_order)
                parts = zip(*(t.split(rows) for t in one[:3]), strict=True)
                coded = [Coded(*part, one.group_of) for part in parts]
            else:
                cuts = [not name.endswith(UNCUT) for name in inputs.names]
                coded = [self.grid.coded(w, inputs.moments, cut) for w, cut in zip(own, cuts, strict=True)]
            for name, w, one in zip(inputs.names, own, coded, strict=True):
                made[name] = one
                lost += awq.lost(one.weight() - w, inputs.moments)
                whole += awq.lost(w, inputs.moments)
        return made, lost / max(whole, 1e-30)

    def _packed(self, number: int, weights: LayerWeights, coded: Mapping[str, Coded]) -> dict[str, Tensor]:
        stem, made = f"{self.model.name(number)}.", {}
        for name in (n for n in self.model.headers if n.startswith(stem)):
            short = name.removeprefix(stem)
            module = short.removesuffix(".weight")
            if module not in coded or module == short:
                made[name] = weights.stored(short)
                continue
            for param, tensor in self.layout.tensors(coded[module]).items():
                made[f"{stem}{module}.{param}"] = tensor.cpu()
        return made


def quantize(
    model: str,
    out: str | Path,
    options: QuantizeOptions,
    calibration: str | None = None,
    device: str | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> WrittenModel:
    """Write ``out``.  Errors: ``Quantizing``; ResourceError for a full disk.  What was finished is then in a directory
    beside ``out``, from which the same call goes on."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = Quantizing(model, out, options, calibration, device)
    return work.run() if progress is None else work.run(progress)
