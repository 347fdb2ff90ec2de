"""Updates of weights in a running engine, compared with engines that load the same weights."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from devices import quantized_on_cpu
from native_runs import FAMILIES, checkpoint, engine, prompt
from safetensors.torch import load_file, save_file

from minivllm import EngineDeadError, RequestError, SamplingParams
from minivllm.device.layers.embedding import TiedLMHead
from minivllm.device.layers.linear import Linear
from minivllm.device.layers.module import all_finite
from minivllm.device.layers.norm import RMSNorm
from minivllm.device.loading import weight_update
from minivllm.device.loading.weight_update import SpareMemory, WeightUpdate
from minivllm.device.worker.weights import RunningWeights
from minivllm.testing.tiny import quiet, tiny_dir

PROMPTS = [prompt(n, seed) for seed, n in enumerate((3, 21, 9))]
SCORED = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2, prompt_logprobs=1)
QUANTIZERS = ("int8", "int4", "fp8", "nf4")


def answers(llm, params=SCORED, prompts=PROMPTS):
    """Return the tokens and the log-probabilities of fixed prompts."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


def tokens_of(found):
    """Return the tokens of answers; log-probabilities have other bits where a prompt is cached."""
    return [tokens for tokens, *_ in found]


def other_weights(folder: Path, seed: int = 5, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Return a folder's weights with noise."""
    torch.manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor + scale * torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in tensors.items()}


