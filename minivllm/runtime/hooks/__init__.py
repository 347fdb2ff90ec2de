"""Hooks tell many: a package listens to the engine, or answers where it asks, without standing in its way.

    from minivllm.runtime.hooks import Hooks, hookimpl

    class Counter(Hooks):
        @hookimpl
        def minivllm_step_finished(self, step):
            self.tokens += step.generated

A hook plug-in is chosen by name like any other (``hooks = ["acme/counter"]``, a ``Spec`` in the entry-point group
``minivllm.hooks``), and installing a package enables nothing.  ``contract.py`` says what each hook is told, when, and
on which thread; ``views.py`` holds what it is told.  Importing this package imports no torch.
"""

from __future__ import annotations

from .contract import API, HookContracts, Hooks, hookimpl
from .views import BlocksView, EngineView, FinishedStep, PlannedStep, PreemptionView, RequestEnd, RequestView

__all__ = [
    "API", "BlocksView", "EngineView", "FinishedStep", "HookContracts", "Hooks", "PlannedStep", "PreemptionView",
    "RequestEnd", "RequestView", "hookimpl",
]  # fmt: skip
