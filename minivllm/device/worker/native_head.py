"""Native CPU code for the layers of a drafter's head, and for whole steps with its drafts."""

from __future__ import annotations

from typing import Any

from minivllm.device.hardware import free_ram
from minivllm.device.layers.lowering import NotLowered
from minivllm.device.layers.native_drafts import NativeDrafts
from minivllm.device.layers.native_steps import NativeHead, NativeSteps

from .head_model import HeadModel


def add_native_head(runner: Any, steps: NativeSteps) -> None:
    """Build the native CPU code that runs the layers of a drafter's head, or note the reason why it cannot.

    ``runner`` is the ``Runner`` that has the drafter.  ``steps`` are the native steps of the served model, to which the
    head is added."""
    own = runner.own_models.get("drafter")
    if not isinstance(own, HeadModel):
        return
    own.native = None
    try:
        second = own.second
        made = NativeHead(steps, second.model, second.parts, second.one_rope, free_ram() // 4)
    except NotLowered as e:
        runner.worker.notes.append(f"the layers of the drafter run as separate operations: {e}")
        return
    steps.head = own.native = made
    steps.copied += made.copied
    if _draws_whole_steps(runner, steps, own):
        steps.drafts = NativeDrafts(steps, made, own.read, own.drafted, own.states.memory)


def _draws_whole_steps(runner: Any, steps: NativeSteps, own: HeadModel) -> bool:
    """Return whether native code may run all parts of a step with drafts.

    It may not if the drafter or the sampler has code of its own that must run, or if steps need other preparations:
    those of adapters, images, recurrent states or compressions."""
    parts = (runner.adapters, runner.images, runner.state.recurrent, runner.compactor)
    if any(part is not None for part in parts):
        return False
    drafts = runner.drafting is not None and runner.drafting.head is own
    return bool(drafts and steps.plain and not runner.chain.commits[-1])
