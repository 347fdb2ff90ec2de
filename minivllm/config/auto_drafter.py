"""The automatic choice of a drafter: on a GPU ``drafter = auto`` uses the head for next-token prediction that a
checkpoint holds.

A configuration is first resolved without drafts.  If the checkpoint has a head, it is resolved again with the drafter
``mtp``.  An error of this second attempt is the reason, in a note, why the first result is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.device.loading.tensor_names import names_in
from minivllm.errors import MinivllmError

from .own_models import has_head
from .values import PluginChoice

if TYPE_CHECKING:
    from .resolved import Resolved
    from .values import EngineConfig

FOUND = "the checkpoint holds a head for next-token prediction"
AUTO, MTP = PluginChoice(), PluginChoice(prefer=["minivllm/mtp"])
# names of executors whose steps may have drafts; others, such as simulations, may compute drafts differently
EXECUTORS = ("minivllm/local", "minivllm/process", "minivllm/multiprocess", "minivllm/ray")


def choose_drafter(config: EngineConfig, resolve: Callable[[EngineConfig, bool], Resolved]) -> Resolved:
    """Return the result of ``resolve``, with the drafter ``mtp`` where ``drafter = auto`` may use it.

    ``resolve(config, again)`` chooses all plug-ins; ``again`` means that an earlier call has chosen them with another
    drafter.  Exceptions of the call without drafts are raised.
    """
    plain = resolve(config, False)
    wiring = plain.wiring
    if config.drafter != AUTO or wiring.speculation.num_speculative_tokens:
        return plain
    if not has_head(names_in(Path(wiring.model_dir), config.load_format)):
        return plain
    reason = _excluded(plain)
    if not reason:
        try:
            found = resolve(config.model_copy(update={"drafter": MTP}), True)
        except MinivllmError as e:
            reason = str(e)
        else:
            note = ("drafter.head", f"{FOUND}; drafter=auto uses it, drafter=none does not")
            return replace(found, config=config, notes=(*found.notes, note), without_head=plain)
    return keep_none(plain, reason)


def keep_none(plain: Resolved, reason: str) -> Resolved:
    """Return choices without drafts, with a note why the head of the checkpoint is not used."""
    note = ("drafter.head", f"{FOUND}, which drafter=auto does not use: {reason}")
    return replace(plain, notes=(*plain.notes, note))


def _excluded(plain: Resolved) -> str:
    """Return the reason why a head is not used although the drafter ``mtp`` supports the model, or ""."""
    if plain.device.kind != "cuda":
        return "on a CPU no head is used by itself; drafter=mtp uses it"
    if plain.wiring.images.max_images:
        return "images are not implemented with a drafter that has a model; max_images=0 serves text only"
    name = plain.parts["executor"].name
    if name not in EXECUTORS:
        return f"executor={name} may compute no drafts; drafter=mtp uses it"
    return ""
