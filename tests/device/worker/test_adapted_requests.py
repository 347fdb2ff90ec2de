"""Requests with adapters together with the other features, compared with engines of the merged weights."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time

import pytest

pytest.importorskip("peft")

import numpy as np
from adapters import PROMPT, engine, lora, write_adapter
from devices import DEVICE

from minivllm import AsyncLLM, LoRARequest, RequestError, SamplingParams, Tap
from minivllm.core.interfaces.adapter import AdapterContext
from minivllm.device.loading import adapter_files
from minivllm.device.loading.adapter_files import AdapterChecks
from minivllm.plugins.adapter.lora import LoRA
from minivllm.testing.tiny import quiet, save, tiny_dir


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Create folders of a tiny model, of two adapters, and of the model with each adapter merged."""
    from peft import PeftModel

    place = tmp_path_factory.mktemp("adapted")
    folder, _, model = tiny_dir(place / "base", "qwen3")
    found = {"base": folder}
    for n, name in enumerate(("one", "two")):
        found[name] = write_adapter(model, place / name, seed=n + 1, r=(4, 6)[n], lora_alpha=12)
    for name in ("one", "two"):
        with quiet():
            merged = PeftModel.from_pretrained(tiny_dir(place / "again", "qwen3")[2], found[name]).merge_and_unload()
        found[f"merged {name}"] = save(merged, place / f"merged {name}")
    return found


NAMES = (None, "one", "two")


def tokens_of(outputs):
    return [[out.token_ids for out in output.outputs] for output in outputs]


def compare(made, prompts, params, names=NAMES, generate=None, places=8, **options):
    """Run all prompts with all adapters in one batch, and compare with engines of the merged weights."""
    generate = generate or (lambda llm, prompts, params, requested: llm.generate(prompts, params, False, **requested))
    items = [{"prompt_token_ids": prompt} for prompt in prompts]
    pairs = [(name, item) for item in items for name in names]
    requested = [None if name is None else lora(made[name], NAMES.index(name)) for name, _ in pairs]
    with engine(made["base"], max_loras=places, **options) as llm:
        outputs = generate(llm, [item for _, item in pairs], params, {"lora_request": requested})
        assert all(out.error is None for out in outputs)
        stats = llm.stats()
        llm.engine.check()
    for name in names:
        merged = made["base"] if name is None else made[f"merged {name}"]
        with engine(merged, enable_lora=False, **options) as llm:
            expected = generate(llm, items, params, {})
        mine = [out for out, (other, _) in zip(outputs, pairs, strict=True) if other == name]
        assert tokens_of(mine) == tokens_of(expected), name
    return stats


def greedy(tokens=10, **more):
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


def prompts_of(count, length=19):
    rng = np.random.default_rng(0)
    return [rng.integers(3, 61, length).tolist() for _ in range(count)]


def test_chunked_prompts_prefix_hits_and_preemption_give_the_tokens_of_merged_weights(made):
    prompts = [*prompts_of(2, 30), *prompts_of(2, 30)]  # the second two find the prefixes of the first
    stats = compare(
        made, prompts, greedy(14), max_num_batched_tokens=16, num_kvcache_blocks=36, max_num_seqs=6, places=2
    )
    assert stats["prefix_hits"] and stats["preemptions"]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"beam_width": 3, "n": 2},
        {"repetition_penalty": 1.3, "min_tokens": 4},
        {"guidance_scale": 1.5, "negative_prompt_token_ids": [5, 6, 7]},
    ],
    ids=str,
)
def test_samples_beams_penalties_and_guides_of_a_request_have_its_adapter(made, more):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **more})
    options = {"strategies": ["guidance"]} if "guidance_scale" in more else {}
    compare(made, prompts_of(1), params, **options)


def test_last_products_of_fewer_tokens_use_the_adapters_of_these_tokens(made):
    """The last layer computes its last products only for tokens that draw, whose adapters are grouped again."""
    prompts = [{"prompt_token_ids": PROMPT[n:]} for n in (0, 3, 9)] * 2
    requested = [lora(made["one"], 1), None, lora(made["two"], 2), lora(made["two"], 2), lora(made["one"], 1), None]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found, sizes = [], []
    with engine(made["base"], max_num_batched_tokens=20, enable_prefix_caching=False) as llm:
        runner = llm.engine.executor.runner
        runner.native = None
        (memory,) = runner.adapters.memories
        begin = memory.begin
        memory.begin = lambda tokens: sizes.append(len(tokens)) or begin(tokens)
        for runner.selects in (True, False):
            found.append(tokens_of(llm.generate(prompts, params, False, lora_request=requested)))
            sizes.append(0)
    assert found[0] == found[1]
    selected, whole = sizes[: sizes.index(0)], sizes[sizes.index(0) + 1 : -1]
    assert any(size < before for before, size in itertools.pairwise(selected)) and len(selected) > len(whole)


