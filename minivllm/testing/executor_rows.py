"""Tests of executors: rows that draw no token, rows with a guide, rows whose prompt is scored, and rows with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from minivllm.core.interfaces.plan import LENGTH, OVERSHOOT, StepPlan, StepResult

from .base import Seen, since
from .driver import NEAR, Driver, by_slot, check_result, check_scores, prompts
from .executor_reference import ExecutorReference

DRAFTS = 3  # most drafts of a row in a step


class ExecutorRows(ExecutorReference):
    """The tests of rows that do more, or less, than draw one token; a base class of the suite of executors."""

    started: Callable[..., AbstractContextManager[Driver]]

    @since(1, 0)
    def test_a_held_row_draws_nothing_and_gives_its_logprobs(self) -> None:
        """Check a row in ``StepPlan.held``, which draws no token, so that the host can choose one.

        Its count and flags are 0, even if its best token is a stop id.  The result has its k best log-probabilities.
        The row continues from the token that the host sends with a later delta.
        """
        a, b = prompts(6, 11)
        stop = self.greedy(a, 1)
        with self.started() as driver:
            driver.join(0, a, 20, stop=tuple(stop))
            driver.join(1, b, 20)
            plan = driver.submit({0: 6, 1: 11}, held=(0,), topk=3)
            driver.submit({1: 1})
            result, second = driver.collect()
            check_result(plan, result, driver.capacity.vocab_size)
            _check_nothing_drawn(result, 0)
            best = self.logprobs_after(a).topk(3)
            best_ids = best.indices.tolist()
            row = result.slots.tolist().index(0)
            logprobs = result.logprobs
            ids = logprobs.top_ids[row, :3].tolist()
            top = logprobs.top[row, :3]
            assert ids == best_ids, f"the 3 best tokens of a held row are {ids}: expected {best_ids}"
            assert np.allclose(top, best.values, atol=NEAR), f"log-probabilities {top}: expected {best.values}"
            self._check_other_row([result, second], b)
            self._check_continues(driver, 0, a, ids[1])

    def _check_other_row(self, results: Sequence[StepResult], prompt: list[int]) -> None:
        """Fail unless the row in slot 1 drew the tokens that follow its prompt."""
        found = [by_slot(result)[1] for result in results]
        expected = self.greedy(prompt, len(found))
        assert found == expected, "tokens of the other row"

    def _check_continues(self, driver: Driver, slot: int, prompt: list[int], token: int) -> None:
        """Send a token that the host chose for a slot, and fail unless the next step continues after it."""
        driver.token(slot, token)
        driver.submit({0: 1, 1: 1})
        (result,) = driver.collect()
        drawn = by_slot(result)[slot]
        (expected,) = self.greedy([*prompt, token], 1)
        assert drawn == expected, f"after token {token} of the host it draws {drawn}: expected {expected}"

    @since(1, 0)
    def test_a_host_row_gives_its_logits_and_takes_its_token_later(self) -> None:
        """Check a row in ``StepPlan.host``, for which the host chooses a token from the logits.

        The result has logits (float32 [len(host), V]) and count 0.  The host sends the token with a later plan.
        """
        a, b = prompts(6, 11)
        with self.started() as driver:
            driver.join(0, a, 20)
            driver.join(1, b, 20)
            plan = driver.submit({0: 6, 1: 11}, host=(0,))
            driver.submit({1: 1})
            result, second = driver.collect()
            vocab = driver.capacity.vocab_size
            check_result(plan, result, vocab)
            shape = np.shape(result.logits)
            assert shape == (1, vocab), f"logits {shape}: expected {(1, vocab)}"
            logits = result.logits[0]
            difference = logits - self.logits_after(a).numpy()
            worst = float(np.abs(difference).max())
            assert worst < 1e-3, f"logits differ from those of transformers by up to {worst:.2g}: allowed 1e-3"
            _check_nothing_drawn(result, 0)
            self._check_other_row([result, second], b)
            second_best = int(logits.argsort()[-2])
            self._check_continues(driver, 0, a, second_best)

    @since(2, 1)
    def test_a_row_with_a_guide_is_drawn_from_both(self) -> None:
        """Check a row with a guide (``StepPlan.guided``), another row that changes its distribution.

        The row draws from scale * (p - q) + q, where p and q are the log-softmax of the logits of the row and of the
        guide.  Its log-probabilities are computed from this distribution.  The guide gets the same token, stop flags
        and history.  A third row is not changed.
        """
        a, b, c = prompts(9, 4, 6)
        other = self.greedy(c, 4)
        histories = [list(a), list(b)]
        with self.started() as driver:
            if not driver.capacity.guides:
                pytest.skip("excused: its capacity has guides=False, so the engine gives it none")
            for slot, prompt in enumerate((a, b, c)):
                driver.join(slot, prompt, 4)
            for step in range(4):
                p, q = map(self.logprobs_after, histories)
                scale = 0.5 + step
                guided = scale * (p - q) + q
                token = int(guided.argmax())
                if step:
                    rows = {1: 1, 0: 1, 2: 1}
                else:
                    rows = {0: 9, 1: 4, 2: 6}
                plan = driver.submit(rows, guided=[(0, 1, scale)], topk=2)
                (result,) = driver.collect()
                check_result(plan, result, driver.capacity.vocab_size)
                tokens = by_slot(result)
                expected = {0: token, 1: token, 2: other[step]}
                assert tokens == expected, f"step {step}: tokens {tokens}; expected {expected}"
                flags = by_slot(result, "flags")
                end = LENGTH if step == 3 else 0
                assert set(flags.values()) == {end}, f"step {step}: flags {flags}"
                row = result.slots.tolist().index(0)
                best = guided.log_softmax(-1).topk(2)
                logprobs = result.logprobs
                found = logprobs.top_ids[row, :2].tolist()
                wanted = best.indices.tolist()
                assert found == wanted, f"{logprobs}"
                near = np.allclose(logprobs.top[row, :2], best.values, atol=NEAR * scale)
                assert near, f"{logprobs}"
                for history in histories:
                    history.append(token)

    @since(1, 0)
    def test_prompt_logprobs_come_with_the_chunks_that_compute_them(self) -> None:
        """Check the log-probabilities of prompt tokens, which come with the chunk that computes them.

        ``StepPlan.prompt`` has the row and the number of tokens to score.  The scores of these tokens, which follow the
        computed ones, have a rank and the k best tokens, row after row.  They are None for a step without such rows.
        """
        items = prompts(9, 14, 4)
        k = 2
        with self.started() as driver:
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            plans = [driver.submit({0: 5, 1: 6, 2: 4}, prompt={0: 5, 1: 6}, prompt_topk=k)]
            plans.append(driver.submit({0: 4, 1: 7, 2: 1}, prompt={0: 3, 1: 7}, prompt_topk=k))
            plans.append(driver.submit({0: 1, 1: 1, 2: 1}))
            results = driver.collect()
        tokens = []
        for plan, result in zip(plans, results, strict=True):
            check_result(plan, result, driver.capacity.vocab_size)
            self._check_prompt_scores(plan, result, items, k)
            of_slots = by_slot(result)
            tokens.append(of_slots[2])
        expected = self.greedy(items[2], 3)
        assert tokens == expected, f"the row that is not scored has {tokens}"

    def _check_prompt_scores(self, plan: StepPlan, result: StepResult, items: list[list[int]], k: int) -> None:
        """Fail unless a result has the scores of the prompt tokens that its plan names; ``items`` has the prompts."""
        scores = result.prompt
        step = f"step {plan.id}"
        if not len(plan.prompt):
            assert scores is None, f"{step}: prompt is {scores}, but the plan scores no row"
            return
        assert scores is not None, f"{step}: prompt is None, but the plan scores the rows {plan.prompt}"
        scored = 0
        for row, count in plan.prompt.tolist():
            slot = plan.slots[row]
            prompt = items[slot]
            first = int(plan.computed[row]) + 1
            for i in range(first, first + count):
                expected = self.logprobs_after(prompt[:i])
                token = prompt[i]
                place = f"{step}, slot {slot}, token {i} of the prompt"
                likelier = expected > expected[token]
                rank = 1 + int(likelier.sum())
                found = scores.rank[scored]
                assert found == rank, f"{place}: rank {found}, expected {rank}"
                check_scores(scores, scored, expected, token, k, place)
                scored += 1
        n = len(scores.chosen)
        assert scored == n, f"{step}: {n} scores, expected {scored}"

    @since(1, 0)
    def test_steps_with_drafts_give_the_tokens_of_steps_without(self) -> None:
        """Check that steps with drafts (``StepPlan.draft``) give the tokens of steps without drafts.

        The tokens of a row end before its first rejected draft, and the counts of later positions are 0.  ``drafted``
        has the number of drafts of each row.  A row whose end is among its drafts ends there.
        """
        seen = Seen()
        loop = [5, 9, 12, 40] * 4
        (other,) = prompts(7)
        options: dict[str, Any] = {"drafter": "minivllm/ngram", "num_speculative_tokens": DRAFTS, "speculate": "always"}
        with self.started(**options) as driver:
            driver.join(0, loop, 30)
            driver.join(1, other, 40)
            driver.submit({0: len(loop), 1: len(other)})
            (result,) = driver.collect()
            first = by_slot(result)
            tokens = {slot: [token] for slot, token in first.items()}
            expected = self.greedy(loop, 30)
            while len(tokens[0]) < 29:
                k = min(DRAFTS, 29 - len(tokens[0]))  # the last draft may be the last token of the row
                plan = driver.submit({0: 1, 1: 1}, drafts={0: k})
                (result,) = driver.collect()
                check_result(plan, result, driver.capacity.vocab_size)
                of_row = result.slots == 0
                n = _check_accepted(driver, result, k)
                accepted = result.tokens[of_row][:n]
                tokens[0] += accepted.tolist()
                tokens[1] += result.tokens[~of_row].tolist()
                done = len(tokens[0])
                assert tokens[0] == expected[:done], f"with drafts {tokens[0]}; without {expected}"
                flags = result.flags[of_row]
                ends = flags[flags != 0].tolist()
                wanted_ends = [LENGTH] if done == 30 else []
                assert ends == wanted_ends, f"flags {flags} after {done} of 30 tokens"
                seen["accepted"] += n - 1
                seen["rejected"] += int(result.drafted[0]) > n - 1
            wanted = self.greedy(other, len(tokens[1]))
            assert tokens[1] == wanted, "tokens of the row without drafts"
            for _ in range(31 - len(tokens[0])):
                driver.submit({0: 1, 1: 1})
                (result,) = driver.collect()
            last = by_slot(result, "flags")
            overshot = {slot for slot, flags in last.items() if flags & OVERSHOOT}
            assert overshot == {0}, f"flags {last} after the end of row 0"
        seen.require(accepted=3, rejected=3)


def _check_accepted(driver: Driver, result: StepResult, k: int) -> int:
    """Fail unless a result has valid counts for the row in slot 0, which has k drafts.

    Return the number of its accepted tokens.
    """
    assert len(result.drafted) == 1, f"drafted {result.drafted}: expected one row with drafts"
    n = driver.drafted(0, result)
    count = result.count[result.slots == 0]
    ones_first = np.arange(len(count)) < n
    assert (count == ones_first).all(), f"count {count}: expected ones, then zeros"
    assert 1 <= n <= 1 + k, f"{n} tokens of a step with {k} drafts"
    return n


def _check_nothing_drawn(result: StepResult, slot: int) -> None:
    """Fail unless the row of a slot drew no token: its count and flags are 0."""
    count = by_slot(result, "count")[slot]
    flags = by_slot(result, "flags")[slot]
    assert (count, flags) == (0, 0), f"the row must not draw: count {count}, flags {flags}, expected 0 and 0"