def written(folder: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a copy of a model's folder with other weights."""
    shutil.copytree(folder, to)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Create a tiny model, and a folder of it with other weights."""
    place = tmp_path_factory.mktemp("weights")
    folder, _, _ = tiny_dir(place / "first", "qwen3", intermediate_size=64)
    return folder, written(folder, place / "second", other_weights(folder))


def expected(folder: Path, **options):
    """Return the answers of an engine that loads the weights of a folder."""
    with engine(str(folder), **options) as llm:
        return answers(llm)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_answers_as_if_it_had_loaded_the_new_weights(tmp_path, architecture):
    first = Path(checkpoint(tmp_path / "first", architecture))
    tensors = other_weights(first)
    second = written(first, tmp_path / "second", tensors)
    for options in ({}, {"graph": "off"}):
        want = expected(second, **options)
        with engine(str(first), **options) as llm:
            before = answers(llm)
            assert llm.update_weights(tensors) == 1
            assert answers(llm) == want
            assert before != want
            assert llm.update_weights(first) == 2
            assert answers(llm) == before


@quantized_on_cpu
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_weights_that_are_quantized_while_loading_are_quantized_again(tiny, quantizer):
    first, second = tiny
    named = {"name": quantizer, "options": {"group_size": 32}} if quantizer in ("int4", "nf4") else quantizer
    want = expected(second, quantizer=named)
    with engine(str(first), quantizer=named) as llm:
        before = answers(llm)
        llm.update_weights(second)
        assert answers(llm) == want != before


@quantized_on_cpu
def test_unquantized_parts_of_a_quantized_layer_change_with_it(tiny):
    """Torch multiplies by a packed copy of such a part, which is made during the first long prompts."""
    first, second = tiny
    parts = {"name": "int8", "options": {"bits": {r"re:.*\.qkv\.[kv]": 16}}}
    long = [{"prompt_token_ids": list(range(2, 18 + n))} for n in range(40)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with engine(str(second), quantizer=parts) as llm:
        want = [answer.tokens for answer in llm.generate(long, params, use_tqdm=False)]
    with engine(str(first), quantizer=parts) as llm:
        before = [answer.tokens for answer in llm.generate(long, params, use_tqdm=False)]
        llm.update_weights(second)
        assert [answer.tokens for answer in llm.generate(long, params, use_tqdm=False)] == want != before


@pytest.mark.parametrize(
    "options",
    [
        {"batch_invariant": True},
        {"executor": "process"},
        {"executor": "multiprocess", "tensor_parallel_size": 2},
        {"load_format": "dummy"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda options: next(iter(options)) + "=" + str(next(iter(options.values()))),
)
def test_updates_work_with_other_ways_of_running(tiny, options):
    first, second = tiny
    want = expected(second, **{name: value for name, value in options.items() if name != "load_format"})
    with engine(str(first), **options) as llm:
        before = answers(llm)
        llm.update_weights(load_file(second / "model.safetensors").items())
        assert answers(llm) == want != before


def test_a_state_dict_of_transformers_is_accepted(tmp_path):
    folder, _, model = tiny_dir(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    assert "lm_head.weight" in model.state_dict()
    with engine(str(folder)) as llm:
        llm.update_weights(model.state_dict())
        got = answers(llm)
        without_head = {name: p for name, p in model.state_dict().items() if name != "lm_head.weight"}
        llm.update_weights(without_head)
        assert answers(llm) == got
        differs = {**model.state_dict(), "lm_head.weight": model.lm_head.weight + 1}
        with pytest.raises(RequestError, match="shares one weight for both; expected equal tensors"):
            llm.update_weights(differs)
    with quiet():
        model.save_pretrained(tmp_path / "again")
    assert got == expected(tmp_path / "again")


def test_a_partial_update_changes_the_given_weights_only(tiny, tmp_path):
    first, second = tiny
    old, new = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    part = {name: new[name] for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight")}
    want = expected(written(first, tmp_path / "mixed", old | part))
    with engine(str(first)) as llm:
        llm.update_weights(part, partial=True)
        assert answers(llm) == want
    with engine(str(first), quantizer="int8") as llm, pytest.raises(RequestError, match="quantized as a whole"):
        llm.update_weights(part, partial=True)


def changed(tensors, **changes):
    return {**tensors, **changes}


BAD = {
    "an unknown name": (
        lambda t: changed(t, **{"model.layers.7.mlp.up_proj.weight": t["model.norm.weight"]}),
        "no place",
    ),
    "a missing name": (
        lambda t: {n: x for n, x in t.items() if n != "model.norm.weight"},
        "model.norm.weight are missing",
    ),
    "a shape": (lambda t: changed(t, **{"model.norm.weight": torch.zeros(7)}), r"shape \[7\], expected \[32\]"),
    "a dtype": (lambda t: changed(t, **{"model.norm.weight": torch.zeros(32).int()}), "dtype int32"),
    "NaN": (lambda t: changed(t, **{"model.norm.weight": torch.full((32,), torch.nan)}), "infinite numbers or NaN"),
    "no tensor": (lambda t: changed(t, **{"model.norm.weight": [1.0]}), "is a list; expected a tensor"),
    "no values": (
        lambda t: changed(t, **{"model.norm.weight": torch.empty(32, device="meta")}),
        "has no values .device meta.; expected a dense tensor",
    ),
    "sparse": (
        lambda t: changed(t, **{"model.norm.weight": torch.zeros(32).to_sparse()}),
        "has the layout torch.sparse_coo; expected a dense tensor",
    ),
    "a name twice": (lambda t: [*t.items(), next(iter(t.items()))], "twice"),
    "nothing": (lambda t: [], "no tensors were given"),
    "other things": (lambda t: [1, 2], "expected pairs of a name and a tensor"),
    "a number": (lambda t: 3, "expected a folder, a mapping"),
    "no folder": (lambda t: "/nowhere/at/all", "no such model directory"),
}


def test_refused_weights_change_nothing(tiny):
    first, second = tiny
    tensors = load_file(second / "model.safetensors")
    with engine(str(first)) as llm:
        before = answers(llm)
        for make, message in BAD.values():
            with pytest.raises(RequestError, match=message):
                llm.update_weights(make(tensors))
            assert answers(llm) == before
        assert llm.stats()["weights"]["version"] == 0
        llm.update_weights(changed(tensors, **{"model.norm.weight": torch.full((32,), 1e30)}), finite=False)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"quantizer": "int8"}, marks=quantized_on_cpu)], ids=["plain", "int8"]
)
def test_numbers_must_be_finite_in_the_dtype_of_the_model(tiny, options):
    first, _ = tiny
    tensors = load_file(first / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    large = changed(tensors, **{name: torch.full_like(tensors[name], 1e6)})
    with engine(str(first), dtype="float16", **options) as llm:
        with pytest.raises(RequestError, match="infinite numbers or NaN in float16"):
            llm.update_weights(large)
        assert llm.update_weights(tensors) == 1


@pytest.mark.parametrize("executor", ["local", "process"])
def test_a_model_of_pickled_files_takes_tensors_and_folders_of_both_forms(tiny, tmp_path, executor):
    first, second = tiny
    pickled = tmp_path / "pickled"
    shutil.copytree(first, pickled, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(first / "model.safetensors"), pickled / "pytorch_model.bin")
    want = expected(second)
    with engine(str(pickled), load_format="pt", executor=executor) as llm:
        old = answers(llm)
        llm.update_weights(load_file(second / "model.safetensors"))
        assert answers(llm) == want
        llm.update_weights(pickled)
        assert answers(llm) == old
        llm.update_weights(second)
        assert answers(llm) == want


def failing(monkeypatch):
    """Let the sixth tensor of an update fail."""
    fill, filled = weight_update.Target.fill, []

    def broken(self, tensor):
        filled.append(self)
        if len(filled) > 5:
            raise RuntimeError("planted")
        fill(self, tensor)

    monkeypatch.setattr(weight_update.Target, "fill", broken)


def kv_cache(self):
    """Return the KV cache of any device."""
    return [tensor for group in self.runner.worker.caches for layer in group for tensor in layer.values()]


def test_a_failure_in_the_middle_restores_the_old_weights(tiny, monkeypatch):
    first, second = tiny
    for options in ({}, {"graph": "off"}, {"batch_invariant": True}):
        with engine(str(first), **options) as llm:
            before = answers(llm)
            with monkeypatch.context() as m:
                failing(m)
                with pytest.raises(RequestError, match="the old weights are in place again: RuntimeError: planted"):
                    llm.update_weights(second)
            assert answers(llm) == before
            assert llm.stats()["weights"]["version"] == 0


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_rows_survive_old_weights_in_the_kv_cache(tiny, monkeypatch, fails, kv):
    """An update may overwrite keys and values, except with kv=keep: open streams and cached prefixes stay right."""
    first, second = tiny
    monkeypatch.setattr(RunningWeights, "_replaceable", kv_cache)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with engine(str(first), num_kvcache_blocks=256) as llm:
        before = answers(llm)
        want = llm.generate([{"prompt_token_ids": PROMPTS[1]}], long, use_tqdm=False)[0].tokens
        stream = llm.stream({"prompt_token_ids": PROMPTS[1]}, long)
        got = list(next(stream).token_ids)
        if fails:
            with monkeypatch.context() as m:
                failing(m)
                with pytest.raises(RequestError, match="planted"):
                    llm.update_weights(second, kv=kv)
            overwritten = llm.stats()["preemptions"] > 0
            assert overwritten == (kv == "recompute")
            assert got + [token for part in stream for token in part.token_ids] == want
            assert tokens_of(answers(llm)) == tokens_of(before)
        else:
            llm.update_weights(second, kv=kv)
            got += [token for part in stream for token in part.token_ids]
            assert len(got) == len(want)
            assert tokens_of(answers(llm)) == tokens_of(expected(second)) != tokens_of(before)
        llm.check()


@pytest.mark.parametrize("fails", [True, False])
def test_tiers_store_no_block_that_old_weights_have_overwritten(tiny, tmp_path, monkeypatch, fails):
    """Blocks that tiers have not stored yet when an update begins, as with steps in flight, are stored before it."""
    first, second = tiny
    store = {"name": "disk", "options": {"path": str(tmp_path / "pages"), "bytes": 1 << 24}}
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drawn = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)

    def chosen(output):
        return [next(iter(of_token.values())).logprob for of_token in output.outputs[0].logprobs]

    with engine(str(first)) as llm:
        want = chosen(llm.generate([{"prompt_token_ids": PROMPTS[1]}], drawn, use_tqdm=False)[0])
    with engine(str(first), num_kvcache_blocks=256, kvstore=store) as llm:
        stream = llm.stream({"prompt_token_ids": PROMPTS[1]}, long)
        with monkeypatch.context() as m:
            m.setattr(llm.engine, "_turn_loads", lambda: None)
            next(stream)
        assert llm.engine.cache.tiers.backlog
        monkeypatch.setattr(RunningWeights, "_replaceable", kv_cache)
        with monkeypatch.context() as m:
            if fails:
                failing(m)
            with pytest.raises(RequestError, match="planted") if fails else contextlib.nullcontext():
                llm.update_weights(second)
        stream.close()
    with engine(str(first), num_kvcache_blocks=256, kvstore=store) as llm:
        monkeypatch.setattr(llm.engine.cache.tiers.choice, "loads", lambda *sizes: True)
        output = llm.generate([{"prompt_token_ids": PROMPTS[1]}], drawn, use_tqdm=False)[0]
        assert output.num_cached_tokens > 0
        assert chosen(output) == pytest.approx(want, abs=1e-4)


def test_spare_memory_keeps_values_and_is_zero_afterwards():
    memory = torch.full((4, 40), 7, dtype=torch.float16)
    spare = SpareMemory([memory])
    tensors = [torch.randn(5, 3), torch.arange(50, dtype=torch.int8), torch.randn(4, 4).t()]
    kept = [spare.keep(tensor) for tensor in tensors]
    assert [within(memory, copies) for copies in kept] == [[True], [True], [False]]
    assert_restored(tensors, kept)
    spare.clear()
    used = memory.flatten()[:64]
    assert not used.any() and (memory.flatten()[64:] == 7).all()


def test_spare_memory_divides_tensors_that_are_larger_than_its_pieces():
    memory = torch.zeros(3, 24, dtype=torch.float16)
    spare = SpareMemory(memory.unbind(), room=3000)
    tensors = [torch.randn(7, 3), torch.zeros(0), torch.randn(8)]
    assert_restored(tensors, [spare.keep(tensor) for tensor in tensors])
    assert not spare.added
    large = torch.randn(700)
    copies = spare.keep(large)
    assert within(memory, copies) == [True, False] and spare.added
    assert_restored([large], [copies])
    # neither the rest of the memory nor the rest of the room is enough
    again = torch.randn(700)
    assert_restored([again], [spare.keep(again)])


def within(memory, copies):
    """Return for each copy whether it lies in ``memory``."""
    end = memory.data_ptr() + memory.nbytes
    return [memory.data_ptr() <= copy.data_ptr() < end for _, copy in copies]


def assert_restored(tensors, kept):
    """Change tensors, write back the copies of their parts, and compare the values."""
    for tensor, copies in zip(tensors, kept, strict=True):
        want = tensor.clone()
        tensor.zero_()
        for part, copy in copies:
            part.copy_(copy)
        assert torch.equal(tensor, want)


def test_numbers_that_a_gpu_checks_once_it_has_them_leave_the_old_weights_in_place(tiny, tmp_path, monkeypatch):
    """The check after the write refuses the same tensors, by the same names, as the check before it."""
    monkeypatch.setattr(weight_update, "read_once", lambda tensor, device: True)
    monkeypatch.setattr(RunningWeights, "_replaceable", kv_cache)
    first, second = tiny
    tensors = load_file(second / "model.safetensors")
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with engine(str(first), num_kvcache_blocks=256) as llm:
        before = answers(llm)
        want = llm.generate([{"prompt_token_ids": PROMPTS[1]}], long, use_tqdm=False)[0].tokens
        stream = llm.stream({"prompt_token_ids": PROMPTS[1]}, long)
        got = list(next(stream).token_ids)
        numbers = {"model.norm.weight": torch.nan, "model.layers.1.self_attn.k_proj.weight": -torch.inf}
        for name, number in numbers.items():
            bad = tensors[name].clone()
            bad.view(-1)[3] = number
            with pytest.raises(RequestError, match=f"in place again.*{name}.*infinite numbers or NaN in float32"):
                llm.update_weights(changed(tensors, **{name: bad}))
        got += [token for part in stream for token in part.token_ids]
        assert got == want
        assert tokens_of(answers(llm)) == tokens_of(before)
        assert llm.stats()["weights"]["version"] == 0
        part = "model.layers.1.self_attn.q_proj.weight"
        nan = torch.full_like(tensors[part], torch.nan)
        llm.update_weights({part: nan}, partial=True, finite=False)
        other = "model.layers.1.self_attn.k_proj.weight"  # stored next to the numbers that were allowed
        llm.update_weights({other: tensors[other]}, partial=True)
        assert llm.update_weights(tensors) == 3
        assert tokens_of(answers(llm)) == tokens_of(expected(second))
    tied = tiny_dir(tmp_path / "tied", "qwen3", tie_word_embeddings=True)[0]
    weights = load_file(tied / "model.safetensors")
    head = torch.full_like(weights.pop("model.embed_tokens.weight"), torch.nan)
    with engine(str(tied)) as llm, pytest.raises(RequestError, match=r"lm_head.weight.*infinite numbers or NaN"):
        llm.update_weights({**weights, "lm_head.weight": head})


def test_a_refused_update_of_dropped_weights_leaves_an_earlier_one_in_place(tiny, monkeypatch):
    """No old weights could be restored after the write, so the numbers are checked before it."""
    monkeypatch.setattr(weight_update, "read_once", lambda tensor, device: True)
    first, second = tiny
    tensors = load_file(second / "model.safetensors")
    bad = torch.full_like(tensors["model.norm.weight"], torch.nan)
    with engine(str(first)) as llm:
        llm.sleep(2)
        assert llm.update_weights(tensors) == 1
        with pytest.raises(RequestError, match=r"model.norm.weight.*infinite numbers or NaN"):
            llm.update_weights(changed(tensors, **{"model.norm.weight": bad}))
        llm.wake()
        assert llm.stats()["weights"]["version"] == 1
        assert tokens_of(answers(llm)) == tokens_of(expected(second))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16])
def test_numbers_of_all_dtypes_are_checked(dtype):
    values = torch.ones(40, 3).to(dtype)
    assert bool(all_finite(values, dtype))
    if dtype.is_floating_point:
        values[7, 1] = torch.nan
        assert not bool(all_finite(values, dtype))


def test_weights_that_cannot_be_restored_end_the_engine(tiny, monkeypatch):
    first, second = tiny

    def broken(self):
        raise RuntimeError("planted")

    monkeypatch.setattr(WeightUpdate, "write", broken)
    monkeypatch.setattr(WeightUpdate, "restore", broken)
    with engine(str(first)) as llm:
        with pytest.raises(EngineDeadError, match="could not be restored"):
            llm.update_weights(second)
        with pytest.raises(EngineDeadError, match="could not be restored"):
            answers(llm)


# ---- planted faults: each must be found by a comparison above --------------------------------------------------------


def stale_part(self, part, param, tensor, load=Linear.load):
    """Leave one part of merged weights as it was."""
    if part != "k":
        load(self, part, param, tensor)


def keep_copy(self, params):
    """Leave the packed copies of a layer as they were."""


@pytest.mark.parametrize(
    ("owner", "method", "fault", "options"),
    [
        (Linear, "load", stale_part, {}),
        (RMSNorm, "load", lambda self, part, param, tensor: None, {}),
        (Linear, "refresh", keep_copy, {"graph": "off"}),
        (Linear, "refresh", keep_copy, {"batch_invariant": True}),
        (TiedLMHead, "refresh", keep_copy, {"batch_invariant": True}),
    ],
)
def test_a_stale_weight_is_found(tiny, tmp_path, monkeypatch, owner, method, fault, options):
    first, second = tiny
    if owner is TiedLMHead:
        first = tiny_dir(tmp_path / "tied", "qwen3", tie_word_embeddings=True)[0]
        second = written(first, tmp_path / "other", other_weights(first))
    want = expected(second, **options)
    with engine(str(first), **options) as llm:
        answers(llm)
        monkeypatch.setattr(owner, method, fault)
        llm.update_weights(second)
        assert answers(llm) != want


@quantized_on_cpu
def test_a_scheme_with_a_hidden_copy_is_refused(tiny, monkeypatch):
    from minivllm.plugins.quantizer.int8 import Int8Weight

    first, second = tiny
    finish, apply = Int8Weight.finish, Int8Weight.apply

    def copies(self):
        finish(self)
        self.native = None  # it would read the tensors themselves
        self.hidden = self.scale.clone()

    def multiplies(self, x, out=None, adapter=None):
        scale, self.scale = self.scale, self.hidden
        try:
            return apply(self, x, out, adapter)
        finally:
            self.scale = scale

    monkeypatch.setattr(Int8Weight, "finish", copies)
    monkeypatch.setattr(Int8Weight, "apply", multiplies)
    with engine(str(first), quantizer="int8", graph="off") as llm:
        before = answers(llm)
        with pytest.raises(RequestError, match="keeps a copy of its weight outside of its tensors"):
            llm.update_weights(second)
        assert answers(llm) == before
