"""Compile the kernels of a step in threads or processes, before the step runs.

    rehearse   run() ──► shapes and dtypes only; a kernel that is not compiled is queued, and none is launched
    compile    queue ──► threads, each of which may have a process for it (``compile_processes``)
    run        run() ──► every kernel is compiled, or the launch waits until a thread has compiled it

A step compiles its kernels one after another, each at its first launch.  A rehearsal finds the same variants, because
it calls the same functions with tensors of the same shapes.  A later step of this process, or of another one, reads the
compiled kernels from memory or from Triton's folder (``TRITON_CACHE_DIR``).

A rehearsal depends on no content that a kernel writes: Triton's kernels do not run, and torch's operations on such
content run only if they accept any (``ShapesOnly``).  So an index in memory that was never written is not used, on any
device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import minivllm
from minivllm.device.compile_processes import MARK, CompileProcesses, usable_threads
from minivllm.errors import describe_error

from .compile_requests import make_request

log = logging.getLogger(__name__)
_THREAD = threading.local()
_ONE = threading.Lock()  # held by the thread that rehearses, because a rehearsal replaces a method of Triton's class
_SHARING = threading.Lock()  # held by the thread that replaces Triton's method for compilation
aten = torch.ops.aten
# operations of torch that allocate memory and leave its content undefined
_EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
# operations of torch whose result does not depend on the content of their arguments
_CONSTANT = (
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.zero_,
)
_CONSTANT_OVERLOADS = (aten.fill_.Scalar,)
# operations of torch that accept any content, beside those on single elements (tag ``pointwise``)
_ANY_CONTENT = {
    aten.floor_divide.default,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.__xor__.Tensor,
    aten.cat.default,
    aten.softmax.int,
    aten._softmax.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.cumsum.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.argmax.default,
    aten.max.dim,
    aten.any.default,
    aten.any.dim,
    aten.all.default,
    aten.all.dim,
}
# kinds of operations that are not run although they are pointwise: their results are no tensors or are random
_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
# product of matrices -> shape of its result, from its arguments
_PRODUCTS: dict[Any, Callable[..., tuple[int, ...]]] = {
    aten.linear.default: lambda x, weight, bias=None: (*x.shape[:-1], weight.shape[0]),
    aten.mm.default: lambda x, y: (x.shape[0], y.shape[1]),
    aten.addmm.default: lambda bias, x, y: (x.shape[0], y.shape[1]),
    aten.bmm.default: lambda x, y: (*x.shape[:2], y.shape[2]),
}
# operations of torch that read elements of their first argument at the indices in their other tensors
_INDEXING = (aten.index.Tensor, aten.embedding.default, aten.index_select.default, aten.gather.default)
_MASKS = (torch.bool, torch.uint8)  # dtypes of indices that select elements by their truth


def blank(x: torch.Tensor) -> torch.Tensor:
    """Fill a new tensor, whose content is undefined, with zeros, and return it."""
    return x.zero_()


def rehearsing() -> bool:
    """Return whether this thread rehearses: kernels are recorded for compilation and not launched."""
    return getattr(_THREAD, "ahead", None) is not None


class ShapesOnly(TorchDispatchMode):
    """Mode in which operations of torch return results of the right shape, dtype, strides and device without computing
    them.

    Views, allocations and constants still run, because they read no content.  Operations on tensors that were made from
    constants alone, such as a table of angles, run too, because a module may keep the results.  Of other operations
    those run that accept any content (``_skip``).  The results of the rest are zeros, and operations in place change
    nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        # address -> storage with the content that a real run would have; the storages stay alive, so no address is
        # reused
        self._certain: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return True: ``torch.compile`` needs no protection from this mode.

        The protection imports torch._dynamo at the first operation, which takes about a second of a start."""
        return False

    def forget(self, values: Any) -> None:
        """Note that the content of the tensors in ``values`` is unknown, because a kernel would write to them."""
        for x in _tensors(values):
            self._certain.pop(x.untyped_storage().data_ptr(), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        inputs = _tensors((args, kwargs))
        if packet in _EMPTY:
            return blank(func(*args, **kwargs))
        constant = packet in _CONSTANT or func in _CONSTANT_OVERLOADS
        if constant or all(x.untyped_storage().data_ptr() in self._certain for x in inputs):
            out = func(*args, **kwargs)
            for x in _tensors(out):
                self._keep(x, constant and func._schema.is_mutable)
            return out
        returns = [one.alias_info for one in func._schema.returns]
        view = any(one is not None and not one.is_write for one in returns)
        if view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        return self._skip(func, args, kwargs, inputs)

    def _keep(self, x: torch.Tensor, partly: bool) -> None:
        """Note that the content of a tensor was really computed.

        ``partly`` means that other elements of its storage may hold other content.
        """
        storage = x.untyped_storage()
        if not partly:
            self._certain[storage.data_ptr()] = storage

    def _skip(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        """Return results of the right shape for an operation that is not run.

        Torch computes most shapes with torch._dynamo or sympy, whose imports take seconds of a start.  So operations
        that write to new memory are run if they accept any content, as is indexing, with indices of zero.  Shapes of
        products of matrices are computed here."""
        schema = func._schema
        if _accepts_any_content(func, kwargs):
            return func(*args, **kwargs)
        if func in _INDEXING and args[0].numel() and not any(x.dtype in _MASKS for x in inputs[1:]):
            return func(args[0], *tree_map(_zeros_of, args[1:]), **tree_map(_zeros_of, kwargs))
        if func in _PRODUCTS and not kwargs:
            return blank(args[0].new_empty(_PRODUCTS[func](*args)))
        # name of an alias set in the operation's schema -> argument that the operation would overwrite and return
        written = {}
        for at, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[at] if at < len(args) else kwargs.get(argument.name)
                self.forget(value)
                written[_names(argument)] = value
        if all(one.alias_info is not None for one in schema.returns):  # it returns no new tensor
            found = tuple(written[_names(one)] for one in schema.returns)
            return found[0] if len(found) == 1 else found or None
        device = kwargs.get("device")
        moved = {**kwargs, "device": "meta"} if device is not None else kwargs
        made = func(*tree_map(_shape_of, args), **tree_map(_shape_of, moved))
        place = _device(inputs) if device is None else torch.device(device)
        returns = schema.returns
        results = (made,) if len(returns) == 1 else made or ()
        found = tuple(
            written[_names(one)] if one.alias_info is not None else tree_map(lambda x: _memory_of(x, place), result)
            for result, one in zip(results, returns, strict=True)
        )
        return found[0] if len(returns) == 1 else found


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _names(described: Any) -> frozenset[str]:
    """Return the names of the alias sets (shared memory) of an argument or result in the schema of an operation."""
    return frozenset(described.alias_info.before_set)


def _device(inputs: list[torch.Tensor]) -> torch.device:
    """Return the device of an operation's result, which is the device of its arguments except single numbers on the
    CPU.
    """
    return next((x.device for x in inputs if x.dim()), inputs[0].device)


def _shape_of(x: Any) -> Any:
    """Return a tensor on the ``meta`` device (without memory) of the same shape for a tensor; return other values
    unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _accepts_any_content(func: Any, kwargs: Any) -> bool:
    """Return whether an operation writes to new memory, accepts any content of its arguments, and waits for no device.

    A copy to the CPU waits."""
    if func._schema.is_mutable:
        return False
    if func is aten._to_copy.default:
        device = kwargs.get("device")
        return device is None or torch.device(device).type != "cpu"
    pointwise = torch.Tag.pointwise in func.tags and _DEPENDENT.isdisjoint(func.tags)
    return pointwise or func in _ANY_CONTENT


