"""Kernels compiled ahead of their launch for a Hopper where none is; run by device/worker/test_gradual_captures.py."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import triton
import triton.language as tl
from compiled_loops import Hopper
from small_kernels import broken, double, negate, number
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minivllm.core.timing import StartTimes
from minivllm.device.kernels import ahead as ahead_module
from minivllm.device.kernels.ahead import CompileAhead, CompiledMarks
from minivllm.device.worker.start import Rehearsals


def doubled(x, size, half=False):
    y = torch.empty_like(x)
    launched = double[(1,)](x, y, len(x), size, half)
    return y, launched


def poison(x):
    """Fill memory with values that no index and no number may have."""
    return x.fill_(float("nan") if x.is_floating_point() else 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


def check_operations() -> None:
    """Check that operations on unwritten memory give shapes and read nothing."""
    weights, tables = torch.randn(7, 4), {}

    def run():
        at = torch.empty(5, dtype=torch.long)
        got = torch.index_select(weights, 0, at)
        assert got.shape == (5, 4) and got.dtype == weights.dtype
        assert torch.nn.functional.embedding(at.view(5, 1), weights).shape == (5, 1, 4)
        assert weights[at].shape == (5, 4) and weights.gather(0, at[:, None]).shape == (5, 1)
        assert (got @ weights.T).half().t().is_contiguous() is False
        weights.index_copy_(0, at, got)
        weights[at] = got
        assert weights.add_(1) is weights and torch.mul(weights, 2, out=weights) is weights
        values, order = got.sort(-1)
        assert values.shape == order.shape and order.dtype == torch.long
        tables["angles"] = (torch.arange(6).float()[:, None] * torch.ones(3)).cos()
        tables["counters"] = torch.zeros(3, dtype=torch.int32)
        tables["filled"] = torch.empty(4).fill_(2.0)
        again = torch.zeros(2, dtype=torch.long)
        again.copy_(at[:2])
        assert torch.index_select(weights, 0, again - 1).shape == (2, 4), "it may be written, so it is not used"

    before = weights.clone()
    CompileAhead(torch.device("cpu"), 1).rehearse(run)
    assert torch.equal(weights, before), "operations in place change nothing"
    assert torch.equal(tables["angles"], (torch.arange(6).float()[:, None] * torch.ones(3)).cos())
    assert not tables["counters"].any() and (tables["filled"] == 2).all()
    try:
        CompileAhead(torch.device("cpu"), 1).rehearse(lambda: (weights @ weights.T).sum().item())
    except (RuntimeError, NotImplementedError):
        return
    raise AssertionError("a number that was not computed was read on the host")


def results(x, at, on, w):
    """Yield results of the operations of steps, most of which torch would describe with sympy."""
    function = torch.nn.functional
    yield from (x + 1, x.t() * 2, x[:, :1] - x, at // 2, at & 1, on | on, on ^ on, x.half(), x > 0, -at)
    yield from (torch.where(on, x, 0.0), torch.where(on, 0.0, x), torch.where(on, x, x.t().contiguous().view(6, 4)))
    yield from (torch.cat([x, x]), x.softmax(-1), *x.sort(-1), *x.sort(stable=True, dim=0), *x.topk(2), x.cumsum(0))
    yield from (x.sum(), x.sum(0), x.mean(-1), x.amax(1), x.argmax(-1), *x.max(0), on.any(), on.all(1))
    yield from (
        function.linear(x, w),
        function.linear(x.view(2, 3, 4), w),
        function.linear(x, w, x[:5, 0]),
        x @ w.t(),
        x[None] @ w.t()[None],
    )
    yield from (x[at], x[:, at[:2] // 2], x[at[:, None], at], w[None, :, at], function.embedding(at, x))
    yield from (x.gather(0, at[:, None]), x.index_select(1, at))


def check_shapes() -> None:
    """Check that rehearsed results are like real ones, and that no rehearsal imports the compiler of torch."""
    real = [*results(torch.randn(6, 4), torch.tensor([0, 3, 2]), torch.ones(6, 4, dtype=torch.bool), torch.randn(5, 4))]
    found = []

    def run():
        given = torch.empty(6, 4), torch.empty(3, dtype=torch.long), torch.empty(6, 4, dtype=torch.bool)
        found.extend(results(*given, torch.empty(5, 4)))

    CompileAhead(torch.device("cpu"), 1).rehearse(run)
    for at, (one, other) in enumerate(zip(real, found, strict=True)):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), at
    assert not {"sympy", "torch._dynamo"} & {*sys.modules}, "they take seconds of a first start"


def check_two_threads() -> None:
    """Check that two threads may rehearse at once: neither launches a kernel, and Triton's methods are restored."""
    methods = JITFunction.run, JITFunction._do_compile
    first, second, ended = threading.Event(), threading.Event(), threading.Event()
    seen, x = [], torch.ones(32)

    def launch(size):
        seen.append(negate[(1,)](x, torch.empty_like(x), size))

    def begins_first():
        first.set()
        second.wait(0.3)
        launch(16)

    def begins_second():
        second.set()
        ended.wait(10)
        launch(32)

    def other():
        first.wait(10)
        try:
            CompileAhead(torch.device("cpu"), 1).rehearse(begins_second)
        except Exception as e:
            seen.append(e)

    thread = threading.Thread(target=other)
    thread.start()
    CompileAhead(torch.device("cpu"), 1).rehearse(begins_first)
    ended.set()
    thread.join()
    assert methods == (JITFunction.run, JITFunction._do_compile)
    assert seen == [None, None], "a kernel was launched"


