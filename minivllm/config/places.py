"""Where the files of a configuration are: of its model, of the models beside it, of its tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.device.loading.generation import generation_file
from minivllm.device.loading.hf_config import Checkpoint, find_model, open_checkpoint
from minivllm.device.loading.hub import DESCRIPTION, MODEL, PICKLED_MODEL, HubOptions, tokenizer_files
from minivllm.errors import ModelError
from minivllm.runtime.text.tokenizer import OTHER_FILES, configured_eos, token_ids

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part

    from .values import EngineConfig

TOKENIZER = tokenizer_files(("tokenizer.json", *OTHER_FILES))


@dataclass(frozen=True)
class ModelPlaces:
    """Finds what a configuration names, on the Hugging Face hub where it is an id.  ``weights``: they are wanted too,
    as they are not by who only asks what would be chosen, or has dummies in their place."""

    config: EngineConfig
    weights: bool = True

    def model(self, hooks: Sequence[Part], notes: list[tuple[str, str]]) -> str:
        """What a hook says that the name of the model stands for, which is noted, or the name."""
        name = self.config.model
        if not hooks:
            return name
        from minivllm.runtime.hooks.manager import ask_model

        found = ask_model(hooks, name)
        if found is None:
            return name
        notes.append(("resolved", f"{name} is {found[1]} (says {found[0]})"))
        return found[1]

    def served(self, name: str) -> Checkpoint:
        """Return the model that is served, with ``hf_overrides`` laid over its config.json.  Errors: ``checkpoint``."""
        return self.checkpoint(name, self.config.revision, overrides=self.config.hf_overrides)

    def checkpoint(
        self,
        name: str,
        revision: str | None = None,
        option: str = "revision",
        overrides: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Return the model ``name`` at a revision, which the user calls ``option``.  ModelError, ConfigError."""
        whole = PICKLED_MODEL if self.config.load_format == "pt" else MODEL
        wanted = whole if self.weights and self.config.load_format != "dummy" else DESCRIPTION
        return open_checkpoint(name, wanted, HubOptions(revision, self.config.download_dir, option), overrides)

    def tokenizer(self, model: str, folder: Path) -> Path | None:
        """The directory of the tokenizer, None if none is wanted, where ``model`` is in ``folder``."""
        config = self.config
        if config.skip_tokenizer_init:
            return None
        if config.tokenizer is None and config.tokenizer_revision is None:
            return self._own(model, folder)
        own = config.tokenizer in (None, model)
        revision = config.tokenizer_revision or (config.revision if own else None)
        option = "tokenizer_revision" if config.tokenizer_revision else "revision"
        try:
            return find_model(config.tokenizer or model, TOKENIZER, HubOptions(revision, config.download_dir, option))
        except ModelError as exc:
            raise ModelError(f"the tokenizer {exc}") from exc

    def _own(self, model: str, folder: Path) -> Path:
        """The model's: of a snapshot in which others have left weights alone, the rest is fetched."""
        there = files.snapshot_of(folder)
        if there is not None and there[0] == model and TOKENIZER.lacks(folder):
            with contextlib.suppress(ModelError):  # a model may have none, which who reads it says
                return find_model(model, TOKENIZER, HubOptions(there[1], self.config.download_dir))
        return folder


def end_ids(config: EngineConfig, model_dir: Path) -> list[int] | None:
    """Return the end-of-sequence ids that ``hf_overrides`` or the model's files configure; None: those of the
    tokenizer's directory.  ModelError."""
    if (own := config.hf_overrides.get("eos_token_id")) is not None:
        return token_ids(own, "hf_overrides")
    path = generation_file(config.generation_config, model_dir)
    return configured_eos(model_dir, path) or None


def told(folder: Path) -> str:
    """A model's folder in a message; of a snapshot its id and commit first."""
    there = files.snapshot_of(folder)
    return str(folder) if there is None else f"{there[0]} at {there[1]}, in {folder}"