def _zeros_of(x: Any) -> Any:
    """Return a tensor of zeros like a tensor; return other values unchanged."""
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else x


def _memory_of(x: Any, device: torch.device) -> Any:
    """Return a tensor of zeros on ``device`` for a tensor without memory; return other values unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    return blank(torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device))


class Compilation:
    """The compilation of a variant of a kernel, which the first caller of ``run`` makes and other callers wait for."""

    def __init__(self, compile_it: Callable[[], Any]) -> None:
        self.compile_it = compile_it
        self.kernel: Any = None
        self._lock = threading.Lock()

    def run(self, prepare: Callable[[Any], None] | None = None, finish: Callable[[Any], None] | None = None) -> Any:
        """Return the compiled kernel.

        The caller that compiles it calls ``prepare`` with ``compile_it`` before, and ``finish`` with the kernel
        afterwards.  After an error the next caller compiles it again, so that a launch reports the error."""
        with self._lock:
            if self.kernel is None:
                if prepare is not None:
                    prepare(self.compile_it)
                self.kernel = self.compile_it()
                if finish is not None:
                    finish(self.kernel)
            return self.kernel


# (id of the kernel function, key of the variant, number of the device) -> compilation that is queued or running
_PENDING: dict[tuple[int, Any, int], Compilation] = {}


def _place(function: Any, key: Any) -> tuple[int, Any, int]:
    """Return the key in ``_PENDING`` of a kernel's variant for the current device."""
    return id(function), key, driver.active.get_current_device()