def test_drafts_are_verified_with_the_adapter_of_their_row(made):
    repeated = [[7, 8, 9, 10] * 5, [20, 21, 22] * 6]
    stats = compare(made, repeated, greedy(16), drafter="ngram", speculate="always")
    assert stats["speculation"]["proposed"]


def test_steps_ahead_and_mixed_settings_give_the_tokens_of_merged_weights(made):
    compare(made, prompts_of(3), greedy(9), run_ahead=2)


def test_the_products_of_quantized_base_weights_get_the_adapter_added(made):
    """The merged weights would be rounded, so the reference adds the adapter to the rounded base weights."""
    params = greedy(1, logprobs=61)
    item = {"prompt_token_ids": PROMPT}
    requested = [None, lora(made["one"])]
    scores = {}
    for quantizer in ("none", "int8"):
        with engine(made["base"], quantizer=quantizer) as llm:
            outputs = llm.generate([item] * 2, params, False, lora_request=requested)
        rows = [out.outputs[0].logprobs[0] for out in outputs]
        scores[quantizer] = [np.array([row[i].logprob for i in range(61)]) for row in rows]
    error = np.abs(scores["int8"][0] - scores["none"][0]).max()
    assert 0 < error < 0.3, "the base weights are rounded"
    assert np.abs(scores["int8"][1] - scores["none"][1]).max() < 3 * error
    assert np.abs(scores["int8"][1] - scores["int8"][0]).max() > 1


def test_taps_read_the_values_of_the_adapted_model(made):
    point, prompt = "layers.1.residual", {"prompt_token_ids": PROMPT}
    with engine(made["base"]) as llm:
        requested = [None, lora(made["one"])]
        mine = llm.generate([prompt] * 2, greedy(2), False, taps=[Tap(point, read=True)], lora_request=requested)
    with engine(made["merged one"], enable_lora=False) as llm:
        expected = llm.generate([prompt], greedy(2), False, taps=[Tap(point, read=True)])
    base, adapted, merged = (out.outputs[0].taps[point] for out in (*mine, *expected))
    np.testing.assert_allclose(adapted, merged, atol=1e-4, rtol=1e-4)
    assert np.abs(base - adapted).max() > 0.1


def test_two_processes_share_the_layers_of_an_adapter(made):
    compare(made, prompts_of(2), greedy(6), tensor_parallel_size=2)


def test_a_row_has_the_same_bits_in_every_batch(made):
    params = greedy(4, logprobs=5)
    prompt = {"prompt_token_ids": PROMPT}
    with engine(made["base"], batch_invariant=True, enable_prefix_caching=False) as llm:
        alone = llm.generate([prompt], params, False, lora_request=lora(made["one"]))[0]
        requested = [lora(made["two"], 2), lora(made["one"]), None, lora(made["one"])]
        others = [{"prompt_token_ids": p} for p in prompts_of(2, 11)]
        batch = llm.generate([others[0], prompt, others[1], prompt], params, False, lora_request=requested)
    for out in (batch[1], batch[3]):
        assert out.outputs[0].logprobs == alone.outputs[0].logprobs


def test_more_adapters_than_places_take_turns(made, tmp_path):
    folders = []
    for n in range(5):
        folders.append(shutil.copytree(made["one" if n % 2 else "two"], tmp_path / f"copy {n}"))
    requested = [lora(folder, n + 1) for n, folder in enumerate(folders)] * 2
    prompts = [{"prompt_token_ids": PROMPT}] * len(requested)
    with engine(made["base"], max_loras=1, max_cpu_loras=2, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, greedy(6), False, lora_request=requested)
        stats = llm.stats()["adapters"]
        llm.engine.check()
        assert len(llm.engine.adapters.known) <= 2, "adapters that left host memory are forgotten"
    assert stats["replaced_on_device"] >= 4 and stats["in_host_memory"] <= 2 and stats["waiting"] == 0
    kinds = [[o.outputs[0].token_ids for o in outputs[n::2][:1]] for n in range(2)]
    for n, out in enumerate(outputs):
        assert out.outputs[0].token_ids == kinds[(n % 5) % 2][0], n
    assert kinds[0] != kinds[1]


