"""The conformance suite of quantizers, which hold weights in few bits.

A weight must be held within half a step of the format, products must use the held weight, and no other memory may be
kept.  The held weight is read as the product with the identity matrix, so that no test depends on the format.
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
from .model_config import tolerance_of
from .quantizer_data import dtype_of, random_weight
from .quantizer_experts import QuantizerExperts
from .quantizer_memory import Memory
from .quantizer_sizes import QuantizerSizes
from .spec import SpecConformance
from .tiny import ARCHS, read_tensors, tiny_dir, write_tensors

NO_BITS = "; without traits['bits'] the weight must be held exactly"
STEPS = " (an error of half of step(weight, info) is allowed: a test class overrides step if the format has others)"
GRID = " (a test class overrides grid(info) if these are not numbers of the format, or returns None)"
OTHER_METHOD = "a method of next year"


class QuantizerConformance(Memory, QuantizerSizes, QuantizerExperts, SpecConformance):
    """The conformance suite of quantizers.

    Override ``checkpoint`` and ``checkpoint_tensors`` if checkpoints store the weights quantized in a way that
    ``testing.quantizer_written`` does not write.  Override ``step`` and ``grid`` if the format is not one symmetric
    scale per output row, and ``scale_bits`` if scales take more memory.  Override ``outs``, ``ins`` and ``sizes`` if
    the quantizer takes only some sizes.
    Products are compared with the exact product of ``x``.  The tolerance includes the rounding of the rows of ``x`` to
    ``inputs`` bits, if the spec has that trait.  The quality of this rounding is for a test of the author.
    """

    kind = "quantizer"
    outs: Sequence[int] = (1, 2, 3, 5, 17, 33, 64, 129)  # numbers of output rows of a part (such as q, k or v) to test
    ins: Sequence[int] = (1, 2, 3, 7, 8, 16, 31, 33, 64, 128, 129, 256)  # numbers of inputs of a module to test
    # magnitudes of the smallest and the largest rows to test; narrower for float16 scales
    sizes: tuple[float, float] = (1e-30, 1e30)
    scale_bits: float = 2.0  # most bits per element for scales and zero points: two float16 for 16 elements
    patterns: Sequence[str] = ("skip",)  # names of options that hold patterns of modules to leave unquantized
    # fields of the tiny model's config.json that suit the quantizer
    model: Mapping[str, Any] = {"intermediate_size": 64}

    # ---- methods that a test class may override ------------------------------------------------------------------

    def checkpoint(self) -> Mapping[str, Any] | None:
        """Return the ``quantization_config`` for config.json; None means a checkpoint with plain weights."""
        limit = written.methods(self.spec)
        if allows(limit, "none"):
            return None
        method = written.of(self.spec)
        return {"quant_method": min(limit), **(method.config if method else {})}

    def checkpoint_tensors(self, info: ModuleInfo, part: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores for a weight [rows of the part, in], as parameter -> tensor."""
        method = written.of(self.spec)
        if method is None:
            return {"weight": weight}
        return method.tensors(weight)

    def step(self, weight: Tensor, info: ModuleInfo) -> Tensor:
        """Return the distance of neighbouring values of the format at each element of a weight [out, in], float64.

        The held weight may be off by half of it.  The default is a format of ``bits`` bits with a symmetric scale per
        row, or rounding to the module's dtype if the spec has no such trait."""
        if method := written.of(self.spec):
            return method.step(weight)
        if "bits" in self.spec.traits:
            described = data.numbers(self.spec.traits)
            return data.step(weight, **described)
        rounded = weight.to(dtype_of(info)).double()
        return 2 * (weight - rounded).abs()

    def grid(self, info: ModuleInfo) -> Tensor | None:
        """Return a weight [out, in] of many different values that the format holds exactly; None if there is none."""
        if method := written.of(self.spec):
            return data.grid(info, method.bits, method.exponent)
        if "bits" in self.spec.traits:
            described = data.numbers(self.spec.traits)
            return data.grid(info, **described)
        weight = random_weight(info).to(dtype_of(info))
        return weight.double()

    # ---- schemes to test -----------------------------------------------------------------------------------------

    def context(self) -> tuple[Any, ...]:
        return (self.checkpoint(),)

    def exercise(self, instance: Quantizer) -> Any:
        torch.manual_seed(0)
        info = self.info((24, 8), 64)
        scheme = instance.scheme(info)
        if scheme is None:
            return None
        weights = data.by_part(random_weight(info), info)
        self.fill(scheme, info, weights)
        return data.dequantized(scheme, info).tolist()

    def dtype(self) -> str:
        """Return the most exact dtype that the plug-in claims."""
        claimed = self.values("dtype", *data.DTYPES)
        return claimed[0] if claimed else pytest.skip("claims no floating dtype that is known here")

    def info(self, rows: Sequence[int], inp: int, **more: Any) -> ModuleInfo:
        """Return the description of a linear layer whose parts (such as q, k and v) have these numbers of output rows.

        ``inp`` is the number of inputs, ``more`` are other fields.
        """
        names = "qkvabc" if len(rows) > 1 else [""]
        parts = tuple(zip(names, rows, strict=False))
        facts: dict[str, Any] = {"dtype": self.dtype(), "device": self.place()}
        facts |= {"kind": "linear", "name": "layers.3.attn.qkv"}
        facts |= more
        return ModuleInfo(in_features=inp, parts=parts, **facts)

    def scheme(self, info: ModuleInfo) -> WeightScheme | None:
        """Return a new scheme (holder of one weight) for a module.

        None means that the module is left unquantized or refused with a reason.
        """
        try:
            return self.build(*self.context()).scheme(info)
        except MinivllmError as exc:
            assert str(exc).strip(), "a refusal without a message"
            return None

    def fill(self, scheme: WeightScheme, info: ModuleInfo, weights: Mapping[str, Tensor]) -> WeightScheme:
        """Load the parts of a weight into a scheme, in the order of the mapping, and return the scheme."""
        for part, weight in weights.items():
            tensors = self.checkpoint_tensors(info, part, weight)
            for param, tensor in tensors.items():
                scheme.load(param, tensor, part)
        scheme.finish()
        return scheme

    def loaded(self, info: ModuleInfo, weight: Tensor) -> WeightScheme:
        """Return a new scheme of a module that the plug-in quantizes, loaded with a weight [out, in]."""
        scheme = self.scheme(info)
        assert scheme is not None, f"leaves a module unquantized that it quantized before: {info}"
        weights = data.by_part(weight, info)
        return self.fill(scheme, info, weights)

    def quantized(self, shapes: Sequence[tuple] = data.SHAPES, **more: Any) -> Iterator[ModuleInfo]:
        """Yield the modules of some shapes, ((output rows of each part), inputs), that the plug-in quantizes.

        Skip the test if it quantizes none, or fail if the spec claims ``bits``.
        """
        found = False
        for rows, inp in shapes:
            info = self.info(rows, inp, **more)
            if self.scheme(info) is not None:
                found = True
                yield info
        if not found:
            assert "bits" not in self.spec.traits, f"claims bits and quantizes none of {shapes}"
            pytest.skip("leaves every module unquantized")

    # ---- the held weight -----------------------------------------------------------------------------------------

    @since(1, 0)
    def test_each_element_is_held_within_half_a_step(self) -> None:
        """Check that each element is held within half a step of the format.

        This holds for any shape, dtype of the checkpoint, order of parts and size of numbers.  Rows of zeros stay
        zero, and quantizing the held weight again changes nothing.
        """
        next(iter(self.quantized()))
        seen = Seen()
        method = written.of(self.spec)
        outs = st.sampled_from(method.outs if method else self.outs)
        rows = st.lists(outs, min_size=1, max_size=3)
        # 0 means as many inputs as rows: only with a square weight is a transposition no error of shape
        inputs = st.sampled_from([*self.ins, 0, 0])
        elements = self.values("dtype", *data.DTYPES)
        dtype = st.sampled_from(elements)
        stored = st.sampled_from(data.DTYPES)
        kinds = st.sampled_from(data.KINDS)
        seeds = st.integers(0, 1 << 20)
        case = st.tuples(rows, inputs, kinds, dtype, stored, seeds)
        case_of_fill = dict.fromkeys(data.FILLS, case)

        @self.for_all(30, st.fixed_dictionaries(case_of_fill))
        def _(cases: dict) -> None:
            for fill, drawn in cases.items():
                found = self._hold(fill, drawn)
                seen.update(found)

        self.meet(seen, quantized=5)
        if not seen["refused"]:
            self.meet(seen, merged=15, odd=10, square=2)
            self.meet(seen, **dict.fromkeys(data.FILLS, 2))

    def _hold(self, fill: str, drawn: tuple) -> list[str]:
        """Check the held weight of one random module, and return the names of the hard cases that it belongs to."""
        rows, inp, kind, dtype, stored, seed = drawn
        torch.manual_seed(seed)
        square = not inp
        if square:
            inp = sum(rows)
        info = self.info(rows, inp, dtype=dtype, kind=kind, bias=seed % 3 == 0)
        scheme = self.scheme(info)
        if scheme is None:
            return ["refused"] if kind == "linear" else []
        low, high = written.sizes(self.spec, self.sizes, dtype, stored)
        weight = data.filled(fill, info, low, high)
        weight = weight.to(getattr(torch, stored))
        parts = list(data.by_part(weight, info).items())
        order = torch.randperm(len(parts))
        weights = dict(parts[i] for i in order.tolist())
        self.fill(scheme, info, weights)
        self._within(scheme, info, weight.double(), f"{fill} numbers stored as {stored}")
        found = [fill, "quantized"]
        if len(rows) > 1:
            found.append("merged")
        if inp % 2:
            found.append("odd")
        if square:
            found.append("square")
        return found

    def _within(self, scheme: WeightScheme, info: ModuleInfo, weight: Tensor, what: str) -> None:
        """Fail unless a scheme holds a weight, float64 [out, in], within half a step; ``what`` names it in messages."""
        held = data.dequantized(scheme, info)
        label = f"{info.kind} of parts {info.parts}, {info.in_features} inputs, {info.dtype}, {what}"
        if "bits" not in self.spec.traits:
            label += NO_BITS
        label += STEPS
        eps = torch.finfo(dtype_of(info)).eps
        sizes = weight.abs()
        if eps < 1e-6:
            sizes = sizes.amax(1, keepdim=True)
        half = self.step(weight, info).cpu() / 2
        rounding = 2 * eps * sizes
        tolerance = half * (1 + 1e-4) + rounding
        data.compare(held, weight, tolerance, info, label)
        if info.dtype == "float32":
            copy = self.loaded(info, held.float())
            again = data.dequantized(copy, info)
            few = tolerance * 0.02
            data.compare(again, held, few, info, f"{label}, quantized a second time")

    @since(1, 0)
    def test_weights_that_the_format_has_come_back_exactly(self) -> None:
        """Check that a weight of numbers that the format has comes back exactly.

        Packing must lose nothing, also at odd sizes.
        """
        torch.manual_seed(1)
        times = 12 if self.long else 2
        for info in self.quantized(data.MORE_SHAPES):
            for _ in range(times):
                weight = self.grid(info)
                if weight is None:
                    pytest.skip("grid() returns None")
                rounding = 1e-6 * weight.abs()
                tolerance = self.step(weight, info) * 1e-3 + rounding
                scheme = self.loaded(info, weight.float())
                held = data.dequantized(scheme, info)
                data.compare(held, weight, tolerance, info, f"a weight of grid(), {info.parts}, must be exact{GRID}")

    @since(1, 0)
    def test_modules_share_nothing(self) -> None:
        """Check that two schemes of one quantizer that are loaded in turns each hold their own weight."""
        torch.manual_seed(2)
        for info in self.quantized():
            quantizer = self.build(*self.context())
            infos = [replace(info, name=f"layers.{i}.attn.qkv") for i in (0, 1)]
            schemes = [quantizer.scheme(i) for i in infos]
            weights = [random_weight(info) for _ in infos]
            modules = list(zip(schemes, infos, weights, strict=True))
            for scheme, module, weight in modules:
                parts = data.by_part(weight, module)
                self.fill(scheme, module, parts)
            for scheme, module, weight in modules:
                exact = weight.double()
                self._within(scheme, module, exact, "beside another module")

    # ---- products ------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_products_are_those_of_the_weight_that_is_held(self) -> None:
        """Check products against float64: the error is at most twice that of a plain product in the same dtype.

        Steps of several sizes are tried, with ``x`` contiguous and not, and with and without ``out``.  The product
        must not add the bias.  With ``batch_invariant`` a row has the same bits alone.
        """
        shapes = (*data.SHAPES, data.LONG)
        for dtype in self.values("dtype", *data.DTYPES):
            for info in self.quantized(shapes, dtype=dtype, bias=True):
                torch.manual_seed(4)
                weight = data.filled("rows of all sizes", info, *self.sizes)
                self._check_products(info, weight)

    def _check_products(self, info: ModuleInfo, weight: Tensor) -> None:
        """Check the products of one module that holds a weight [out, in], for steps of several sizes."""
        scheme = self.loaded(info, weight)
        if info.dtype == "float32":
            exact = weight.double()
            self._within(scheme, info, exact, "rows of all sizes")
        held, hidden = self._held(scheme, info, weight)
        ours = []
        plain = []
        for tokens in data.TOKENS:
            for form, x in data.inputs(tokens, info):
                label = f"{info.parts}, {info.in_features} inputs, {tokens} tokens, {form}, {info.dtype}"
                got = data.product(scheme, x, label)
                if self.claims("batch_invariant"):
                    data.alone(scheme, x, got, label)
                on_host = x.cpu()
                wide = on_host.double()
                want = wide @ held.T
                size = wide.abs() @ held.abs().T + 1e-30
                allowed = size + data.input_rounding(x, held, self.spec.traits)
                difference = got.cpu().double() - want
                off = difference.abs() / allowed
                row, column = divmod(int(off.argmax()), off.shape[1])
                few_units = 6 * torch.finfo(x.dtype).eps
                assert off.max() <= few_units + hidden, (
                    f"{label}: token {row}, output {column} is {got[row, column]:.6g}, expected {want[row, column]:.6g}"
                )
                ours.append(off.flatten())
                naive = on_host @ held.to(x.dtype).T
                error = (naive.double() - want).abs()
                plain_off = error / size
                plain.append(plain_off.flatten())
        if "inputs" in self.spec.traits:
            return  # the errors that the rounding of inputs makes are not bounded by the size of a sum
        error = _rms(ours)
        plain_error = _rms(plain)
        unit = torch.finfo(dtype_of(info)).eps
        most = 2 * plain_error + unit / 64 + hidden
        assert error <= most, (
            f"{info.parts}, {info.dtype}: error {error:.2e} of the sum's size, a plain product has {plain_error:.2e}"
        )

    def _held(self, scheme: WeightScheme, info: ModuleInfo, weight: Tensor) -> tuple[Tensor, float]:
        """Return the weight that a scheme holds, float64 [out, in], and the relative error of reading it.

        In half precision the product with the identity is rounded.  If a float32 scheme holds the same weight, its
        product is returned instead, with error 0.
        """
        own = data.dequantized(scheme, info)
        if info.dtype == "float32":
            return own, 0.0
        eps = torch.finfo(dtype_of(info)).eps
        full = replace(info, dtype="float32")
        if self.values("dtype", "float32") and self.scheme(full) is not None:
            scheme_of_full = self.loaded(full, weight)
            exact = data.dequantized(scheme_of_full, full)
            off = (own - exact).abs()
            allowed = eps * exact.abs() + 1e-7
            if bool((off <= allowed).all()):
                return exact, 0.0
        return own, eps

    @since(1, 0)
    def test_a_product_that_the_dtype_can_hold_does_not_overflow(self) -> None:
        """Check a product that float16 can hold, although its sum of unscaled integers exceeds the range of float16."""
        for dtype in self.values("dtype", *data.DTYPES):
            for info in self.quantized(dtype=dtype):
                shape = (info.out_features, info.in_features)
                weight = torch.full(shape, 0.01)
                scheme = self.loaded(info, weight)
                hundreds = 100 * data.ones(3, info)
                got = scheme.apply(hundreds)
                difference = got.double() - info.in_features
                off = difference.abs().max() / info.in_features
                assert off <= 0.3, f"{info.parts}, {dtype}: {info.in_features} x 100 x 0.01 gives {got[0, 0]}"

    # ---- loading -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_params_are_what_comes_from_the_checkpoint(self) -> None:
        """Check that ``params()`` names exactly the tensors that a checkpoint stores for a module, without the bias."""
        for info in self.quantized(bias=True):
            part, rows = info.parts[0]
            weight = torch.randn(rows, info.in_features)
            want = set(self.checkpoint_tensors(info, part, weight))
            declared = self.scheme(info).params()
            got = {name: tuple(shape) for name, shape in declared.items()}
            assert set(got) == want, f"params() names {sorted(got)}, the checkpoint has {sorted(want)}"
            shape = (info.out_features, info.in_features)
            if want == {"weight"}:
                assert got["weight"] == shape, f"params(): weight is {got['weight']}, expected {shape} over all parts"

    @since(1, 0)
    def test_what_does_not_fit_is_refused(self) -> None:
        """Check that ``load`` refuses a tensor of another shape with a ModelError, and a part that the module does not
        have with a MinivllmError or LookupError.  ``apply`` must refuse an adapter that it does not support with a
        MinivllmError."""
        for info in self.quantized():
            part, rows = info.parts[0]
            inp = info.in_features
            weight = torch.randn(rows, inp)
            tensors = self.checkpoint_tensors(info, part, weight)
            for param, tensor in tensors.items():
                scheme = self.scheme(info)
                doubled = torch.cat((tensor, tensor))
                wrong = [doubled, tensor[..., :-1], tensor.flatten(), tensor[None]]
                if tensor.dim() == 2 and rows != inp:
                    wrong.append(tensor.T)
                for other in wrong:
                    if other.shape == tensor.shape:
                        continue
                    with pytest.raises(ModelError):
                        scheme.load(param, other, part)
                        pytest.fail(f"{param} of shape {list(other.shape)} is loaded, expected {list(tensor.shape)}")
                with pytest.raises((MinivllmError, LookupError)):
                    scheme.load(param, tensor, "no such part")
                    pytest.fail(f"{info.parts}: loads a part of another name")
            scheme = self.loaded(info, random_weight(info))
            with pytest.raises(MinivllmError):
                one = data.ones(1, info)
                scheme.apply(one, adapter=object())
                pytest.fail("an adapter is silently ignored")

    @since(1, 0)
    def test_each_process_holds_its_share(self) -> None:
        """Check that each of 2 to 4 processes holds its shard of a weight within half a step.

        The shards are of the outputs of every part, or of the inputs.  With the trait ``sliceable`` a shard equals the
        slice of the weight that one process would hold.
        """
        torch.manual_seed(5)
        for split in ("column", "row"):
            info = next(self.quantized(data.SHARED, split=split))
            scales = torch.linspace(0.2, 3, info.in_features)
            weight = random_weight(info) * scales
            undivided = replace(info, split=None)
            whole = None
            if self.claims("sliceable") and self.scheme(undivided) is not None:
                undivided_scheme = self.loaded(undivided, weight)
                whole = data.dequantized(undivided_scheme, info)
            for size in (2, 3, 4):
                for rank in range(size):
                    shard = Shard(rank, size)
                    self._check_shard(info, weight, shard, whole)

    def _check_shard(self, info: ModuleInfo, weight: Tensor, shard: Shard, whole: Tensor | None) -> None:
        """Fail unless a process holds its shard of a weight.

        ``whole`` is the weight that a single process holds, of which a sliceable format holds a slice; None if there
        is none.
        """
        split = info.split
        parts = info.parts
        inputs = info.in_features
        if split == "column":
            parts = tuple((part, rows // shard.size) for part, rows in parts)
        else:
            inputs //= shard.size
        module = replace(info, parts=parts, in_features=inputs, shard=shard)
        scheme = self.scheme(module)
        if scheme is None:
            return
        for part, rows in data.by_part(weight, info).items():
            tensors = self.checkpoint_tensors(info, part, rows)
            for param, tensor in tensors.items():
                sliced = scheme.slice(param, tensor, split, shard)
                scheme.load(param, sliced, part)
        scheme.finish()
        held = data.dequantized(scheme, module)
        want = data.cut(weight.double(), info, shard)
        step_of_all = self.step(weight, info)
        step = data.cut(step_of_all, info, shard)
        own_step = self.step(want, module)
        tolerance = torch.maximum(step, own_step) / 2
        if info.dtype != "float32":
            tolerance = tolerance + 1e-2 * want.abs()
        label = f"{split} split, process {shard.rank} of {shard.size}"
        tolerance = tolerance * 1.0001 + 1e-6
        data.compare(held, want, tolerance, module, label)
        if whole is not None:
            want = data.cut(whole, info, shard)
            rounding = 1e-6 * want.abs()
            data.compare(held, want, rounding, module, f"{label}, against the slice of the whole")

    @since(1, 0)
    def test_a_checkpoint_of_another_method_is_refused(self) -> None:
        """Check that the constructor refuses a checkpoint of another quantization method with a ModelError.

        Its tensors would be read as plain weights.
        """
        if allows(written.methods(self.spec), OTHER_METHOD):
            pytest.skip("claims to read checkpoints of any method")
        with pytest.raises(ModelError, match=OTHER_METHOD):
            self.build({"quant_method": OTHER_METHOD, "bits": 3})
            pytest.fail(f"the constructor accepts quant_method={OTHER_METHOD!r}: raise a ModelError that names it")

    @since(1, 0)
    def test_options_that_name_modules_are_checked(self) -> None:
        """Check that a pattern in an option leaves the modules that it matches unquantized.

        A pattern that matches no module is refused once the schemes of all modules were requested.
        """
        if self.spec.options:
            model = import_target(self.spec.options)
        else:
            model = None
        names = [name for name in self.patterns if model is not None and name in model.model_fields]
        if not names:
            pytest.skip(f"has no option {' or '.join(self.patterns)}")
        for name in names:
            self._quantizer_without(name, "layers.0.*", True).finish()
            unused = self._quantizer_without(name, "layer.0.*", False)
            with pytest.raises(PluginError, match=r"layer\.0"):
                unused.finish()
                pytest.fail(f"{name}=['layer.0.*'] matches no module and is not refused")

    def _quantizer_without(self, option: str, pattern: str, matches: bool) -> Quantizer:
        """Return a quantizer whose ``option`` has a pattern of modules to leave unquantized.

        Fail if it leaves out layer 1, or if it does not leave out layer 0 although the pattern ``matches`` that.
        """
        changed = {**self.options, option: [pattern]}
        quantizer = self.build(*self.context(), options=changed)
        rows = (32,)
        first = quantizer.scheme(self.info(rows, 64, name="layers.0.mlp.down"))
        second = quantizer.scheme(self.info(rows, 64, name="layers.1.mlp.down"))
        assert second is not None, f"{option}={[pattern]} leaves out layers.1.mlp.down"
        fault = "is not left out" if matches else "is left out"
        assert (first is None) == matches, f"{option}={[pattern]}: layers.0.mlp.down {fault}"
        return quantizer

    # ---- in a model ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_model_computes_what_transformers_computes_with_the_held_weights(self, tmp_path: Path) -> None:
        """Check the logits of a tiny Llama against transformers with the weights that the quantizer holds.

        The held weights of all quantized layers are read back and copied to the model of transformers.
        """
        fields = data.fields(self.spec.traits, self.model)
        path, cfg, hf = tiny_dir(tmp_path, "llama", **fields)
        arch = ARCHS["llama"]()
        plain = logits(hf, PROMPT)
        harness = self._model(path, cfg, arch)
        state = hf.state_dict()
        for source, part, module in self._linears(arch, cfg, harness):
            held = data.dequantized(module.scheme, module.info)
            rows = data.by_part(held, module.info)
            state[f"{source}.weight"].copy_(rows[part])
        want = logits(hf, PROMPT)
        half = None
        if self.dtype() != "float32":
            half = logits(hf.to(getattr(torch, self.dtype())), PROMPT)
        tolerance = tolerance_of(want, half)
        step = harness.step({0: PROMPT})
        got = step[0].cpu()
        off = (got - want).abs()
        assert got.isfinite().all(), "logits are not finite"
        # each layer rounds its inputs, and layers with random weights increase the error
        if "inputs" in self.spec.traits:
            error = float(off.norm() / want.norm())
            assert error <= 0.3, f"logits are off by {error:.2f} of their norm"
            return
        assert off.max() <= tolerance, f"a logit is off by {off.max():.2e}, tolerance {tolerance:.2e}"
        if "bits" in self.spec.traits:
            changed = (want - plain).abs().max()
            assert changed > tolerance, "claims bits, and the model's weights are unchanged"

    def _model(self, path: Path, cfg: Any, arch: Any) -> Harness:
        """Return the harness of a tiny model whose checkpoint was rewritten in the quantizer's format."""
        place: dict[str, Any] = {"dtype": self.dtype(), "device": self.place()}
        tensors = read_tensors(path)
        first = self.build(*self.context())
        built = Harness(None, arch, cfg, quantizer=first, **place)
        for source, part, module in self._linears(arch, cfg, built):
            if set(module.scheme.params()) != {"weight"}:
                name = f"{source}.weight"
                weight = tensors.pop(name)
                rewritten = self.checkpoint_tensors(module.info, part, weight)
                for param, tensor in rewritten.items():
                    tensors[f"{source}.{param}"] = tensor.contiguous()
        write_tensors(path, tensors)
        quantizer = self.build(*self.context())
        harness = Harness(path, arch, cfg, quantizer=quantizer, **place)
        quantizer.finish()
        return harness

    def _linears(self, arch: Any, cfg: Any, harness: Harness) -> set[tuple[str, str, Linear]]:
        """Return (name in the checkpoint, part, layer) of every linear layer."""
        weights = arch.weights(cfg)
        targets = find_targets(weights, harness.parts)
        found = set()
        for name, t in targets.items():
            if isinstance(t.module, Linear):
                source = name.removesuffix(f".{t.param}")
                found.add((source, t.parts[0], t.module))
        return found


def _rms(errors: list[Tensor]) -> float:
    """Return the root mean square of errors."""
    mean_square = torch.cat(errors).square().mean()
    return float(mean_square.sqrt())
