"""A hook plug-in that records all hooks, and simulated engines with hooks."""

from __future__ import annotations

import random

from minivllm.runtime.hooks import Hooks, hookimpl
from minivllm.runtime.hooks.bridge import EngineHooks
from minivllm.runtime.hooks.manager import NAMES, HookManager
from minivllm.testing.sim import VOCAB, request, sim_engine


class Received(Hooks):
    """A hook plug-in that records all hooks."""

    def __init__(self, options=None):
        super().__init__(options)
        self.of = {name: [] for name in NAMES}

    @hookimpl
    def minivllm_engine_started(self, engine):
        self.of["minivllm_engine_started"].append(engine)

    @hookimpl
    def minivllm_engine_stopped(self, engine, error):
        self.of["minivllm_engine_stopped"].append((engine, error))

    @hookimpl
    def minivllm_request_added(self, request):
        self.of["minivllm_request_added"].append(request)

    @hookimpl
    def minivllm_request_finished(self, request, end):
        self.of["minivllm_request_finished"].append((request, end))

    @hookimpl
    def minivllm_preempted(self, preemption):
        self.of["minivllm_preempted"].append(preemption)

    @hookimpl
    def minivllm_step_finished(self, step):
        self.of["minivllm_step_finished"].append(step)

    @hookimpl
    def minivllm_evicted(self, blocks):
        self.of["minivllm_evicted"].append(blocks)

    @hookimpl
    def minivllm_removed(self, blocks):
        self.of["minivllm_removed"].append(blocks)


def hooked(*plugins, **options):
    """Return a simulated engine with plug-ins named a, b, ..."""
    names = [f"acme/{'abcdef'[i]}" for i in range(len(plugins))]
    manager = HookManager(zip(names, plugins, strict=True))
    engine = sim_engine(**options)
    EngineHooks(manager, {}, engine).started()
    return engine


def crowd(engine, n=14, seed=0):
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(16)]
    return [
        request(engine, f"r{i}", [*shared[: rng.randrange(16)], rng.randrange(VOCAB), i], max_tokens=rng.randint(1, 30))
        for i in range(n)
    ]
