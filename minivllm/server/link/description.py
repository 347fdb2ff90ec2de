"""What an engine says of itself to a client, once it has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.core.engine.strategies import own_names

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine


def describe(engine: Engine, resolved: Any) -> dict[str, Any]:
    """What a client is told of an engine: the fields of ``EngineInfo``, and ``tokenizer``, its folder or None."""
    import minivllm

    w, config = engine.wiring, resolved.config
    reads = own_names(engine.strategies).union(*(made.reads for _, made in engine.processors))
    room = min(pool.total for pool in engine.cache.pools) - 1
    most = engine.capacity.vocab_size if w.max_logprobs < 0 else w.max_logprobs
    several = {"strategy": resolved.strategies, "hooks": resolved.hooks}
    return {
        "model": config.model,
        "max_model_len": w.max_model_len,
        "vocab_size": engine.capacity.vocab_size,
        "kv_tokens": room * w.block,
        "max_num_seqs": w.max_num_seqs,
        "max_logprobs": most,
        "selections": {seam: part.name for seam, part in resolved.parts.items()}
        | {seam: [part.name for part in parts] for seam, parts in several.items() if parts},
        "version": minivllm.__version__,
        "reads": sorted(reads),
        "tap_points": dict(engine.capacity.taps or {}),
        "energy": "" if engine.energy is None else engine.energy.meter.name,
        "device": w.device,
        "dtype": w.dtype,
        "tokenizer": resolved.tokenizer_dir,
        "eos_ids": list(w.eos_ids),
        "sampling": dict(resolved.sampling),
    }
