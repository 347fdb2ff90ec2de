"""The module that packages of plug-ins import from.  Their tests also import ``minivllm.testing``.

    from minivllm.plugin import ANY, Sampler, Spec, gumbel

Each name is imported from its defining module at its first use.  Importing this module, or a module of specs, therefore
imports neither torch nor numpy.  The names remain valid as long as the contract of their seam keeps its version
(docs/compatibility.md).  The defining modules are private and may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minivllm.errors import suggest as _suggest

if TYPE_CHECKING:
    from minivllm.core.interfaces.adapter import (
        AdaptedLayer,
        AdaptedModel,
        AdapterContext,
        AdapterMemory,
        AdapterMethod,
        AdapterSource,
        AdapterTarget,
        ExtendedWeight,
        LowRank,
        NeededRows,
        TensorCopy,
        adapter_refusal,
    )
    from minivllm.core.interfaces.attention import (
        NULL_BLOCK,
        AttentionBackend,
        AttentionContext,
        AttnLayer,
        AttnMeta,
        AttnSpec,
        GraphKey,
        QKPre,
    )
    from minivllm.core.interfaces.codec import (
        CodecError,
        decode_late,
        decode_plan,
        decode_result,
        encode_late,
        encode_plan,
        encode_result,
    )
    from minivllm.core.interfaces.compressor import Compressor, CompressorContext, StoredTokens
    from minivllm.core.interfaces.decoder import (
        MLP,
        ConvNames,
        DecoderSpec,
        DeltaNames,
        ExpertNames,
        Experts,
        GatedDelta,
        LayerSpec,
        Norm,
        Rope,
        Router,
        ShortConv,
        WeightNames,
    )
    from minivllm.core.interfaces.drafter import Ask, Drafter, DrafterContext, DraftModel, Head, HeadFiles
    from minivllm.core.interfaces.encoder import EncoderContext, ImageEncoder, ImageFacts, ImageValues
    from minivllm.core.interfaces.evictor import BlockInfo, Evictor, EvictorContext
    from minivllm.core.interfaces.executor import (
        AdapterWiring,
        CacheWiring,
        Capacity,
        DraftWiring,
        Executor,
        ImageWiring,
        ParallelWiring,
        Part,
        SpeculationWiring,
        StepWiring,
        Wiring,
    )
    from minivllm.core.interfaces.grammar import Compiled, Grammar, GrammarContext, GrammarSource
    from minivllm.core.interfaces.kvformat import KVFormat, KVLayout, TensorSpec
    from minivllm.core.interfaces.kvstore import KVStore, StoreContext
    from minivllm.core.interfaces.model import (
        Attention,
        Conversion,
        LinearModule,
        Model,
        ModelArch,
        Parts,
        Rule,
        StepTaps,
        StepTensors,
        StepWatch,
        decoder_rules,
    )
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.plan import (
        Delta,
        Join,
        LateInputs,
        LogProbs,
        StepError,
        StepForm,
        StepPlan,
        StepResult,
    )
    from minivllm.core.interfaces.predictor import Predictor, PredictorContext, RequestFacts, StepWork
    from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource, Quantizer, Shard, StoredWeight, WeightScheme
    from minivllm.core.interfaces.router import ReplicaLoad, ReplicaRouter, RoutedRequest, RouterContext
    from minivllm.core.interfaces.sampling import Column, Draw, Processor, Row, Rows, Sampler, SamplingContext
    from minivllm.core.interfaces.scheduler import Load, QueueView, SchedulerContext, SchedulerPolicy, StepShape
    from minivllm.core.interfaces.session import Session, SessionTurn
    from minivllm.core.interfaces.strategy import Branch, BranchEnd, DecodingStrategy, Grown, Guide, Moves, Pick, Search
    from minivllm.core.interfaces.structured import StructuredOutputsParams
    from minivllm.core.interfaces.taps import Tap
    from minivllm.core.interfaces.tokenizer import TokenizerBackend, TokenizerContext
    from minivllm.core.wiring import wiring_from_json, wiring_to_json
    from minivllm.device.layers import fields
    from minivllm.device.layers.experts import route
    from minivllm.device.layers.linear import no_adapter, part_rows
    from minivllm.device.layers.module import Module, Tensors, check_shape
    from minivllm.device.worker.process import build as build_worker
    from minivllm.device.worker.runner import Runner
    from minivllm.device.worker.sampling import gumbel, noise, noise_bits
    from minivllm.errors import (
        ConfigError,
        MinivllmError,
        ModelError,
        OptionError,
        PluginError,
        RequestError,
        ResourceError,
    )
    from minivllm.registration.fresh import command as worker_command
    from minivllm.registration.spec import (
        ANY,
        AtLeast,
        AtMost,
        MultipleOf,
        Needs,
        Param,
        PluginQuery,
        Range,
        Reason,
        Spec,
    )
    from minivllm.runtime.hooks import (
        BlocksView,
        EngineView,
        FinishedStep,
        HookContracts,
        Hooks,
        PlannedStep,
        PreemptionView,
        RequestEnd,
        RequestView,
        hookimpl,
    )
    from minivllm.runtime.processes.channel import Channel, ChannelClosed
    from minivllm.runtime.replies import (
        Begun,
        Calls,
        Channels,
        DescribedParser,
        Ended,
        Pairs,
        Reasoning,
        Reply,
        ReplyContext,
        ReplyFormat,
        ReplyParser,
        Said,
        Thought,
        Written,
    )

_HOMES: dict[str, str] = {  # module -> names that it defines
    # every plug-in
    "minivllm.registration.spec": "ANY AtLeast AtMost MultipleOf Needs Param PluginQuery Range Reason Spec",
    "minivllm.errors": "ConfigError MinivllmError ModelError OptionError PluginError RequestError ResourceError",
    # requests
    "minivllm.core.interfaces.params": "SamplingParams",
    "minivllm.core.interfaces.session": "Session SessionTurn",
    "minivllm.core.interfaces.structured": "StructuredOutputsParams",
    "minivllm.core.interfaces.taps": "Tap",
    # adapter
    "minivllm.core.interfaces.adapter": "AdaptedLayer AdaptedModel AdapterContext AdapterMemory AdapterMethod "
    "AdapterSource AdapterTarget ExtendedWeight LowRank NeededRows TensorCopy adapter_refusal",
    # attention
    "minivllm.core.interfaces.attention": "NULL_BLOCK AttentionBackend AttentionContext AttnLayer "
    "AttnMeta AttnSpec GraphKey QKPre",
    # compressor
    "minivllm.core.interfaces.compressor": "Compressor CompressorContext StoredTokens",
    # drafter
    "minivllm.core.interfaces.drafter": "Ask Drafter DrafterContext DraftModel Head HeadFiles",
    # encoder
    "minivllm.core.interfaces.encoder": "EncoderContext ImageEncoder ImageFacts ImageValues",
    # evictor
    "minivllm.core.interfaces.evictor": "BlockInfo Evictor EvictorContext",
    # executor
    "minivllm.core.interfaces.executor": "AdapterWiring CacheWiring Capacity DraftWiring Executor ImageWiring "
    "ParallelWiring Part SpeculationWiring StepWiring Wiring",
    "minivllm.core.interfaces.plan": "Delta Join LateInputs LogProbs StepError StepForm StepPlan StepResult",
    "minivllm.core.interfaces.codec": "CodecError decode_late decode_plan decode_result encode_late "
    "encode_plan encode_result",
    "minivllm.device.worker.runner": "Runner",
    "minivllm.core.wiring": "wiring_from_json wiring_to_json",
    "minivllm.runtime.processes.channel": "Channel ChannelClosed",
    # grammar
    "minivllm.core.interfaces.grammar": "Compiled Grammar GrammarContext GrammarSource",
    # hooks
    "minivllm.runtime.hooks": "BlocksView EngineView FinishedStep HookContracts Hooks PlannedStep PreemptionView "
    "RequestEnd RequestView hookimpl",
    # kvformat
    "minivllm.core.interfaces.kvformat": "KVFormat KVLayout TensorSpec",
    # kvstore
    "minivllm.core.interfaces.kvstore": "KVStore StoreContext",
    # model
    "minivllm.core.interfaces.model": "Attention Conversion LinearModule Model ModelArch Parts Rule "
    "StepTaps StepTensors StepWatch decoder_rules",
    "minivllm.core.interfaces.decoder": (
        "MLP ConvNames DecoderSpec DeltaNames ExpertNames Experts GatedDelta LayerSpec Norm Rope Router ShortConv "
        "WeightNames"
    ),
    "minivllm.device.layers": "fields",
    "minivllm.device.layers.module": "Module Tensors check_shape",
    "minivllm.device.layers.experts": "route",
    # parser
    "minivllm.runtime.replies": "Begun Calls Channels DescribedParser Ended Pairs Reasoning Reply ReplyContext "
    "ReplyFormat ReplyParser Said Thought Written",
    # predictor
    "minivllm.core.interfaces.predictor": "Predictor PredictorContext RequestFacts StepWork",
    # quantizer
    "minivllm.core.interfaces.quantizer": "ModuleInfo PartSource Quantizer Shard StoredWeight WeightScheme",
    "minivllm.device.layers.linear": "no_adapter part_rows",
    # processor and sampler
    "minivllm.core.interfaces.sampling": "Column Draw Processor Row Rows Sampler SamplingContext",
    "minivllm.device.worker.sampling": "gumbel noise noise_bits",
    # router
    "minivllm.core.interfaces.router": "ReplicaLoad ReplicaRouter RoutedRequest RouterContext",
    # scheduler
    "minivllm.core.interfaces.scheduler": "Load QueueView SchedulerContext SchedulerPolicy StepShape",
    # strategy
    "minivllm.core.interfaces.strategy": "Branch BranchEnd DecodingStrategy Grown Guide Moves Pick Search",
    # tokenizer
    "minivllm.core.interfaces.tokenizer": "TokenizerBackend TokenizerContext",
}
_RENAMED = {  # name in this module -> (module, name in that module)
    "build_worker": ("minivllm.device.worker.process", "build"),
    "worker_command": ("minivllm.registration.fresh", "command"),
}
_FOUND = {name: (module, name) for module, names in _HOMES.items() for name in names.split()} | _RENAMED

__all__ = [
    "ANY",
    "MLP",
    "NULL_BLOCK",
    "AdaptedLayer",
    "AdaptedModel",
    "AdapterContext",
    "AdapterMemory",
    "AdapterMethod",
    "AdapterSource",
    "AdapterTarget",
    "AdapterWiring",
    "Ask",
    "AtLeast",
    "AtMost",
    "Attention",
    "AttentionBackend",
    "AttentionContext",
    "AttnLayer",
    "AttnMeta",
    "AttnSpec",
    "Begun",
    "BlockInfo",
    "BlocksView",
    "Branch",
    "BranchEnd",
    "CacheWiring",
    "Calls",
    "Capacity",
    "Channel",
    "ChannelClosed",
    "Channels",
    "CodecError",
    "Column",
    "Compiled",
    "Compressor",
    "CompressorContext",
    "ConfigError",
    "ConvNames",
    "Conversion",
    "DecoderSpec",
    "DecodingStrategy",
    "Delta",
    "DeltaNames",
    "DescribedParser",
    "DraftModel",
    "DraftWiring",
    "Drafter",
    "DrafterContext",
    "Draw",
    "EncoderContext",
    "Ended",
    "EngineView",
    "Evictor",
    "EvictorContext",
    "Executor",
    "ExpertNames",
    "Experts",
    "ExtendedWeight",
    "FinishedStep",
    "GatedDelta",
    "Grammar",
    "GrammarContext",
    "GrammarSource",
    "GraphKey",
    "Grown",
    "Guide",
    "Head",
    "HeadFiles",
    "HookContracts",
    "Hooks",
    "ImageEncoder",
    "ImageFacts",
    "ImageValues",
    "ImageWiring",
    "Join",
    "KVFormat",
    "KVLayout",
    "KVStore",
    "LateInputs",
    "LayerSpec",
    "LinearModule",
    "Load",
    "LogProbs",
    "LowRank",
    "MinivllmError",
    "Model",
    "ModelArch",
    "ModelError",
    "Module",
    "ModuleInfo",
    "Moves",
    "MultipleOf",
    "NeededRows",
    "Needs",
    "Norm",
    "OptionError",
    "Pairs",
    "ParallelWiring",
    "Param",
    "Part",
    "PartSource",
    "Parts",
    "Pick",
    "PlannedStep",
    "PluginError",
    "PluginQuery",
    "Predictor",
    "PredictorContext",
    "PreemptionView",
    "Processor",
    "QKPre",
    "Quantizer",
    "QueueView",
    "Range",
    "Reason",
    "Reasoning",
    "ReplicaLoad",
    "ReplicaRouter",
    "Reply",
    "ReplyContext",
    "ReplyFormat",
    "ReplyParser",
    "RequestEnd",
    "RequestError",
    "RequestFacts",
    "RequestView",
    "ResourceError",
    "Rope",
    "RoutedRequest",
    "Router",
    "RouterContext",
    "Row",
    "Rows",
    "Rule",
    "Runner",
    "Said",
    "Sampler",
    "SamplingContext",
    "SamplingParams",
    "SchedulerContext",
    "SchedulerPolicy",
    "Search",
    "Session",
    "SessionTurn",
    "Shard",
    "ShortConv",
    "Spec",
    "SpeculationWiring",
    "StepError",
    "StepForm",
    "StepPlan",
    "StepResult",
    "StepShape",
    "StepTaps",
    "StepTensors",
    "StepWatch",
    "StepWiring",
    "StepWork",
    "StoreContext",
    "StoredTokens",
    "StoredWeight",
    "StructuredOutputsParams",
    "Tap",
    "TensorCopy",
    "TensorSpec",
    "Tensors",
    "Thought",
    "TokenizerBackend",
    "TokenizerContext",
    "WeightNames",
    "WeightScheme",
    "Wiring",
    "Written",
    "adapter_refusal",
    "build_worker",
    "check_shape",
    "decode_late",
    "decode_plan",
    "decode_result",
    "decoder_rules",
    "encode_late",
    "encode_plan",
    "encode_result",
    "fields",
    "gumbel",
    "hookimpl",
    "no_adapter",
    "noise",
    "noise_bits",
    "part_rows",
    "route",
    "wiring_from_json",
    "wiring_to_json",
    "worker_command",
]


def __getattr__(name: str) -> Any:
    """Import a name of this module when it is first used (PEP 562)."""
    if name not in _FOUND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{_suggest(name, __all__)}")
    module, attribute = _FOUND[name]
    home = importlib.import_module(module)
    value = getattr(home, attribute, None)
    if value is None:  # the name is a module of a package
        value = importlib.import_module(f"{module}.{attribute}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
