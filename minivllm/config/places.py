"""Find the files of a configuration: its model, second models, and its tokenizer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.device.loading.generation import generation_file
from minivllm.device.loading.hf_config import Checkpoint, find_model, open_checkpoint
from minivllm.device.loading.hub import DESCRIPTION, MODEL, PICKLED_MODEL, HubOptions, tokenizer_files
from minivllm.errors import ConfigError, ModelError, shown
from minivllm.runtime.text.tokenizer import configured_eos, token_ids
from minivllm.runtime.text.tokenizer_files import OTHER_FILES

from .values import PluginChoice

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part

    from .values import EngineConfig

TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:Class
TOKENIZER = tokenizer_files(("tokenizer.json", *OTHER_FILES))


@dataclass(frozen=True)
class ModelPlaces:
    """Finds models and tokenizers.  Ids are downloaded from the Hugging Face hub.  ``weights`` False downloads no
    weights, for callers that only need to know the chosen plug-ins."""

    config: EngineConfig
    weights: bool = True

    def model(self, hooks: Sequence[Part], notes: list[tuple[str, str]]) -> str:
        """Return the name or path of the model.  A hook may replace the configured name; this is added to ``notes``."""
        name = self.config.model
        if not hooks:
            return name
        from minivllm.runtime.hooks.manager import resolve_model

        found = resolve_model(hooks, name)
        if found is None:
            return name
        notes.append(("resolved", f"{name} is {found[1]} (says {found[0]})"))
        return found[1]

    def served(self, name: str) -> Checkpoint:
        """Return the checkpoint of the served model, with ``hf_overrides`` applied to its config.json.  Raise the
        errors of ``checkpoint``."""
        return self.checkpoint(name, self.config.revision, overrides=self.config.hf_overrides)

    def checkpoint(
        self,
        name: str,
        revision: str | None = None,
        option: str = "revision",
        overrides: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Return the checkpoint ``name`` at a revision.

        ``option`` is the name of the user's option for the revision, for error messages.  ModelError or ConfigError if
        the checkpoint cannot be found or read.
        """
        whole = PICKLED_MODEL if self.config.load_format == "pt" else MODEL
        wanted = whole if self.weights and self.config.load_format != "dummy" else DESCRIPTION
        return open_checkpoint(name, wanted, HubOptions(revision, self.config.download_dir, option), overrides)

    def tokenizer(self, model: str, folder: Path) -> Path | None:
        """Return the directory of the tokenizer, or None if none is needed.  ``folder`` is the directory of ``model``.

        ModelError if there is no tokenizer.  ConfigError for options that contradict each other."""
        config = self.config
        if config.skip_tokenizer_init:
            if config.tokenizer_mode != PluginChoice():
                raise ConfigError("tokenizer_mode: skip_tokenizer_init=true loads no tokenizer; remove one of them")
            return None
        if config.tokenizer is None and config.tokenizer_revision is None:
            return self._of_model(model, folder)
        if config.tokenizer is not None and TARGET.fullmatch(config.tokenizer):
            target = shown(config.tokenizer)
            raise ConfigError(f"tokenizer={target}: expected a directory or an id; a class is tokenizer_mode={target}")
        same = config.tokenizer in (None, model)
        revision = config.tokenizer_revision or (config.revision if same else None)
        option = "tokenizer_revision" if config.tokenizer_revision else "revision"
        try:
            return find_model(config.tokenizer or model, TOKENIZER, HubOptions(revision, config.download_dir, option))
        except ModelError as exc:
            raise ModelError(f"the tokenizer {exc}") from exc

    def _of_model(self, model: str, folder: Path) -> Path:
        """Return the model's directory.  If it is a hub snapshot without tokenizer files, download them first."""
        snapshot = files.snapshot_of(folder)
        if snapshot is not None and snapshot[0] == model and TOKENIZER.lacks(folder):
            with contextlib.suppress(ModelError):  # the reader of the tokenizer reports that there is none
                return find_model(model, TOKENIZER, HubOptions(snapshot[1], self.config.download_dir))
        return folder


def end_ids(config: EngineConfig, model_dir: Path) -> list[int] | None:
    """Return the end-of-sequence ids from ``hf_overrides`` or the model's files.

    None means that the ids of the tokenizer apply.  ModelError.
    """
    override = config.hf_overrides.get("eos_token_id")
    if override is not None:
        return token_ids(override, "hf_overrides")
    path = generation_file(config.generation_config, model_dir)
    return configured_eos(model_dir, path) or None


def describe_folder(folder: Path) -> str:
    """Return a model's folder for a message.  For a hub snapshot, its id and commit come first."""
    snapshot = files.snapshot_of(folder)
    return str(folder) if snapshot is None else f"{snapshot[0]} at {snapshot[1]}, in {folder}"
