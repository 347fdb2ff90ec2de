"""``close()`` frees the model, the KV cache and the captures even while the front end is still referenced."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from dataclasses import replace

import pytest
import torch

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.plugins.executor.local import Local
from minivllm.plugins.executor.spec import LOCAL
from minivllm.testing.tiny import tiny_dir

OPTIONS = dict(skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=64, max_num_seqs=8, max_model_len=256)
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
GIB = 1 << 30


def watched(llm) -> dict[str, weakref.ref]:
    runner = llm.engine.executor.runner
    return {
        "model": weakref.ref(runner.model),
        "KV cache": weakref.ref(next(iter(runner.worker.caches[0][0].values()))),
        "columns": weakref.ref(runner.state),
        "runner": weakref.ref(runner),
    }


def alive(found: dict[str, weakref.ref]) -> list[str]:
    return [name for name, ref in found.items() if ref() is not None]


@pytest.mark.parametrize(
    "options",
    [{}, {"graph": "off"}, {"quantizer": "int8"}, {"drafter": "ngram", "num_speculative_tokens": 3}],
    ids=lambda o: ",".join(o) or "default",
)
def test_close_frees_model_and_cache_without_the_garbage_collector(options, tmp_path):
    tiny_dir(tmp_path, "qwen3", vocab_size=257)
    llm = LLM(model=str(tmp_path), device="cpu", **OPTIONS, **options)
    llm.generate([[1, 2, 3]] * 2, TEN, use_tqdm=False)
    found = watched(llm)
    gc.disable()
    try:
        llm.close()
        assert alive(found) == []
    finally:
        gc.enable()


def test_close_frees_model_and_cache_while_an_exception_of_the_engine_is_kept(tmp_path):
    tiny_dir(tmp_path, "qwen3", vocab_size=257)
    llm = LLM(model=str(tmp_path), device="cpu", **OPTIONS)
    runner = llm.engine.executor.runner

    def fail(plan):
        cache = runner.worker.caches
        raise KeyboardInterrupt(f"a step over {len(cache)} groups")

    found = watched(llm)
    runner.forward = fail
    with pytest.raises(KeyboardInterrupt) as kept:
        llm.generate([[1, 2, 3]], TEN, use_tqdm=False)
    assert kept.value.__traceback__ is not None
    llm.close()
    gc.collect()
    assert "KV cache" not in alive(found)


def test_async_close_frees_model_and_cache(tmp_path):
    tiny_dir(tmp_path, "qwen3", vocab_size=257)

    async def run() -> tuple[AsyncLLM, dict[str, weakref.ref]]:
        llm = AsyncLLM(model=str(tmp_path), device="cpu", **OPTIONS)
        async for _ in llm.generate([1, 2, 3], TEN):
            pass
        found = watched(llm)
        await asyncio.to_thread(llm.close)
        return llm, found

    llm, found = asyncio.run(run())
    gc.collect()
    assert llm is not None and alive(found) == []


# ---- on a GPU: the device's own count of free memory ---------------------------------------------------------------


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def open_and_close(folder, kind: str) -> object:
    """Run one engine of a kind and close it.  Return the objects to which a notebook would still refer."""
    options = dict(model=str(folder), device="cuda", **{**OPTIONS, "dtype": "bfloat16", "num_kvcache_blocks": -1})
    if kind == "AsyncLLM":

        async def run() -> AsyncLLM:
            llm = AsyncLLM(**options)
            async for _ in llm.generate([1, 2, 3], TEN):
                pass
            await asyncio.to_thread(llm.close)
            return llm

        return asyncio.run(run())
    options |= {
        "LLM": {},
        "int8": {"quantizer": "int8"},
        "ngram": {"drafter": "ngram", "num_speculative_tokens": 3},
        "model drafts": {
            "drafter": {"name": "model", "options": {"model": str(folder)}},
            "num_speculative_tokens": 3,
        },
        "process": {"executor": "process"},
        "uncaptured": {"graph": "off"},
        "int8 KV": {"kv_format": "int8"},
        "failed request": {},
        "failed start": {"max_num_batched_tokens": 64},
    }[kind]
    if kind == "failed start":
        with pytest.raises(Exception, match="planted") as kept, pytest.MonkeyPatch.context() as patch:
            patch.setattr("minivllm.device.worker.runner.Runner.native_steps", plant)
            LLM(**options)
        return kept
    llm = LLM(**options)
    try:
        if kind == "failed request":
            llm.engine.executor.runner.forward = plant
            answers = llm.generate([[1, 2, 3]] * 4, TEN, use_tqdm=False)
            assert {answer.outputs[0].finish_reason for answer in answers} == {"error"}
            return llm
        llm.generate([[1, 2, 3]] * 4, TEN, use_tqdm=False)
    finally:
        llm.close()
    return llm


def plant(*_):
    raise RuntimeError("planted")


KINDS = (
    "LLM",
    "AsyncLLM",
    "int8",
    "ngram",
    "model drafts",
    "process",
    "uncaptured",
    "int8 KV",
    "failed request",
    "failed start",
)


@pytest.mark.gpu
@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="other processes change the free memory of the card",
)
def test_ten_engines_in_turn_leave_the_free_memory_of_the_start(tmp_path):
    tiny_dir(tmp_path, "qwen3", vocab_size=257)
    torch.zeros(1, device="cuda")  # the context of the process itself remains
    start, kept, left = free(), [], {}
    for kind in KINDS:
        kept.append(open_and_close(tmp_path, kind))
        left[kind] = (start - free()) / GIB
    print("".join(f"\n{kind:16} {gib:6.3f} GiB less than at the start" for kind, gib in left.items()))
    assert max(left.values()) < 1.0, left


class FailsToStop(Local):
    """An executor whose ``stop`` raises."""

    spec = replace(LOCAL, impl=f"{__name__}:FailsToStop")

    def stop(self):
        super().stop()
        raise RuntimeError("the device does not answer")


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_an_executor_that_cannot_be_stopped_loses_no_record(kind, tmp_path):
    record = tmp_path / "run.json"
    llm = kind("pocket", executor=FailsToStop, record=str(record), device="cpu")
    stopped = []
    llm.engine.events.engine_stopped.subscribe(stopped.append)
    with pytest.raises(RuntimeError, match="does not answer"):
        llm.close()
    assert record.exists() and len(stopped) == 1
