"""The folder of a model and the contents of its config.json.  No code of a model directory is ever run."""

from __future__ import annotations

import copy
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.device.loading.gguf_file import is_gguf
from minivllm.errors import ModelError, brief, shown

from . import Fields
from .hub import MODEL, HubFiles, HubOptions, find_snapshot, one_line
from .numbers import check_numbers, with_floats
from .overrides import lay_over
from .plain_config import plain_config
from .text_model import TextModel, find_text_model, holds_text_model, nested_parts

# name of a packaged model -> its directory in minivllm/pocket
IN_PACKAGE = {"pocket": "model", "pocket-draft": "draft", "pocket-mtp": "mtp"}
# name of a class in a checkpoint's own code -> transformers' name of the class
RENAMED = {"MPTForCausalLM": "MptForCausalLM"}
# model types that have another name for max_position_embeddings
CONTEXT_KEYS = {"mpt": ("max_seq_len",), "bloom": ("seq_length",)}
# file that AutoGPTQ or AutoAWQ writes -> its quantization method
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
MOST_HUB_ID = 200  # characters
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A model directory, or a GGUF file, and the facts of its config.json that choose plug-ins."""

    folder: Path
    raw: Fields

    @property
    def architecture(self) -> str:
        named = self.raw.get("architectures")
        if not (isinstance(named, list) and named and isinstance(named[0], str)):
            raise ModelError(f'{self.folder}/config.json: names no architecture; expected "architectures": ["..."]')
        if len(named[0]) > 128:
            raise ModelError(
                f"{self.folder}/config.json: architectures={shown(named)}: expected a name of up to 128 letters"
            )
        return RENAMED.get(named[0], named[0])

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type") or "")

    @property
    def dtype(self) -> str:
        """Return the dtype of the weights, "float32" if the file has none, as in transformers."""
        parts = [self.raw, *(part for _, part in nested_parts(self.raw))]
        named = next((c[k] for c in parts for k in ("dtype", "torch_dtype") if c.get(k)), "float32")
        return str(named).removeprefix("torch.")

    @property
    def quantization(self) -> str:
        """Return the method that the weights are quantized with, "none" if they are not."""
        parts = [self.raw, *(part for _, part in nested_parts(self.raw))]
        named: Fields = next((c["quantization_config"] for c in parts if c.get("quantization_config")), {})
        return str(named.get("quant_method", "unknown")) if named else "none"

    @cached_property
    def text(self) -> TextModel | None:
        """Return the text model of a checkpoint with several models, or None if the checkpoint has one model.

        ModelError if config.json cannot be read, or if the text model cannot be served.
        """
        if not holds_text_model(self.raw):
            return None
        try:
            return find_text_model(copy.deepcopy(dict(self.raw)), self.architecture)
        except ModelError as exc:
            raise ModelError(f"{self.folder}/config.json: {self.architecture}: {exc}") from None
        except Exception as exc:  # transformers checks fields with errors of many types
            raise ModelError(f"{self.folder}/config.json: {one_line(exc)}") from exc

    def hf_config(self) -> Any:
        """Return the configuration of the text model, with the attributes of transformers' object.

        No code of the model's folder is run.  ModelError if it cannot be read.
        """
        return plain_config(self.raw, self.from_transformers) or self.from_transformers()

    def from_transformers(self) -> Any:
        """Return transformers' configuration of the text model.  ModelError with its reason if it refuses the file."""
        if self.text is not None:
            return self.text.config
        from transformers.configuration_utils import PreTrainedConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        known = self.model_type in CONFIG_MAPPING
        # ``CONFIG_MAPPING[name]`` imports the class of a model type, and ``CONFIG_MAPPING.get`` does not.
        kind = CONFIG_MAPPING[self.model_type] if known else PreTrainedConfig
        try:  # some classes change their argument, so they receive a copy
            return kind.from_dict(copy.deepcopy(dict(self.raw))).get_text_config()
        except Exception as exc:  # transformers checks fields with errors of many types
            raise ModelError(f"{self.folder}/config.json: {one_line(exc)}") from exc


