"""The conformance suite of each seam (kind of plug-in)."""

from __future__ import annotations

SUITES = {  # seam -> (module of this package, class)
    "adapter": ("adapter", "AdapterConformance"),
    "attention": ("attention", "AttentionConformance"),
    "compressor": ("compressor", "CompressorConformance"),
    "drafter": ("drafter", "DrafterConformance"),
    "encoder": ("encoder", "EncoderConformance"),
    "evictor": ("evictor", "EvictorConformance"),
    "executor": ("executor", "ExecutorConformance"),
    "grammar": ("grammar", "GrammarConformance"),
    "hooks": ("hooks", "HooksConformance"),
    "kvformat": ("kvformat", "KVFormatConformance"),
    "kvstore": ("kvstore", "KVStoreConformance"),
    "model": ("model", "ModelConformance"),
    "parser": ("parser", "ParserConformance"),
    "predictor": ("predictor", "PredictorConformance"),
    "processor": ("processor", "ProcessorConformance"),
    "quantizer": ("quantizer", "QuantizerConformance"),
    "router": ("router", "RouterConformance"),
    "sampler": ("sampler", "SamplerConformance"),
    "scheduler": ("scheduler", "SchedulerConformance"),
    "strategy": ("strategy", "StrategyConformance"),
    "tokenizer": ("tokenizer", "TokenizerConformance"),
}
