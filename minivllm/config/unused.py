"""Options that mean nothing to the executor that was chosen are refused: nobody measures a part that does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.errors import ConfigError
from minivllm.spec import OPTION_OF
from minivllm.validation import begins, source_of

if TYPE_CHECKING:
    from minivllm.registry import Candidate

    from .values import EngineConfig


def refuse_unused(config: EngineConfig, executor: Candidate, origins: Mapping[str, str]) -> None:
    """ConfigError for a plug-in that is chosen by name for a seam which the executor does not run (trait ``unused``:
    the seams, with spaces between them)."""
    spec = executor.require_spec()
    for seam in str(spec.traits.get("unused", "")).split():
        option = OPTION_OF.get(seam, seam)
        if (choice := getattr(config, option)).name != "auto":
            said = f"{begins(source_of(origins, option))}{option}={choice.name} with executor={config.executor.name}"
            raise ConfigError(f"{said}, which runs no {seam}: leave {option} out, or take executor=local")
