"""Garbage collections scan no objects of a start, and all objects once an engine is closed or deleted.  Requests leave
no garbage."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.frontend import garbage
from minivllm.frontend.garbage import exclude_present
from minivllm.testing.tiny import tiny_dir

OPTIONS = dict(dtype="float32", device="cpu", num_kvcache_blocks=8, max_model_len=32, skip_tokenizer_init=True)


class Cycle:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Let engines of other tests exclude nothing."""
    monkeypatch.setattr(garbage, "_excluded", set())
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def scanned(one) -> bool:
    """Return whether collections scan an object."""
    return any(other is one for other in gc.get_objects())


def freed(ref) -> bool:
    """Return whether the object of a weak reference is freed by a collection at the latest."""
    gc.collect()
    return ref() is None


@pytest.mark.parametrize("ends", ["closed", "deleted"])
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_collections_scan_no_objects_of_a_start_until_the_engine_ends(tmp_path, kind, ends):
    tiny_dir(tmp_path, "qwen3")
    garbage_before = weakref.ref(Cycle())
    llm = kind(model=str(tmp_path), **OPTIONS)
    engine = weakref.ref(llm.engine)
    assert garbage_before() is None and not scanned(llm.engine) and not scanned(llm)
    later = Cycle()
    assert scanned(later)
    if ends == "closed" or kind is AsyncLLM:  # its thread runs until it is closed
        llm.close()
        assert scanned(llm.engine)
    del llm
    assert freed(engine) and gc.get_freeze_count() == 0


class Owner:
    pass


def test_the_end_of_one_of_several_engines_includes_all_objects():
    """Garbage of that engine is among the objects that are excluded for the others."""
    owners = [Owner(), Owner()]
    ends = [exclude_present(owner) for owner in owners]
    cycle = weakref.ref(kept := Cycle())
    third = Owner()
    ends.append(exclude_present(third))
    del kept
    assert not freed(cycle)
    ends[0]()
    assert freed(cycle) and gc.get_freeze_count() == 0
    fourth = Owner()
    exclude_present(fourth)
    for end in ends:  # of engines since whose end others have started
        end()
    assert not scanned(fourth)
    del fourth
    assert gc.get_freeze_count() == 0


def test_objects_that_the_program_has_excluded_itself_stay_so():
    own = Cycle()
    gc.freeze()
    later = Cycle()
    owner = Owner()
    end = exclude_present(owner)
    assert not scanned(own) and scanned(later)
    end()
    assert not scanned(own)


def test_nothing_is_collected_or_excluded_if_the_program_collects_by_itself():
    gc.disable()
    cycle = weakref.ref(Cycle())
    exclude_present(Owner())
    assert cycle() is not None and gc.get_freeze_count() == 0


STRATEGIES = "single", "parallel", "beam", "guidance"


@pytest.fixture(scope="module")
def llm():
    with LLM("pocket", device="cpu", max_num_seqs=8, num_kvcache_blocks=64, strategies=list(STRATEGIES)) as made:
        yield made


def garbage_of(call) -> list[str]:
    """Return the types of the objects that only a garbage collection frees after a second call of a function."""
    call()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return [type(one).__qualname__ for one in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


PARAMS = {
    "one": {},
    "scored": {"logprobs": 2, "prompt_logprobs": 1, "stop": ["badger"]},
    "branches": {"n": 3, "temperature": 1.0},
    "beams": {"n": 2, "beam_width": 3},
    "guide": {"guidance_scale": 1.5, "negative_prompt": "No"},
    "grammar": {"structured_outputs": {"choice": ["one", "two"]}},
}


@pytest.mark.parametrize("name", PARAMS)
def test_an_ended_request_is_freed_without_a_collection(llm, name):
    params = SamplingParams(max_tokens=6, **PARAMS[name])
    assert garbage_of(lambda: llm.generate("Once upon a time", params, use_tqdm=False)) == []


@pytest.mark.parametrize("ends", ["by itself", "aborted"])
def test_an_ended_stream_is_freed_without_a_collection(llm, ends):
    def read():
        stream = llm.stream("Once upon a time", SamplingParams(max_tokens=6))
        if ends == "aborted":
            next(stream)
            stream.close()
        else:
            assert list(stream)[-1].output.outputs[0].token_ids

    assert garbage_of(read) == []


def test_an_embedding_is_freed_without_a_collection(llm):
    assert garbage_of(lambda: llm.embed("Once upon a time", use_tqdm=False)) == []


def test_an_output_stays_complete_after_the_end_of_its_request(llm):
    """It is made when the request ends, before the sequences are dropped."""
    params = SamplingParams(max_tokens=6, n=2, beam_width=3, logprobs=1, prompt_logprobs=1)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    assert output.finished and output.error is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert [one.index for one in output.outputs] == [0, 1] and output.outputs[0].score >= output.outputs[1].score
    assert all(len(one.logprobs) == len(one.token_ids) > 0 for one in output.outputs)


def test_an_ended_request_of_async_llm_is_freed_without_a_collection():
    async def main():
        async with AsyncLLM("pocket", device="cpu", max_num_seqs=8, num_kvcache_blocks=64) as llm:

            async def read():
                async for _ in llm.generate("Once upon a time", SamplingParams(max_tokens=6)):
                    pass
                await llm.stats()  # the engine's thread has left the step

            await read()
            gc.collect()
            gc.disable()
            await read()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = [type(one).__qualname__ for one in gc.garbage]
            gc.set_debug(0)
            gc.garbage.clear()
            return [name for name in found if name in ("Tracked", "Request", "Seq", "SequenceText")]

    assert asyncio.run(main()) == []
