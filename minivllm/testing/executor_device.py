"""Tests of executors whose device runs steps later than the host submits them, in captured steps of a few sizes.

A step must read the data that was there when it was submitted.  Its result must not change later, and rows that are
not in the step must not change.  The tests submit steps as far ahead as the host can plan them, and collect the
results at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import numpy as np

from minivllm.core.interfaces.plan import StepPlan, StepResult

from .base import since
from .driver import BLOCK, SLOTS, Driver, by_slot, check_logprobs, check_result, prompts
from .executor_reference import ExecutorReference
from .faulty import FIRST_TALLY

VOCAB = 64  # number of bits of a mask, which is more than the tokens of the tiny model


def tally(n: int, first: int = 0) -> list[int]:
    """Return the next n tokens of a row that draws the count of its earlier tokens (``faulty.CountingProcessor``).

    The row has already drawn ``first`` tokens.
    """
    start = FIRST_TALLY + first
    return list(range(start, start + n))


def masks(*allowed: Sequence[int]) -> np.ndarray:
    """Return token masks, int32 [n, 2]; mask j allows exactly the tokens ``allowed[j]``."""
    bits = np.zeros((len(allowed), VOCAB), bool)
    for row, tokens in zip(bits, allowed, strict=True):
        row[list(tokens)] = True
    packed = np.packbits(bits, axis=1, bitorder="little")
    return packed.view("<i4")


def late_slots(plan: StepPlan) -> list[int]:
    """Return the slots of the rows of a step whose masks come after the plan, in the order of the masks."""
    drawing = plan.slots[plan.samples]
    return drawing[plan.late].tolist()


def masks_of(allowed: Mapping[int, Sequence[int]], slots: Sequence[int]) -> np.ndarray:
    """Return the token masks of some slots; ``allowed`` has the tokens of each slot."""
    of_slots = [allowed[slot] for slot in slots]
    return masks(*of_slots)


def drawn(results: Sequence[StepResult]) -> dict[int, list[int]]:
    """Return slot -> drawn tokens of some steps in order; only rows with count 1 draw.  No step may have failed."""
    found: dict[int, list[int]] = {}
    for result in results:
        assert not result.errors, f"step {result.id} failed: {result.errors}"
        counts = by_slot(result, "count")
        for slot, token in by_slot(result).items():
            tokens = found.setdefault(slot, [])
            tokens += [token] * counts[slot]
    return found


class ExecutorDevice(ExecutorReference):
    """The tests of steps that run while the host plans later ones."""

    started: Callable[..., AbstractContextManager[Driver]]

    def drivers(self) -> Iterator[Driver]:
        """Yield a started executor for each way to run steps: eager, and on a GPU also captured in CUDA graphs."""
        with self.started() as driver:
            yield driver
        if self.place().startswith("cuda") and find_spec("triton") is not None:
            with self.started(attention="minivllm/triton") as driver:
                yield driver

    # ---- masks ---------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_each_late_step_draws_under_its_own_masks(self) -> None:
        """Check that each step with token masks draws under its own masks, in prompt and decode steps.

        The masks of a second step, in other memory, are supplied before the result of the first step is collected.
        Rows and their number change from step to step.  The memory of ``mask_memory`` is written again after the
        result has come.
        """
        items = prompts(5, 9, 12)
        for driver in self.drivers():
            known = [list(prompt) for prompt in items]
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            first = driver.submit({0: 5}, late=(0,))
            second = driver.submit({1: 9}, late=(1,))
            memory = driver.executor.mask_memory(1, 2)
            memory[:] = masks([7, 8])
            driver.supply(first, memory)
            other_memory = masks([50, 51])
            driver.supply(second, other_memory)
            result, second_result = driver.collect()
            self._check_masked(result, {0: [7, 8]}, known)
            self._check_masked(second_result, {1: [50, 51]}, known)
            driver.submit({2: 12})
            of_slots = drawn(driver.collect())
            known[2] += of_slots[2]
            memory = driver.executor.mask_memory(3, 2)
            for n, late in enumerate([(0, 1, 2), (2,), (1, 2), (0, 2), (0, 1, 2)]):
                self._check_late(driver, late, memory, n, known)

    def _check_late(
        self, driver: Driver, late: Sequence[int], memory: np.ndarray, n: int, known: list[list[int]]
    ) -> None:
        """Run a step of three rows, whose late masks are written to ``memory``, and check its tokens.

        ``n`` chooses the masks.  ``known`` has the tokens of each slot.
        """
        plan = driver.submit({0: 1, 1: 1, 2: 1}, late=late)
        allowed = {}
        for slot in late:
            allowed[slot] = [3 + n, 20 + 5 * slot + n, 55 - n]
        used = memory[: len(late)]
        used[:] = masks_of(allowed, late_slots(plan))
        driver.supply(plan, used)
        (result,) = driver.collect()
        memory[:] = 0
        self._check_masked(result, allowed, known)

    def _check_masked(self, result: StepResult, allowed: dict[int, list[int]], known: list[list[int]]) -> None:
        """Fail unless each row drew its most likely token, among the allowed tokens of its slot if there are any.

        The drawn tokens are appended to ``known``, the tokens of each slot.
        """
        assert not result.errors, f"step {result.id} failed: {result.errors}"
        for slot, token in by_slot(result).items():
            if slot in allowed:
                expected = self.likeliest(known[slot], allowed[slot])
                condition = f"under its mask {allowed[slot]}"
            else:
                (expected,) = self.greedy(known[slot], 1)
                condition = "without a mask"
            assert token == expected, (
                f"step {result.id}, slot {slot}: drew {token}; the most likely token {condition} is {expected}"
            )
            known[slot].append(token)

    @since(1, 0)
    def test_the_mask_memory_of_one_is_not_anothers(self) -> None:
        """Check that two executors have different mask memory.

        The masks of both are written before either of them draws.
        """
        a, b = prompts(6, 9)
        cases = [(a, [7, 9]), (b, [40, 41])]
        tokens = []
        with self.started() as first, self.started() as second:
            waiting = []
            for driver, (prompt, allowed) in zip((first, second), cases, strict=True):
                driver.join(0, prompt, 20)
                plan = driver.submit({0: len(prompt)}, late=(0,))
                memory = driver.executor.mask_memory(1, 2)
                memory[:] = masks(allowed)
                waiting.append((driver, plan, memory))
            for driver, plan, memory in waiting:
                driver.supply(plan, memory)
                of_slots = drawn(driver.collect())
                tokens += of_slots[0]
        expected = []
        for prompt, allowed in cases:
            expected.append(self.likeliest(prompt, allowed))
        assert tokens == expected, f"the executors draw {tokens}: expected {expected}"

    # ---- rows and blocks -------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_rows_that_are_not_in_a_step_are_left_alone(self) -> None:
        """Check steps of every number of rows while all slots have a sequence.

        An executor may pad a step to a captured size.  It must not draw, store or count anything for a row that is not
        in the step, nor twice for a row of the step.
        """
        items = prompts(*range(3, 3 + SLOTS))
        counting = set() if self.made_up else {0, 4, SLOTS - 1}
        for driver in self.drivers():
            lengths = {}
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 40, tally=slot in counting)
                lengths[slot] = len(prompt)
            driver.submit(lengths)
            steps: Counter[int] = Counter()  # steps of each slot
            for n in range(1, SLOTS + 1):
                for start in (0, 3, 6):
                    slots = [(start + i) % SLOTS for i in range(n)]
                    driver.submit(dict.fromkeys(slots, 1))
                    steps.update(slots)
            tokens = drawn(driver.collect())
            for slot, prompt in enumerate(items):
                n = 1 + steps[slot]
                expected = tally(n) if slot in counting else self.greedy(prompt, n)
                assert tokens[slot] == expected, f"slot {slot}: drew {tokens[slot]}, expected {expected}"

    @since(1, 0)
    def test_a_step_reads_the_table_that_came_with_it(self) -> None:
        """Check that a step uses the block table of its own plan.

        A row gets blocks one by one, in a slot whose last sequence had other blocks.  Two rows exchange their blocks
        while steps are in flight: every source of a copy must be read before a block is written.
        """
        old, a, b = prompts(30, 6, 14)
        for driver in self.drivers():
            # the table of slot 0 still names the old blocks, which now belong to the row in slot 1
            driver.join(0, old, 2, pile=1)
            driver.submit({0: 30})
            driver.leave(0)
            driver.join(0, a, 26, blocks=2)
            driver.join(1, b, 18)
            driver.submit({0: 6, 1: 14})
            for length in range(6, 18):
                block, offset = divmod(length, BLOCK)
                if offset == 0:
                    driver.give(0, [block])
                driver.submit({0: 1, 1: 1})
            for to, source in ((0, 1), (1, 0)):
                driver.copy(source, to, 8)
                driver.give(source, range(8), pile=to)
            for _ in range(5):
                driver.submit({0: 1, 1: 1})
            tokens = drawn(driver.collect())
            first_tokens = self.greedy(old, 1) + self.greedy(a, 18)
            expected = {0: first_tokens, 1: self.greedy(b, 18)}
            assert tokens == expected, f"tokens by slot: {tokens}; expected {expected}"

    @since(1, 0)
    def test_a_row_that_ended_stores_nothing_in_blocks_of_others(self) -> None:
        """Check that a row that has ended does not write to blocks of other rows.

        Later steps may have positions for which the row has no block.  Its table has there the blocks of the slot's
        last sequence, which now belong to another row.
        """
        old, a, b = prompts(30, 5, 30)
        for driver in self.drivers():
            driver.join(0, old, 20, pile=1)
            driver.submit({0: 30})
            driver.leave(0)
            driver.join(1, b, 20)
            driver.join(0, a, 3)
            driver.submit({0: 5, 1: 30})
            for _ in range(19):
                driver.submit({0: 1, 1: 1})
            tokens = drawn(driver.collect())
            wanted = self.greedy(old, 1) + self.greedy(a, 3)
            assert tokens[0] == wanted, f"the row that ended has {tokens[0]}"
            expected = self.greedy(b, 20)
            assert tokens[1] == expected, f"the row that now owns the blocks has {tokens[1]}: expected {expected}"

    # ---- columns -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_branch_begins_as_its_source_was(self) -> None:
        """Check that a branch (``Delta.fork``) has the history, keys and processor columns of its source at the fork.

        The source leaves with the same delta, and its slot gets a new sequence.  The branch runs only some steps later.
        """
        a, b, c = prompts(6, 9, 11)
        columns = not self.made_up
        for driver in self.drivers():
            driver.join(0, a, 20, tally=columns)
            driver.join(1, b, 20)
            driver.submit({0: 6, 1: 9})
            driver.submit({0: 1, 1: 1})
            driver.fork(0, 4, int(columns))  # generated tokens depend on the sample number of the branch
            driver.fork(1, 5, int(columns))
            driver.leave(0)
            driver.submit({1: 1})
            driver.join(0, c, 20)
            driver.submit({0: 11, 1: 1})
            for _ in range(3):
                driver.submit({0: 1, 1: 1, 4: 1, 5: 1})
            tokens = drawn(driver.collect())
            # expected tokens of the row in slot 0, and of its branch
            source = tally(5) if columns else self.greedy(a, 5)
            other = self.greedy(b, 7)
            expected = {1: other, 5: other[2:5]}
            expected[0] = source[:2] + self.greedy(c, 4)
            expected[4] = source[2:]
            assert tokens == expected, f"tokens by slot {tokens}: expected {expected}"

    @since(1, 0)
    def test_kept_columns_of_a_preempted_row_come_back_as_they_were(self) -> None:
        """Check that the saved columns of a preempted row are restored (``Delta.keep`` and ``Join.saved``).

        Processors receive the tokens of the row again, and then the saved values replace the columns.  Two rows return
        in other slots.  One of the old slots gets a new sequence at once.
        """
        self.need_model()
        a, b, c = prompts(6, 9, 4)
        for driver in self.drivers():
            driver.join(0, a, 20, tally=True)
            driver.join(1, b, 20, tally=True)
            driver.submit({0: 6, 1: 9})
            driver.submit({0: 1})
            driver.submit({0: 1, 1: 1})
            before = drawn(driver.collect())
            wanted = {0: tally(3), 1: tally(2)}
            assert before == wanted, f"before they are preempted: {before}"
            driver.keep(0, 70)
            driver.keep(1, 71)
            driver.leave(0, 1)
            driver.join(0, c, 20)
            driver.submit({0: 4})
            driver.join(1, a, 20, tally=True, drawn=before[0], saved=70)
            driver.join(3, b, 20, tally=True, drawn=before[1], saved=71)
            driver.submit({0: 1, 1: 9, 3: 11})
            driver.submit({0: 1, 1: 1, 3: 1})
            tokens = drawn(driver.collect())
            expected = {0: self.greedy(c, 3)}
            expected[1] = tally(2, 3)
            expected[3] = tally(2, 2)
            assert tokens == expected, f"tokens by slot after the rows returned {tokens}: expected {expected}"

    # ---- results -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_logprobs_are_those_of_the_rows_that_draw(self) -> None:
        """Check log-probabilities in steps with changing ``topk`` in which some rows do not draw."""
        items = prompts(30, 9, 12, 5)
        for driver in self.drivers():
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            plans = [driver.submit({0: 4, 1: 9, 2: 3, 3: 5}, topk=0)]
            for n, k in enumerate((3, 0, 2, -1, 1, 3)):
                rows = {0: 4, 1: 1, 2: 1, 3: 1}
                if n < 3:
                    rows[2] = 3
                absent = 3 if n % 2 else 1
                del rows[absent]
                plans.append(driver.submit(rows, topk=k))
            results = driver.collect()
            known = [list(prompt) for prompt in items]
            check_logprobs(plans, results, known, driver.capacity.vocab_size, self.logits_after)
            scored = [plan.samples for plan in plans if plan.topk >= 0]
            strong = any(len(samples) and samples[0] > 0 for samples in scored)
            assert strong, "the test itself is too weak: no step has a row that draws after a row that does not"

    @since(1, 0)
    def test_a_result_stays_as_it_was_handed_over(self) -> None:
        """Check that later steps do not change a result.

        It has tokens, counts, flags, log-probabilities, logits and the scores of a prompt.
        """
        items = prompts(8, 11)
        for driver in self.drivers():
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            plans = [driver.submit({0: 8, 1: 11}, topk=2, prompt={0: 7, 1: 10}, prompt_topk=1)]
            results = driver.collect()
            copies = [_copies(result) for result in results]
            for slot in (0, 1, 0, 1):
                plans.append(driver.submit({0: 1, 1: 1}, topk=2, host=(slot,)))
                (result,) = driver.collect()
                results.append(result)
                copies.append(_copies(result))
                best = result.logits[0].argmax()
                driver.token(slot, int(best))
            ids = [result.id for result in results]
            assert ids == [plan.id for plan in plans], f"expected each result once, in order; the steps are {ids}"
            for plan, result, before in zip(plans, results, copies, strict=True):
                check_result(plan, result, driver.capacity.vocab_size)
                changed = _changed(before, result)
                assert not changed, f"step {result.id}: {changed} changed after the result was collected"

    @since(1, 0)
    def test_a_plan_and_its_masks_stay_as_the_host_made_them(self) -> None:
        """Check that an executor does not write to a plan or to supplied masks."""
        items = prompts(5, 9)
        for driver in self.drivers():
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            copies = []
            options: list[dict[str, Any]] = [{}, {"topk": 1}, {"late": (0, 1)}]
            for of_step in options:
                rows = {0: 1, 1: 1} if copies else {0: 5, 1: 9}
                plan = driver.plan(rows, **of_step)
                copies.append((plan, _copies(plan)))
                driver.executor.submit(plan)
            mask = masks([3, 4], [5, 6])
            driver.supply(plan, mask)
            driver.collect()
            for plan, before in copies:
                changed = _changed(before, plan)
                assert not changed, f"step {plan.id}: the executor changed {changed} of the plan"
            assert np.array_equal(mask, masks([3, 4], [5, 6])), "the executor changed the masks"


def _copies(value: Any, name: str = "") -> dict[str, np.ndarray]:
    """Return copies of all arrays of a plan or a result, by their path of field names."""
    if isinstance(value, np.ndarray):
        return {name: value.copy()}
    found: dict[str, np.ndarray] = {}
    for key in getattr(value, "__dataclass_fields__", ()):
        path = f"{name}.{key}" if name else key
        found |= _copies(getattr(value, key), path)
    return found


def _changed(before: dict[str, np.ndarray], value: Any) -> list[str]:
    """Return the paths of the arrays of a plan or a result that differ from their earlier copies."""
    now = _copies(value)
    changed = []
    for name, old in before.items():
        if not np.array_equal(old, now[name]):
            changed.append(name)
    return changed
