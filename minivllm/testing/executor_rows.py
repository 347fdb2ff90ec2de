"""Executors: rows of a step that draw nothing, that are scored, or that bring drafts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from minivllm.core.interfaces.plan import LENGTH, OVERSHOOT

from .base import Seen, since
from .driver import NEAR, Driver, by_slot, check_result, prompts
from .executor_reference import ExecutorReference

DRAFTS = 3


class ExecutorRows(ExecutorReference):
    started: Callable[..., AbstractContextManager[Driver]]

    @since(1, 0)
    def test_a_held_row_draws_nothing_and_gives_its_logprobs(self) -> None:
        """``StepPlan.held``: count 0, no flag, even if the best token is a stop id of the row, and the k best
        log-probabilities; it goes on from the token that the host chooses from them, which comes with a delta."""
        a, b = prompts(6, 11)
        stop = (self.greedy(a, 1)[0],)
        with self.started() as driver:
            driver.join(0, a, 20, stop=stop)
            driver.join(1, b, 20)
            plan = driver.submit({0: 6, 1: 11}, held=(0,), topk=3)
            driver.submit({1: 1})
            result, second = driver.executor.collect(0)
            check_result(plan, result, driver.capacity.vocab_size)
            count, flags = by_slot(result, "count")[0], by_slot(result, "flags")[0]
            assert (count, flags) == (0, 0), f"a held row has count {count}, flags {flags}: want 0 and 0"
            want, row = self.logits_after(a).log_softmax(-1).topk(3), result.slots.tolist().index(0)
            ids, top = result.logprobs.top_ids[row, :3].tolist(), result.logprobs.top[row, :3]
            assert ids == want.indices.tolist(), f"the 3 best of a held row are {ids}: want {want.indices.tolist()}"
            assert np.allclose(top, want.values, atol=NEAR), f"log-probabilities {top}: want {want.values}"
            assert [by_slot(result)[1], by_slot(second)[1]] == self.greedy(b, 2), "the row beside it"
            driver.token(0, chosen := ids[1])
            driver.submit({0: 1, 1: 1})
            after = by_slot(driver.executor.collect(0)[0])[0]
            assert after == self.greedy([*a, chosen], 1)[0], "the row goes on from the token that the host chose"

    @since(1, 0)
    def test_a_host_row_gives_its_logits_and_takes_its_token_later(self) -> None:
        """``logits`` f32 [len(host), V]; count 0 until the host's token comes with a delta."""
        a, b = prompts(6, 11)
        with self.started() as driver:
            driver.join(0, a, 20)
            driver.join(1, b, 20)
            plan = driver.submit({0: 6, 1: 11}, host=(0,))
            driver.submit({1: 1})
            result, second = driver.executor.collect(0)
            check_result(plan, result, driver.capacity.vocab_size)
            shape = (1, driver.capacity.vocab_size)
            assert np.shape(result.logits) == shape, f"logits {np.shape(result.logits)}: want {shape}"
            worst = float(np.abs(result.logits[0] - self.logits_after(a).numpy()).max())
            assert worst < 1e-3, f"logits differ from transformers' by up to {worst:.2g}: allowed 1e-3"
            count, flags = by_slot(result, "count")[0], by_slot(result, "flags")[0]
            assert (count, flags) == (0, 0), f"the host has not chosen: count {count}, flags {flags}, want 0 and 0"
            assert [by_slot(result)[1], by_slot(second)[1]] == self.greedy(b, 2), "the row beside it"
            driver.token(0, chosen := int(result.logits[0].argsort()[-2]))  # the second best
            driver.submit({0: 1, 1: 1})
            after = by_slot(driver.executor.collect(0)[0])[0]
            assert after == self.greedy([*a, chosen], 1)[0], "the row goes on from the token that the host chose"

    @since(2, 1)
    def test_a_row_with_a_guide_is_drawn_from_both(self) -> None:
        """``StepPlan.guided``: of s * (p - q) + q, p and q the log-softmax of its logits and of its guide's and s its
        ``scale``.  The guide gets the same token, stop flags and history; the log-probabilities of the row are those
        of what it was drawn from; the row beside them hears nothing of it."""
        a, b, c = prompts(9, 4, 6)
        due, texts = self.greedy(c, 4), [list(a), list(b)]
        with self.started() as driver:
            if not driver.capacity.guides:
                pytest.skip("excused: its capacity says that it serves no guides, so the engine gives it none")
            for slot, prompt in enumerate((a, b, c)):
                driver.join(slot, prompt, 4)
            for step in range(4):
                p, q = (self.logits_after(text).log_softmax(-1) for text in texts)
                scale = 0.5 + step
                want = scale * (p - q) + q
                rows = {1: 1, 0: 1, 2: 1} if step else {0: 9, 1: 4, 2: 6}
                plan = driver.submit(rows, guided=[(0, 1, scale)], topk=2)
                (result,) = driver.executor.collect(0)
                check_result(plan, result, driver.capacity.vocab_size)
                got, token = by_slot(result), int(want.argmax())
                assert got == {0: token, 1: token, 2: due[step]}, f"step {step}: tokens {got}; want {token} twice"
                flags = by_slot(result, "flags")
                assert set(flags.values()) == {LENGTH * (step == 3)}, f"step {step}: flags {flags}"
                row, best = result.slots.tolist().index(0), want.log_softmax(-1).topk(2)
                assert result.logprobs.top_ids[row, :2].tolist() == best.indices.tolist(), f"{result.logprobs}"
                assert np.allclose(result.logprobs.top[row, :2], best.values, atol=NEAR * scale), f"{result.logprobs}"
                for text in texts:
                    text.append(token)

    @since(1, 0)
    def test_prompt_logprobs_come_with_the_chunks_that_compute_them(self) -> None:
        """``StepPlan.prompt``: of the tokens that follow the first ``count`` of a row, one row of the plan after the
        other, with their rank and the k best; None for steps that ask for none."""
        items, k = prompts(9, 14, 4), 2
        with self.started() as driver:
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            plans = [
                driver.submit({0: 5, 1: 6, 2: 4}, prompt={0: 5, 1: 6}, prompt_topk=k),
                driver.submit({0: 4, 1: 7, 2: 1}, prompt={0: 3, 1: 7}, prompt_topk=k),
                driver.submit({0: 1, 1: 1, 2: 1}),
            ]
            results = list(driver.executor.collect(0))
        for plan, result in zip(plans, results, strict=True):
            check_result(plan, result, driver.capacity.vocab_size)
            lp, at = result.prompt, 0
            assert (lp is not None) == bool(len(plan.prompt)), f"step {plan.id}: prompt is {lp}, asked {plan.prompt}"
            for row, count in plan.prompt.tolist():
                prompt, first = items[plan.slots[row]], int(plan.computed[row]) + 1
                for i in range(first, first + count):
                    want, token = self.logits_after(prompt[:i]).log_softmax(-1), prompt[i]
                    where = f"step {plan.id}, slot {plan.slots[row]}, token {i} of the prompt"
                    assert lp is not None and abs(lp.chosen[at] - want[token]) < NEAR, f"{where}: {lp}; {want[token]}"
                    rank, best = 1 + int((want > want[token]).sum()), want.topk(k)
                    assert lp.rank[at] == rank, f"{where}: rank {lp.rank[at]}, want {rank}"
                    assert lp.top_ids[at, :k].tolist() == best.indices.tolist(), f"{where}: {lp.top_ids[at]}"
                    assert np.allclose(lp.top[at, :k], best.values, atol=NEAR), f"{where}: {lp.top[at]}"
                    at += 1
            assert lp is None or at == len(lp.chosen), f"step {plan.id}: {len(lp.chosen)} scores, want {at}"
        got = [by_slot(r)[2] for r in results]
        assert got == self.greedy(items[2], 3), f"the row that is not scored has {got}"

    @since(1, 0)
    def test_steps_with_drafts_give_the_tokens_of_steps_without(self) -> None:
        """``StepPlan.draft``: a row's tokens are those before the first draft that does not hold, count 0 behind it;
        ``drafted`` says how many drafts each row had.  An end within the drafts ends the row there."""
        seen = Seen()
        loop, other = [5, 9, 12, 40] * 4, prompts(7)[0]
        more: dict[str, Any] = {"drafter": "minivllm/ngram", "num_speculative_tokens": DRAFTS, "speculate": "always"}
        with self.started(**more) as driver:
            for slot, prompt in ((0, loop), (1, other)):
                driver.join(slot, prompt, 40 if slot else 30)
            driver.submit({0: len(loop), 1: len(other)})
            got = {s: [t] for s, t in by_slot(driver.executor.collect(0)[0]).items()}
            due = {0: self.greedy(loop, 30), 1: self.greedy(other, 40)}
            while len(got[0]) < 29:
                k = min(DRAFTS, 29 - len(got[0]))  # the last of them may meet the end
                plan = driver.submit({0: 1, 1: 1}, drafts={0: k})
                (result,) = driver.executor.collect(0)
                check_result(plan, result, driver.capacity.vocab_size)
                assert len(result.drafted) == 1, f"drafted {result.drafted}: one row speculates"
                mine = result.slots == 0
                count, flags = result.count[mine], result.flags[mine]
                n = driver.drafted(0, result)
                assert (count == (np.arange(len(count)) < n)).all(), f"count {count}: want ones, then zeros"
                assert 1 <= n <= 1 + k, f"{n} tokens of a step with {k} drafts"
                got[0] += result.tokens[mine][:n].tolist()
                got[1] += result.tokens[~mine].tolist()
                assert got[0] == due[0][: len(got[0])], f"with drafts {got[0]}; without {due[0]}"
                ends = flags[flags != 0].tolist()
                assert ends == [LENGTH] * (len(got[0]) == 30), f"flags {flags} after {len(got[0])} of 30 tokens"
                seen["accepted"] += n - 1
                seen["rejected"] += int(result.drafted[0]) > n - 1
            assert got[1] == due[1][: len(got[1])], "the row beside it, which has no drafts"
            for _ in range(31 - len(got[0])):
                driver.submit({0: 1, 1: 1})
                after = by_slot(driver.executor.collect(0)[0], "flags")
            assert after[0] & OVERSHOOT and not after[1] & OVERSHOOT, f"flags {after} behind the end of row 0"
        seen.require(accepted=3, rejected=3)
