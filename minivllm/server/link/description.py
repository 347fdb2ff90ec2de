"""The description of a started engine that its client receives."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minivllm.core.engine.strategies import own_names
from minivllm.frontend.building import image_reader
from minivllm.frontend.pooling import MODULES, default_pooling

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine

# names of config.json that clients may read
SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "num_experts",
)  # fmt: skip


def describe(engine: Engine, resolved: Any) -> dict[str, Any]:
    """Return the fields of ``EngineInfo``, the folder and the plug-in of the tokenizer (None without one), and its
    ``eos_ids``."""
    import minivllm

    wiring, config = engine.wiring, resolved.config
    reads = own_names(engine.strategies)
    for _, processor in engine.processors:
        reads = reads.union(processor.reads)
    blocks = min(pool.total for pool in engine.cache.pools) - 1  # the null block is not counted
    selections: dict[str, Any] = {seam: part.name for seam, part in resolved.parts.items()}
    for seam, parts in (("strategy", resolved.strategies), ("hooks", resolved.hooks)):
        if parts:
            selections[seam] = [part.name for part in parts]
    vocab_size = engine.capacity.vocab_size
    pooling = default_pooling(wiring.model_dir)
    modules = os.path.join(wiring.model_dir, MODULES)
    return {
        "model": config.model,
        "max_model_len": wiring.max_model_len,
        "vocab_size": vocab_size,
        "block": wiring.block,
        "kv_tokens": blocks * wiring.block,
        "max_num_seqs": wiring.max_num_seqs,
        "max_logprobs": vocab_size if wiring.max_logprobs < 0 else wiring.max_logprobs,
        "selections": selections,
        "version": minivllm.__version__,
        "reads": sorted(reads),
        "tap_points": dict(engine.capacity.taps or {}),
        "energy": "" if engine.energy is None else engine.energy.meter.name,
        "device": wiring.device,
        "dtype": wiring.dtype,
        "tokenizer": resolved.tokenizer_dir,
        "tokenizer_part": None if resolved.tokenizer_dir is None else vars(resolved.parts["tokenizer"]),
        "eos_ids": list(wiring.eos_ids),
        "sampling": dict(resolved.sampling),
        "weight_bytes": engine.capacity.weight_bytes,
        "shape": _shape(resolved.hf_config),
        "hidden": engine.capacity.hidden,
        "pooling": pooling.name,
        "pooling_fault": pooling.fault,
        "for_embeddings": os.path.isfile(modules),
        "forms": [] if engine.grammars is None else list(engine.grammars.kinds),
        "explained": _explained(resolved),
        "images": _images(engine, resolved),
    }


def _images(engine: Engine, resolved: Any) -> dict[str, Any]:
    """Return the arguments of the ``ImageReader`` of a client."""
    reader = image_reader(resolved, engine.capacity)
    facts = vars(reader)
    kept = {name: facts[name] for name in ("raw", "max_tokens", "why_not")}
    wiring = asdict(reader.wiring)
    part = None if reader.part is None else asdict(reader.part)
    return {**kept, "folder": str(reader.folder), "wiring": wiring, "part": part}


def _shape(config: Any) -> dict[str, Any]:
    """Return the type and the sizes of a model that its configuration has."""
    found = {name: getattr(config, name, None) for name in SHAPE}
    return {name: value for name, value in found.items() if isinstance(value, (str, int))}


def _explained(resolved: Any) -> list[list[str]]:
    """Return (kind of plug-in, chosen plug-in, reasons as text) of each choice, for the page of the server."""
    found = []
    for selection in resolved.explanation.selections:
        chosen = "" if selection.chosen is None else selection.chosen.entry.label
        found.append([selection.kind, chosen, selection.explain()])
    return found