def check_first_kernels(cpu) -> None:
    """Check that half of the threads compile other kernels until the first ones are compiled, and then all."""
    ahead, x, end, more = CompileAhead(cpu, 4), torch.ones(32), threading.Event(), threading.Semaphore(0)
    running = [0]

    def compile_now(pending):
        running[0] += 1
        assert end.wait(60.0)
        if "negate" not in pending.compile_it.args[0]._fn_name:
            assert more.acquire(timeout=60.0)
        running[0] -= 1

    ahead._compile_now = compile_now
    first = ahead.rehearse(lambda: negate[(1,)](x, x, 16), first=True)
    others = ahead.rehearse(lambda: [double[(1,)](x, x, 16, size, False) for size in (1, 2, 4, 8, 16)])
    time.sleep(0.3)
    assert running == [1 + 2] and len(first) == 1 and len(others) == 5
    end.set()
    ahead.wait(first)
    time.sleep(0.3)
    assert running == [4]
    more.release(5)
    assert [job.exception(60.0) for job in [*first, *others]] == [None] * 6
    ahead.close()


def check_one_replacement(cpu) -> None:
    """Check that the first objects of two threads replace Triton's method once."""
    replaced, both = [], threading.Barrier(2)

    class Kernels:
        compile_one = None

        @property
        def _do_compile(self):
            found = self.compile_one
            with suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # both threads read before one of them writes, unless they are kept apart
            return found

        @_do_compile.setter
        def _do_compile(self, method):
            replaced.append(method)
            self.compile_one = method

    ahead_module.JITFunction = Kernels()
    threads = [threading.Thread(target=CompileAhead, args=(cpu, 1)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ahead_module.JITFunction = JITFunction
    assert len(replaced) == 1


def check_one_compilation(cpu) -> None:
    """Check that a launch waits for a compilation of its kernel in a thread, makes one that has not begun itself, and
    that no thread compiles the kernel again."""
    x, begun, go = torch.ones(64), threading.Event(), threading.Event()
    compiled, got = [], []

    def launch(size):
        return negate.warmup(x, x, size, grid=(1,))

    def hold(*, metadata, cache_hit, **_):
        compiled.append((threading.current_thread().name, cache_hit))
        if threading.current_thread().name.startswith("minivllm"):
            begun.set()
            go.wait(10)

    knobs.compilation.listener = hold
    ahead = CompileAhead(cpu, 1)
    jobs = ahead.rehearse(lambda: [negate[(1,)](x, x, size) for size in (4, 8)])
    assert len(jobs) == 2 and begun.wait(10)
    waits = threading.Thread(target=lambda: got.append(launch(4)))
    waits.start()
    launch(8)  # it is queued behind the one that runs
    assert [at for at, _ in compiled[1:]] == ["MainThread"] and not got
    go.set()
    waits.join()
    ahead.wait(jobs)
    ahead.pool.shutdown()
    knobs.compilation.listener = None
    assert [hit for _, hit in compiled] == [False, False] and got == [launch(4)]
    assert not ahead_module._PENDING


def check_held(cpu) -> None:
    """Check that no thread begins to compile while compilations are held, that a launch does, and that all begin
    afterwards, also after an error."""
    x = torch.ones(64)
    ahead = CompileAhead(cpu, 2)
    try:
        with ahead.held():
            jobs = ahead.rehearse(lambda: [negate[(1,)](x, x, size) for size in (512, 1024)])
            launched = negate.warmup(x, x, 512, grid=(1,))
            assert not any(job.done() for job in jobs) and launched is not None
            raise ValueError("a rehearsal failed")
    except ValueError:
        ahead.wait(jobs)
    assert [job.exception() for job in jobs] == [None, None] and negate.warmup(x, x, 512, grid=(1,)) is launched


def check_failed_rehearsal(cpu) -> None:
    """Check that kernels which were queued before a rehearsal failed are still compiled by threads."""
    x, go = torch.ones(64), threading.Event()
    rehearsals = Rehearsals(SimpleNamespace(steps=SimpleNamespace(compile_ahead=False)), StartTimes(), cpu, True)
    rehearsals.ahead = ahead = CompileAhead(cpu, 1)
    ahead.pool.submit(go.wait)
    launch, later = (partial(negate[(1,)], x, x, size) for size in (2, 32))
    assert not rehearsals.compiling
    jobs = rehearsals.begin(launch, lambda: (weights := torch.ones(2)) @ weights.new_empty(3), later)
    assert len(jobs) == 1 and not rehearsals.active and not jobs[0].done() and rehearsals.compiling
    go.set()
    ahead.pool.shutdown()
    assert not rehearsals.compiling and jobs[0].done() and jobs[0].exception() is None
    rehearsals.close()


def check_ends(cpu) -> None:
    """Check that the end of all last compilations is noted once, and not if one is cancelled."""
    for cancelled in (False, True):
        go = threading.Event()
        ahead = CompileAhead(cpu, 1)
        waiting = [ahead.pool.submit(go.wait) for _ in range(3)]
        ends: list[bool] = []
        ahead.finish([*waiting, *waiting], partial(ends.append, True))
        assert not ends
        if cancelled:
            ahead.close()
        go.set()
        ahead.pool.shutdown()
        assert ends == ([] if cancelled else [True])
    ends = []
    CompileAhead(cpu, 1).finish([], partial(ends.append, True))
    assert ends == [True]


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    ahead_module.blank = poison
    check_shapes()
    check_operations()
    check_two_threads()
    cpu = torch.device("cpu")
    check_first_kernels(cpu)
    check_one_replacement(cpu)
    check_one_compilation(cpu)
    ahead, x, seen, launched_before = CompileAhead(cpu, 2), torch.ones(48), [], JITFunction.run

    def run():
        for size, half in ((16, False), (32, False), (16, True), (16, False)):
            y, launched = doubled(x, size, half)
            assert launched is None
            seen.append(y)

    jobs = ahead.rehearse(run)
    assert len(seen) == 4 and len(jobs) == 3 and JITFunction.run is launched_before
    assert all(y.isnan().all() for y in seen), "no kernel was launched"
    ahead.wait(jobs)
    assert [job.exception() for job in jobs] == [None] * 3
    compiled = list(double.device_caches[0][0].values())
    assert len(compiled) == 3 and all("sm_90" in one.asm["ptx"] and one.asm["cubin"] for one in compiled)

    # kernels that are compiled are not launched either: they would read what others did not write
    assert ahead.rehearse(run) == [] and len(seen) == 8 and all(y.isnan().all() for y in seen)

    # constants that only look like a dtype keep their type
    jobs = ahead.rehearse(lambda: number[(1,)](x, 16, "fp16", tl.float16))
    ahead.wait(jobs)
    assert len(jobs) == 1 and jobs[0].exception() is None
    assert "st.global" in next(iter(number.device_caches[0][0].values())).asm["ptx"]

    # a warm-up finds them in memory: no further variant is compiled
    new = []
    knobs.runtime.jit_cache_hook = lambda **found: new.append(found["repr"])
    double.warmup(x, x, len(x), 16, True, grid=(1,))
    assert not new
    double.warmup(x, x, len(x), 64, True, grid=(1,))
    assert len(new) == 1

    # another thread compiles while this one rehearses
    counts = []

    def elsewhere():
        double.warmup(x, x, len(x), 128, True, grid=(1,))
        counts.append(len(new))

    def both():
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        doubled(x, 256)

    jobs = ahead.rehearse(both)
    assert len(jobs) == 1 and counts == [2], "the other thread compiles at once"
    ahead.wait(jobs)
    assert len(new) == 3
    knobs.runtime.jit_cache_hook = None

    # an error of the compiler is left to the launch
    fails = lambda: broken[(1,)](x, 16)  # noqa: E731
    for _ in range(2):
        jobs = ahead.rehearse(fails)
        ahead.wait(jobs)
        assert "nothing_of_this_name" in str(jobs[0].exception())
    try:
        fails()
    except triton.compiler.errors.CompilationError as e:
        assert "nothing_of_this_name" in str(e)
    else:
        raise AssertionError("it compiled")
    ahead.close()

    check_ends(cpu)
    check_failed_rehearsal(cpu)
    check_held(cpu)
    marks, others = CompiledMarks(cpu, ["a"]), CompiledMarks(cpu, ["b"])
    assert not marks.exist()
    marks.set()
    assert marks.exist() and not others.exist()
    print("ok")


if __name__ == "__main__":
    main()
