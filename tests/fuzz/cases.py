"""The case of a seed, which is plain data for JSON with engines, requests and the way they are driven.

A case is a function of (seed, device, dtype) and of ``VERSION``.  A change of the drawn values must increase
``VERSION``, so that the seeds of a ledger are not mistaken for other cases.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import asks, configs, pictures
from .weights import changeable

VERSION = "24"
# kinds of faults, the most serious first; a case counts for the first of its kinds
KINDS = ("died", "hung", "device assert", "dead", "nan", "mask", "wrong token", "exception", "count", "leak", "weights",
         "finish", "stream", "text", "logprob", "taps", "ties")  # fmt: skip
DRIVES = {"generate": 5, "streams": 4, "async": 4}
FLOODS = 12  # largest number of requests that evict the cached blocks of an engine
DEFAULT_DTYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Ask:
    """A request.  ``params`` are the fields of ``SamplingParams`` as plain data (``functions.sampling_params``).

    With ``after`` the prompt is the prompt and the answer of that request, and then ``prompt``, as in a conversation.
    ``leave`` is the number of pieces after which the client leaves.  ``delay`` is the number of turns of the driver
    before the request arrives, counted from the beginning of its wave.
    """

    prompt: list[int]
    params: dict[str, Any]
    engine: int = 0
    wave: int = 0
    after: int | None = None
    leave: int | None = None
    delay: int = 0


@dataclass(frozen=True)
class Case:
    """A case.  ``engines`` has the options of each engine, without device and dtype.

    Waves of requests follow one another.  ``resets`` are the waves before which the prefix caches are emptied.
    ``weights`` has the set of weights of each wave (``weights.EngineWeights``); waves beyond its end have set 0.  While
    a wave runs, ``changes`` times something happens to the weights of an engine that changes no answer, and in
    ``mixed`` waves they change to the other set.
    ``walk`` checks the cache after every step.  ``late`` is the share of the meetings of host and device that are
    delayed (``delays``).
    """

    seed: int
    device: str
    dtype: str
    drive: str
    engines: list[dict[str, Any]]
    asks: list[Ask]
    resets: list[int] = field(default_factory=list)
    walk: bool = False
    late: float = 0.0
    weights: list[int] = field(default_factory=list)
    changes: int = 0
    mixed: list[int] = field(default_factory=list)

    def set_of(self, ask: Ask) -> int:
        """Return the set of weights with which a request begins."""
        options = self.engines[ask.engine]
        return self.weights[ask.wave] if ask.wave < len(self.weights) and changeable(options, self.device) else 0

    def options_of(self, ask: Ask) -> dict[str, Any]:
        """Return the options of a request's engine, with its set of weights."""
        return {**self.engines[ask.engine], "weights": self.set_of(ask)}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        values = json.loads(text)
        return cls(**{**values, "asks": [Ask(**ask) for ask in values["asks"]]})


def dtype_of(seed: int, dtypes: list[str]) -> str:
    """Return the dtype of a seed.  Nothing else in its case depends on the requested dtypes."""
    return dtypes[random.Random(f"dtype {seed}").randrange(len(dtypes))]


