"""The limits of taps: bytes that are read, the range of a dtype, the memory of the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from greedy import prompts

from minivllm import LLM, RequestError, SamplingParams, Tap
from minivllm.testing.sim import at_rest
from minivllm.testing.tiny import tiny_dir

SMALL = dict(
    skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=96, max_num_seqs=6, kvcache_block_size=8
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_dir(tmp_path_factory.mktemp("models"))[0])


def test_who_reads_more_than_allowed_ends_with_an_error_and_nobody_else(folder):
    items = prompts(61, [10, 10, 10])
    taps = [[Tap("norm", read=True)], [Tap("norm", read=True)], []]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 5, 40)]
    with LLM(folder, **SMALL, max_tap_bytes=20 * 32 * 4, run_ahead=1) as llm:
        much, few, none = llm.generate(items, params, False, taps)
        assert much.finish_reason == "error" and "max_tap_bytes" in much.error and len(much.tokens) < 15
        assert [few.finish_reason, none.finish_reason, len(none.tokens)] == ["length", "length", 40]
        assert few.taps["norm"].shape == (14, 32)
        with pytest.raises(RequestError, match="max_tap_bytes"):
            llm.generate(prompts(61, [21]), params[1], False, taps[0])
        at_rest(llm.engine)


def test_logits_of_a_scored_prompt_count_before_it_is_computed(folder):
    tap = Tap("logits", read=True)
    plain = SamplingParams(temperature=0, max_tokens=1)
    with LLM(folder, **SMALL) as llm:
        width = llm.tap_points()["logits"]
    with LLM(folder, **SMALL, max_tap_bytes=20 * width * 4) as llm:
        (fits,) = llm.generate(prompts(61, [21]), plain, False, [tap])
        assert fits.taps["logits"].shape == (1, width)
        with pytest.raises(RequestError, match="max_tap_bytes"):
            llm.generate(prompts(61, [21]), replace(plain, prompt_logprobs=0), False, [tap])


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"beam_width": 2, "n": 2}], ids=str)
def test_a_row_for_whose_vector_there_is_no_memory_fails_alone_and_is_never_unsteered(folder, monkeypatch, extra):
    """The branches of the row are not steered without the vector either.

    With enough memory, the same request is steered.
    """
    prompt = prompts(61, [21])[0]
    tap = Tap("layers.0.mlp", add=np.linspace(-1, 1, 32))
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requested = replace(greedy, temperature=float("beam_width" not in extra), seed=1, **extra)
    with LLM(folder, **SMALL) as llm:
        steered = llm.generate([prompt], requested, use_tqdm=False, taps=[tap])[0]
    with LLM(folder, **SMALL) as llm:
        plain = llm.generate([prompt], greedy, use_tqdm=False)[0].tokens
        state = llm.engine.executor.runner.taps

        def full(rows, point):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(state, "_rows", full)
        failed, beside = llm.generate([prompt] * 2, [requested, greedy], use_tqdm=False, taps=[[tap], []])
        assert failed.finish_reason == "error" and "no memory left for what is added at layers.0.mlp" in failed.error
        assert not any(out.tokens for out in failed.outputs) and beside.tokens == plain
        monkeypatch.undo()
        assert llm.generate([prompt], greedy, use_tqdm=False)[0].tokens == plain  # the slot works afterwards
        again = llm.generate([prompt], requested, use_tqdm=False, taps=[tap])[0]
    assert again.error is None and [o.tokens for o in again.outputs] == [o.tokens for o in steered.outputs]


class Ranks:
    """A communicator of two ranks, whose other rank has memory or has none."""

    def __init__(self, room: bool) -> None:
        self.room, self.requested = room, 0

    def least(self, numbers: list[int]) -> list[int]:
        self.requested += 1
        return [min(int(number), int(self.room)) for number in numbers]


@pytest.mark.parametrize("other", [True, False])
def test_ranks_of_which_one_has_no_memory_for_a_vector_add_it_on_none(folder, monkeypatch, other):
    """Otherwise the ranks would capture different steps, with different calls to the others."""
    prompt, tap = prompts(61, [21])[0], Tap("layers.0.mlp", add=np.linspace(-1, 1, 32))
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, **SMALL) as llm:
        state = llm.engine.executor.runner.taps
        monkeypatch.setattr(state, "ranks", Ranks(other))
        for requested in (1, 2):
            (out,) = llm.generate([prompt], greedy, use_tqdm=False, taps=[[tap]])
            assert (out.error is None) == (list(state.steering) == ["layers.0.mlp"]) == other
            assert state.ranks.requested == (1 if other else requested)


@pytest.mark.parametrize(("dtype", "beyond", "most"), [("bfloat16", 3.4e38, 3.38e38), ("float16", 65540.0, 65500.0)])
def test_what_a_dtype_cannot_hold_is_refused_before_it_is_infinite(folder, dtype, beyond, most):
    """``scale`` is included, and so is the sum of several vectors at one point."""
    params, full = SamplingParams(max_tokens=2), np.full(32, most)
    with LLM(folder, **{**SMALL, "dtype": dtype}) as llm:
        for adds in ([Tap("norm", add=np.full(32, beyond))], [Tap("norm", add=full, scale=-0.6)] * 2):
            with pytest.raises(RequestError, match=f"out of the range of {dtype}"):
                llm.generate([[5]], params, False, adds)
        assert llm.generate([[5]], params, False, [Tap("norm", add=full, scale=1 / most)])[0].error is None
        # the request is accepted, whatever the model computes from it
        llm.generate([[5]], params, False, [Tap("norm", add=full)])


def test_a_prompt_that_all_outputs_together_may_not_hold_is_refused(folder):
    taps, prompt = [Tap("norm", read=True)], prompts(61, [20])[0]
    with LLM(folder, **{**SMALL, "max_tap_bytes": 3 * 20 * 32 * 4}) as llm:
        llm.generate([prompt], SamplingParams(n=2, max_tokens=2), False, taps)
        with pytest.raises(RequestError, match="more than 7680 bytes"):
            llm.generate([prompt], SamplingParams(n=4, max_tokens=2), False, taps)
