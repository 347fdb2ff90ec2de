"""The contract of hooks: the arguments, the time and the thread of each call.

There are four kinds of hooks.  An *observer* returns nothing.  A *wrapper* is a generator that yields once, so it runs
before and after an action.  A *first-result* hook answers a question: the first answer that is not None counts.  The
*figures* of all plug-ins are collected.

Rules for all hooks:

* A plug-in takes only the arguments that it names, so a hook may get further arguments later.
* Plug-ins are called in the order of the configuration.  The first wrapper is the outermost.
* Calls come from one thread at a time, the thread of the engine's loop.  It is the caller's thread for ``LLM``, and the
  thread ``minivllm-engine`` for ``AsyncLLM``.  Only ``engine_started`` is called by the thread that builds the engine,
  and ``engine_stopped`` by the thread that closes it.  A hook that shares state with another thread must lock it.
* A hook runs within the step, so every request waits for it (``stats()["seam_ms"]`` shows its time).  It must not call
  the engine, and it cannot change the engine, because its arguments are read-only views.
* If an observer or a wrapper raises, or figures raise or are not numbers by name, the error is logged with the package
  and the step continues.  After three errors the plug-in is disabled.  An error of a first-result hook is raised to the
  caller, and an error of ``engine_started`` ends the start, because a plug-in of the configuration must work.

``API`` is the version (major, minor).  A new hook or argument increases the minor number, a changed meaning the major
number.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pluggy

from .views import BlocksView, EngineView, FinishedStep, PlannedStep, PreemptionView, RequestEnd, RequestView

API = (1, 2)  # version of the contract of hooks; 1.2 has added minivllm_figures
PROJECT = "minivllm"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
FIGURES = "minivllm_figures"
WRAPPERS = ("minivllm_plan_and_submit", "minivllm_publish")


class Hooks:
    """Base class of hook plug-ins.

    A plug-in has methods named as in ``HookContracts``, each marked ``@hookimpl`` (``@hookimpl(wrapper=True)`` for a
    wrapper).  An object is made for each engine, and another for each call of first-result hooks.  So a plug-in opens
    files and starts threads in ``minivllm_engine_started``, not in its constructor."""

    def __init__(self, options: Any = None) -> None:
        self.options = options


class HookContracts:
    """All hooks."""

    # ---- observers -----------------------------------------------------------------------------------------------

    @hookspec
    def minivllm_engine_started(self, engine: EngineView) -> None:
        """Handle the start of an engine: the model is loaded and the engine accepts requests."""

    @hookspec
    def minivllm_engine_stopped(self, engine: EngineView, error: str | None) -> None:
        """Handle the stop of an engine, which has released its resources.  It is called once.

        ``error`` is the reason if the engine failed before it was stopped, else None."""

    @hookspec
    def minivllm_request_added(self, request: RequestView) -> None:
        """Handle an accepted request, which waits in the queue.  Refused requests cause no call."""

    @hookspec
    def minivllm_request_finished(self, request: RequestView, end: RequestEnd) -> None:
        """Handle the end of a request, for any reason.  It is called once for each added request."""

    @hookspec
    def minivllm_preempted(self, preemption: PreemptionView) -> None:
        """Handle the preemption of a running sequence, which returns to the queue because of a lack of blocks."""

    @hookspec
    def minivllm_step_finished(self, step: FinishedStep) -> None:
        """Handle the result of a step, which the engine has processed.

        It is called at the end of the same turn of the engine's loop, in the order of the steps."""

    @hookspec
    def minivllm_stored(self, blocks: BlocksView) -> None:
        """Handle blocks that enter the prefix cache."""

    @hookspec
    def minivllm_evicted(self, blocks: BlocksView) -> None:
        """Handle cached blocks that are evicted to make room."""

    @hookspec
    def minivllm_removed(self, blocks: BlocksView) -> None:
        """Handle blocks that leave the prefix cache, for any reason.

        Stored minus removed blocks are the cached blocks."""

    # ---- all results ---------------------------------------------------------------------------------------------

    @hookspec
    def minivllm_figures(self) -> Mapping[str, float]:
        """Return the plug-in's figures for ``stats()["figures"]["hooks:NAME"]``, records and metrics.

        At most 64 names ``[a-z][a-z0-9_]*`` with finite numbers.  The call must not change the figures."""
        raise NotImplementedError

    # ---- wrappers ------------------------------------------------------------------------------------------------

    @hookspec
    def minivllm_plan_and_submit(self, turn: int) -> Generator[None, PlannedStep | None, None]:
        """Wrap the planning of a step and its submission to the executor, in each turn of the engine's loop.

        The yield returns the step, or None if there was no work."""
        raise NotImplementedError

    @hookspec
    def minivllm_publish(self, step: PlannedStep) -> Generator[None, None, None]:
        """Wrap the publication of a step's result: text, streams, ends of sequences, and the prefix cache.  It is a
        generator that yields once, where the publication takes place."""
        raise NotImplementedError

    # ---- first result --------------------------------------------------------------------------------------------

    @hookspec(firstresult=True)
    def minivllm_resolve_model(self, model: str) -> str | None:
        """Return the directory or the Hugging Face id for the option ``model``, or None for an unknown model."""

    @hookspec(firstresult=True)
    def minivllm_read_config(self, path: str) -> Mapping[str, Any] | None:
        """Return the options in a configuration file that is neither TOML nor YAML, or None for an unknown format.

        The plug-in must be enabled by another file, the environment, ``--set`` or a keyword, which are read before."""