@pytest.mark.parametrize("params", [{"n": 2, "seed": 1}, {"n": 3, "seed": 2}], ids=str)
def test_several_sequences_of_a_request_leave_host_memory_to_another_adapter(made, params):
    """All rows of a request are preempted while another adapter needs the only place in host memory."""
    requested = [lora(made["one"], 1), lora(made["two"], 2)]
    several = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, **params)
    prompt = {"prompt_token_ids": PROMPT}
    with engine(made["base"], max_loras=1, max_cpu_loras=1, max_num_seqs=4) as llm:
        want = llm.generate([prompt], several, False, lora_request=requested[0])
    with engine(made["base"], max_loras=1, max_cpu_loras=1, max_num_seqs=4) as llm:
        first = llm.stream(prompt, several, lora_request=requested[0])
        next(first)
        second = llm.stream(prompt, greedy(6), lora_request=requested[1])
        for _ in range(3):
            llm.engine.step()
        assert llm.engine.adapters.leaving is not None
        llm.engine.settle()
        while len(running := llm.engine.slots.running):
            llm.engine.planner.preempt(int(running[0]))
        until = time.monotonic() + 120  # a thread loads the adapter, and may run seldom on a busy machine
        while llm.engine.requests and time.monotonic() < until:
            if not llm.engine.step():
                time.sleep(llm.engine.idle())
        assert not llm.engine.requests, llm.stats()["adapters"]
        assert [list(second)[-1].finish_reason, list(first)[-1].finish_reason] == ["length"] * 2
        llm.engine.check()
        again = llm.generate([prompt], several, False, lora_request=requested[0])[0]
    assert tokens_of([again]) == tokens_of(want)


def test_an_adapter_gets_its_turn_beside_adapters_that_always_have_requests(made, tmp_path):
    """Host memory has room for two adapters, and each of them always has a running request."""
    folders = [shutil.copytree(made["one"], tmp_path / f"copy {n}") for n in range(3)]
    options = dict(enable_lora=True, max_loras=2, max_cpu_loras=2, max_num_seqs=10, dtype="float32", device=DEVICE)

    async def serve():
        done, ended = [], []
        async with AsyncLLM(str(made["base"]), skip_tokenizer_init=True, max_model_len=128, **options) as llm:

            async def one(number, tokens):
                requested = lora(folders[number], number + 1)
                prompt = {"prompt_token_ids": PROMPT}
                async for piece in llm.generate(prompt, greedy(tokens), lora_request=requested):
                    last = piece
                done.append(number)
                return last.output.outputs[0].token_ids

            async def always(number):
                while not ended and len(done) < 300:
                    assert await one(number, 24)

            busy = [asyncio.create_task(always(number)) for number in (0, 0, 0, 0, 1, 1, 1, 1)]
            while len(done) < 4:
                await asyncio.sleep(0.01)
            before = len(done)
            tokens = [await one(2, 6), await one(2, 6)]
            between = len(done) - before
            ended.append(True)
            await asyncio.gather(*busy)
            stats = await llm.stats()
            return tokens, between, stats["adapters"]

    tokens, between, stats = asyncio.run(serve())
    with engine(made["base"]) as llm:
        alone = llm.generate({"prompt_token_ids": PROMPT}, greedy(6), False, lora_request=lora(folders[2], 3))
    assert tokens == [alone[0].outputs[0].token_ids] * 2
    assert between < 45, "requests of other adapters overtake without end"
    assert stats["waiting"] == 0 and stats["loads"] >= 4


def test_a_wrong_adapter_fails_its_request_alone(made, tmp_path):
    config = json.loads((made["one"] / "adapter_config.json").read_text())
    broken = shutil.copytree(made["one"], tmp_path / "broken")
    (broken / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    prompts = [{"prompt_token_ids": PROMPT}] * 3
    with engine(made["base"]) as llm:
        requested = [lora(made["one"]), lora(broken, 2), None]
        good, bad, plain = llm.generate(prompts, greedy(4), False, lora_request=requested)
        assert good.error is None and plain.error is None and len(good.outputs[0].token_ids) == 4
        assert "has shape [4, 48], expected [5, 48]" in bad.error and bad.outputs[0].finish_reason == "error"
        fixed = LoRARequest("fixed", 2, str(made["two"]))
        again = llm.generate(prompts[:1], greedy(4), False, lora_request=fixed)[0]
        assert again.error is None, "the number of the failed adapter is free again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not implemented"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not implemented"),
        ({"bias": "all"}, "bias='all' is not implemented"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"peft_type": "IA3"}, "expected 'LORA'"),
        ({"r": 17}, "its rank is 17; expected at most max_lora_rank=16"),
        ({"rank_pattern": {"q_proj": 64}}, "its rank is 64"),
        ({"rank_pattern": {"(": 4}}, "a regular expression"),
        ({"lora_alpha": 0}, "expected a positive number"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_string": "now"}, "alora_invocation_string='now' is not implemented"),
        ({"method_of_tomorrow": {"x": 1}}, "method_of_tomorrow=.* is not implemented"),
    ],
    ids=str,
)
def test_settings_that_are_not_implemented_are_refused_by_name(made, tmp_path, change, message):
    check_adapter = AdapterChecks({"LORA": LoRA(None, AdapterContext(8, 16))})
    config = json.loads((made["one"] / "adapter_config.json").read_text())
    folder = shutil.copytree(made["one"], tmp_path / "changed")
    check_adapter(str(folder))
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(RequestError, match=message):
        check_adapter(str(folder))


