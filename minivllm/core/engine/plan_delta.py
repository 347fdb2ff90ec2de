"""The changes since the last plan that the device has not received yet (``plan.Delta``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.core.interfaces.plan import NO_CHANGE, Delta

from .plan_columns import join_of

if TYPE_CHECKING:
    from .adapters import EngineAdapters
    from .cache import KVCache
    from .images import Images
    from .request import Seq
    from .slots import Slots


class ChangedPlanner(Protocol):
    """The attributes of a planner that hold changes for the device."""

    slots: Slots
    cache: KVCache
    adapters: EngineAdapters | None
    images: Images | None
    left: list[int]
    keeps: list[tuple[int, int]]
    forgotten: list[int]
    chosen: list[tuple[int, int]]
    joins: list[tuple[int, Seq]]
    forks: list[tuple[int, int, Seq]]


def take_delta(planner: ChangedPlanner) -> Delta:
    """Return the changes since the last plan for the device, and clear the planner's lists of changes."""
    p = planner
    s = p.slots
    forks = [(parent, slot, seq.sample) for parent, slot, seq in p.forks if s.seq[slot] is seq]
    # A parent may have been preempted since, but the device still copies its columns for the fork.
    parents = {parent for parent, _, _ in forks}
    joins = [(slot, seq) for slot, seq in p.joins if s.seq[slot] is seq or slot in parents]
    changes: dict[str, Any] = p.cache.changes()
    if joins:
        changes["join"] = join_of(joins, s, p.images)
    _add_columns(changes, np.int32, leave=p.left, fork=forks, token=p.chosen)
    if p.adapters is not None:
        _add_columns(changes, np.int32, adapter=p.adapters.changes())
    if p.images is not None:
        changes |= p.images.changes()
    _add_columns(changes, np.int64, keep=p.keeps, forget=p.forgotten)
    taken = (p.left, p.chosen, p.joins, p.forks, p.keeps, p.forgotten)
    for rows in taken:
        rows.clear()
    return Delta(**changes) if changes else NO_CHANGE


def _add_columns(changes: dict[str, Any], dtype: Any, **columns: list[Any]) -> None:
    """Add the columns that are not empty to ``changes``, as arrays of ``dtype``."""
    for name, rows in columns.items():
        if rows:
            changes[name] = np.array(rows, dtype)
