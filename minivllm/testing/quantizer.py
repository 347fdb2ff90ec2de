"""What any quantizer must do: hold a weight within half a step, multiply by what it holds, and hold nothing else.

What a scheme holds is read by multiplying the identity matrix, so no test knows the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, Quantizer, Shard, WeightScheme
from minivllm.device.layers.linear import Linear
from minivllm.device.loading.weights import find_targets
from minivllm.errors import MinivllmError, ModelError, PluginError
from minivllm.registration.spec import allows
from minivllm.registry import import_target

from . import quantizer_data as data
from . import quantizer_written as written
from .base import Seen, since
from .harness import Harness
from .model import PROMPT, logits
from .quantizer_experts import QuantizerExperts
from .quantizer_memory import Memory
from .quantizer_sizes import QuantizerSizes
from .spec import SpecConformance
from .tiny import ARCHS, read_tensors, tiny_dir, write_tensors

NO_BITS = "; without traits['bits'] the weight must be held exactly"
STEPS = (
    " (what is off by half of step(weight, info) passes: a test class overrides it if the format's steps are others)"
)
GRID = " (a test class overrides grid(info) if these are not numbers of the format, or returns None)"


class QuantizerConformance(Memory, QuantizerSizes, QuantizerExperts, SpecConformance):
    """Override ``checkpoint`` and ``checkpoint_tensors`` if the weights come quantized in a way that
    ``testing.quantizer_written`` does not write, ``step`` and ``grid`` if the format is not one symmetric scale per
    output row, ``outs``, ``ins`` and ``sizes`` if it takes only some, and ``scale_bits`` if its scales take more;
    ``patterns`` names options, ``model`` sizes of the tiny model.

    Products are compared with those of ``x`` as it is, within what rounding its rows to ``inputs`` bits may move them.
    How well a scheme that does so rounds them is for a test of its own."""

    kind = "quantizer"
    outs: Sequence[int] = (1, 2, 3, 5, 17, 33, 64, 129)  # output rows of a part, tried with
    ins: Sequence[int] = (1, 2, 3, 7, 8, 16, 31, 33, 64, 128, 129, 256)
    sizes: tuple[float, float] = (1e-30, 1e30)  # of the smallest and the largest rows; narrower for float16 scales
    scale_bits: float = 2.0  # of memory that scales and zero points may take an element: two of float16 for 16 of them
    patterns: Sequence[str] = ("skip",)  # options that are lists of patterns of modules to leave out, if it has them
    model: Mapping[str, Any] = {"intermediate_size": 64}  # fields of the tiny config.json that suit the quantizer

    # ---- what an author may override -----------------------------------------------------------------------------

    def checkpoint(self) -> Mapping[str, Any] | None:
        """``quantization_config`` of config.json; None for a plain checkpoint."""
        made, limit = written.of(self.spec), written.methods(self.spec)
        return None if allows(limit, "none") else {"quant_method": min(limit), **(made.config if made else {})}

    def checkpoint_tensors(self, info: ModuleInfo, part: str, weight: Tensor) -> dict[str, Tensor]:
        """A weight [rows of the part, in] as the tensors that a checkpoint has for it: parameter -> tensor."""
        made = written.of(self.spec)
        return {"weight": weight} if made is None else made.tensors(weight)

    def step(self, weight: Tensor, info: ModuleInfo) -> Tensor:
        """Distance of neighbouring values of the format at each element of a weight [out, in], float64; what is held
        may be off by half of it.  Default: of ``bits`` bits with a symmetric scale per row, or exact rounding."""
        if made := written.of(self.spec):
            return made.step(weight)
        if "bits" not in self.spec.traits:
            return 2 * (weight - weight.to(getattr(torch, info.dtype)).double()).abs()
        return data.step(weight, **data.numbers(self.spec.traits))

    def grid(self, info: ModuleInfo) -> Tensor | None:
        """A weight [out, in] that the format holds exactly, with many different values; None if there is none."""
        if made := written.of(self.spec):
            return data.grid(info, made.bits, made.exponent)
        if "bits" not in self.spec.traits:
            return torch.randn(info.out_features, info.in_features).to(getattr(torch, info.dtype)).double()
        return data.grid(info, **data.numbers(self.spec.traits))

    # ---- making schemes ------------------------------------------------------------------------------------------

    def context(self) -> tuple[Any, ...]:
        return (self.checkpoint(),)

    def exercise(self, instance: Quantizer) -> Any:
        torch.manual_seed(0)
        info = self.info((24, 8), 64)
        scheme = instance.scheme(info)
        if scheme is None:
            return None
        self.fill(scheme, info, data.by_part(torch.randn(32, 64), info))
        return data.dequantized(scheme, info).tolist()

    def dtype(self) -> str:
        """The most exact dtype that is claimed."""
        found = self.values("dtype", *data.DTYPES)
        return found[0] if found else pytest.skip("claims no floating dtype that is known here")

    def info(self, rows: Sequence[int], inp: int, **more: Any) -> ModuleInfo:
        parts = tuple(zip("qkvabc" if len(rows) > 1 else [""], rows, strict=False))
        given = {"dtype": self.dtype(), "device": self.place(), "kind": "linear", "name": "layers.3.attn.qkv", **more}
        return ModuleInfo(in_features=inp, parts=parts, **given)

    def scheme(self, info: ModuleInfo) -> WeightScheme | None:
        """A new scheme; None if the module is left unquantized or refused with a reason."""
        try:
            return self.build(*self.context()).scheme(info)
        except MinivllmError as exc:
            assert str(exc).strip(), "a refusal without words"
            return None

    def fill(self, scheme: WeightScheme, info: ModuleInfo, weights: Mapping[str, Tensor]) -> WeightScheme:
        """Load the parts in the order in which they are given."""
        for part, weight in weights.items():
            for param, tensor in self.checkpoint_tensors(info, part, weight).items():
                scheme.load(param, tensor, part)
        scheme.finish()
        return scheme

    def loaded(self, info: ModuleInfo, weight: Tensor) -> WeightScheme | None:
        scheme = self.scheme(info)
        return None if scheme is None else self.fill(scheme, info, data.by_part(weight, info))

    def quantized(self, shapes: Sequence[tuple] = data.SHAPES, **more: Any) -> Iterator[ModuleInfo]:
        """Those of the shapes that are quantized; skips the test if none is and the spec promises none."""
        met = False
        for rows, inp in shapes:
            info = self.info(rows, inp, **more)
            if self.scheme(info) is not None:
                met = True
                yield info
        if not met:
            assert "bits" not in self.spec.traits, f"claims bits and quantizes none of {shapes}"
            pytest.skip("leaves every module unquantized")

    # ---- what is held --------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_each_element_is_held_within_half_a_step(self) -> None:
        """Whatever the shape, the dtype of the checkpoint, the order of the parts and the size of the numbers; rows of
        zeros stay zero, and to quantize again changes nothing."""
        next(iter(self.quantized()))
        seen = Seen()
        made = written.of(self.spec)
        rows = st.lists(st.sampled_from(made.outs if made else self.outs), min_size=1, max_size=3)
        inputs = st.sampled_from([*self.ins, 0, 0])  # 0: as many as rows, where no shape shows that they are mixed up
        dtypes = (st.sampled_from(self.values("dtype", *data.DTYPES)), st.sampled_from(data.DTYPES))
        case = st.tuples(rows, inputs, st.sampled_from(data.KINDS), *dtypes, st.integers(0, 1 << 20))

        @self.for_all(30, st.fixed_dictionaries(dict.fromkeys(data.FILLS, case)))
        def _(cases: dict) -> None:
            for fill, drawn in cases.items():
                seen.update(self._hold(fill, *drawn))

        seen.require(quantized=5)
        if not seen["refused"]:
            seen.require(merged=15, odd=10, square=2, **dict.fromkeys(data.FILLS, 2))

    def _hold(self, fill: str, rows: list, inp: int, kind: str, dtype: str, stored: str, seed: int) -> list[str]:
        """Check one module; returns what it was a case of."""
        torch.manual_seed(seed)
        info = self.info(rows, inp or sum(rows), dtype=dtype, kind=kind, bias=seed % 3 == 0)
        scheme = self.scheme(info)
        if scheme is None:
            return ["refused"] * (kind == "linear")
        low, high = written.sizes(self.spec, self.sizes, dtype, stored)
        weight = data.FILLS[fill](info.out_features, info.in_features, low, high).to(getattr(torch, stored))
        parts = list(data.by_part(weight, info).items())
        self.fill(scheme, info, dict(parts[i] for i in torch.randperm(len(parts)).tolist()))
        self._within(scheme, info, weight.double(), f"{fill} numbers stored as {stored}")
        met = {"merged": len(rows) > 1, "odd": info.in_features % 2, "square": not inp, "quantized": True}
        return [fill, *(name for name, here in met.items() if here)]

    def _within(self, scheme: WeightScheme, info: ModuleInfo, weight: Tensor, what: str) -> None:
        held, step = data.dequantized(scheme, info), self.step(weight, info).cpu()
        where = f"{info.kind} of parts {info.parts}, {info.in_features} inputs, {info.dtype}, {what}"
        where += f"{NO_BITS if 'bits' not in self.spec.traits else ''}{STEPS}"
        eps = torch.finfo(getattr(torch, info.dtype)).eps
        room = step / 2 * (1 + 1e-4) + 2 * eps * (weight.abs() if eps > 1e-6 else weight.abs().amax(1, keepdim=True))
        data.compare(held, weight, room, info, where)
        if info.dtype == "float32":
            again = self.loaded(info, held.float())
            assert again is not None
            data.compare(data.dequantized(again, info), held, room * 0.02, info, f"{where}, quantized a second time")

    @since(1, 0)
    def test_weights_that_the_format_has_come_back_exactly(self) -> None:
        """Different numbers stay different: packing loses nothing, at odd sizes either."""
        torch.manual_seed(1)
        for info in self.quantized((*data.SHAPES, ((3, 5), 7), ((1,), 3), ((7, 1), 129))):
            for _ in range(12 if self.long else 2):
                weight = self.grid(info)
                if weight is None:
                    pytest.skip("grid() gives none")
                scheme = self.loaded(info, weight.float())
                assert scheme is not None
                near = self.step(weight, info) * 1e-3 + 1e-6 * weight.abs()
                held = data.dequantized(scheme, info)
                data.compare(held, weight, near, info, f"a weight of grid(), {info.parts}, of which none is off{GRID}")

    @since(1, 0)
    def test_modules_share_nothing(self) -> None:
        """Two schemes of one quantizer that are loaded in turn."""
        torch.manual_seed(2)
        for info in self.quantized():
            quantizer = self.build(*self.context())
            infos = [replace(info, name=f"layers.{i}.attn.qkv") for i in (0, 1)]
            schemes = [quantizer.scheme(i) for i in infos]
            weights = [torch.randn(info.out_features, info.in_features) for _ in infos]
            for scheme, one, weight in zip(schemes, infos, weights, strict=True):
                self.fill(scheme, one, data.by_part(weight, one))
            for scheme, one, weight in zip(schemes, infos, weights, strict=True):
                self._within(scheme, one, weight.double(), "beside another module")

    # ---- what is computed ----------------------------------------------------------------------------------------

    @since(1, 0)
    def test_products_are_those_of_the_weight_that_is_held(self) -> None:
        """Against float64, by at most twice the error of a plain product in the same dtype; for any number of tokens,
        contiguous or not, into ``out`` or not, and without the bias, which is the layer's.  ``batch_invariant``: a row
        has the same bits alone."""
        for dtype in self.values("dtype", *data.DTYPES):
            for info in self.quantized((*data.SHAPES, data.LONG), dtype=dtype, bias=True):
                torch.manual_seed(4)
                weight = data.FILLS["rows of all sizes"](info.out_features, info.in_features, *self.sizes)
                scheme = self.loaded(info, weight)
                assert scheme is not None
                if dtype == "float32":
                    self._within(scheme, info, weight.double(), "rows of all sizes")
                held, floor = self._held(scheme, info, weight)
                ours, plain = [], []
                for tokens in data.TOKENS:
                    for form, x in data.inputs(tokens, info):
                        got = data.product(scheme, x, f"{tokens} tokens, {form}, {info.in_features} inputs, {dtype}")
                        want, size = x.cpu().double() @ held.T, x.cpu().double().abs() @ held.abs().T + 1e-30
                        if self.claims("batch_invariant"):
                            data.alone(scheme, x, got, f"{info.parts}, {tokens} tokens, {form}, {dtype}")
                        off = (got.cpu().double() - want).abs() / (
                            size + data.rounded(x, held, self.spec.traits, dtype)
                        )
                        row, column = divmod(int(off.argmax()), off.shape[1])
                        assert off.max() <= 6 * torch.finfo(x.dtype).eps + floor, (
                            f"{info.parts}, {tokens} tokens, {form}, {dtype}: token {row}, output {column} is "
                            f"{got[row, column]:.6g}, want {want[row, column]:.6g}"
                        )
                        ours.append(off.flatten())
                        naive = x.cpu() @ held.to(x.dtype).T
                        plain.append(((naive.double() - want).abs() / size).flatten())
                if "inputs" in self.spec.traits:
                    continue  # the sum's size says too little of it
                a, b = (float(torch.cat(e).square().mean().sqrt()) for e in (ours, plain))
                room = 2 * b + torch.finfo(getattr(torch, dtype)).eps / 64 + floor
                assert a <= room, f"{info.parts}, {dtype}: error {a:.2e} of the sum's size, a plain product has {b:.2e}"

    def _held(self, scheme: WeightScheme, info: ModuleInfo, weight: Tensor) -> tuple[Tensor, float]:
        """(what a scheme holds, float64; how much of it rounding hides).  In half precision the product with the
        identity is rounded, so it is read from a float32 scheme, if that holds the same."""
        own = data.dequantized(scheme, info)
        eps = torch.finfo(getattr(torch, info.dtype)).eps
        if info.dtype == "float32":
            return own, 0.0
        full = replace(info, dtype="float32")
        made = self.loaded(full, weight) if self.values("dtype", "float32") else None
        if made is not None:
            exact = data.dequantized(made, full)
            if bool(((own - exact).abs() <= eps * exact.abs() + 1e-7).all()):
                return exact, 0.0
        return own, eps

    @since(1, 0)
    def test_a_product_that_the_dtype_can_hold_does_not_overflow(self) -> None:
        """Sums of unscaled integers leave float16 long before the product does."""
        for dtype in self.values("dtype", *data.DTYPES):
            for info in self.quantized(dtype=dtype):
                scheme = self.loaded(info, torch.full((info.out_features, info.in_features), 0.01))
                assert scheme is not None
                x = torch.full((3, info.in_features), 100.0, dtype=getattr(torch, dtype), device=info.device)
                got = scheme.apply(x)
                off = (got.double() - info.in_features).abs().max() / info.in_features
                assert off <= 0.3, f"{info.parts}, {dtype}: {info.in_features} x 100 x 0.01 gives {got[0, 0]}"

    # ---- loading -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_params_are_what_comes_from_the_checkpoint(self) -> None:
        """Exactly those; the bias is the layer's."""
        for info in self.quantized(bias=True):
            scheme = self.scheme(info)
            assert scheme is not None
            want = set(self.checkpoint_tensors(info, info.parts[0][0], torch.randn(info.parts[0][1], info.in_features)))
            got = {k: tuple(v) for k, v in scheme.params().items()}
            assert set(got) == want, f"params() says {sorted(got)}, the checkpoint has {sorted(want)}"
            shape = (info.out_features, info.in_features)
            if want == {"weight"}:
                assert got["weight"] == shape, f"params() says weight {got['weight']}, want {shape} over all parts"

    @since(1, 0)
    def test_what_does_not_fit_is_refused(self) -> None:
        """A tensor of another shape: ModelError; a part that the module does not have and an adapter: any error."""
        for info in self.quantized():
            (part, rows), inp = info.parts[0], info.in_features
            for param, tensor in self.checkpoint_tensors(info, part, torch.randn(rows, inp)).items():
                wrong = [torch.cat((tensor, tensor)), tensor[..., :-1], tensor.flatten(), tensor[None]]
                wrong += [tensor.T] if tensor.dim() == 2 and rows != inp else []
                scheme = self.scheme(info)
                assert scheme is not None
                for other in (t for t in wrong if t.shape != tensor.shape):
                    with pytest.raises(ModelError):
                        scheme.load(param, other, part)
                        pytest.fail(f"{param} of shape {list(other.shape)} is taken, want {list(tensor.shape)}")
                with pytest.raises((MinivllmError, LookupError)):
                    scheme.load(param, tensor, "no such part")
                    pytest.fail(f"{info.parts}: takes a part of another name")
            scheme = self.loaded(info, torch.randn(info.out_features, inp))
            assert scheme is not None
            with pytest.raises(MinivllmError):
                scheme.apply(torch.ones(1, inp, dtype=getattr(torch, info.dtype), device=info.device), adapter=object())
                pytest.fail("an adapter is ignored in silence")

    @since(1, 0)
    def test_each_process_holds_its_share(self) -> None:
        """The outputs of every part, or the inputs, split over 2 to 4 processes: each share is within half a step; with
        ``sliceable`` it is the slice of what one process holds."""
        torch.manual_seed(5)
        for split in ("column", "row"):
            info = next(self.quantized(data.SHARED, split=split))
            weight = torch.randn(info.out_features, info.in_features) * torch.linspace(0.2, 3, info.in_features)
            whole = self.loaded(replace(info, split=None), weight)
            for size in (2, 3, 4):
                for rank in range(size):
                    share = self._share(info, weight, split, Shard(rank, size))
                    if share is None:
                        continue
                    mine, scheme = share
                    want, step = (
                        data.cut(w, info, split, rank, size) for w in (weight.double(), self.step(weight, info))
                    )
                    room = torch.maximum(step, self.step(want, mine)) / 2 + 1e-2 * want.abs() * (
                        info.dtype != "float32"
                    )
                    held, what = data.dequantized(scheme, mine), f"{split} split, process {rank} of {size}"
                    data.compare(held, want, room * 1.0001 + 1e-6, mine, what)
                    if self.claims("sliceable") and whole is not None:
                        want = data.cut(data.dequantized(whole, info), info, split, rank, size)
                        data.compare(held, want, 1e-6 * want.abs(), mine, f"{what}, against the slice of the whole")

    def _share(self, info: ModuleInfo, weight: Tensor, split: str, shard: Shard) -> tuple[ModuleInfo, Any] | None:
        """A process's module and its loaded scheme."""
        by_rows, by_inputs = (shard.size, 1) if split == "column" else (1, shard.size)
        parts = tuple((part, rows // by_rows) for part, rows in info.parts)
        mine = replace(info, parts=parts, in_features=info.in_features // by_inputs, shard=shard)
        scheme = self.scheme(mine)
        if scheme is None:
            return None
        for part, rows in data.by_part(weight, info).items():
            for param, tensor in self.checkpoint_tensors(info, part, rows).items():
                scheme.load(param, scheme.slice(param, tensor, split, shard), part)
        scheme.finish()
        return mine, scheme

    @since(1, 0)
    def test_a_checkpoint_of_another_method_is_refused(self) -> None:
        """Its tensors would be taken for weights."""
        limit = written.methods(self.spec)
        other = {"quant_method": "a method of next year", "bits": 3}
        if allows(limit, other["quant_method"]):
            pytest.skip("claims to read checkpoints of any method")
        with pytest.raises(ModelError, match="a method of next year"):
            self.build(other)

    @since(1, 0)
    def test_options_that_name_modules_are_checked(self) -> None:
        """A pattern leaves out the modules that it names; one that names none is refused when all were asked."""
        model = import_target(self.spec.options) if self.spec.options else None
        names = [name for name in self.patterns if model is not None and name in model.model_fields]
        if not names:
            pytest.skip(f"has no option {' or '.join(self.patterns)}")
        for name in names:
            for pattern, used in (("layers.0.*", True), ("layer.0.*", False)):
                quantizer = self.build(*self.context(), options={**self.options, name: [pattern]})
                first, second = (
                    quantizer.scheme(self.info((32,), 64, name=f"layers.{i}.mlp.down")) is not None for i in (0, 1)
                )
                assert second, f"{name}={[pattern]} leaves out layers.1.mlp.down"
                assert first != used, f"{name}={[pattern]}: layers.0.mlp.down is{' not' * used} left out"
                if used:
                    quantizer.finish()
                else:
                    with pytest.raises(PluginError, match=r"layer\.0"):
                        quantizer.finish()
                        pytest.fail(f"{name}={[pattern]} names no module and is not refused")

    # ---- in a model ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_model_computes_what_transformers_computes_with_the_held_weights(self, tmp_path: Path) -> None:
        """Tiny Llama: the weights of all quantized layers are read back and given to transformers."""
        path, cfg, hf = tiny_dir(tmp_path, "llama", **data.fields(self.spec.traits, self.model))
        plain, arch = logits(hf, PROMPT), ARCHS["llama"]()
        harness = self._model(path, cfg, arch)
        state = hf.state_dict()
        for source, part, module in self._linears(arch, cfg, harness):
            held = data.by_part(data.dequantized(module.scheme, module.info), module.info)[part]
            state[f"{source}.weight"].copy_(held)
        want = logits(hf, PROMPT)
        room = max(1e-4, 2e-5 * float(want.abs().max()))
        if self.dtype() != "float32":
            room = 4 * float((logits(hf.to(getattr(torch, self.dtype())), PROMPT) - want).abs().max()) + 1e-3
        got = harness.step({0: PROMPT})[0].cpu()
        off = (got - want).abs()
        assert got.isfinite().all(), "logits are not finite"
        if "inputs" in self.spec.traits:  # rounded anew by each layer, of which random ones magnify what is off
            assert (error := float(off.norm() / want.norm())) <= 0.3, f"logits are off by {error:.2f} of their norm"
            return
        assert off.max() <= room, f"a logit is off by {off.max():.2e}, allowed {room:.2e}"
        if "bits" in self.spec.traits:
            assert (want - plain).abs().max() > (1e-4 if "inputs" in self.spec.traits else room), (
                "claims bits, and the model's weights are as they were"
            )

    def _model(self, path: Path, cfg: Any, arch: Any) -> Harness:
        """The model of a plain checkpoint, rewritten as the quantizer reads it."""
        where: dict[str, Any] = {"dtype": self.dtype(), "device": self.place()}
        tensors = read_tensors(path)
        built = Harness(None, arch, cfg, quantizer=self.build(*self.context()), **where)
        for source, part, module in self._linears(arch, cfg, built):
            if set(module.scheme.params()) != {"weight"}:
                made = self.checkpoint_tensors(module.info, part, tensors.pop(f"{source}.weight"))
                tensors |= {f"{source}.{k}": v.contiguous() for k, v in made.items()}
        write_tensors(path, tensors)
        quantizer = self.build(*self.context())
        harness = Harness(path, arch, cfg, quantizer=quantizer, **where)
        quantizer.finish()
        return harness

    def _linears(self, arch: Any, cfg: Any, harness: Harness) -> set[tuple[str, str, Linear]]:
        """(name in the checkpoint, part, layer) of every linear layer."""
        targets = find_targets(arch.weights(cfg), harness.parts)
        found = {(name[: -len(t.param) - 1], t.parts[0], t.module) for name, t in targets.items()}
        return {(name, part, module) for name, part, module in found if isinstance(module, Linear)}
