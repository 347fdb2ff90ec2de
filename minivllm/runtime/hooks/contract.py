"""The hooks: who is told what, when, and on which thread.

Four kinds.  An *observer* is told and gives nothing back.  A *wrapper* is a generator that yields once, so it has a
time before and a time after.  A *first-result* hook is asked: the first plug-in that does not return None has answered.
For its *figures* every plug-in is asked.

Rules for all of them:

* A plug-in takes only the arguments that it names, so a hook may be given more of them later.
* Plug-ins are called in the order of the configuration; of wrappers the first is the outermost.
* Calls come from one thread at a time: the one that runs the engine's loop.  That is the caller's thread for ``LLM``,
  and the thread ``minivllm-engine`` for ``AsyncLLM``; only ``engine_started`` comes from the thread that builds the
  engine, and ``engine_stopped`` from the one that closes it.  A hook that shares state with another thread locks it.
* A hook runs within the step: what it takes, every request waits for (``stats()["seam_ms"]`` shows it).  It must not
  call the engine, and cannot change it: what it gets are frozen views.
* An observer or a wrapper that raises, and figures that raise or are no numbers by name, are logged with their package;
  after three times the plug-in is disabled.  The step goes on.  An error of a first-result hook is the error of what
  asked, and one of ``engine_started`` is that of the start: what the configuration names and cannot work is never
  passed over.

``API`` is the version (major, minor): a new hook or argument is a new minor, another meaning a new major.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pluggy

from .views import BlocksView, EngineView, FinishedStep, PlannedStep, PreemptionView, RequestEnd, RequestView

API = (1, 2)  # 1.2: minivllm_figures
PROJECT = "minivllm"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
FIGURES = "minivllm_figures"
WRAPPERS = ("minivllm_plan_and_submit", "minivllm_publish")


class Hooks:
    """Base class of hook plug-ins: methods named as in ``HookContracts``, each marked ``@hookimpl``
    (``@hookimpl(wrapper=True)`` for a wrapper).  It is made once for each engine, and once more wherever first-result
    hooks are asked, so it takes files, threads and terminals in ``minivllm_engine_started``, not when it is made."""

    def __init__(self, options: Any = None) -> None:
        self.options = options


class HookContracts:
    """Every hook there is."""

    # ---- observers -----------------------------------------------------------------------------------------------

    @hookspec
    def minivllm_engine_started(self, engine: EngineView) -> None:
        """The model is loaded and the engine takes requests."""

    @hookspec
    def minivllm_engine_stopped(self, engine: EngineView, error: str | None) -> None:
        """The engine has given everything back, once; ``error`` is what ended it before it was stopped."""

    @hookspec
    def minivllm_request_added(self, request: RequestView) -> None:
        """A request was accepted and waits; one that is refused is not told."""

    @hookspec
    def minivllm_request_finished(self, request: RequestView, end: RequestEnd) -> None:
        """A request has ended, in whatever way; once for each that was added."""

    @hookspec
    def minivllm_preempted(self, preemption: PreemptionView) -> None:
        """A running sequence was sent back to the queue because blocks were short."""

    @hookspec
    def minivllm_step_finished(self, step: FinishedStep) -> None:
        """The result of a step was published; at the end of that turn of the loop, in the order of the steps."""

    @hookspec
    def minivllm_stored(self, blocks: BlocksView) -> None:
        """Blocks can be found as a prefix from now on."""

    @hookspec
    def minivllm_evicted(self, blocks: BlocksView) -> None:
        """Cached blocks were given up because room was needed."""

    @hookspec
    def minivllm_removed(self, blocks: BlocksView) -> None:
        """Blocks cannot be found any longer, for whatever reason: stored less removed is what is cached."""

    # ---- asked of all --------------------------------------------------------------------------------------------

    @hookspec
    def minivllm_figures(self) -> Mapping[str, float]:
        """What it counts, for ``stats()["figures"]["hooks:NAME"]``, records and metrics: at most 64 names
        ``[a-z][a-z0-9_]*`` with finite numbers.  Asking changes nothing."""
        raise NotImplementedError

    # ---- wrappers ------------------------------------------------------------------------------------------------

    @hookspec
    def minivllm_plan_and_submit(self, turn: int) -> Generator[None, PlannedStep | None, None]:
        """Round planning a step and handing it to the executor, in each turn of the loop; the yield gives the step, or
        None if there was nothing to do."""
        raise NotImplementedError

    @hookspec
    def minivllm_publish(self, step: PlannedStep) -> Generator[None, None, None]:
        """Round handing the result of a step to its sequences: text, streams, ends, the prefix cache."""
        raise NotImplementedError

    # ---- first result --------------------------------------------------------------------------------------------

    @hookspec(firstresult=True)
    def minivllm_resolve_model(self, model: str) -> str | None:
        """The directory (or the Hugging Face id) that ``model`` of the configuration stands for; None: not mine."""

    @hookspec(firstresult=True)
    def minivllm_read_config(self, path: str) -> Mapping[str, Any] | None:
        """The table of options in a configuration file that is neither TOML nor YAML; None: not mine.  The plug-in must
        be enabled by what is read before: a file, the environment, ``--set`` or a keyword."""
