"""The engine on a CUDA device: the same answers as transformers, at every depth of run-ahead."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import transformers
from greedy import hf_greedy, prompts, tokens
from test_taps import FAMILIES, hooked, steered_greedy

from minivllm import LLM, SamplingParams, Tap
from minivllm.testing.tiny import save, small_config, tiny_dir, tiny_model

pytestmark = pytest.mark.gpu


def engine(folder, **options):
    base = dict(
        skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=200, max_num_seqs=16, kvcache_block_size=16
    )
    return LLM(model=str(folder), device="cuda", **{**base, "max_num_batched_tokens": 256, **options})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 0},
        {"run_ahead": 3},
        {"max_num_batched_tokens": 16},
        {"num_kvcache_blocks": 10},
        {"num_kvcache_blocks": 10, "run_ahead": 3},
    ],
)
def test_greedy_tokens_are_those_of_transformers(family, options, tmp_path):
    model = tiny_dir(tmp_path, family, vocab_size=257)[2].cuda()
    items = prompts(257, (1, 15, 16, 17, 33, 70))
    want = []
    for p in items:
        ids = torch.tensor([p], device="cuda")
        keep = dict(attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, eos_token_id=None)
        want.append(model.generate(ids, pad_token_id=0, **keep)[0, len(p) :].tolist())
    with engine(tmp_path, **options) as llm:
        assert tokens(llm, items) == want
        assert tokens(llm, items) == want, "after a prefix hit"
        if options.get("num_kvcache_blocks") == 10:
            assert llm.stats()["preemptions"] > 0
        llm.engine.cache.check()


def test_windows_forks_host_rows_and_late_rows_work_ahead_of_the_host(tmp_path):
    window = dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=20, max_window_layers=2)
    model = tiny_dir(tmp_path, "qwen2", vocab_size=257, **window)[2]
    items = prompts(257, (5, 21, 75))
    want = [hf_greedy(model, p) for p in items]
    greedy = dict(temperature=0, max_tokens=32, ignore_eos=True)
    params = [
        SamplingParams(**greedy),
        SamplingParams(**greedy, choose_fn=lambda logits, ids: int(np.argmax(logits))),
        SamplingParams(**greedy, allowed_tokens_fn=lambda ids: range(257)),
    ]
    for ahead in (0, 1, 3):
        with engine(tmp_path, run_ahead=ahead) as llm:
            assert [o.tokens for o in llm.generate(items, params, use_tqdm=False)] == want
            branches = SamplingParams(n=4, seed=3, max_tokens=20, ignore_eos=True)
            four = llm.generate(items[1], branches, use_tqdm=False)[0]
            assert len({tuple(o.token_ids) for o in four.outputs}) == 4
            llm.engine.cache.check()


def test_a_stop_id_ends_a_row_although_the_host_is_ahead(tmp_path):
    tiny_dir(tmp_path, "qwen3", vocab_size=257)
    items = prompts(257, (9, 30))
    with engine(tmp_path, run_ahead=3) as llm:
        free = tokens(llm, items)
        stop = free[0][7]
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, stop_token_ids=[stop])
        out = llm.generate(items, params, use_tqdm=False)
        assert out[0].tokens == free[0][: free[0].index(stop) + 1]
        assert out[1].tokens == (free[1] if stop not in free[1] else free[1][: free[1].index(stop) + 1])


def test_auto_sizing_takes_the_memory_that_was_allowed(tmp_path):
    tiny_dir(tmp_path, "qwen3", vocab_size=257)
    with engine(tmp_path, num_kvcache_blocks=-1, gpu_memory_utilization=0.3) as llm:
        assert llm.stats()["blocks_total"] >= 16 * (256 // 16)
        assert torch.cuda.memory_reserved() < 0.31 * torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("options", [{}, {"run_ahead": 0}, {"run_ahead": 3}, {"graph": "off"}])
def test_masks_are_those_of_their_rows_in_captured_steps(options):
    pytest.importorskip("llguidance")
    requested = [
        {"choice": ["yes", "no"]},
        {"regex": "[0-9]{3}-[0-9]{4}"},
        {"json": {"type": "integer", "maximum": 99}},
        None,
    ]
    params = [
        SamplingParams(seed=i, max_tokens=12, logprobs=3 if i % 3 == 0 else None, structured_outputs=requested[i % 4])
        for i in range(24)
    ]
    with LLM(model="pocket", device="cuda", max_num_seqs=16, num_kvcache_blocks=400, **options) as llm:
        outputs = llm.generate(["Tell me."] * 24, params, use_tqdm=False)
        steps = llm.engine.executor.runner.graphs
        assert options.get("graph") == "off" or (steps.masks is not None and any(key[1][-1] for key in steps.samples))
    for i, output in enumerate(outputs):
        text = output.text
        assert output.error is None
        if i % 4 == 0:
            assert text in ("yes", "no")
        elif i % 4 == 1:
            assert len(text) == 8 and text[3] == "-" and (text[:3] + text[4:]).isdigit()
        elif i % 4 == 2 and output.finish_reason == "stop":
            assert int(text) <= 99
        else:
            assert len(output.tokens) == 12 or output.finish_reason == "stop"


def test_masks_are_not_run_over_by_what_the_device_still_does_with_their_memory():
    from minivllm.device.kernels.mask import DeviceMasks

    for _ in range(3):
        busy = [torch.randn(2048, 2048, device="cuda") for _ in range(4)]
        torch.cuda._sleep(200_000_000)
        for x in busy:
            x @ x
        del busy, x
        masks = DeviceMasks(8, 2048 * 32, torch.device("cuda"))
        wanted = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 2048)).astype(np.int32)
        masks.put(np.array([5, 0, 2]), wanted)
        torch.cuda.synchronize()
        assert masks.index.tolist() == [1, -1, 2, -1, -1, 0, -1, -1]
        assert np.array_equal(masks.mask[:3].cpu().numpy(), wanted)


def test_copies_of_steps_allocate_no_pinned_memory_once_it_is_allocated_ahead():
    from minivllm.device.worker.state import pin_ahead, to_host

    device = torch.device("cuda")
    torch.cuda.init()  # without it there are no statistics
    pin_ahead(device)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    for bytes_ in (1, 12, 40, 3000, 100_000, 3 << 20):
        assert to_host(torch.zeros(bytes_, dtype=torch.uint8, device=device)).is_pinned()
    torch.cuda.synchronize()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before


def test_a_capture_that_fails_leaves_its_thread_on_its_stream_and_the_next_one_works():
    from minivllm.device.worker.capture import GraphRecorder

    recorder, x, calls = GraphRecorder(), torch.zeros(8, device="cuda"), []
    first, _ = recorder.capture(lambda: x.add_(1))

    def raises():
        calls.append(x + 1)
        if len(calls) % 2 == 0:
            raise ValueError("in the second call")

    here = torch.cuda.current_stream()
    for wrong in (lambda: x.sum().item(), lambda: 1 / 0, raises):
        with pytest.raises((RuntimeError, ArithmeticError, ValueError)):
            recorder.capture(wrong)
        assert torch.cuda.current_stream() == here
    graph, y = recorder.capture(lambda: x + 2)
    x.fill_(3)
    first.replay()
    graph.replay()
    assert x.tolist() == [4.0] * 8 and y.tolist() == [6.0] * 8


def test_engines_in_threads_of_one_process_capture_side_by_side(tmp_path):
    tiny_dir(tmp_path, "qwen3", vocab_size=257)
    items = prompts(257, (3, 20, 40, 70))
    with engine(tmp_path, graph="off", batch_invariant=True) as llm:
        want = tokens(llm, items)
    found, failed = {}, []

    def play(i):
        try:
            with engine(tmp_path, batch_invariant=True, max_num_batched_tokens=64, max_num_seqs=4 + i) as llm:
                found[i] = [tokens(llm, items) for _ in range(6)]
                assert torch.cuda.current_stream() == torch.cuda.default_stream()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=play, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed
    assert found == {i: [want] * 6 for i in range(4)}


@pytest.mark.parametrize(
    "dtype, kv_format", [("float16", "int8"), ("float16", "fp8"), ("float16", "auto"), ("bfloat16", "int8")]
)
def test_invariant_bits_with_any_cache_depend_on_neither_the_block_size_nor_the_other_rows(dtype, kv_format):
    items = prompts(2000, (45, 35, 7, 60, 100, 33))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, detokenize=False)
    sizes = dict(max_model_len=256, max_num_seqs=8, num_kvcache_blocks=150, gpu_memory_utilization=0.1)
    base = dict(model="pocket", dtype=dtype, kv_format=kv_format, batch_invariant=True, **sizes)
    found = []
    for size, budget, alone in ((32, 1024, True), (16, 16, False), (64, 64, False)):
        with LLM(**base, enable_prefix_caching=False, kvcache_block_size=size, max_num_batched_tokens=budget) as llm:
            asks = [[item] for item in items] if alone else [items]
            answers = [answer for ask in asks for answer in llm.generate(ask, params, use_tqdm=False)]
            found.append([[{i: p.logprob for i, p in step.items()} for step in a.outputs[0].logprobs] for a in answers])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "options",
    [{}, {"run_ahead": 0}, {"run_ahead": 3}, {"num_kvcache_blocks": 14}, {"graph": "off"}, {"fuse": False}],
    ids=str,
)
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Cohere"])
def test_taps_in_captured_steps_are_those_of_transformers(name, options, tmp_path):
    cls = getattr(transformers, f"{name}ForCausalLM")
    values, branches = FAMILIES[name]
    model = tiny_model(small_config(cls.config_class, **{**values, "vocab_size": 257}), cls=cls)
    save(model, tmp_path)
    items, added = prompts(257, (40, 9, 33, 21)), np.linspace(-0.5, 0.5, 32)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with engine(tmp_path, **options) as llm:
        plain = tokens(llm, items)
        assert plain == [hf_greedy(model, p) for p in items]
        read = [Tap(point, read=True) for point in llm.tap_points()]
        taps = [read, [], [Tap("layers.0.residual", add=added), *read[:5]], []]
        for _ in range(2):
            outs = llm.generate(items, params, False, taps)
            assert [outs[i].tokens for i in (0, 1, 3)] == [plain[i] for i in (0, 1, 3)]
            assert outs[2].tokens == steered_greedy(model, items[2], 0, added) != plain[2]
            want = hooked(model, branches, items[0] + plain[0][:-1])
            want["logits"] = want["logits"][len(items[0]) - 1 :]
            for point, x in outs[0].taps.items():
                assert x.shape == want[point].shape and np.abs(x - want[point]).max() < 2e-3, point
        graphs = llm.engine.executor.runner.graphs
        if graphs is not None:
            from minivllm.device.worker.graphs import TappedKey

            assert not graphs.notes and any(isinstance(k, TappedKey) and k.read and k.steered for k in graphs.forwards)
        assert tokens(llm, items) == plain
        llm.engine.cache.check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_taps_of_the_fused_layers_of_half_precision_stay_near_those_of_separate_launches(dtype):
    """A model large enough for the kernels of products; values are float32 whatever the model computes in."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for options in ({}, {"graph": "off"}, {"graph": "off", "fuse": False}):
        with LLM(model="pocket", device="cuda", dtype=dtype, max_num_seqs=8, num_kvcache_blocks=200, **options) as llm:
            points = [p for p in llm.tap_points() if p.split(".")[-1] in ("q", "mlp", "residual", "norm", "embedding")]
            taps = [[Tap(p, read=True) for p in points], []]
            (out, _) = llm.generate(["Tell me a story."] * 2, params, False, taps)
            found.append(out)
    first, *others = found
    for other in others:
        n = next((i for i, (a, b) in enumerate(zip(first.tokens, other.tokens, strict=True)) if a != b), 12)
        for point, x in first.taps.items():
            y = other.taps[point]
            assert x.dtype == np.float32 and x.shape == y.shape
            same = len(first.prompt_token_ids) + n
            off = np.abs(x[:same] - y[:same]).max() / np.abs(y[:same]).max()
            assert off < 0.05, (point, off)