def _share_compilations() -> None:
    """Make every launch in this process use ``_PENDING``: Triton itself compiles a variant in each thread that launches
    it.  Triton compiles a variant in ``JITFunction._do_compile``."""
    with _SHARING:  # a method that was replaced twice would wait for itself
        compile_one = JITFunction._do_compile
        if getattr(compile_one, "shared", False):
            return

        def shared(function: Any, key: Any, *rest: Any, **more: Any) -> Any:
            compile_it = partial(compile_one, function, key, *rest, **more)
            if rehearsing():
                _THREAD.ahead._queue(function, key, compile_it)
                return None
            pending = _PENDING.get(_place(function, key))
            return compile_it() if pending is None else pending.run()

        shared.shared = True  # type: ignore[attr-defined]
        JITFunction._do_compile = shared


def prepare_rehearsals() -> None:
    """Load what the first rehearsal uses: Triton's driver, which is compiled C code."""
    driver.active.get_current_device()


class CompileAhead:
    """Compiles the kernels of rehearsed functions in threads.  The rehearsals of all engines of a process run one after
    another.

    With ``processes``, which this object ends, each thread waits for one of them and then loads the kernel from
    Triton's folder."""

    def __init__(self, device: torch.device, threads: int = 0, processes: CompileProcesses | None = None) -> None:
        _share_compilations()
        self.device = device
        self.processes = processes
        count = threads or usable_threads()
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="minivllm-compile")
        self._begins = threading.Event()  # cleared while no further compilation begins
        self._begins.set()
        self._room = threading.Semaphore(count)  # taken by each compilation that is not among the first ones
        self._reserved = count - count // 2
        # key in ``_PENDING`` -> compilation of the variant
        self.jobs: dict[tuple[int, Any, int], Future[None]] = {}
        self._found: dict[tuple[int, Any, int], Future[None]] = {}
        self._first = False
        _OPEN.add(self)

    def rehearse(self, run: Callable[[], Any], first: bool = False) -> list[Future[None]]:
        """Call ``run`` without launching kernels, and start to compile those that are not compiled.

        With ``first``, at most half of the threads compile kernels of other functions meanwhile.  A start waits for the
        longest compilation, and two threads of one core slow each other down.

        Return the compilations.  A ``run`` that reads results on the host raises an error of torch, as does an
        operation whose shape depends on the content of tensors."""
        with _ONE:
            self._found = {}
            self._first = first
            _THREAD.ahead = self
            try:
                with ShapesOnly() as shapes, self._collecting(shapes):
                    run()
            finally:
                _THREAD.ahead = None
            if first:
                self._reserve(self._found.values())
            return list(self._found.values())

    def _reserve(self, jobs: Iterable[Future[None]]) -> None:
        """Keep half of the threads from other kernels until ``jobs`` have ended."""
        taken = sum(self._room.acquire(blocking=False) for _ in range(self._reserved))
        if taken:
            _when_ended(jobs, partial(self._room.release, taken))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin no compilation in threads during the body of the ``with`` statement.

        Compilations hold Python's lock for a part of their time, and a rehearsal takes it again after each operation of
        torch, so rehearsals beside many compilations take several times as long.  Compilations in processes begin at
        once."""
        if self.processes is None:
            self._begins.clear()
        try:
            yield
        finally:
            self._begins.set()

    def wait(self, jobs: Sequence[Future[None]]) -> None:
        """Wait for compilations.

        Errors are ignored here, because the launch of the kernel compiles it again and reports them.
        """
        for job in jobs:
            job.exception()

    def finish(self, jobs: Iterable[Future[None]], finished: Callable[[], None]) -> None:
        """Accept no more functions, and call ``finished`` in a thread when the compilations ``jobs`` have ended.

        It is not called if one of them is cancelled.  The processes end with the last compilation."""
        jobs = set(jobs)

        def ended() -> None:
            if not any(_is_cancelled(job) for job in jobs):
                finished()

        self.pool.shutdown(wait=False)
        _when_ended(self.jobs.values(), self._end_processes)
        _when_ended(jobs, ended)

    def close(self) -> None:
        """Cancel the compilations that have not begun, and those that run in processes."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._end_processes()

    def _end_processes(self) -> None:
        if self.processes is not None:
            self.processes.close()

    @contextmanager
    def _collecting(self, shapes: ShapesOnly) -> Iterator[None]:
        """Make this thread launch no kernels: Triton launches nothing with ``warmup``."""
        run = JITFunction.run
        thread = threading.get_ident()

        def not_launched(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return run(function, *args, grid=grid, warmup=warmup, **options)
            shapes.forget((args, options))
            run(function, *args, grid=grid, warmup=True, **options)
            return None

        JITFunction.run = not_launched
        try:
            yield
        finally:
            JITFunction.run = run

    def _queue(self, function: Any, key: Any, compile_it: Callable[[], Any]) -> None:
        """Queue the compilation of a kernel's variant, unless it was queued before.

        If a compilation fails, the launch in a real run reports the error."""
        at = _place(function, key)
        if at not in self.jobs:
            pending = _PENDING.setdefault(at, Compilation(compile_it))
            self.jobs[at] = job = self.pool.submit(self._compile, pending, self._first)
            job.add_done_callback(lambda job: _PENDING.pop(at, None))
        self._found[at] = self.jobs[at]

    def _compile(self, pending: Compilation, first: bool = False) -> None:
        """Compile a kernel's variant in a thread.  ``first`` is that of its rehearsal."""
        self._begins.wait()
        with nullcontext() if first else self._room:
            self._compile_now(pending)

    def _compile_now(self, pending: Compilation) -> None:
        """Compile a kernel's variant for this object's device."""
        prepare = None if self.processes is None else self._in_process
        if self.device.type != "cuda":
            pending.run(prepare)
            return
        with torch.cuda.device(self.device):
            pending.run(prepare, _build_launcher)

    def _in_process(self, compile_it: Callable[[], Any]) -> None:
        """Make a process compile a kernel, so that ``compile_it`` finds it in Triton's folder.

        Nothing is done if the kernel cannot be named in another process."""
        assert self.processes is not None
        launcher = driver.active.launcher_cls if self.device.type == "cuda" else None
        try:
            request = make_request(compile_it, driver.active.get_current_target(), launcher)
        except Exception as e:  # values of any type may be among the kernel's constants
            log.info("a thread compiles a kernel in place of a process: %s", describe_error(e))
            return
        self.processes.compile(request)


def _is_cancelled(job: Future[None]) -> bool:
    """Return whether a compilation that has ended was cancelled, before it began or while it ran in a process."""
    return job.cancelled() or isinstance(job.exception(), CancelledError)


def _when_ended(jobs: Iterable[Future[None]], call: Callable[[], None]) -> None:
    """Call ``call`` when all compilations have ended, in the thread of the last of them."""
    left = set(jobs)
    lock = threading.Lock()
    if not left:
        call()

    def ended(job: Future[None]) -> None:
        with lock:
            left.discard(job)
            last = not left
        if last:
            call()

    for job in tuple(left):
        job.add_done_callback(ended)


_OPEN: weakref.WeakSet[CompileAhead] = weakref.WeakSet()


def _close_all() -> None:
    """Cancel the compilations of all objects that have not begun.  A program that ends would otherwise wait for them,
    because the end of Python waits for a pool's queue."""
    for ahead in list(_OPEN):
        ahead.close()


# functions of ``atexit`` are called after the wait for the pools
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _build_launcher(kernel: Any) -> None:
    """Compile the C code that launches a kernel, so that the first launch finds it in Triton's cache.

    The C compiler takes as long as the kernel's own compilation.  The launcher is not stored in ``kernel``: another
    thread may launch the kernel now, and must then find either all of its handles or none."""
    if kernel is not None:
        driver.active.launcher_cls(kernel.src, kernel.metadata)


class CompiledMarks:
    """A file beside Triton's compiled kernels that marks that the kernels of a configuration are compiled.

    It is in the same folder, so it is deleted with the kernels.  It is valid for one card and configuration, and for
    one version of Triton and minivllm.
    """

    def __init__(self, device: torch.device, facts: Sequence[str]) -> None:
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        text = json.dumps([triton.__version__, minivllm.__version__, card, *facts])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = Path(knobs.cache.dir) / f"minivllm-{name}{MARK}"

    def exist(self) -> bool:
        """Return whether the file exists, because an earlier start has compiled the kernels."""
        return os.path.exists(self.path)

    def set(self) -> None:
        """Write the file that marks the kernels as compiled.

        Without write access nothing is noted, and the next start rehearses again.
        """
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
