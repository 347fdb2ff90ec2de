"""The counter of joules that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Executor
    from minivllm.runtime.energy.account import EnergyAccount


def counter_of(asked: str, executor: Executor, name: str) -> EnergyAccount | None:
    """What reads the counter for an engine, None with ``energy=off``; ``executor`` has started.  ConfigError where
    there is no counter: figures are measured or not there."""
    if asked == "off":
        return None
    from minivllm.runtime.energy.account import EnergyAccount
    from minivllm.runtime.energy.counters import open_counter

    try:
        return EnergyAccount(open_counter(asked, lambda: executor.call("devices")))
    except NotImplementedError:
        why = f"the executor {name} does not say what computes"
    except OSError as exc:
        why = str(exc)
    folder = "rapl:FOLDER, where Linux's powercap is mounted elsewhere"
    raise ConfigError(f"energy={asked}: {why}; want energy=off, or {folder}")
