"""The contracts: which kinds of plug-ins there are, and what one of each kind may say about itself (``spec.Spec``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_SEAMS = "minivllm.core.interfaces."


@dataclass(frozen=True)
class Kind:
    """One contract: plug-ins of it are subclasses of ``base`` and come by the entry-point ``group``.

    ``api`` is the contract's (major, minor); a plug-in fits if its major is equal and its minor is not newer.
    ``facts`` are what ``limits`` may name, ``features`` and ``traits`` what a spec may claim and declare.  The engine
    asks for some of the features; the others are promises to users, and the conformance kit holds plug-ins to all.
    ``open`` are the facts that a user may leave open and a spec may supply in ``prefer``.  ``changed`` says what an
    author of the major before has to change.
    """

    name: str
    base: str
    api: tuple[int, int] = (1, 0)
    facts: tuple[str, ...] = ()
    features: Mapping[str, str] = field(default_factory=dict)  # name -> what is claimed
    traits: Mapping[str, str] = field(default_factory=dict)  # name -> what is declared
    open: tuple[str, ...] = ()
    changed: str = ""

    @property
    def group(self) -> str:
        return f"minivllm.{self.name}"


_INVARIANT = {"batch_invariant": "a row's bits do not depend on the rows beside it, nor on how it is cut into chunks"}
_SAMPLING = {
    "graph_safe": "can be captured in a CUDA graph and replayed on new data",
    "multi_position": "serves several positions of one row in a step, so that rows which bind it can speculate",
}
_PROCESSING = {
    **_SAMPLING,
    "own_model": "is given the logits of a model of its own, which its option `model` names; claimed alone",
}
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind(
                "attention",
                _SEAMS + "attention:AttentionBackend",
                api=(1, 3),
                facts=("device", "sm", "dtype", "kv_format", "dim_qk", "dim_v", "queries_per_kv", "block"),
                features={
                    "window": "sliding windows",
                    "sinks": "a learned logit per head that takes probability and gives no value",
                    "softcap": "scores s become softcap * tanh(s / softcap)",
                    "v_in_k": "values are the first dim_v elements of the key (multi-head latent attention)",
                    "lse": "gives the logarithm of the softmax's denominator",
                    "repeatable": "the same step gives the same bits",
                    **_INVARIANT,
                },
                traits={
                    "graph": "steps that can be captured in a CUDA graph: none, decode or mixed",
                    "plan": "where plan() works: host or device",
                    "drafts": "how a row's drafts come: `apart`, as decode rows (the default), or `merged`, as tokens "
                    "of one row, which is for those that read a few tokens as fast as one",
                    "native": "`softmax`: what it computes is the attention of the layer's spec and nothing else, so "
                    "that a captured step of a CPU may compute it",
                },
                open=("block",),
            ),
            Kind(
                "drafter",
                _SEAMS + "drafter:Drafter",
                facts=("device",),
                features={"draft_model": "works with a model of its own, which its option `model` names"},
                traits={"drafts": "how many tokens it can draft for a row in a step, if there is a limit; 0: none"},
            ),
            Kind(
                "evictor",
                _SEAMS + "evictor:Evictor",
                api=(1, 1),
                traits={"order": "the reference order it keeps: lru, fifo or lfu"},
            ),
            Kind(
                "executor",
                _SEAMS + "executor:Executor",
                api=(2, 3),
                changed="Wiring nests since 2.0 (wiring.num_blocks is wiring.cache.num_kvcache_blocks, "
                "wiring.run_ahead is wiring.steps.run_ahead): see docs/compatibility.md",
                facts=("device", "tensor_parallel_size"),
                traits={
                    "unused": "seams that it does not run, with spaces between: a plug-in chosen for one is refused",
                    "made_up": "it computes no model: target of a function (token ids, vocabulary) that gives the "
                    "logits f32 [V] of the next token, which the conformance kit compares with instead",
                },
            ),
            Kind(
                "grammar",
                _SEAMS + "grammar:Grammar",
                api=(1, 1),
                features={
                    "json": "compiles JSON schemas",
                    "regex": "compiles regular expressions, with ASCII classes",
                    "choice": "compiles lists of texts",
                    "grammar": "compiles grammars in Lark's notation and in GBNF",
                },
            ),
            Kind("hooks", "minivllm.hooks:Hooks", api=(1, 2)),
            Kind(
                "kvformat",
                _SEAMS + "kvformat:KVFormat",
                facts=("device", "sm", "dtype", "holds"),
                traits={
                    "native": "`plain`: `k` and `v` hold the numbers themselves, token by token, so that a captured "
                    "step of a CPU may read and write them"
                },
            ),
            Kind(
                "model",
                _SEAMS + "model:ModelArch",
                api=(2, 2),
                changed="a model may be a table since 2.0 (ModelArch.describe); Parts.rotary takes a decoder.Rope, "
                "step.wanted is step.logits_indices, picks is takes_logits_indices: see docs/compatibility.md",
                facts=("device", "dtype", "architecture", "model_type"),
                features={**_INVARIANT, "any_architecture": "serves what no other plug-in names, and is asked last"},
                traits={"ignores": "fields of config.json that change nothing, beside those that every model ignores"},
            ),
            Kind("processor", _SEAMS + "sampling:Processor", api=(1, 4), facts=("device",), features=_PROCESSING),
            Kind(
                "quantizer",
                _SEAMS + "quantizer:Quantizer",
                api=(1, 1),
                facts=("device", "sm", "dtype", "checkpoint"),
                features={
                    **_INVARIANT,
                    "sliceable": "slicing a full tensor and quantizing the slice is quantizing and slicing",
                },
                traits={"bits": "bits of a quantized weight element, scales not counted"},
            ),
            Kind(
                "sampler",
                _SEAMS + "sampling:Sampler",
                api=(1, 4),
                facts=("device",),
                features=_SAMPLING,
                traits={
                    "native": "variant bits, added up, of rows whose draw is the argmax of logits where the column "
                    "`temperature` is 0, else of logits / temperature + Gumbel noise: a captured step of a CPU may "
                    "draw them"
                },
            ),
            Kind(
                "scheduler",
                _SEAMS + "scheduler:SchedulerPolicy",
                api=(1, 1),
                features={"starvation_free": "a request waits for a bounded time under a steady stream of others"},
            ),
            Kind("strategy", _SEAMS + "strategy:DecodingStrategy", api=(1, 4)),
        )
    }
)
OPTION_OF = {  # kind -> its option in the configuration, where that is called otherwise
    "kvformat": "kv_format", "model": "model_arch", "processor": "processors", "strategy": "strategies",
}  # fmt: skip
RESERVED = ("kvstore", "trimmer")  # groups whose contract is not written yet
ASKED = ("processor", "sampler", "strategy")  # kinds that may declare parameters of requests
