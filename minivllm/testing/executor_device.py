"""Executors whose device runs behind the host and in captured steps of a few sizes: what a step reads is what was there
when it was submitted, what it gives stays as it is, and rows that are not in it are left alone.

Nothing here waits longer than an executor may: steps are submitted as far ahead as the host can know them, and their
results are asked for at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import numpy as np

from minivllm.core.interfaces.plan import LateInputs, StepPlan, StepResult

from .base import since
from .driver import BLOCK, SLOTS, Driver, by_slot, check_logprobs, check_result, prompts
from .executor_reference import ExecutorReference
from .faulty import FIRST_TALLY

VOCAB = 64  # bits of a mask's words: more than the tiny model has tokens


def tally(n: int, first: int = 0) -> list[int]:
    """What a row draws that counts its tokens (``faulty.CountingProcessor``)."""
    return [FIRST_TALLY + i for i in range(first, first + n)]


def masks(*allowed: Sequence[int]) -> np.ndarray:
    """i32 [n, 2]: row j allows the tokens ``allowed[j]``."""
    bits = np.zeros((len(allowed), VOCAB), bool)
    for row, tokens in zip(bits, allowed, strict=True):
        row[list(tokens)] = True
    return np.packbits(bits, axis=1, bitorder="little").view("<i4")


def drawn(results: Sequence[StepResult]) -> dict[int, list[int]]:
    """slot -> the tokens that count, over steps without errors."""
    got: dict[int, list[int]] = {}
    for result in results:
        assert not result.errors, f"step {result.id} failed: {result.errors}"
        for slot, token in by_slot(result).items():
            got.setdefault(slot, []).extend([token] * by_slot(result, "count")[slot])
    return got


class ExecutorDevice(ExecutorReference):
    started: Callable[..., AbstractContextManager[Driver]]

    def drivers(self) -> Iterator[Driver]:
        """A started executor for each way in which steps may run: on a GPU also with an attention back end whose steps
        are captured."""
        captured = self.place().startswith("cuda") and find_spec("triton") is not None
        for attention in (None, *(["minivllm/triton"] if captured else [])):
            with self.started(**({} if attention is None else {"attention": attention})) as driver:
                yield driver

    # ---- masks ---------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_each_late_step_draws_under_its_own_masks(self) -> None:
        """From the first one on, in decode steps too; also if the masks of a second step come, in memory of their own,
        before the first one's result is asked for, and if rows and their number change from step to step.  The memory
        of ``mask_memory`` is written again once the result is there."""
        items = prompts(5, 9, 12)
        for driver in self.drivers():
            known = [list(p) for p in items]
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            first = driver.submit({0: 5}, late=(0,))
            second = driver.submit({1: 9}, late=(1,))
            lent = driver.executor.mask_memory(1, 2)
            lent[:], own = masks([7, 8]), masks([50, 51])
            driver.executor.supply(first.id, LateInputs(lent))
            driver.executor.supply(second.id, LateInputs(own))
            for slot, (result, among) in enumerate(zip(driver.executor.collect(0), ([7, 8], [50, 51]), strict=True)):
                self._under(result, {slot: among}, known)
            driver.submit({2: 12})
            known[2] += drawn(driver.executor.collect(0))[2]
            lent = driver.executor.mask_memory(3, 2)
            rounds = [(0, 1, 2), (2,), (1, 2), (0, 2), (0, 1, 2)]
            for n, late in enumerate(rounds):
                plan = driver.submit({0: 1, 1: 1, 2: 1}, late=late)
                among = {slot: [3 + n, 20 + 5 * slot + n, 55 - n] for slot in late}
                order = plan.slots[plan.samples][plan.late].tolist()
                lent[: len(late)] = masks(*(among[slot] for slot in order))
                driver.executor.supply(plan.id, LateInputs(lent[: len(late)]))
                (result,) = driver.executor.collect(0)
                lent[:] = 0
                self._under(result, among, known)

    def _under(self, result: StepResult, among: dict[int, list[int]], known: list[list[int]]) -> None:
        """Rows drew the likeliest token, of their masks where they have one; ``known`` grows by them."""
        assert not result.errors, f"step {result.id} failed: {result.errors}"
        for slot, token in by_slot(result).items():
            want = self.likeliest(known[slot], among[slot]) if slot in among else self.greedy(known[slot], 1)[0]
            what = f"under its mask {among[slot]}" if slot in among else "without a mask"
            assert token == want, f"step {result.id}, slot {slot}: drew {token}; the likeliest {what} is {want}"
            known[slot].append(token)

    @since(1, 0)
    def test_the_mask_memory_of_one_is_not_anothers(self) -> None:
        """Two executors, whose masks are both written before one of them draws."""
        (a, b), got = prompts(6, 9), []
        with self.started() as first, self.started() as second:
            plans, lent = [], []
            for driver, prompt, allowed in ((first, a, [7, 9]), (second, b, [40, 41])):
                driver.join(0, prompt, 20)
                plans.append(driver.submit({0: len(prompt)}, late=(0,)))
                lent.append(driver.executor.mask_memory(1, 2))
                lent[-1][:] = masks(allowed)
            for driver, plan, mask in zip((first, second), plans, lent, strict=True):
                driver.executor.supply(plan.id, LateInputs(mask))
                got.append(drawn(driver.executor.collect(0))[0])
        assert got == [[self.likeliest(a, [7, 9])], [self.likeliest(b, [40, 41])]], "tokens of the two"

    # ---- which rows, and where their keys lie ----------------------------------------------------------------------

    @since(1, 0)
    def test_rows_that_are_not_in_a_step_are_left_alone(self) -> None:
        """Steps of every number of rows, with all slots taken: a step that is filled up to a size of its own must not
        draw, store or count for a row that waits, nor twice for one that is in it."""
        items = prompts(*range(3, 3 + SLOTS))
        counting = () if self.made_up else (0, 4, SLOTS - 1)
        for driver in self.drivers():
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 40, tally=slot in counting)
            driver.submit({slot: len(prompt) for slot, prompt in enumerate(items)})
            steps = [[(start + i) % SLOTS for i in range(n)] for n in range(1, SLOTS + 1) for start in (0, 3, 6)]
            for slots in steps:
                driver.submit(dict.fromkeys(slots, 1))
            got = drawn(driver.executor.collect(0))
            for slot, prompt in enumerate(items):
                n = 1 + sum(slot in slots for slots in steps)
                want = tally(n) if slot in counting else self.greedy(prompt, n)
                assert got[slot] == want, f"slot {slot}: drew {got[slot]}, want {want}"

    @since(1, 0)
    def test_a_step_reads_the_table_that_came_with_it(self) -> None:
        """Blocks that come one by one, where the slot's last owner had others; and blocks that change hands between two
        rows while steps are in flight: every source of a copy is read before a block is written."""
        old, a, b = prompts(30, 6, 14)
        for driver in self.drivers():
            driver.join(0, old, 2, pile=1)  # what it leaves in the table of slot 0 are blocks of the next row
            driver.submit({0: 30})
            driver.leave(0)
            driver.join(0, a, 26, blocks=2)
            driver.join(1, b, 18)
            driver.submit({0: 6, 1: 14})
            for step in range(12):
                if (6 + step) % BLOCK == 0:
                    driver.give(0, [(6 + step) // BLOCK])
                driver.submit({0: 1, 1: 1})
            for to, source in ((0, 1), (1, 0)):
                driver.copy(source, to, 8)
                driver.give(source, range(8), pile=to)
            for _ in range(5):
                driver.submit({0: 1, 1: 1})
            got = drawn(driver.executor.collect(0))
            assert got == {0: self.greedy(old, 1) + self.greedy(a, 18), 1: self.greedy(b, 18)}, f"tokens by slot: {got}"

    @since(1, 0)
    def test_a_row_that_ended_stores_nothing_in_blocks_of_others(self) -> None:
        """Steps behind its end may name positions for which it has no block; its table has there what the slot's last
        owner left, which belongs to somebody else by now."""
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
            got = drawn(driver.executor.collect(0))
            assert got[0] == self.greedy(old, 1) + self.greedy(a, 3), f"the row that ended has {got[0]}"
            assert got[1] == self.greedy(b, 20), (
                f"the row whose blocks were named has {got[1]}: want {self.greedy(b, 20)}"
            )

    # ---- columns -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_branch_begins_as_its_source_was(self) -> None:
        """``Delta.fork``: history, keys and the columns of processors are those at the fork, though the source leaves
        with the same delta, its slot has a new owner, and the branch runs for the first time long after."""
        a, b, c = prompts(6, 9, 11)
        columns = not self.made_up
        for driver in self.drivers():
            driver.join(0, a, 20, tally=columns)
            driver.join(1, b, 20)
            driver.submit({0: 6, 1: 9})
            driver.submit({0: 1, 1: 1})
            driver.fork(0, 4, int(columns))  # made-up tokens of another sample would be others
            driver.fork(1, 5, int(columns))
            driver.leave(0)
            driver.submit({1: 1})
            driver.join(0, c, 20)
            driver.submit({0: 11, 1: 1})
            for _ in range(3):
                driver.submit(dict.fromkeys((0, 1, 4, 5), 1))
            got = drawn(driver.executor.collect(0))
            first, branch = (tally(2), tally(3, 2)) if columns else (self.greedy(a, 2), self.greedy(a, 5)[2:])
            want = {0: first + self.greedy(c, 4), 1: self.greedy(b, 7), 4: branch, 5: self.greedy(b, 5)[2:]}
            assert got == want, f"tokens by slot {got}: want {want}"

    @since(1, 0)
    def test_kept_columns_of_a_preempted_row_come_back_as_they_were(self) -> None:
        """``Delta.keep`` and ``Join.saved``: processors hear of its tokens again, and then have what was put aside; of
        two rows each its own, in other slots than before, one of which has a new owner at once."""
        self.need_model()
        a, b, c = prompts(6, 9, 4)
        for driver in self.drivers():
            driver.join(0, a, 20, tally=True)
            driver.join(1, b, 20, tally=True)
            driver.submit({0: 6, 1: 9})
            driver.submit({0: 1})
            driver.submit({0: 1, 1: 1})
            before = drawn(driver.executor.collect(0))
            assert before == {0: tally(3), 1: tally(2)}, f"before they are preempted: {before}"
            for slot, seq in ((0, 70), (1, 71)):
                driver.keep(slot, seq)
                driver.leave(slot)
            driver.join(0, c, 20)
            driver.submit({0: 4})
            driver.join(1, a, 20, tally=True, drawn=before[0], saved=70)
            driver.join(3, b, 20, tally=True, drawn=before[1], saved=71)
            driver.submit({0: 1, 1: 9, 3: 11})
            driver.submit({0: 1, 1: 1, 3: 1})
            got = drawn(driver.executor.collect(0))
            want = {0: self.greedy(c, 3), 1: tally(2, 3), 3: tally(2, 2)}
            assert got == want, f"after they came back {got}: want {want}"

    # ---- results -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_logprobs_are_those_of_the_rows_that_draw(self) -> None:
        """Whatever was asked for in the step before, and whichever rows of the step do not draw: the first ones too."""
        items = prompts(30, 9, 12, 5)
        for driver in self.drivers():
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            plans = [driver.submit({0: 4, 1: 9, 2: 3, 3: 5}, topk=0)]
            for n, k in enumerate((3, 0, 2, -1, 1, 3)):
                rows = {0: 4, 1: 1, 2: 3 if n < 3 else 1, 3: 1}
                del rows[(1, 3)[n % 2]]
                plans.append(driver.submit(rows, topk=k))
            results = list(driver.executor.collect(0))
            check_logprobs(plans, results, [list(p) for p in items], driver.capacity.vocab_size, self.logits_after)
            weak = not any(len(p.samples) and p.samples[0] > 0 and p.topk >= 0 for p in plans)
            assert not weak, "the test itself is too weak: no row that draws stands behind one that does not"

    @since(1, 0)
    def test_a_result_stays_as_it_was_handed_over(self) -> None:
        """Tokens, counts, flags, log-probabilities, logits and scores of a prompt, while later steps give theirs."""
        items = prompts(8, 11)
        for driver in self.drivers():
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            plans = [driver.submit({0: 8, 1: 11}, topk=2, prompt={0: 7, 1: 10}, prompt_topk=1)]
            held = [(r, _copies(r)) for r in driver.executor.collect(0)]
            for slot in (0, 1, 0, 1):
                plans.append(driver.submit({0: 1, 1: 1}, topk=2, host=(slot,)))
                results = list(driver.executor.collect(0))
                held += [(r, _copies(r)) for r in results]
                driver.token(slot, int(results[0].logits[0].argmax()))
            assert [p.id for p in plans] == [r.id for r, _ in held], "each result once, in order"
            for plan, (result, before) in zip(plans, held, strict=True):
                check_result(plan, result, driver.capacity.vocab_size)
                now = _copies(result)
                changed = [name for name in before if not np.array_equal(before[name], now[name])]
                assert not changed, f"step {result.id}: {changed} changed after the result was handed over"

    @since(1, 0)
    def test_a_plan_and_its_masks_stay_as_the_host_made_them(self) -> None:
        """Nothing that an executor is given is its own to write to."""
        items = prompts(5, 9)
        for driver in self.drivers():
            plans: list[tuple[StepPlan, dict[str, np.ndarray]]] = []

            def submit(rows: dict[int, int], driver: Driver = driver, plans: list = plans, **more: Any) -> StepPlan:
                plan = driver.plan(rows, **more)
                plans.append((plan, _copies(plan)))
                driver.executor.submit(plan)
                return plan

            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            submit({0: 5, 1: 9})
            submit({0: 1, 1: 1}, topk=1)
            late = submit({0: 1, 1: 1}, late=(0, 1))
            mask = masks([3, 4], [5, 6])
            driver.executor.supply(late.id, LateInputs(mask))
            driver.executor.collect(0)
            for plan, before in plans:
                now = _copies(plan)
                changed = [name for name in before if not np.array_equal(before[name], now[name])]
                assert not changed, f"step {plan.id}: the executor changed {changed} of the plan"
            assert np.array_equal(mask, masks([3, 4], [5, 6])), "the executor changed the masks"


def _copies(value: Any, name: str = "") -> dict[str, np.ndarray]:
    """Every array of a plan or a result, by its path."""
    if isinstance(value, np.ndarray):
        return {name: value.copy()}
    found: dict[str, np.ndarray] = {}
    for key in getattr(value, "__dataclass_fields__", ()):
        found.update(_copies(getattr(value, key), f"{name}.{key}" if name else key))
    return found
