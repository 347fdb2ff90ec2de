"""``batch_invariant``: the token ids and the bits of the log-probabilities of a request are the same whatever it runs
beside, however its prompt is cut, and whatever the cache has been through."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams

POCKET = Path(__file__).parents[3] / "minivllm" / "pocket" / "model"
pytestmark = pytest.mark.skipif(not POCKET.is_dir(), reason="the model is not in this tree")
THINGS = ("fox", "lantern", "box", "river", "bird", "stone", "garden", "boat")


def prompts(n: int) -> list[list[int]]:
    """Return token ids of 5 to 100 tokens; every third prompt begins as the one before it."""
    rng, found = random.Random(7), []
    for i in range(n):
        ids = [rng.randrange(3, 2000) for _ in range(rng.choice((5, 17, 40, 64, 100)))]
        found.append((found[-1][:33] if i % 3 == 2 else []) + ids)
    return found


class Condition:
    """Results of the same requests under one dtype and mode, in different company."""

    def __init__(self, count: int, length: int, dtype: str, batch_invariant: bool) -> None:
        self.prompts, self.length = prompts(count), length
        self.options = dict(
            model="pocket",
            device="cpu",
            dtype=dtype,
            batch_invariant=batch_invariant,
            seed=0,
            max_model_len=512,
            num_kvcache_blocks=2048,
        )

    def params(self, i: int, n: int = 1) -> SamplingParams:
        """Return the parameters of request i: every other one is greedy, the others have a seed."""
        return SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            seed=100 + i,
            n=n,
            max_tokens=self.length,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
            top_p=0.95 if i % 4 == 2 else 1.0,
        )

    def run(self, llm: LLM, which, n: int = 1) -> dict[int, list]:
        items = [{"prompt_token_ids": self.prompts[i]} for i in which]
        got = llm.generate(items, [self.params(i, n) for i in which], use_tqdm=False)
        return {i: [bits(o) for o in sorted(r.outputs, key=lambda o: o.index)] for i, r in zip(which, got, strict=True)}

    def alone(self) -> dict[int, list]:
        """Run each request alone, the first time with an empty cache."""
        with LLM(**self.options) as llm:
            found = {}
            for i in range(len(self.prompts)):
                found |= self.run(llm, [i])
                llm.reset_prefix_cache()
            return found

    def batch(self) -> dict[int, list]:
        """Run the requests in a batch of 64 with others."""
        n = len(self.prompts)
        with LLM(**self.options, max_num_seqs=64) as llm:
            fill = [{"prompt_token_ids": [3 + i] * (1 + i % 7)} for i in range(64 - n % 64)]
            items = [{"prompt_token_ids": p} for p in self.prompts] + fill
            params = [self.params(i) for i in range(n)] + [self.params(i) for i in range(len(fill))]
            got = llm.generate(items, params, use_tqdm=False)
            return {i: [bits(got[i].outputs[0])] for i in range(n)}

    def prefix_hit(self) -> dict[int, list]:
        """Run the requests again, with most of each prompt in the cache."""
        with LLM(**self.options) as llm:
            every = list(range(len(self.prompts)))
            self.run(llm, every)
            before = llm.stats()["prefix_hits"]
            found = self.run(llm, every)
            assert llm.stats()["prefix_hits"] > before, "no power: nothing was found in the cache"
            return found

    def chunked(self, tokens: int) -> dict[int, list]:
        with LLM(**self.options, max_num_batched_tokens=tokens, max_num_seqs=min(tokens, 8)) as llm:
            return self.run(llm, range(len(self.prompts)))

    def preempted(self) -> dict[int, list]:
        """Run the requests in a pool that holds several prompts but not their growth, with other block sizes too."""
        pool = (max(map(len, self.prompts)) + self.length) // 4 + 12
        options = {**self.options, "num_kvcache_blocks": pool, "kvcache_block_size": 4, "max_num_seqs": 16}
        with LLM(**options) as llm:
            found = self.run(llm, range(len(self.prompts)))
            assert llm.stats()["preemptions"] > 0, "no power: nothing was preempted"
            return found

    def evicted(self) -> dict[int, list]:
        """Run the requests after others have evicted their blocks."""
        options = {**self.options, "num_kvcache_blocks": (133 + self.length) // 16 + 2, "max_num_seqs": 1}
        with LLM(**options) as llm:
            for _ in range(2):
                found = self.run(llm, range(len(self.prompts)))
            return found

    def four(self) -> dict[int, list]:
        """Run four samples of each request together; the first sample is the request itself."""
        with LLM(**self.options) as llm:
            return self.run(llm, range(len(self.prompts)), n=4)

    def four_alone(self) -> dict[int, list]:
        with LLM(**self.options) as llm:
            found = {}
            for i in range(len(self.prompts)):
                found |= self.run(llm, [i], n=4)
                llm.reset_prefix_cache()
            return found

    def table(self) -> dict[str, int]:
        """Count the requests whose tokens or bits differ from those alone, by condition."""
        want, four = self.alone(), self.four()
        differ = lambda got, want: sum(got[i] != want[i] for i in want)  # noqa: E731
        return {
            "batch of 64": differ(self.batch(), want),
            "prefix hit": differ(self.prefix_hit(), want),
            "chunks of 16": differ(self.chunked(16), want),
            "chunks of 64": differ(self.chunked(64), want),
            "preemption": differ(self.preempted(), want),
            "eviction and refill": differ(self.evicted(), want),
            "n = 4, the first": differ({i: x[:1] for i, x in four.items()}, want),
            "n = 4, all of them": differ(four, self.four_alone()),
        }


def bits(output) -> tuple:
    """Return token ids, and each log-probability as its four bytes."""
    steps = [sorted((t, struct.pack("<f", lp.logprob)) for t, lp in step.items()) for step in output.logprobs]
    return tuple(output.token_ids), steps


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_some_requests_have_the_same_bits_in_any_company(dtype, one_thread):
    here = Condition(4, 6, dtype, True)
    want = here.alone()
    assert here.preempted() == want, "with preemption"
    assert here.chunked(16) == want, "in chunks of 16"
    if dtype == "float32":
        assert here.batch() == want, "in a batch of 64"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forty_requests_have_the_same_bits_in_any_company(dtype):
    table = Condition(40, 12, dtype, True).table()
    assert not any(table.values()), table


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_mode_the_same_requests_show_a_difference(dtype):
    table = Condition(40, 12, dtype, False).table()
    if not any(table.values()):
        pytest.skip("no power: on this machine the bits are the same without the mode, too")
    assert sum(table.values()) > 0, table
