"""Ranks whose steps are captured, and go through memory that all reach, give the tokens of one process.

The fault that this is for: rank 0 draws by a capture, of a padded number of rows, and the others send the logits of the
rows that there are; or the other way round.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.plugins.executor import multiprocess
from minivllm.testing.tiny import tiny_dir

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"), pytest.mark.slow]
SIZE = 2
PROMPTS = [[(7 * j + i) % 60 for j in range(1 + 13 * i % 50)] for i in range(7)]
MORE = {2: {"repetition_penalty": 1.3}, 4: {"top_p": 0.9}, 5: {"logprobs": 2}}


def requested() -> list[SamplingParams]:
    """Rows that end one after another, so that most steps have fewer than a captured size; some are not drawn by a
    capture from the start."""
    return [
        SamplingParams(
            temperature=0 if i % 3 else 0.8, seed=i, max_tokens=4 + 2 * i, ignore_eos=True, **MORE.get(i, {})
        )
        for i in range(len(PROMPTS))
    ]


def answers(llm: LLM) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, requested(), use_tqdm=False)]


def test_rows_that_fill_no_captured_size_are_drawn_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # of the ranks; this process launches no kernel
    monkeypatch.setenv("RANK_CAPTURES", str(tmp_path))
    for rank in range(SIZE):
        with open(tmp_path / str(rank), "wb") as file:
            file.truncate(1 << 28)  # pages are taken when they are written
    tiny_dir(tmp_path / "model", "qwen3")
    options = dict(
        model=str(tmp_path / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        max_num_seqs=5,
        num_kvcache_blocks=60,
        kvcache_block_size=16,
        max_num_batched_tokens=64,
        max_model_len=96,
        fuse=False,
    )
    with LLM(**options, graph="off") as llm:
        want = answers(llm)
    monkeypatch.setattr(multiprocess, "WORKER", "rank_captures:main")
    ranks = {"name": "multiprocess", "options": {"timeout": 300, "start_timeout": 900}}
    more = dict(attention="cpu_captures:OnDevice", allow_targets=["cpu_captures"])
    with LLM(**options, **more, tensor_parallel_size=SIZE, executor=ranks) as llm:
        assert answers(llm) == want
        assert answers(llm) == want, "behind prefixes that the cache has"
