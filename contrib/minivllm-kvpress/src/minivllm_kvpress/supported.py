"""The presses that cannot score stored tokens, with the reasons, and those that read attention."""

from __future__ import annotations

_MODEL = "reads the model or data of its own, and a compressor has the stored tokens only"
_HIDDEN = "reads hidden states, which the seam `compressor` does not give"
_OWN_PASS = "runs further passes of the model over the prompt"
_DECODING = "compresses at decode by itself; use its inner press with compress_every"
_SELECTS = "chooses tokens in `compress` beyond the scores of its inner press; use the inner press"
_BUDGETS = "gives heads or layers different numbers of tokens; each head of a row keeps the same number here"
_CHANGES = "changes keys or values, and a compressor chooses tokens only"

# Names of classes in kvpress 0.5.5, and why they are refused.
REFUSED = {
    "ScorerPress": "is the base class of scorers; name one of its subclasses",
    "BasePress": "is the base class of presses; name one that scores tokens",
    "CapPress": _HIDDEN,
    "CompactorPress": _HIDDEN,
    "CriticalKVPress": "reads the output projection of the model, which the seam `compressor` does not give",
    "ExpectedAttentionPress": _HIDDEN,
    "ExpectedAttentionStatsPress": _MODEL,
    "KVzapPress": _MODEL,
    "LeverageScorePress": _HIDDEN,
    "NonCausalAttnPress": _HIDDEN,
    "ObservedAttentionPress": "reads the attention of all queries; use the built-in h2o with mean=true and recent=0",
    "PyramidKVPress": _BUDGETS + "; SnapKVPress has the same scores",
    "QFilterPress": _MODEL,
    "AdaKVPress": _BUDGETS,
    "CriticalAdaKVPress": _BUDGETS,
    "DMSPress": _BUDGETS,
    "DuoAttentionPress": _BUDGETS,
    "LUKVPress": _BUDGETS,
    "PerLayerCompressionPress": _BUDGETS,
    "SimLayerKVPress": _BUDGETS,
    "BlockPress": _SELECTS,
    "ChunkPress": _SELECTS,
    "ChunkKVPress": _SELECTS,
    "EntropyGatedChunkKVPress": _SELECTS,
    "ComposedPress": "runs several presses, one after another; name one of them",
    "CAMPress": _CHANGES,
    "KeyRerotationPress": _CHANGES,
    "MergingPress": _CHANGES,
    "ThinKPress": _CHANGES,
    "CompressionRatioDecodingPress": _DECODING,
    "DecodingPress": _DECODING,
    "PrefillDecodingPress": _DECODING,
    "FastKVzipPress": _MODEL,
    "FinchPress": _CHANGES,
    "KVComposePress": _OWN_PASS,
    "KVgradPress": _OWN_PASS,
    "KVzipPress": _OWN_PASS,
    "RestoreKVPress": _OWN_PASS,
}

# Names of classes that read the attention of the last queries, and the attribute with their number, or the number.
READS_ATTENTION: dict[str, str | int] = {"SnapKVPress": "window_size", "TOVAPress": 1}

# Attributes of presses that are numbers of first or last tokens.  A press accepts longer inputs only.
LEAST = ("window_size", "n_sink", "num_sinks")
