"""The conformance suite of adapter methods (such as LoRA), which change the outputs of layers for single requests.

The suite compares layer outputs and tap points (named activations of a model) with float64, in a tiny model whose
layers are merged and split over processes.  Then an engine serves requests with adapters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.core.interfaces.adapter import AdapterContext, AdapterMethod, LowRank
from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.errors import RequestError

from . import adapter_folders
from .adapter_folders import FOLDERS, Shapes
from .adapter_model import LAYERS, POINTS, ModelProcess, inputs_of, layers_of, sources_of
from .base import since, token_logprobs
from .kept import Lasting
from .spec import SpecConformance
from .tiny import tiny_dir

PLACES = 4
NONE = -1
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28]
OUTPUT = 6  # tokens
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
Folders = list[Path | None]  # the folder of the adapter in each slot of adapter memory, None for an empty slot


def difference(x: Tensor, y: Tensor) -> float:
    """Return the largest absolute difference of two tensors."""
    return (x - y).abs().max().item()


class AdapterConformance(Lasting, SpecConformance):
    """The conformance suite of adapter methods.

    It writes adapter folders (adapter_config.json and weights) for the built-in values of ``peft_type``: LORA, IA3 and
    STEERING.  For any other value a test class overrides ``write``, and ``output`` or ``value``.
    """

    kind = "adapter"

    # ---- what a test class may override ------------------------------------------------------------------------------

    def write(self, folder: Path, number: int, layers: Shapes, points: dict[str, int]) -> None:
        """Write the folder of test adapter ``number``, 0 to 2.

        ``layers`` has layer name -> (outputs, inputs) of the model, ``points`` tap point -> width.  The three adapters
        must differ, and at least one of them must leave some layers or points unchanged.
        """
        writer = adapter_folders.WRITERS.get(self.folders)
        if writer is None:
            pytest.skip(f"the kit has no folders of peft_type={self.folders!r}: override write, output and value")
        writer(folder, number, layers, points)

    def output(self, folder: Path, name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the expected output of a layer with the adapter of a folder, float64 [T, out].

        ``name`` is the layer of the checkpoint, x [T, in] its input, ``weight`` [out, in] and ``bias`` [out] its
        tensors without the adapter.
        """
        compute = adapter_folders.OUTPUTS.get(self.folders)
        if compute is None:
            return x @ weight.T + bias
        return compute(folder, name, x, weight, bias)

    def value(self, folder: Path, point: str, x: Tensor) -> Tensor:
        """Return the expected value of a tap point with the adapter of a folder, float64 [T, width], for its value x
        without the adapter."""
        compute = adapter_folders.VALUES.get(self.folders)
        if compute is None:
            return x
        return compute(folder, point, x)

    # ---- instances ---------------------------------------------------------------------------------------------------

    @property
    def folders(self) -> str:
        """Return the ``peft_type`` of the adapter folders that the method reads, from its spec."""
        return str(self.spec.traits.get("peft_type"))

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        return (AdapterContext(PLACES, 8),)

    def made(self, rank: int = 0, size: int = 1, invariant: bool = False) -> ModelProcess:
        """Create the test model of process ``rank`` of ``size``, with adapter memory of a new instance of the plug-in.

        ``invariant`` is the engine's option ``batch_invariant``.
        """
        context = self.context()
        method = self.build(*context)
        return ModelProcess(method, self.place(), rank, size, invariant)

    def exercise(self, instance: AdapterMethod) -> Any:
        """Return the outputs of all layers in a step of three tokens without adapters, as lists by layer name."""
        process = ModelProcess(instance, self.place())
        inputs = inputs_of(3, self.place())
        outputs = process.outputs([NONE] * 3, inputs)
        return {name: y.tolist() for name, y in outputs.items()}

    def once_more(self, instance: AdapterMethod, number: int) -> None:
        """Run a step without adapters, whose number of tokens, 1 to 7, depends on ``number``."""
        tokens = 1 + number % 7
        process = ModelProcess(instance, self.place())
        inputs = inputs_of(tokens, self.place(), number)
        process.outputs([NONE] * tokens, inputs)

    def written(self, place: Path) -> list[Path]:
        """Write the three test adapters into subfolders of ``place``, and return the subfolders."""
        folders = []
        for number in range(FOLDERS):
            folder = place / f"adapter{number}"
            self.write(folder, number, LAYERS, POINTS)
            folders.append(folder)
        return folders

    # ---- comparisons -------------------------------------------------------------------------------------------------

    def compare(self, processes: list[ModelProcess], folders: Folders, places: list[int], seed: int = 0) -> None:
        """Run a step of the test model, and fail unless its layer outputs are close to a float64 reference.

        ``places`` has the slot of adapter memory of each token, or -1 for none.  ``processes`` are the ranks that
        share the model.
        """
        inputs = inputs_of(len(places), self.place(), seed)
        before = {name: x.clone() for name, x in inputs.items()}
        shares = [process.outputs(places, inputs) for process in processes]
        of_tokens: Folders = []
        for place in places:
            of_tokens.append(None if place == NONE else folders[place])
        for name, x in inputs.items():
            assert torch.equal(x, before[name]), f"the inputs of {name} were changed in place"
            of_layer = [share[name] for share in shares]
            for source, y in self._outputs(processes, name, of_layer).items():
                self._compare_layer(source, x, y, of_tokens)

    def _outputs(self, processes: list[ModelProcess], name: str, shares: list[Tensor]) -> dict[str, Tensor]:
        """Return the outputs of the checkpoint's layers that a served layer consists of, [T, out] by name.

        ``shares`` has the product of each process, without the bias.
        """
        sources = sources_of(name)
        first = processes[0]
        if first.infos[name].split == "row":
            products = sum(shares[1:], shares[0])
            whole = products + first.biases[name]
            return dict.fromkeys(sources, whole)
        found = {}
        for source in sources:
            found[source] = self._joined(processes, name, source, shares)
        return found

    def _compare_layer(self, name: str, x: Tensor, y: Tensor, folders: Folders) -> None:
        """Fail unless the outputs y [T, out] of a layer of the checkpoint are close to a float64 reference.

        x [T, in] is the input, and ``folders`` has the folder of each token's adapter.
        """
        layer = layers_of(self.place())[name]
        weight = layer.weight.double()
        bias = layer.bias.double()
        for token, folder in enumerate(folders):
            row = x[token : token + 1].double()
            if folder is None:
                wanted = row @ weight.T + bias
            else:
                wanted = self.output(folder, name, row, weight, bias)
            found = y[token].double()
            error = difference(found, wanted[0])
            adapter = "no adapter" if folder is None else folder.name
            assert torch.allclose(found, wanted[0], **CLOSE), (
                f"{name}, token {token} of {len(folders)} with {adapter}: the output differs by {error:.2e}"
            )

    def _joined(self, processes: list[ModelProcess], name: str, source: str, shares: list[Tensor]) -> Tensor:
        """Join the outputs of all processes for layer ``source`` of the checkpoint, [T, out], with the bias.

        The served layer ``name`` contains it, perhaps merged with other layers.
        """
        parts = []
        for part in sources_of(name)[source]:
            for process, share in zip(processes, shares, strict=True):
                rows = process.infos[name].rows[part]
                with_bias = share + process.biases[name]
                parts.append(with_bias[:, rows])
        return torch.cat(parts, dim=1)

    def compare_points(self, process: ModelProcess, folders: Folders, loaded: list[Any], places: list[int]) -> None:
        """Fail unless the values of tap points in a step are close to a float64 reference.

        ``places`` has the slot of adapter memory of each token, or -1.  ``loaded`` has the loaded adapter of each slot.
        """
        generator = torch.Generator().manual_seed(3)
        width = next(iter(POINTS.values()))
        x = torch.randn(len(places), width, generator=generator)
        x = x.to(self.place())
        before = x.clone()
        stored = [one for one in loaded if one is not None]
        values = process.values(places, stored, x)
        assert torch.equal(x, before), "the value of a point was changed in place"
        for point, y in values.items():
            for token, place in enumerate(places):
                folder = None if place == NONE else folders[place]
                wanted = x[token : token + 1].double()
                if folder is not None:
                    wanted = self.value(folder, point, wanted)
                found = y[token].double()
                error = difference(found, wanted[0])
                near = torch.allclose(found, wanted[0], **CLOSE)
                assert near, f"{point}, token {token}: the value differs by {error:.2e}"

    # ---- rules -------------------------------------------------------------------------------------------------------

    @since(1, 0, spec_only=True)
    def test_the_spec_names_the_folders_that_it_reads(self) -> None:
        """Check that the spec has the trait ``peft_type``, by which the engine finds the method for an adapter
        folder."""
        self._has_spec()
        assert self.spec.traits.get("peft_type"), "the spec has no trait peft_type"

    @since(1, 0)
    def test_each_token_has_the_adapter_of_its_row(self, tmp_path: Path) -> None:
        """Check layer outputs and tap points of steps whose tokens use different adapters, and of steps with one
        adapter."""
        process = self.made()
        folders = self.written(tmp_path)
        at: Folders = [folders[2], None, folders[0], folders[1]]
        loaded = process.store(at)
        steps = [[2, 0, NONE, 3, 2, 3, 0], [3], [2, 2, 2], [NONE, 0], [0, 2] * 20]
        for seed, places in enumerate(steps):
            self.compare([process], at, places, seed)
            self.compare_points(process, at, loaded, places)

    @since(1, 0)
    def test_a_token_without_an_adapter_keeps_its_bits(self, tmp_path: Path) -> None:
        """Check that a token without an adapter has the output bits of a plain product, beside tokens with adapters."""
        process = self.made()
        folders = self.written(tmp_path)
        process.store(folders[:1])
        inputs = inputs_of(6, self.place())
        places = [0, NONE, 0, NONE, NONE, 0]
        mixed = process.outputs(places, inputs)
        for name, weight in process.weights.items():
            plain = inputs[name] @ weight.T
            for token in (1, 3, 4):
                assert torch.equal(mixed[name][token], plain[token]), f"{name}: token {token} changes"

    @since(1, 0)
    def test_a_place_keeps_nothing_of_the_adapter_before(self, tmp_path: Path) -> None:
        """Check that an adapter stored in a used slot of adapter memory has only its own effect.

        The adapter before it may have been larger, and a step may have used the slot before.  The adapters in other
        slots keep their effect.
        """
        process = self.made()
        folders = self.written(tmp_path)
        loaded = [process.read(folder) for folder in folders]
        at: Folders = [None] * PLACES
        stored: list[Any] = [None] * PLACES
        changes = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 0)]
        for place, number in changes:
            process.memory.store(place, loaded[number])
            at[place] = folders[number]
            stored[place] = loaded[number]
            places = [0, NONE, 0]
            if at[1] is not None:
                places.append(1)
            self.compare([process], at, places)
            self.compare_points(process, at, stored, places)

    @since(1, 0)
    def test_what_was_read_is_not_changed_by_later_reads_and_stores(self, tmp_path: Path) -> None:
        """Check that a loaded adapter has its effect when it is stored after other adapters were read and stored."""
        process = self.made()
        folders = self.written(tmp_path)
        first = process.read(folders[0])
        at: Folders = [folders[1], folders[2], None, None]
        loaded = process.store(at)
        process.memory.store(3, first)
        at[3] = folders[0]
        loaded[3] = first
        places = [3, 0, 1, 3]
        self.compare([process], at, places)
        self.compare_points(process, at, loaded, places)

    @since(1, 0)
    def test_processes_share_the_result_of_a_layer(self, tmp_path: Path) -> None:
        """Check that two tensor-parallel processes, each with a shard of every layer, compute the outputs of the
        whole layers."""
        processes = [self.made(rank, 2) for rank in range(2)]
        folders = self.written(tmp_path)
        for process in processes:
            process.store(folders)
        places = [0, NONE, 2, 1, 0]
        self.compare(processes, [*folders], places)

    @since(1, 0)
    def test_a_batch_invariant_token_does_not_depend_on_others(self, tmp_path: Path) -> None:
        """Check that with the option ``batch_invariant`` a token has the same output bits alone and beside other
        tokens."""
        process = self.made(invariant=True)
        process.store(self.written(tmp_path))
        inputs = inputs_of(9, self.place())
        places = [0, 1, NONE, 2, 0, 0, 1, 2, 0]
        for name, weight in process.weights.items():
            identity = torch.eye(*weight.shape)
            process.weights[name] = identity.to(self.place())
        together = process.outputs(places, inputs)
        for token, place in enumerate(places):
            inputs_of_token = {name: x[token : token + 1] for name, x in inputs.items()}
            alone = process.outputs([place], inputs_of_token)
            for name, y in alone.items():
                assert torch.equal(y[0], together[name][token]), f"{name}: token {token} has other bits alone"

    @since(1, 0)
    def test_captured_steps_apply_adapters_that_are_stored_later(self, tmp_path: Path) -> None:
        """Check on a GPU that a captured step gives right outputs when it is replayed with other adapters.

        The adapters in the slots, and the slot of each token, change before a replay.
        """
        if self.place() != "cuda":
            pytest.skip("steps are captured on a GPU")
        process = self.made()
        folders = self.written(tmp_path)
        loaded = [process.read(folder) for folder in folders]
        tokens = torch.tensor([0, 1, NONE, 0], dtype=torch.int32, device="cuda")
        inputs = inputs_of(len(tokens), "cuda")

        def step() -> dict[str, Tensor]:
            process.memory.begin(tokens)
            found = {name: process.output(name, x) for name, x in inputs.items()}
            process.memory.end()
            return found

        process.memory.store(0, loaded[0])
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for places, stored in (([0, NONE, NONE, 0], 1), ([1, 0, 1, NONE], 2)):
            process.memory.store(0, loaded[stored])
            process.memory.store(1, loaded[0])
            tokens.copy_(torch.tensor(places, dtype=torch.int32))
            graph.replay()
            apart = step()
            for name, y in captured.items():
                assert torch.allclose(y, apart[name], **CLOSE), f"{name}: a replay differs from a step"

    @since(1, 0)
    def test_low_rank_products_are_those_of_the_changes(self, tmp_path: Path) -> None:
        """Check that the matrices of ``low_rank``, which native CPU steps use, give the same layer outputs as the
        layer's change."""
        process = self.made()
        folders = self.written(tmp_path)
        found = {name: process.memory.low_rank(name) for name in process.changes}
        if not any(found.values()):
            pytest.skip("the method describes no low-rank products")
        process.store(folders[:2])
        process.store(folders[2:])
        inputs = inputs_of(4, self.place())
        places = [0, 1, NONE, 0]
        outputs = process.outputs(places, inputs)
        for name, one in found.items():
            if one is None:
                continue
            for token, place in enumerate(places):
                x = inputs[name][token]
                y = process.weights[name] @ x
                if place != NONE and int(one.ranks[place]):
                    y = y + _low_rank_product(one, place, x, process.infos[name])
                output = outputs[name][token]
                error = difference(y, output)
                assert torch.allclose(y, output, **CLOSE), f"{name}, token {token}: differs by {error:.2e}"

    @since(1, 0)
    def test_folders_that_do_not_fit_are_refused(self, tmp_path: Path) -> None:
        """Check that an adapter folder with an unknown config field, an unknown tensor name, a wrong shape, NaN or
        no tensor is refused."""
        method = self.build(*self.context())
        process = self.made()
        folder = tmp_path / "adapter"
        self.write(folder, 0, LAYERS, POINTS)
        text = (folder / CONFIG).read_text(encoding="utf-8")
        config = json.loads(text)
        method.check(str(folder), config)
        with pytest.raises(RequestError):
            method.check(str(folder), {**config, "a_field_of_tomorrow": {"x": 1}})
            pytest.fail("a field that no code reads is accepted", pytrace=False)
        tensors = load_file(folder / WEIGHTS)
        name, values = next(iter(tensors.items()))
        unknown = name.replace("0", "7") + "_of_tomorrow"
        larger = [n + 1 for n in values.shape]
        wrong = {"an unknown name": {**tensors, unknown: values.clone()}}
        wrong["another shape"] = {**tensors, name: torch.ones(larger)}
        wrong["a number that is not finite"] = {**tensors, name: values * float("nan")}
        wrong["no tensor"] = {}
        for what, changed in wrong.items():
            save_file(changed, folder / WEIGHTS)
            try:
                process.read(folder)
            except RequestError:
                continue
            pytest.fail(f"a folder with {what} is accepted: expected a RequestError", pytrace=False)

    @since(1, 0)
    def test_the_engine_serves_it(self, tmp_path: Path) -> None:
        """Check that a request with an adapter has the same log-probabilities alone and beside others in an engine.

        The prefix cache is off and on, and the engine has as many slots for adapters as it needs, or only one.
        """
        path, _, model = tiny_dir(tmp_path / "model")
        layers = {}
        for name, m in model.named_modules():
            if isinstance(m, torch.nn.Linear) and name != "lm_head":
                layers[name] = (m.out_features, m.in_features)
        points = dict.fromkeys(("layers.0.residual", "embedding"), model.config.hidden_size)
        requested: list[LoRARequest | None] = []
        for number in range(FOLDERS):
            folder = tmp_path / f"served{number}"
            self.write(folder, number, layers, points)
            requested.append(LoRARequest(folder.name, 1 + number, str(folder)))
        requested.append(None)
        alone: list[list[float]] = []
        with self._engine(path, max_loras=PLACES, enable_prefix_caching=False) as llm:
            for one in requested:
                alone += self._scores(llm, [one])
        for number, scores in enumerate(alone):
            same = [other for other in range(number) if alone[other] == scores]
            assert not same, f"adapters {number} and {same[0]} have the same log-probabilities"
        for places in (PLACES, 1):
            with self._engine(path, max_loras=places) as llm:
                for _ in range(2):
                    together = self._scores(llm, requested)
                    self._compare_scores(alone, together)

    def _engine(self, path: Path, **options: Any) -> LLM:
        """Start an engine whose adapter method is the plug-in, for the model in ``path``."""
        plain: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "kvcache_block_size": 4}
        plain["adapters"] = [self.choice()]
        plain["allow_targets"] = self.own_targets()
        plain["device"] = self.place()
        return LLM(str(path), max_num_seqs=4, **plain, **options)

    def _scores(self, llm: LLM, requested: list[LoRARequest | None]) -> list[list[float]]:
        """Generate greedy tokens for one request per adapter, and return the log-probabilities of the tokens of each
        request."""
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=0)
        prompts = [PROMPT] * len(requested)
        results = llm.generate(prompts, params, use_tqdm=False, lora_request=requested)
        scores = []
        for result in results:
            assert result.error is None, f"a request with an adapter ended with an error: {result.error}"
            (output,) = result.outputs
            scores.append(token_logprobs(output))
        return scores

    def _compare_scores(self, alone: list[list[float]], together: list[list[float]]) -> None:
        for number, (a, b) in enumerate(zip(alone, together, strict=True)):
            if number == FOLDERS:
                request = "the request without an adapter"
            else:
                request = f"the request with adapter {number}"
            assert b == pytest.approx(a, abs=1e-4), f"{request} has other log-probabilities beside others than alone"


def _low_rank_product(one: LowRank, place: int, x: Tensor, info: ModuleInfo) -> Tensor:
    """Return the sum of low-rank products B A x [out] of one slot of adapter memory for an input x [in]."""
    parts = []
    for part, (name, _) in enumerate(info.parts):
        low = one.a[place, part] @ x
        b = one.b[place, info.rows[name]]
        parts.append(b @ low)
    return torch.cat(parts)
