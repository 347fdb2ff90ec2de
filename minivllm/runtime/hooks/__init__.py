"""Hooks: plug-ins that observe the engine, or answer questions about models and configurations.

    from minivllm.runtime.hooks import Hooks, hookimpl

    class Counter(Hooks):
        @hookimpl
        def minivllm_step_finished(self, step):
            self.tokens += step.generated

A hook plug-in is chosen by name like any other (``hooks = ["acme/counter"]``, a ``Spec`` in the entry-point group
``minivllm.hooks``).  Installing a package enables no hook.  ``contract.py`` describes the arguments, the time and the
thread of each hook, and ``views.py`` has the types of the arguments.  Importing this package does not import torch.
"""

from __future__ import annotations

from .contract import API, HookContracts, Hooks, hookimpl
from .views import BlocksView, EngineView, FinishedStep, PlannedStep, PreemptionView, RequestEnd, RequestView

__all__ = [
    "API", "BlocksView", "EngineView", "FinishedStep", "HookContracts", "Hooks", "PlannedStep", "PreemptionView",
    "RequestEnd", "RequestView", "hookimpl",
]  # fmt: skip
