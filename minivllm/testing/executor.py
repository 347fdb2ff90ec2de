"""The conformance suite of executors, which run the steps of an engine on a device.

An executor with a tiny model runs hand-made plans, and serves an engine.  It must give the tokens of transformers.
"""

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
from minivllm.config.resolve import resolve
from minivllm.config.resolved import Resolved
from minivllm.core.interfaces.executor import Executor, Wiring
from minivllm.core.interfaces.plan import FAILED, LENGTH, OVERSHOOT, STOP_ID
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
from .executor_device import ExecutorDevice, drawn, late_slots, masks
from .executor_engine import check_greedy, check_made_up, check_random, reference
from .executor_pooling import ExecutorPooling
from .executor_taps import ExecutorTaps
from .faulty import FATAL_CHUNK, TARGETS

BUDGET = 64  # most tokens of a step
BLOCKS = 200  # number of blocks of the KV cache


class ExecutorConformance(ExecutorDevice, ExecutorTaps, ExecutorPooling):
    """The conformance suite of executors.

    Override ``sizes`` if this machine cannot run a claimed ``tensor_parallel_size``.
    """

    kind = "executor"

    def sizes(self) -> list[int]:
        """Return the claimed values of tensor_parallel_size for which this machine has enough devices."""
        if self.spec.limits == ANY:
            return [1]
        if self.place() == "cuda":
            most = torch.cuda.device_count()
        else:
            most = 2
        sizes = [n for n in self.values("tensor_parallel_size", 1, 2, 4) if n <= most]
        if not sizes:
            pytest.skip("every claimed tensor_parallel_size needs more devices than this machine has")
        return sizes

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options: none."""
        return ()

    def engine_options(self, seed: int = 0, **values: Any) -> dict[str, Any]:
        """Return the options of an engine with the tiny model and this executor; ``values`` replace some of them."""
        processors = [f"{TARGETS}:Faulty", f"{TARGETS}:CountingProcessor"]
        options = dict(
            model=str(tiny(seed).path),
            dtype="float32",
            device=self.place(),
            skip_tokenizer_init=True,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=BUDGET,
            max_model_len=MAX_LEN,
            kvcache_block_size=BLOCK,
            num_kvcache_blocks=BLOCKS,
            processors=processors,
            attention=self.attention,
        )
        options["tensor_parallel_size"] = self.sizes()[0]
        options["allow_targets"] = [TARGETS, *self.own_targets()]
        options["executor"] = self.choice()
        return options | values

    def resolve(self, **values: Any) -> Resolved:
        """Resolve the options of an engine; ``run_ahead`` is 2 unless ``values`` has another number."""
        options = self.engine_options(**{"run_ahead": 2, **values})
        return resolve(EngineConfig(**options), Catalog.discover())

    def wiring(self, **values: Any) -> Wiring:
        """Return the resolved parts of an engine (its wiring) after a round trip through JSON."""
        return wiring_from_json(wiring_to_json(self.resolve(**values).wiring))

    @contextmanager
    def started(self, instance: Executor | None = None, **values: Any) -> Iterator[Driver]:
        """Start an executor for a ``with`` statement, and stop it at the end.

        ``instance`` None makes a new executor.  ``values`` are options of the engine.
        """
        wiring = self.wiring(**values)
        executor = self.build() if instance is None else instance
        try:
            yield Driver(executor, executor.start(wiring), wiring)
        finally:
            executor.stop()

    def exercise(self, instance: Executor) -> Any:
        """Return the tokens that an executor generates for two prompts, and its capacity."""
        with self.started(instance) as driver:
            tokens = driver.generate(prompts(5, 9), 4)
            return tokens, driver.capacity

    def check_tokens(self, driver: Driver, ahead: int, seed: int = 0, lengths: Sequence[int] = (1, 12, 31)) -> None:
        """Fail unless an executor generates the expected tokens for some prompts, ``ahead`` steps ahead."""
        items = prompts(*lengths)
        found = driver.generate(items, 8, ahead)
        for prompt, tokens in zip(items, found, strict=True):
            expected = self.greedy(prompt, 8, seed)
            assert tokens == expected, (
                f"prompt of {len(prompt)} tokens, {ahead} steps ahead: tokens {tokens}, expected {expected}"
            )

    # ---- start and capacity --------------------------------------------------------------------------------------

    @since(1, 0)
    def test_the_capacity_is_true(self) -> None:
        """Check the capacity that ``start`` returns.

        It has the configured number of blocks plus the null block, the bytes of a block over all layers of its group,
        the width of the logits and the bytes of the weights.  Its depth is at most ``run_ahead``.
        """
        for ahead in (0, 1, 3):
            with self.started(run_ahead=ahead) as driver:
                c = driver.capacity
                assert 0 <= c.depth <= ahead, f"run_ahead={ahead}: depth is {c.depth}"
        expected = (BLOCKS + 1,) * 2
        assert tuple(c.blocks) == expected, f"num_kvcache_blocks={BLOCKS}: blocks are {c.blocks}"
        model = tiny().model
        vocab = model.config.vocab_size
        assert c.vocab_size == vocab, f"vocab_size {c.vocab_size}, expected {vocab}"
        resolved = self.resolve()
        if self.made_up is not None:
            assert c.weight_bytes == 0, f"weight_bytes {c.weight_bytes} of an executor without a model"
        elif resolved.config.tensor_parallel_size == 1:
            block_bytes = self._block_bytes(resolved)
            assert tuple(c.block_bytes) == block_bytes, f"block_bytes {c.block_bytes}, expected {block_bytes}"
            weights = sum(4 * p.numel() for p in model.parameters())
            assert 0.9 * weights <= c.weight_bytes <= 1.2 * weights, f"weight_bytes {c.weight_bytes} of {weights}"

    def _block_bytes(self, resolved: Resolved) -> tuple[int, ...]:
        """Return the bytes of a block of each KV group, over all layers of the group."""
        wiring = resolved.wiring
        fmt = build_part("kvformat", wiring.parts["kvformat"])
        ctx = attention_context(wiring, fmt)
        attention = build_part("attention", wiring.parts["attention"], ctx)
        of_layer = [attention.layout(spec, fmt, wiring.block).bytes for spec in resolved.attention]
        found = []
        for group in resolved.groups:
            found.append(sum(of_layer[i] for i in group))
        return tuple(found)

    @since(1, 0)
    def test_with_num_blocks_left_open_it_takes_some_and_they_are_there(self) -> None:
        """Check that ``num_blocks=-1`` allocates as many blocks as fit, and that the last blocks can be used."""
        with self.started(num_kvcache_blocks=-1, gpu_memory_utilization=0.5) as driver:
            assert min(driver.capacity.blocks) > 2 * -(-MAX_LEN // BLOCK), f"blocks {driver.capacity.blocks}"
            self.check_tokens(driver, 2, lengths=(9, 20))

    @since(1, 0)
    def test_alive_is_true_between_start_and_stop(self) -> None:
        """Check that ``alive`` returns True exactly between ``start`` and ``stop``."""
        executor = self.build()
        assert not executor.alive(), "alive() before start()"
        with self.started(executor):
            assert executor.alive(), "not alive() after start()"
        assert not executor.alive(), "alive() after stop()"

    @since(1, 0)
    def test_a_start_that_fails_says_why_and_takes_nothing(self) -> None:
        """Check that ``start`` raises ModelError for a missing model, and ResourceError for a cache that is too large.

        Then the executor is not alive, can be stopped, and keeps no threads, files or memory.
        """
        wiring = self.wiring()
        cases = [
            (replace(wiring, model_dir=str(tiny().path / "nowhere")), ModelError, "nowhere"),
            (replace(wiring, cache=replace(wiring.cache, num_kvcache_blocks=1 << 50)), ResourceError, None),
        ]
        more: dict[str, Any] = {}
        for patience in (0.0, 3.0):  # two rounds, because the first one may open files that the process keeps
            before = belongings()
            for broken, error, words in cases:
                executor = self.build()
                with pytest.raises(error, match=words):
                    executor.start(broken)
                assert not executor.alive(), f"alive() after start() raised {error.__name__}"
                executor.stop()
                del executor
            more = left_behind(before, patience)
        assert not more, f"a failed start keeps these resources: {more}"

    @since(1, 0)
    def test_a_verb_that_it_does_not_know_is_named(self) -> None:
        """Check that ``call`` of an unknown verb raises NotImplementedError with its name, and steps still run."""
        with self.started() as driver:
            with pytest.raises(NotImplementedError, match="surely_no_verb"):
                pytest.fail(f"returned {driver.executor.call('surely_no_verb')!r}: expected NotImplementedError")
            self.check_tokens(driver, 1)

    # ---- tokens --------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_tokens_are_those_of_transformers(self) -> None:
        """Check greedy tokens, for each claimed tensor_parallel_size that this machine can run.

        Prompts come in chunks, several rows share a step, and one of two KV groups has a sliding window.
        """
        for size in self.sizes():
            with self.started(tensor_parallel_size=size) as driver:
                for ahead in (0, 1, 3):
                    self.check_tokens(driver, ahead)
                    lengths = (40, 3, 2, 2, 9, 25, 7, 16)
                    self.check_tokens(driver, ahead, lengths=lengths)

    @since(1, 0)
    def test_the_engine_serves_with_it(self) -> None:
        """Check an engine with the executor, with different numbers of steps ahead.

        The cache is so small that rows are preempted.  There are prefix hits, branches, rows whose token the host
        chooses, and rows whose mask comes late.  A row that fails ends alone, and a step that fails ends only its own
        requests.  Random tokens, their ends and their log-probabilities equal those of the executor "local".  The
        tokens of an executor without a model do not depend on the number of steps ahead.
        """
        if self.made_up:
            expected = []
        else:
            expected = reference(self.engine_options())
        for ahead, blocks in ((None, BLOCKS), (0, 36), (2, 36)):
            case = f"run_ahead={ahead}"
            with LLM(**self.engine_options(run_ahead=ahead, num_kvcache_blocks=blocks)) as llm:
                if self.made_up:
                    check_made_up(llm, case, self.greedy)
                else:
                    check_greedy(llm, case)
                    check_random(llm, expected, case)
                assert blocks == BLOCKS or llm.stats()["preemptions"], (
                    "the test itself is too weak: no row is preempted"
                )
                llm.engine.cache.check()

    @since(1, 0)
    def test_logprobs_come_if_they_are_asked_for(self) -> None:
        """Check the log-probabilities of the raw logits for each row that draws; with ``topk=-1`` there are none."""
        items = prompts(5, 9, 12)
        with self.started() as driver:
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
            decode = {0: 1, 1: 1, 2: 1}
            plans = [driver.submit({0: 5, 1: 9, 2: 12}, topk=2)]
            plans.append(driver.submit(decode, topk=0))
            plans.append(driver.submit(decode))
            results = driver.collect()
            known = [list(prompt) for prompt in items]
            check_logprobs(plans, results, known, driver.capacity.vocab_size, self.logits_after)

    # ---- order ---------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_results_come_in_order_of_submission_each_once(self) -> None:
        """Check that any order of ``submit`` and ``collect`` returns each result once, in order of submission.

        After ``collect(n)`` at most n steps are in flight.
        """
        seen = Seen()
        (prompt,) = prompts(6)
        with self.started() as driver:
            action = st.one_of(st.just("submit"), st.integers(0, 4))

            @self.for_all(40, st.lists(action, min_size=1, max_size=30))
            def order(actions: list[Any]) -> None:
                driver.join(0, prompt, 40)
                plans = []
                results = []
                # at least one step is submitted, so that the row joins before it leaves the batch
                for action in [*actions, "submit", 0]:
                    if action == "submit":
                        missing = int(driver.known[0] - driver.computed[0])
                        plans.append(driver.submit({0: missing}))
                        continue
                    new = list(driver.executor.collect(action))
                    results += new
                    in_flight = len(plans) - len(results)
                    assert in_flight <= action, f"collect({action}) leaves {in_flight} steps in flight"
                    seen["several"] += len(plans) > 1 and bool(new)
                submitted = [plan.id for plan in plans]
                collected = [result.id for result in results]
                assert collected == submitted, f"steps {submitted} submitted, {collected} collected after {actions}"
                for plan, result, token in zip(plans, results, self.greedy(prompt, 40), strict=False):
                    check_result(plan, result, driver.capacity.vocab_size)
                    right = not result.errors and result.tokens[0] == token
                    assert right, f"step {plan.id}: {result}, expected token {token}"
                driver.leave(0)

            self.meet(seen, several=10)

    @since(1, 0)
    def test_a_row_that_ended_on_the_device_does_nothing_more(self) -> None:
        """Check that a row that drew a stop id, or reached its length, has OVERSHOOT and count 0 in later steps.

        The host has submitted these steps before it received the result.  Other rows continue.
        """
        a, b = prompts(5, 8)
        tokens = self.greedy(a, 6)
        new = [i for i, token in enumerate(tokens) if token not in tokens[:i]]
        stop = new[1]  # index of a token that is not drawn before
        cases = {STOP_ID: {"out": 20, "stop": (tokens[stop],)}, LENGTH: {"out": stop + 1}}
        for flag, options in cases.items():
            with self.started() as driver:
                driver.join(0, a, **options)
                driver.join(1, b, 20)
                driver.submit({0: 5, 1: 8})
                for _ in range(stop + 2):
                    driver.submit({0: 1, 1: 1})
                ends = []
                other = []
                for result in driver.collect():
                    count = by_slot(result, "count")[0]
                    flags = by_slot(result, "flags")[0]
                    ends.append((count, flags))
                    other.append(by_slot(result)[1])
                expected = [(1, 0)] * stop + [(1, flag)] + [(0, OVERSHOOT)] * 2
                assert ends == expected, f"(count, flags) of the row: {ends}; expected {expected}"
                assert other == self.greedy(b, len(other)), f"the other row has {other}"

    @since(1, 0)
    def test_a_slot_may_change_hands_while_steps_are_in_flight(self) -> None:
        """Check that a sequence may leave its slot while its steps are in flight, as after an abort.

        The next sequence in the slot is not changed by these steps.
        """
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
            tokens = drawn(driver.collect())
            first_tokens = self.greedy(a, 2) + self.greedy(c, 2)
            expected = {0: first_tokens, 1: self.greedy(b, 5)}
            assert tokens == expected, f"tokens by slot: {tokens}; expected {expected}"

    # ---- masks from the host -------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_late_step_waits_for_its_masks_and_keeps_its_place(self) -> None:
        """Check that the results of a step with token masks, and of later steps, come only after ``supply``.

        Rows in ``StepPlan.late`` draw tokens that their masks allow.  Other rows draw without a mask.
        """
        items = prompts(5, 9, 12, 7)
        likeliest = []
        with self.started() as driver:
            for slot, prompt in enumerate(items):
                driver.join(slot, prompt, 20)
                likeliest += self.greedy(prompt, 1)
            first = driver.submit({0: 5, 1: 9, 2: 12}, late=(0, 2))
            second = driver.submit({3: 7})
            assert not driver.executor.collect(2), f"collect(2) returned steps, although step {first.id} has no masks"
            allowed = {}
            for slot in late_slots(first):
                allowed[slot] = sorted({3, 40 + slot, 60} - {likeliest[slot]})
            mask = driver.executor.mask_memory(2, 2)
            valid = (mask.shape, mask.dtype) == ((2, 2), np.int32)
            assert valid, f"mask_memory(2, 2) returned {mask.dtype} {mask.shape}"
            mask[:] = masks(*allowed.values())
            driver.supply(first, mask)
            results = driver.collect()
            ids = [result.id for result in results]
            assert ids == [first.id, second.id], f"order of the results: {ids}"
            tokens = by_slot(results[0]) | by_slot(results[1])
            for slot, choices in allowed.items():
                expected = self.likeliest(items[slot], choices)
                assert tokens[slot] == expected, (
                    f"slot {slot}: drew {tokens[slot]}, the most likely token of its mask {choices} is {expected}"
                )
            unmasked = [tokens[1], tokens[3]]
            assert unmasked == [likeliest[1], likeliest[3]], f"rows without a mask draw {unmasked}"
            driver.submit({0: 1})
            (result,) = driver.collect()
            after = by_slot(result)[0]
            (expected,) = self.greedy([*items[0], tokens[0]], 1)
            assert after == expected, "it does not continue from the token that its mask allowed"

    # ---- faults --------------------------------------------------------------------------------------------------

    @since(1, 0)
    @pytest.mark.parametrize("where", ["apply", "commit"])
    def test_a_processor_that_raises_fails_its_rows_as_a_value(self, where: str) -> None:
        """Check that a processor that raises gives an error of scope "rows" and changes only its own rows.

        Their flags have FAILED, and their count is 0 if ``apply`` raises.  The error has the name of the plug-in and
        the message of the exception.  Other rows and later steps have the right tokens.
        """
        self.need_model()
        a, b = prompts(5, 9)
        with self.started() as driver:
            driver.join(0, a, 20, fault=where)
            driver.join(1, b, 20)
            plan = driver.submit({0: 5, 1: 9})
            driver.submit({0: 1, 1: 1})
            first, second = driver.collect()
            check_result(plan, first, driver.capacity.vocab_size)
            check_error(first, "rows", "Faulty", f"boom in {where}")
            failed = [first.slots.tolist().index(0)]
            rows = list(first.errors[0].rows)
            assert rows == failed, f"rows {rows} of the error: expected {failed}, the rows with the processor"
            assert by_slot(first, "flags")[0] & FAILED, "FAILED is not among the flags of the row"
            assert where != "apply" or by_slot(first, "count")[0] == 0, "a row that failed counts its token"
            later = (by_slot(second, "flags")[0], by_slot(second, "count")[0])
            assert later == (OVERSHOOT, 0), f"(flags, count) of the failed row in the next step: {later}"
            found = [by_slot(first)[1], by_slot(second)[1]]
            expected = self.greedy(b, 2)
            assert found == expected, "tokens of the other row"
            driver.leave(0, 1)
            self.check_tokens(driver, 2)

    @since(1, 0)
    @pytest.mark.parametrize("late", [False, True], ids=["", "with masks"])
    def test_a_step_that_fails_is_a_value_and_the_next_one_works(self, late: bool) -> None:
        """Check that a step that fails gives an error of scope "step", and that later steps run.

        ``submit``, ``supply`` and ``collect`` do not raise.  The error has the name of the plug-in and the message of
        the exception.  All counts of the step are 0.
        """
        self.need_model()
        a, b, c = prompts(FATAL_CHUNK, 6, 10)
        with self.started() as driver:
            driver.join(1, b, 20)
            driver.submit({1: 6})
            driver.join(0, a, 20)
            plan = driver.submit({0: FATAL_CHUNK, 1: 1}, late=(0,) if late else ())
            if late:
                every_token = np.full((1, 2), -1, np.int32)
                driver.supply(plan, every_token)
            driver.leave(0, 1)
            driver.join(2, c, 20)
            driver.submit({2: 10})
            before, failed, after = driver.collect()
            check_result(plan, failed, driver.capacity.vocab_size)
            check_error(failed, "step", "FaultyAttention", "boom in plan")
            assert not failed.count.any(), f"rows of a failed step count: {failed.count}"
            expected = {1: self.greedy(b, 1)}
            assert drawn([before]) == expected, "tokens of the step before the failed one"
            wanted = {2: self.greedy(c, 1)}
            assert drawn([after]) == wanted, "tokens of the step after the failed one"
            driver.leave(2)
            self.check_tokens(driver, 2)
            assert driver.executor.alive(), "not alive() after a step that failed"

    # ---- the end -------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_stop_gives_everything_back_whenever_it_comes(self) -> None:
        """Check that ``stop`` releases all threads, processes, files, shared memory and GPU memory in time.

        It is called before ``start``, at rest, with steps in flight, with a step that waits for masks, while a profile
        is running, and twice in a row.
        """
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
        for situation in (at_rest, in_flight, waiting, profiling):
            more: dict[str, Any] = {}
            name = situation.__name__
            for patience in (0.0, 3.0):  # two rounds, because the first one may open files that the process keeps
                before = belongings()
                with self.started() as driver:
                    situation(driver)
                    start = time.monotonic()
                    driver.executor.stop(deadline=5.0)
                    seconds = time.monotonic() - start
                    assert seconds < 6.0, f"{name}: stop(deadline=5) took {seconds:.1f} s"
                    driver.executor.stop()
                    assert not driver.executor.alive(), f"{name}: alive() after stop()"
                    assert not profile_ended(), "stop() leaves a profile running"
                del driver
                more = left_behind(before, patience)
            assert not more, f"{name}: stop() does not release {more}"

    @since(1, 0)
    def test_two_of_them_live_side_by_side(self) -> None:
        """Check two executors with different models in one process, whose steps alternate.

        Stopping one executor does not change the other.
        """
        a, b = prompts(6, 9)
        with self.started() as first:
            with self.started(seed=1) as second:
                self.check_tokens(first, 1)
                self.check_tokens(second, 1, seed=1)
                first.join(0, a, 20)
                second.join(0, b, 20)
                first_results = []
                second_results = []
                for first_tokens, second_tokens in ((6, 9), (1, 1), (1, 1)):
                    first.submit({0: first_tokens})
                    second.submit({0: second_tokens})
                    first_results += first.collect()
                    second_results += second.collect()
                expected = {0: self.greedy(a, 3)}
                assert drawn(first_results) == expected, "tokens of the first executor"
                wanted = {0: self.greedy(b, 3, seed=1)}
                assert drawn(second_results) == wanted, "tokens of the second executor"
            assert first.executor.alive(), "not alive() after another executor was stopped"
            first.leave(0)
            self.check_tokens(first, 1)