def test_a_folder_is_read_again_only_after_a_change(made, tmp_path, monkeypatch):
    reads = []
    read = adapter_files.read_config
    monkeypatch.setattr(adapter_files, "read_config", lambda folder: reads.append(folder) or read(folder))
    check_adapter = AdapterChecks({"LORA": LoRA(None, AdapterContext(8, 16))})
    folder = shutil.copytree(made["one"], tmp_path / "changing")
    first = check_adapter(str(folder))
    assert check_adapter(str(folder)) == first
    assert len(reads) == 1
    shutil.copy(made["two"] / "adapter_config.json", folder)
    assert check_adapter(str(folder)).stamp != first.stamp
    assert len(reads) == 2
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(RequestError, match="a pickle, which is never opened"):
        check_adapter(str(folder))
    shutil.rmtree(folder)
    with pytest.raises(RequestError, match="no such folder"):
        check_adapter(str(folder))


def test_a_folder_that_changes_during_its_check_is_checked_again(made, tmp_path, monkeypatch):
    """Otherwise the new files would count as checked."""
    read = adapter_files.read_config
    folder = shutil.copytree(made["one"], tmp_path / "replaced")
    path = folder / "adapter_config.json"

    def replaced(name):
        config = read(name)
        path.write_text("[]")
        return config

    monkeypatch.setattr(adapter_files, "read_config", replaced)
    check_adapter = AdapterChecks({"LORA": LoRA(None, AdapterContext(8, 16))})
    check_adapter(str(folder))
    with pytest.raises(RequestError, match=r"adapter_config\.json is a list"):
        check_adapter(str(folder))


def test_pickles_missing_files_and_wrong_requests_are_refused(made, tmp_path):
    pickled = shutil.copytree(made["one"], tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    prompt = {"prompt_token_ids": PROMPT}
    with engine(made["base"]) as llm:
        for requested, message in (
            (lora(pickled), "a pickle, which is never opened"),
            (LoRARequest("x", 1, str(tmp_path / "none")), "no such folder"),
            (LoRARequest("x", 1, str(tmp_path)), "no adapter_config.json"),
            ("one", "expected a LoRARequest"),
            ([None, None], "2 adapters for 1 prompts"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate([prompt], greedy(2), False, lora_request=requested)
        llm.generate([prompt], greedy(2), False, lora_request=lora(made["one"]))
        for requested, message in (
            (LoRARequest("one", 2, str(made["two"])), "the name 'one' belongs to adapter 'one'"),
            (LoRARequest("two", 1, str(made["two"])), "the id 1 belongs to adapter 'one'"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate([prompt], greedy(2), False, lora_request=requested)
    with engine(made["base"], enable_lora=False) as llm, pytest.raises(RequestError, match="set enable_lora=true"):
        llm.generate([prompt], greedy(2), False, lora_request=lora(made["one"]))


def test_changed_files_are_refused_and_another_name_is_served(made, tmp_path):
    folder = shutil.copytree(made["one"], tmp_path / "changing")
    prompt = {"prompt_token_ids": PROMPT}
    with engine(made["base"]) as llm:
        first = llm.generate([prompt], greedy(4), False, lora_request=LoRARequest("v1", 1, str(folder)))
        shutil.copy(made["two"] / "adapter_model.safetensors", folder)
        shutil.copy(made["two"] / "adapter_config.json", folder)
        with pytest.raises(RequestError, match="have changed since it was loaded"):
            llm.generate([prompt], greedy(4), False, lora_request=LoRARequest("v1", 1, str(folder)))
        second = llm.generate([prompt], greedy(4), False, lora_request=LoRARequest("v2", 2, str(folder)))
        third = llm.generate([prompt], greedy(4), False, lora_request=LoRARequest("t", 3, str(made["two"])))
    assert tokens_of(first) != tokens_of(second) == tokens_of(third), "no prefix of the old weights is used"


def test_host_memory_of_adapters_is_bounded_while_no_step_runs(tmp_path):
    folder, _, model = tiny_dir(tmp_path / "model", "llama")
    paths = [write_adapter(model, tmp_path / str(n), seed=n) for n in range(6)]
    with engine(folder, max_loras=1, max_cpu_loras=2) as llm:
        ended = []
        for number, path in enumerate(paths, 1):
            llm.engine.load_adapter(lora(path, number), ended.append)
        end = time.monotonic() + 60
        while len(ended) < len(paths) and time.monotonic() < end:
            if not llm.engine.step():
                time.sleep(0.002)
        assert ended == [""] * len(paths)
        llm.engine.step()
        assert len(llm.engine.executor.runner.adapters.loaded) <= 2
