"""Executors with a tiny model: driven by plans made by hand, and by the real engine; compared with transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from minivllm.config import EngineConfig
from minivllm.config.resolve import Resolved, resolve
from minivllm.core.interfaces.executor import Executor
from minivllm.core.interfaces.plan import FAILED, LENGTH, OVERSHOOT, STOP_ID, LateInputs
from minivllm.core.wiring import wiring_from_json, wiring_to_json
from minivllm.device.worker.build import attention_context
from minivllm.errors import ModelError, ResourceError
from minivllm.frontend.llm import LLM
from minivllm.registration.spec import ANY
from minivllm.registry import Catalog, build_part

from .base import Seen, since
from .driver import (
    BLOCK,
    MAX_LEN,
    SLOTS,
    Driver,
    belongings,
    by_slot,
    check_error,
    check_logprobs,
    check_result,
    left_behind,
    profile_ended,
    prompts,
    tiny,
)
from .executor_device import ExecutorDevice, masks
from .executor_engine import check_greedy, check_made_up, check_random, reference
from .executor_taps import ExecutorTaps
from .faulty import FATAL_CHUNK, TARGETS

BUDGET, BLOCKS = 64, 200


class ExecutorConformance(ExecutorDevice, ExecutorTaps):
    """Override ``sizes`` if this machine cannot hold a claimed ``tensor_parallel_size``."""

    kind = "executor"

    def sizes(self) -> list[int]:
        """The claimed values of tensor_parallel_size that there are devices for."""
        if self.spec.limits == ANY:
            return [1]
        most = torch.cuda.device_count() if self.place() == "cuda" else 2
        here = [n for n in self.values("tensor_parallel_size", 1, 2, 4) if n <= most]
        if not here:
            pytest.skip("no claimed tensor_parallel_size has so few devices as there are here")
        return here

    def context(self) -> tuple[Any, ...]:
        return ()

    def engine_options(self, seed: int = 0, **values: Any) -> dict[str, Any]:
        """The options of an engine with the tiny model and this executor."""
        own = [self.plugin.partition(":")[0]] if ":" in self.plugin else []
        return (
            dict(
                model=str(tiny(seed).path),
                dtype="float32",
                device=self.place(),
                skip_tokenizer_init=True,
                max_num_seqs=SLOTS,
                max_num_batched_tokens=BUDGET,
                max_model_len=MAX_LEN,
                kvcache_block_size=BLOCK,
                num_kvcache_blocks=BLOCKS,
                tensor_parallel_size=self.sizes()[0],
                processors=[f"{TARGETS}:Faulty", f"{TARGETS}:CountingProcessor"],
                attention=self.attention,
                allow_targets=[TARGETS, *own],
                executor={"name": self.plugin, "options": dict(self.options)},
            )
            | values
        )

    def resolve(self, **values: Any) -> Resolved:
        return resolve(EngineConfig(**self.engine_options(**{"run_ahead": 2, **values})), Catalog.discover())

    @contextmanager
    def started(self, instance: Executor | None = None, **values: Any) -> Iterator[Driver]:
        """A started executor, whose wiring went through JSON, and what drives it; it is stopped at the end."""
        wiring = wiring_from_json(wiring_to_json(self.resolve(**values).wiring))
        executor = self.build() if instance is None else instance
        try:
            yield Driver(executor, executor.start(wiring), wiring)
        finally:
            executor.stop()

    def exercise(self, instance: Executor) -> Any:
        with self.started(instance) as driver:
            return driver.generate(prompts(5, 9), 4), driver.capacity

    def check_tokens(self, driver: Driver, ahead: int, seed: int = 0, lengths: Sequence[int] = (1, 12, 31)) -> None:
        items = prompts(*lengths)
        for prompt, got in zip(items, driver.generate(items, 8, ahead), strict=True):
            want = self.greedy(prompt, 8, seed)
            assert got == want, f"prompt of {len(prompt)} tokens, {ahead} steps ahead: got {got}, transformers {want}"

    # ---- what it says of itself ----------------------------------------------------------------------------------

    @since(1, 0)
    def test_the_capacity_is_true(self) -> None:
        """As many blocks as were asked for and the null block, bytes of a block over all layers of its group, the
        width of the logits, the bytes of the weights, and never more steps ahead than ``run_ahead``."""
        for ahead in (0, 1, 3):
            with self.started(run_ahead=ahead) as driver:
                c = driver.capacity
                assert 0 <= c.depth <= ahead, f"run_ahead={ahead}: depth is {c.depth}"
        assert tuple(c.blocks) == (BLOCKS + 1,) * 2, f"num_kvcache_blocks={BLOCKS}: blocks are {c.blocks}"
        model, found = tiny().model, self.resolve()
        assert c.vocab_size == model.config.vocab_size, f"vocab_size {c.vocab_size}, want {model.config.vocab_size}"
        if self.made_up is not None:
            assert c.weight_bytes == 0, f"weight_bytes {c.weight_bytes} of an executor without a model"
        elif found.config.tensor_parallel_size == 1:
            w = found.wiring
            fmt = build_part("kvformat", w.parts["kvformat"])
            attention = build_part("attention", w.parts["attention"], attention_context(w, fmt))
            size = [attention.layout(spec, fmt, w.block).bytes for spec in found.attention]
            want = tuple(sum(size[i] for i in group) for group in found.groups)
            assert tuple(c.block_bytes) == want, f"block_bytes {c.block_bytes}, want {want}"
            weights = sum(4 * p.numel() for p in model.parameters())
            assert 0.9 * weights <= c.weight_bytes <= 1.2 * weights, f"weight_bytes {c.weight_bytes} of {weights}"

    @since(1, 0)
    def test_with_num_blocks_left_open_it_takes_some_and_they_are_there(self) -> None:
        """``num_blocks=-1``: as many as fit; the last blocks of each group can be written and read."""
        with self.started(num_kvcache_blocks=-1, gpu_memory_utilization=0.5) as driver:
            assert min(driver.capacity.blocks) > 2 * -(-MAX_LEN // BLOCK), f"blocks {driver.capacity.blocks}"
            self.check_tokens(driver, 2, lengths=(9, 20))

    @since(1, 0)
    def test_alive_is_true_between_start_and_stop(self) -> None:
        executor = self.build()
        assert not executor.alive(), "alive() before start()"
        with self.started(executor):
            assert executor.alive(), "not alive() after start()"
        assert not executor.alive(), "alive() after stop()"

    @since(1, 0)
    def test_a_start_that_fails_says_why_and_takes_nothing(self) -> None:
        """ModelError for a model that is not there, ResourceError for a cache that has no room; then it is not alive,
        can be stopped, and leaves nothing behind."""
        wiring = wiring_from_json(wiring_to_json(self.resolve().wiring))
        cases = [
            (replace(wiring, model_dir=str(tiny().path / "nowhere")), ModelError, "nowhere"),
            (replace(wiring, cache=replace(wiring.cache, num_kvcache_blocks=1 << 50)), ResourceError, None),
        ]
        more: dict[str, Any] = {}
        for patience in (0.0, 3.0):  # the first round may open what the process keeps
            before = belongings()
            for broken, error, words in cases:
                executor = self.build()
                with pytest.raises(error, match=words):
                    executor.start(broken)
                assert not executor.alive(), f"alive() after start() raised {error.__name__}"
                executor.stop()
                del executor
            more = left_behind(before, patience)
        assert not more, f"a start that failed leaves behind: {more}"

    @since(1, 0)
    def test_a_verb_that_it_does_not_know_is_named(self) -> None:
        """NotImplementedError, and it works on."""
        with self.started() as driver:
            with pytest.raises(NotImplementedError, match="surely_no_verb"):
                pytest.fail(f"gave {driver.executor.call('surely_no_verb')!r}: want NotImplementedError")
            self.check_tokens(driver, 1)

    # ---- tokens --------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_tokens_are_those_of_transformers(self) -> None:
        """Greedy, in chunks, several rows at once, two KV groups of which one has a window; for each claimed
        tensor_parallel_size that there is room for."""
        for size in self.sizes():
            with self.started(tensor_parallel_size=size) as driver:
                for ahead in (0, 1, 3):
                    self.check_tokens(driver, ahead)
                    self.check_tokens(driver, ahead, lengths=(40, 3, 2, 2, 9, 25, 7, 16))

    @since(1, 0)
    def test_the_engine_serves_with_it(self) -> None:
        """At every depth: a cache so small that rows are preempted, prefix hits, branches, rows whose token the host
        chooses, rows whose mask comes late; a row that fails ends alone, a step that fails ends its own requests.
        Random draws, their ends and log-probabilities are those of executor "local".  Of made-up tokens those of each
        request are the same at every depth."""
        want = [] if self.made_up else reference(self.engine_options())
        for ahead, blocks in ((None, BLOCKS), (0, 36), (2, 36)):
            with LLM(**self.engine_options(run_ahead=ahead, num_kvcache_blocks=blocks)) as llm:
                if self.made_up:
                    check_made_up(llm, f"run_ahead={ahead}", self.greedy)
                else:
                    check_greedy(llm, f"run_ahead={ahead}")
                    check_random(llm, want, f"run_ahead={ahead}")
                assert blocks == BLOCKS or llm.stats()["preemptions"], "the test itself is too weak"
                llm.engine.cache.check()

    @since(1, 0)
    def test_logprobs_come_if_they_are_asked_for(self) -> None:
        """Of the raw logits, in the order of the rows that draw; None with ``topk=-1``."""
        items = prompts(5, 9, 12)
        with self.started() as driver:
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            plans = [driver.submit({0: 5, 1: 9, 2: 12}, topk=2), driver.submit(dict.fromkeys(range(3), 1), topk=0)]
            plans.append(driver.submit(dict.fromkeys(range(3), 1)))
            results = driver.executor.collect(0)
            check_logprobs(plans, results, [list(p) for p in items], driver.capacity.vocab_size, self.logits_after)

    # ---- order ---------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_results_come_in_order_of_submission_each_once(self) -> None:
        """Whatever the order of submit and collect: after collect(n) at most n steps are in flight."""
        seen, prompt = Seen(), prompts(6)[0]
        with self.started() as driver:

            @self.for_all(40, st.lists(st.one_of(st.just("submit"), st.integers(0, 4)), min_size=1, max_size=30))
            def order(actions: list[Any]) -> None:
                driver.join(0, prompt, 40)
                plans, got = [], []
                for action in [*actions, "submit", 0]:  # one at least, so that it joins before it leaves
                    if action == "submit":
                        plans.append(driver.submit({0: int(driver.known[0] - driver.computed[0])}))
                        continue
                    results = list(driver.executor.collect(action))
                    got += results
                    left = len(plans) - len(got)
                    assert left <= action, f"collect({action}) leaves {left} steps in flight"
                    seen["several"] += len(plans) > 1 and bool(results)
                due, ids = [p.id for p in plans], [r.id for r in got]
                assert ids == due, f"submitted the steps {due}, got {ids} after {actions}"
                for plan, result, token in zip(plans, got, self.greedy(prompt, 40), strict=False):
                    check_result(plan, result, driver.capacity.vocab_size)
                    assert not result.errors and result.tokens[0] == token, f"step {plan.id}: {result}, want {token}"
                driver.leave(0)

            seen.require(several=10)

    @since(1, 0)
    def test_a_row_that_ended_on_the_device_does_nothing_more(self) -> None:
        """The host is steps ahead: a row that met a stop id or its length has OVERSHOOT and count 0 in the steps behind
        it, and the rows beside it go on."""
        a, b = prompts(5, 8)
        tokens = self.greedy(a, 6)
        stop = next(i for i, t in enumerate(tokens) if i and t not in tokens[:i])
        for ends, flag in (({"out": 20, "stop": (tokens[stop],)}, STOP_ID), ({"out": stop + 1}, LENGTH)):
            with self.started() as driver:
                driver.join(0, a, **ends)
                driver.join(1, b, 20)
                driver.submit({0: 5, 1: 8})
                for _ in range(stop + 2):
                    driver.submit({0: 1, 1: 1})
                results = list(driver.executor.collect(0))
                got = [(by_slot(r, "count")[0], by_slot(r, "flags")[0]) for r in results]
                assert got == [(1, 0)] * stop + [(1, flag)] + [(0, OVERSHOOT)] * 2, f"(count, flags) of the row: {got}"
                beside = [by_slot(r)[1] for r in results]
                assert beside == self.greedy(b, len(beside)), f"the row beside it has {beside}"

    @since(1, 0)
    def test_a_slot_may_change_hands_while_steps_are_in_flight(self) -> None:
        """An abort: the row leaves with a step that is planned before the results of older ones are in; the next owner
        of its slot sees nothing of it."""
        a, b, c = prompts(9, 6, 20)
        with self.started() as driver:
            driver.join(0, a, 30)
            driver.join(1, b, 30)
            driver.submit({0: 9, 1: 6})
            driver.submit({0: 1, 1: 1})
            driver.leave(0)
            driver.submit({1: 1})
            driver.join(0, c, 30)
            driver.submit({0: 20, 1: 1})
            driver.submit({0: 1, 1: 1})
            got: dict[int, list[int]] = {0: [], 1: []}
            for r in driver.executor.collect(0):
                for slot, token in by_slot(r).items():
                    got[slot] += [token] * by_slot(r, "count")[slot]
            assert got == {0: self.greedy(a, 2) + self.greedy(c, 2), 1: self.greedy(b, 5)}, "tokens by slot"

    # ---- what the host adds --------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_late_step_waits_for_its_masks_and_keeps_its_place(self) -> None:
        """Its results, and those of steps behind it, come when ``supply`` has come; late rows draw what their masks
        allow, rows beside them what they like."""
        items = prompts(5, 9, 12, 7)
        with self.started() as driver:
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            first = driver.submit({0: 5, 1: 9, 2: 12}, late=(0, 2))
            second = driver.submit({3: 7})
            assert not driver.executor.collect(2), f"collect(2) gave steps, and step {first.id} has no masks yet"
            late = first.slots[first.samples][first.late].tolist()
            allowed = {slot: [t for t in (3, 40 + slot, 60) if t != self.greedy(items[slot], 1)[0]] for slot in late}
            mask = driver.executor.mask_memory(2, 2)
            assert (mask.shape, mask.dtype) == ((2, 2), np.int32), f"mask_memory(2, 2) gave {mask.dtype} {mask.shape}"
            mask[:] = masks(*(allowed[slot] for slot in late))
            driver.executor.supply(first.id, LateInputs(mask))
            results = list(driver.executor.collect(0))
            assert [r.id for r in results] == [first.id, second.id], f"order {[r.id for r in results]}"
            got = by_slot(results[0])
            for slot, tokens in allowed.items():
                want = self.likeliest(items[slot], tokens)
                assert got[slot] == want, f"slot {slot}: drew {got[slot]}, the likeliest of its mask {tokens} is {want}"
            assert got[1] == self.greedy(items[1], 1)[0] and by_slot(results[1])[3] == self.greedy(items[3], 1)[0], (
                "without mask"
            )
            driver.submit({0: 1})
            after = by_slot(driver.executor.collect(0)[0])[0]
            assert after == self.greedy([*items[0], got[0]], 1)[0], (
                "it does not go on from the token that its mask allowed"
            )

    # ---- faults --------------------------------------------------------------------------------------------------

    @since(1, 0)
    @pytest.mark.parametrize("where", ["apply", "commit"])
    def test_a_processor_that_raises_fails_its_rows_as_a_value(self, where: str) -> None:
        """Scope "rows": FAILED and count 0 (``apply``) in the rows that bound it, the plug-in and its words in the
        error; the rows beside them and the next steps are right."""
        self.need_model()
        a, b = prompts(5, 9)
        with self.started() as driver:
            driver.join(0, a, 20, fault=where)
            driver.join(1, b, 20)
            plan = driver.submit({0: 5, 1: 9})
            driver.submit({0: 1, 1: 1})
            first, second = driver.executor.collect(0)
            check_result(plan, first, driver.capacity.vocab_size)
            check_error(first, "rows", "Faulty", f"boom in {where}")
            bad = [j for j, slot in enumerate(first.slots.tolist()) if slot == 0]
            assert list(first.errors[0].rows) == bad, f"rows {first.errors[0].rows}: want {bad}, which bound it"
            assert by_slot(first, "flags")[0] & FAILED, "FAILED is not among the flags of the row"
            assert where != "apply" or by_slot(first, "count")[0] == 0, "a row that failed counts its token"
            assert (by_slot(second, "flags")[0], by_slot(second, "count")[0]) == (OVERSHOOT, 0), "the step behind it"
            assert [by_slot(first)[1], by_slot(second)[1]] == self.greedy(b, 2), "the row beside it"
            driver.leave(0, 1)
            self.check_tokens(driver, 2)

    @since(1, 0)
    @pytest.mark.parametrize("late", [False, True], ids=["", "with masks"])
    def test_a_step_that_fails_is_a_value_and_the_next_one_works(self, late: bool) -> None:
        """Neither submit, supply nor collect raises; scope "step" names the plug-in and gives its words, no row of the
        step counts; steps that were submitted behind it run."""
        self.need_model()
        a, b, c = prompts(FATAL_CHUNK, 6, 10)
        with self.started() as driver:
            driver.join(1, b, 20)
            driver.submit({1: 6})
            driver.join(0, a, 20)
            plan = driver.submit({0: FATAL_CHUNK, 1: 1}, late=(0,) if late else ())
            if late:
                driver.executor.supply(plan.id, LateInputs(np.full((1, 2), -1, np.int32)))
            driver.leave(0, 1)
            driver.join(2, c, 20)
            driver.submit({2: 10})
            before, failed, after = driver.executor.collect(0)
            check_result(plan, failed, driver.capacity.vocab_size)
            check_error(failed, "step", "FaultyAttention", "boom in plan")
            assert not failed.count.any(), f"rows of a failed step count: {failed.count}"
            assert by_slot(before)[1] == self.greedy(b, 1)[0] and not before.errors, "the step before it"
            assert by_slot(after)[2] == self.greedy(c, 1)[0] and not after.errors, f"the step behind it: {after.errors}"
            driver.leave(2)
            self.check_tokens(driver, 2)
            assert driver.executor.alive(), "not alive() after a step that failed"

    # ---- the end -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_stop_gives_everything_back_whenever_it_comes(self) -> None:
        """Before start, at rest, with steps in flight, with a step that waits for masks, while a profile is running,
        and again: threads, processes, files, shared memory and GPU memory are what they were, within the deadline."""
        a, b = prompts(8, 5)

        def in_flight(driver: Driver) -> None:
            driver.join(0, a, 30)
            driver.submit({0: 8})
            for _ in range(4):
                driver.submit({0: 1})

        def waiting(driver: Driver) -> None:
            driver.join(1, b, 30)
            driver.submit({1: 5}, late=(1,))
            in_flight(driver)

        def profiling(driver: Driver) -> None:
            try:
                driver.executor.call("profile_start")
            except NotImplementedError:
                return
            self.check_tokens(driver, 1)

        def at_rest(driver: Driver) -> None:
            self.check_tokens(driver, 0, lengths=(5,))

        self.build().stop()
        for what in (at_rest, in_flight, waiting, profiling):
            more: dict[str, Any] = {}
            for patience in (0.0, 3.0):  # the first round may open what the process keeps
                before = belongings()
                with self.started() as driver:
                    what(driver)
                    start = time.monotonic()
                    driver.executor.stop(deadline=5.0)
                    took = time.monotonic() - start
                    assert took < 6.0, f"{what.__name__}: stop(deadline=5) took {took:.1f} s"
                    driver.executor.stop()
                    assert not driver.executor.alive(), f"{what.__name__}: alive() after stop()"
                    assert not profile_ended(), "stop() leaves a profile running"
                del driver
                more = left_behind(before, patience)
            assert not more, f"{what.__name__}: stop() leaves behind {more}"

    @since(1, 0)
    def test_two_of_them_live_side_by_side(self) -> None:
        """Two models in one process, step by step in turns; the end of one does not touch the other."""
        with self.started() as first:
            with self.started(seed=1) as second:
                self.check_tokens(first, 1)
                self.check_tokens(second, 1, seed=1)
                (a, b), want = prompts(6, 9), []
                first.join(0, a, 20)
                second.join(0, b, 20)
                for q, r in ((6, 9), (1, 1), (1, 1)):
                    first.submit({0: q})
                    second.submit({0: r})
                    want.append((first.executor.collect(0)[0].tokens[0], second.executor.collect(0)[0].tokens[0]))
                assert [list(t) for t in zip(*want, strict=True)] == [self.greedy(a, 3), self.greedy(b, 3, seed=1)], (
                    "in turns"
                )
            assert first.executor.alive(), "not alive() after another one was stopped"
            first.leave(0)
            self.check_tokens(first, 1)