def open_checkpoint(
    model: str,
    wanted: HubFiles = MODEL,
    hub: HubOptions = HubOptions(),  # noqa: B008
    overrides: Fields | None = None,
) -> Checkpoint:
    """Find a model and read its config.json, changed by ``overrides``, or the same fields from the header of a GGUF
    file.

    ``wanted`` says which files are downloaded, and ``hub`` has the options of a download.  ModelError names a missing
    or broken file.
    """
    folder = find_model(model, wanted, hub)
    if is_gguf(folder):
        from .gguf import config_of

        raw = lay_over(config_of(folder), overrides)
        check_numbers(f"{folder} with hf_overrides" if overrides else str(folder), raw)
        return Checkpoint(folder, raw)
    path = folder / "config.json"
    if not files.is_there(path):
        raise ModelError(f"{folder}: holds no config.json; expected a Hugging Face model directory")
    raw = files.read_json(path, files.PART, ModelError)
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected a JSON object, got a {type(raw).__name__}")
    try:
        raw = lay_over(with_floats({**raw, **_quantization_beside(folder, raw)}), overrides)
    except ModelError as exc:
        raise ModelError(f"{path}: {exc}") from None
    check_numbers(f"{path} with hf_overrides" if overrides else str(path), raw)
    return Checkpoint(folder, raw)


def _quantization_beside(folder: Path, raw: Fields) -> dict[str, Any]:
    """Return the quantization of older checkpoints, which store it in another file or under another name."""
    if not raw.get("quantization_config") and isinstance(raw.get("compression_config"), dict):
        return {"quantization_config": {"quant_method": "compressed-tensors", **raw["compression_config"]}}
    for name, method in BESIDE.items():
        if not raw.get("quantization_config") and files.is_there(folder / name):
            config = files.read_json(folder / name, files.PART, ModelError)
            if not isinstance(config, dict):
                raise ModelError(f"{folder / name}: expected a JSON object, got a {type(config).__name__}")
            return {"quantization_config": {"quant_method": method, **config}}
    return {}


def longest_context(cfg: Any) -> int | None:
    """Return the largest number of tokens of a sequence, None without a limit.

    It is ``max_position_embeddings``, or more if the rotary embedding extends it.
    """
    _, most = _context_named(cfg)
    params = getattr(cfg, "rope_parameters", None) or getattr(cfg, "rope_scaling", None) or {}
    kind = params.get("rope_type") or params.get("type")
    factor = params.get("factor")
    if most is None or not isinstance(factor, (int, float)) or kind not in ("dynamic", "yarn"):
        return most
    name = "original_max_position_embeddings"
    trained = (getattr(cfg, name, None) or params.get(name)) if kind == "yarn" else most
    return max(most, int((trained or most) * factor))


def describe_context(cfg: Any) -> str:
    """Return ``longest_context`` in words, for a message."""
    most = longest_context(cfg)
    (key, named) = _context_named(cfg)
    stretched = "" if most == named else f", which its rotary embedding stretches to {most}"
    return f"{key}={named}{stretched}"


def _context_named(cfg: Any) -> tuple[str, int | None]:
    """Return the key with the largest number of tokens of a sequence, and its value."""
    keys = ("max_position_embeddings", *CONTEXT_KEYS.get(str(getattr(cfg, "model_type", "")), ()))
    for key in keys:
        value = getattr(cfg, key, None)
        if value is not None:
            return key, value
    return keys[0], None


def find_model(model: str, wanted: HubFiles = MODEL, hub: HubOptions = HubOptions()) -> Path:  # noqa: B008
    """Return the path of a model, which is fetched if the cache lacks files.

    ``model`` is ``pocket``, ``pocket-draft``, a directory, a GGUF file, or an id of the Hugging Face hub.  ``wanted``
    names the files to fetch.  Raise ModelError if there is no such model, and ConfigError for a revision of a local
    model.
    """
    if model in IN_PACKAGE:
        hub.refuse_revision(model)
        folder = Path(__file__).parents[2] / "pocket" / IN_PACKAGE[model]
        if not os.path.isdir(folder):
            raise ModelError(f"the model {shown(model)} is missing from this installation: no {folder}")
        return folder
    directory = files.folder_of(model)
    if directory is not None:
        hub.refuse_revision(f"the directory {model}")
        return directory.resolve()
    if is_gguf(model):
        hub.refuse_revision(f"the file {model}")
        return Path(os.path.realpath(model))
    if os.path.exists(model):
        raise ModelError(f"{brief(model)}: is a file; expected a model directory, or a GGUF file")
    if model.startswith((".", "/", "~")) or len(model) > MOST_HUB_ID:
        raise ModelError(f"{brief(model)}: no such directory")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"{brief(model)}: no such directory, and no Hugging Face id, which is OWNER/NAME")
    return find_snapshot(model, wanted, hub)
