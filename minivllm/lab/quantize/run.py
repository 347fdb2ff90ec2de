"""Quantize a model directory, layer after layer."""

from __future__ import annotations

import contextlib
import math
import os
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

UNCUT = ("q_proj", "k_proj")  # AWQ does not clip these modules, because attention multiplies their errors
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # dtypes of the layers during calibration
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes per number; 1 for all other dtypes

# a function that is called with the number of samples finished since its last call, and the name of the current work;
# methods without samples count layers
Progress = Callable[[int, str], None]


@dataclass
class WrittenModel:
    """The result of a run.

    ``errors`` holds, per layer of this run, the squared error of its linear modules' outputs as a share of the squared
    outputs; it is empty for rtn, which reads no samples.  ``unscaled`` names the modules whose scales AWQ could not
    fold into another module.
    """

    out: Path
    bytes: int
    seconds: float
    resumed: int  # number of layers that an earlier run had written
    errors: list[float] = field(default_factory=list)
    unscaled: list[str] = field(default_factory=list)


class Quantizing:
    """A quantization of one model, ready to run."""

    def __init__(
        self, model: str, out: str | Path, options: QuantizeOptions, calibration: str | None, device: str
    ) -> None:
        """Check the model, the options and the calibration text before ``run`` spends minutes.

        ``device`` is "cpu" or "cuda".  Raise ConfigError for options that do not fit the model, and ModelError for
        files that cannot be used.
        """
        self.out = Path(out)
        self.options = options
        check_free(self.out)
        if options.calibrated and calibration is None:
            raise ConfigError(f"--method {options.method}: expected --calibration FILE, a text like the model's inputs")
        if not options.calibrated and calibration is not None:
            raise ConfigError("--calibration: --method rtn reads no text; leave it out, or use --method gptq or awq")
        self.checkpoint = open_checkpoint(model)
        folder = self.checkpoint.folder
        if os.path.isfile(folder):
            raise ModelError(f"{folder}: is a GGUF file; expected a Hugging Face directory or id")
        if self.checkpoint.quantization != "none":
            raise ModelError(
                f"{folder}: is quantized already ({self.checkpoint.quantization}); expected floating-point weights"
            )
        self.model = LayerModel(self.checkpoint, device, DTYPES[device])
        self.wanted, self.plain = self._select_modules()
        self.samples, checksum = self._read_samples(calibration)
        self.layout = PackedFormat.of(options, getattr(torch, self.checkpoint.dtype))
        self.grid = Grid(options, self.layout.stored)
        self.heads = getattr(self.model.model.config, "num_key_value_heads", None) or 1
        files = sorted({header.path for header in self.model.headers.values()})
        weights = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        source = {"model": str(folder.resolve()), "weights": weights, "device": device, "calibration": checksum}
        plan = {**source, **options.as_dict()}
        self.work = WorkFolder(self.out, plan, len(self.model.layers) + 1)

    def _select_modules(self) -> tuple[list[list[str]], list[str]]:
        """Return the linear modules to quantize, by layer, and the full names of the modules that ``skip`` excludes.

        Raise ConfigError if no module remains or if a module does not fit the options.
        """
        layers = range(len(self.model.layers))
        self.options.check_skips([self.model.name(i, name) for i in layers for name in self.model.linears(i)])
        wanted = []
        plain = []
        sizes = []
        for number in layers:
            names = []
            for name, module in self.model.linears(number).items():
                whole = self.model.name(number, name)
                if self.options.left_out(whole):
                    plain.append(whole)
                    continue
                names.append(name)
                sizes.append((whole, module.out_features, module.in_features))
            wanted.append(names)
        if not sizes:
            raise ConfigError("--skip: leaves no linear module to quantize")
        self.options.check_sizes(sizes)
        return wanted, plain

    def _read_samples(self, calibration: str | None) -> tuple[Tensor | None, str]:
        """Return the samples i64 [samples, length] and their checksum; None and "" without a text."""
        if calibration is None:
            return None, ""
        length = self.options.sample_length
        most = longest_context(self.model.model.config)
        if most is not None and length > most:
            raise ConfigError(f"--length {length}: the model reads at most {most} tokens")
        folder = self.checkpoint.folder
        return read_samples(calibration, folder, self.model.vocabulary, self.options.sample_count, length)

    def run(self, progress: Progress = lambda done, what: None) -> WrittenModel:
        """Quantize the layers that no earlier run has finished, and write the output directory.

        Raise ResourceError for a full disk or too little memory.
        """
        began = time.monotonic()
        report = WrittenModel(self.out, 0, 0.0, 0)
        layers = len(self.model.layers)
        with self.work.held(), torch.no_grad(), self._memory_errors():
            self.work.need(self._estimate_bytes())
            hidden = [] if self.samples is None else self.model.embedded(self.samples)
            for number in range(layers):
                tensors = self.work.read(number)
                if tensors is None:
                    tensors = self._quantize_layer(number, hidden, report, progress)
                    self.work.write(number, tensors)
                else:
                    report.resumed += 1
                    self._resume_layer(number, tensors, hidden, progress)
            self.work.write(layers, self._tensors_outside_layers())
            report.bytes = sum(path.stat().st_size for path in self.work.folder.glob("*.safetensors"))
            config = dict(self.checkpoint.raw)
            config["quantization_config"] = self.layout.settings(self.plain)
            self.work.finish(self.checkpoint.folder, config)
        report.seconds = time.monotonic() - began
        return report

    @contextlib.contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Convert torch's out-of-memory error in the context to a ResourceError with advice to continue."""
        try:
            yield
        except torch.OutOfMemoryError as e:
            cheaper = "--device cpu or a smaller --length" if self.options.calibrated else "--device cpu"
            raise ResourceError(
                f"{self.model.device} has too little memory for a layer: {describe_error(e)}; finished layers are in "
                f"{self.work.folder}: run the same command again when memory is free, or remove that directory and "
                f"start from the first layer with {cheaper}, which takes less memory"
            ) from e

    @property
    def steps(self) -> int:
        """Return the sum of all counts that ``run`` passes to its ``progress`` function."""
        return len(self.model.layers) * (1 if self.samples is None else 2 * len(self.samples))

    def _estimate_bytes(self) -> int:
        """Return the approximate size of the packed model."""
        packed = {f"{self.model.name(i, name)}.weight" for i, names in enumerate(self.wanted) for name in names}
        total = 0
        for name, header in self.model.headers.items():
            numbers = math.prod(header.shape)
            if name in packed:
                group = self.grid.size(header.shape[-1])
                # bits per weight, including a scale and a zero point per group
                bits = self.options.bits + (16 + self.options.bits) / group
                total += int(numbers * bits / 8)
            else:
                total += numbers * SIZES.get(header.dtype, 1)
        return total

    def _tensors_outside_layers(self) -> dict[str, Tensor]:
        """Return the checkpoint's tensors that belong to no layer."""
        inside = tuple(f"{self.model.name(number)}." for number in range(len(self.model.layers)))
        return {name: self.model.tensor(name) for name in self.model.headers if not name.startswith(inside)}

    def _quantize_layer(
        self, number: int, hidden: list[Tensor], report: WrittenModel, progress: Progress
    ) -> dict[str, Tensor]:
        """Return the packed tensors of a layer, and replace ``hidden`` by the layer's outputs."""
        title = f"layer {number}"
        wanted = self.wanted[number]
        weights = LayerWeights(self.model, number)
        coded: dict[str, Coded] = {}
        if not hidden:
            coded = {name: self.grid.coded(weights.get(f"{name}.weight")) for name in wanted}
            progress(1, title)
            return self._pack(number, weights, coded)
        with self.model.filled(number) as layer:
            if wanted:
                inputs = watch(layer, wanted, weights.run, hidden, lambda: progress(1, title))
                if self.options.method == "awq":
                    self._fold_scales(number, weights, inputs, hidden[0], report)
                coded, error = self._round_weights(weights, inputs)
                report.errors.append(error)
                weights.set({f"{name}.weight": one.weight() for name, one in coded.items()})
            self._advance(number, hidden, progress, title)
        return self._pack(number, weights, coded)

    def _advance(self, number: int, hidden: list[Tensor], progress: Progress, title: str) -> None:
        """Replace the hidden states of all samples by the outputs of a layer."""
        for i, x in enumerate(hidden):
            hidden[i] = self.model.run(number, x)
            progress(1, title)

    def _resume_layer(
        self, number: int, tensors: Mapping[str, Tensor], hidden: list[Tensor], progress: Progress
    ) -> None:
        """Replace ``hidden`` by the outputs of a layer that an earlier run has quantized."""
        title = f"layer {number}, done before"
        if not hidden:
            progress(1, title)
            return
        progress(len(hidden), title)
        with self.model.filled(number):
            weights = LayerWeights(self.model, number)
            own = _without_prefix(tensors, f"{self.model.name(number)}.")
            values = {name: own[name] for name, _ in weights.layer.named_parameters() if name in own}
            for name in self.wanted[number]:
                packed = _without_prefix(own, f"{name}.")
                values[f"{name}.weight"] = self.layout.coded(packed).weight()
            weights.set({name: value.to(self.model.device, torch.float32) for name, value in values.items()})
            self._advance(number, hidden, progress, title)

    def _fold_scales(
        self, number: int, weights: LayerWeights, found: Sequence[Inputs], sample: Tensor, report: WrittenModel
    ) -> None:
        """Find AWQ's scales, fold them into the layer where possible, and update the statistics ``found``."""
        before = weights.run(sample)
        packed = set(self.wanted[number])
        uses = find_uses(weights.layer, weights.run, sample)
        for inputs in found:
            fold = find_fold(weights.layer, inputs, self.heads, uses)
            if fold is not None:
                scaled = [weights.get(f"{name}.weight") for name in inputs.names]
                s = awq.find_scales(scaled, fold.tied(inputs.means), inputs.moments, self.grid)
                if fold_in(weights, inputs.names, fold, s, sample, before, packed):
                    inputs.moments /= s[:, None] * s
                    continue
            report.unscaled += [self.model.name(number, name) for name in inputs.names]

    def _round_weights(self, weights: LayerWeights, found: Sequence[Inputs]) -> tuple[dict[str, Coded], float]:
        """Return the codes of each module, and the squared error of all outputs as a share of the squared outputs."""
        coded: dict[str, Coded] = {}
        error = 0.0
        total = 0.0
        for inputs in found:
            plain = [weights.get(f"{name}.weight") for name in inputs.names]
            for name, w, one in zip(inputs.names, plain, self._round_together(inputs, plain), strict=True):
                coded[name] = one
                error += awq.output_error(one.weight() - w, inputs.moments)
                total += awq.output_error(w, inputs.moments)
        return coded, error / max(total, 1e-30)

    def _round_together(self, inputs: Inputs, plain: Sequence[Tensor]) -> list[Coded]:
        """Return the codes of weights that have the same inputs."""
        options = self.options
        if options.method == "awq":
            names_and_weights = zip(inputs.names, plain, strict=True)
            return [self.grid.coded(w, inputs.moments, not name.endswith(UNCUT)) for name, w in names_and_weights]
        stacked = torch.cat(list(plain))
        solved = gptq.solve(stacked, inputs.moments, self.grid, options.damping, options.act_order)
        rows = [len(w) for w in plain]
        parts = zip(*(t.split(rows) for t in (solved.codes, solved.scale, solved.zero)), strict=True)
        return [Coded(*part, solved.group_of) for part in parts]

    def _pack(self, number: int, weights: LayerWeights, coded: Mapping[str, Coded]) -> dict[str, Tensor]:
        """Return the tensors of a layer by their full names.  Quantized weights are packed."""
        prefix = f"{self.model.name(number)}."
        tensors = {}
        for name in self.model.headers:
            if not name.startswith(prefix):
                continue
            short = name.removeprefix(prefix)
            module = short.removesuffix(".weight")
            if module not in coded or module == short:
                tensors[name] = weights.stored(short)
                continue
            for param, tensor in self.layout.tensors(coded[module]).items():
                tensors[f"{prefix}{module}.{param}"] = tensor.cpu()
        return tensors


def _without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by their names without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def quantize(
    model: str,
    out: str | Path,
    options: QuantizeOptions,
    calibration: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> WrittenModel:
    """Quantize a model and write it to the directory ``out``.

    ``calibration`` is a file of text, which all methods but rtn need.  ``device`` is "cpu" or "cuda"; None means cuda
    if torch finds a GPU.  Errors are those of ``Quantizing`` and its ``run``.  After an error or an interrupt the
    finished layers are in a directory beside ``out``, and the same call continues from them.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = Quantizing(model, out, options, calibration, device)
    return work.run() if progress is None else work.run(progress)