def case_of(seed: int, device: str, dtype: str) -> Case:
    """Return the case of a seed."""
    rng = random.Random(f"case {VERSION} {seed}")
    drive = asks.weighted(rng, DRIVES)
    count = asks.weighted(rng, {1: 12, 2: 3, 3: 1})
    engines = [configs.draw(rng, device, dtype) for _ in range(count)]
    engines = [configs.with_adapters(random.Random(f"adapters {seed} {i}"), e) for i, e in enumerate(engines)]
    engines = [configs.with_compression(random.Random(f"compression {seed} {i}"), e) for i, e in enumerate(engines)]
    engines = [pictures.with_pictures(random.Random(f"images {seed} {i}"), e, device) for i, e in enumerate(engines)]
    waves = rng.choice([1, 1, 2, 3])
    made: list[Ask] = []
    # requests of similar sizes, so that a pool for the largest is too small for two others, which causes preemption
    cap = rng.choice([None, None, 60, 90, 150])
    most = rng.choice([3, 8, 12, 20, 28] if cap is None else [8, 12, 20])
    for wave in range(waves):
        for _ in range(rng.randint(1 if cap is None else 5, most) // waves + 1):
            made.append(_ask(rng, engines, made, wave, drive, cap))
    engines = [configs.with_blocks(rng, e, _needs(e, i, made)) for i, e in enumerate(engines)]
    engines = [configs.with_stores(random.Random(f"stores {seed} {i}"), e) for i, e in enumerate(engines)]
    resets = [w for w in range(1, waves) if rng.random() < 0.25]
    case = Case(seed, device, dtype, drive, engines, made, resets, rng.random() < 0.2, rng.choice([0, 0.3, 0.8]))
    case = _with_weights(random.Random(f"weights {seed}"), case, waves)
    return _with_returns(random.Random(f"returns {seed}"), case, waves)


def _with_returns(rng: random.Random, case: Case, waves: int) -> Case:
    """Add two waves for engines with tiers: prompts that evict all cached blocks from the device, and earlier requests
    again, whose blocks are loaded from a tier."""
    added: list[Ask] = []
    for on, engine in enumerate(case.engines):
        mine = [a for a in case.asks if a.engine == on and a.after is None]
        tokens = (engine["num_kvcache_blocks"] - 1) * engine["kvcache_block_size"]
        size = min(engine["max_model_len"] - 8, 250, tokens - 1)
        floods = -(-tokens // size)
        if not engine["kvstore"] or not mine or floods > FLOODS:
            continue
        for _ in range(floods):
            prompt = [rng.randrange(3, configs.VOCAB[engine["model"]]) for _ in range(size)]
            added.append(Ask(prompt, {"seed": 1, "max_tokens": 1}, engine=on, wave=waves))
        longest_first = sorted(mine, key=lambda a: -len(a.prompt))[:6]
        added += [replace(a, wave=waves + 1, leave=None) for a in longest_first]
    return replace(case, asks=[*case.asks, *added])


def _with_weights(rng: random.Random, case: Case, waves: int) -> Case:
    """Draw the sets of weights of the waves, and the changes while requests run."""
    sets = [rng.choice([0, 1]) for _ in range(waves)] if rng.random() < 0.4 else []
    turns = case.drive != "generate"
    changes = rng.choice([0, 0, 1, 2, 4]) if turns else 0
    return replace(
        case, weights=sets, changes=changes, mixed=[w for w in range(waves) if turns and rng.random() < 0.12]
    )


def _ask(
    rng: random.Random, engines: list[dict[str, Any]], before: list[Ask], wave: int, drive: str, cap: int | None
) -> Ask:
    on = rng.randrange(len(engines))
    engine = engines[on]
    turns = drive != "generate"
    leave = rng.choice([1, 1, 2, 3, 5, 8]) if turns and rng.random() < 0.2 else None
    prompt, params = asks.draw(rng, engine, cap)
    ask = Ask(prompt, params, engine=on, wave=wave, leave=leave, delay=rng.choice([0, 0, 0, 1, 3, 9]) * turns)
    earlier = [i for i, a in enumerate(before) if a.engine == on and a.wave < wave and a.after is None]
    earlier = [i for i in earlier if longest(before[i], before) + 12 + ask.params["max_tokens"] < (cap or 250)]
    # an answer may have the id of a part of an image
    if earlier and rng.random() < 0.35 and "guidance_scale" not in params and "encoder" not in engine:
        return replace(ask, prompt=ask.prompt[:12], after=rng.choice(earlier))
    return ask


def longest(ask: Ask, all_asks: list[Ask]) -> int:
    """Return the largest number of tokens of a request's prompt and answer."""
    before = 0 if ask.after is None else longest(all_asks[ask.after], all_asks)
    return before + len(ask.prompt) + ask.params["max_tokens"]


def _needs(engine: dict[str, Any], on: int, made: list[Ask]) -> int:
    """Return the number of blocks that the largest request of an engine needs."""
    mine = [a for a in made if a.engine == on]
    return max((_blocks(engine, a, longest(a, made)) for a in mine), default=1)


def _blocks(engine: dict[str, Any], ask: Ask, end: int) -> int:
    """Return the largest number of blocks of a request.

    Its branches share the full blocks of the prompt, if the prompt is known.  A guide has at most as many as its row.
    """
    block, width = engine["kvcache_block_size"], asks.width(ask.params)
    shared = (len(ask.prompt) - 1) // block if ask.after is None else 0
    whole = -(-min(end, engine["max_model_len"]) // block)
    if "kv_budget" in ask.params:  # the kept tokens are moved to blocks in addition to those of the prompt
        whole = 2 * whole + 2
    return max(shared + width * (whole - shared), 2 * whole if "guidance_scale" in ask.params else 0)
