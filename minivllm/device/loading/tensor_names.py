"""Choose the tensors of a checkpoint that belong to the served model by their names, without torch or reading a tensor.

Two kinds of tensors are left out, because a text model does not have them: tensors of other models in the checkpoint
(an image encoder, a projector), and heads for multi-token prediction (MTP), which transformers leaves out too.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.core.interfaces.model import ModelArch, Rule
from minivllm.errors import MinivllmError, ModelError, shown, suggest

from .text_model import MARK

# names of tensors with scales of a quantized KV cache, in checkpoints of vLLM, compressed-tensors, ModelOpt and Quark
KV_SCALE = re.compile(
    r".*\.(self_attn|self_attention|attn|attention)\.((attn|attention|impl)\.)?"
    r"(([qkv]|kv|prob|prob_output|softmax)_(scale|zero_point|zp)"
    r"|(?P<linear>([qkv]|kv|qkv)_proj|c_attn|query_key_value|Wqkv)\.([qkv]|kv|output)_(scale|zero_point|zp))"
)
# names of tensors in older checkpoints that are not read, because the engine computes them
BUFFERS = re.compile(
    r".*\.rotary_emb\.inv_freq|(.*\.)?h\.\d+\.attn\.(attention\.)?((masked_)?bias|causal_mask)|" + KV_SCALE.pattern
)
NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
LAYER_NUMBER = re.compile(r"[0-9]{1,9}")  # longer numbers of layers are not converted
EMBEDDING = re.compile(r".*(embed|wte)\w*")  # matches the last part of the name of an embedding's module
# parts of tensor names that only other models than the text model have, such as an image encoder
OTHER = re.compile(
    r"(visual|vision\w*|vit|audio\w*|speech\w*|talker|token2wav|code2wav|image\w*|mm_\w+|multi_modal\w*|\w*projector"
    r"|connector|perceiver\w*|qformer|aligner|mlp1|mlp_ar|resampler|encoder)",
    re.IGNORECASE,
)
# beginning of the names that modules of a text model have in classes of transformers
CLASS_PREFIX = re.compile(r"^(model\.)?language_model\.(model\.)?")
# (old, new) parts of tensor names: transformers 5.24 renames layers of the text models of Qianfan-OCR and Kimi-K2.5 so,
# which is meant for their image encoders
SPELLINGS = (("encoder.layers.", "layers."), ("blocks.", "layers."))
OWN_PREFIX = re.compile(r"(^|\.)(language|text|llm)\w*\.$")  # prefixes of tensor names that only a text model has
PREDICTION = re.compile(r"(^|\.)(mtp|mtp_\w+|nextn\w*)(\.|$)")
PREDICTION_PART = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|embed_tokens|mtp_\w+|final_layernorm)(\.|$)")
PREDICTION_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
OF_TEXT = "the text model of "  # start of the note on tensors of other models, removed when an image encoder reads them
PREDICTED = "next-token prediction"
CACHE_SCALES = "scales of keys and values"
MOST_HEADER = 256 << 20  # bytes


class TensorNames:
    """Map the names of a checkpoint's tensors to the names that the loading rules of an architecture use.

    ``skipped`` maps another model or head in the checkpoint to the names of its tensors, which are not loaded.
    """

    def __init__(self, names: Iterable[str], rules: Sequence[Rule], cfg: Any) -> None:
        names = list(names)
        self._known: dict[str, bool] = {}  # cached results of ``placed``; a checkpoint may have 100,000 names
        self.sources = {_numberless(re.sub(r"\{[ie]\}", "0", rule.source)) for rule in rules}
        roots = {source.partition(".")[0] + "." for source in self.sources if "." in source}
        self.roots = sorted(roots)
        self.packed = bool(getattr(cfg, "quantization_config", None))
        self.wrapped = ""
        self.turned: tuple[str, ...] = ()
        self.prefix = ""
        of = getattr(cfg, MARK, None)
        if of:
            self.wrapped = str(of["architecture"])
            self.turned = tuple(of["turned"])
            self.prefix = self._prefix(names)
        self.beyond = self._beyond(names, cfg)
        self.skipped: dict[str, list[str]] = {}
        self._names = {name: self._named(name) for name in names}

    def of(self, name: str) -> str | None:
        """Return the name under which rules match a tensor of the checkpoint; None for a tensor that is left out."""
        return self._names[name] if name in self._names else self._named(name)

    @property
    def changes(self) -> bool:
        """Return whether any tensor has another name or layout in the checkpoint than the architecture's rules
        expect."""
        return bool(self.turned) or any(name != new for name, new in self._names.items())

    def placed(self, name: str) -> bool:
        """Return whether a rule of the architecture matches a tensor of this name."""
        if (found := self._known.get(name)) is None:
            stem = _numberless(name)
            while stem and stem not in self.sources:
                stem = stem.rpartition(".")[0]
            found = self._known[name] = bool(stem)
        return found

    def in_text_model(self, name: str) -> str:
        """Return the name of a module without the prefix that a class of transformers gives the modules of its text
        model.

        The prefix may differ from that of the checkpoint's tensors, because transformers renames these."""
        return CLASS_PREFIX.sub("", name, count=1) if self.wrapped else name

    def of_other_model(self, name: str) -> str:
        """Return the part of a module's name that names another model in the checkpoint, such as "visual"; "" for a
        module of the text model."""
        foreign = self.wrapped and any(OTHER.fullmatch(word) for word in name.split("."))
        return _model_of(name) if foreign else ""

    def notes(self) -> list[str]:
        """Return a sentence for each kind of tensors in the checkpoint that are not loaded."""
        own = (PREDICTED, CACHE_SCALES)
        reported = []
        others = {what: found for what, found in self.skipped.items() if what not in own}
        if others:
            parts = ", ".join(f"{len(found)} of {what}" for what, found in others.items())
            total = sum(map(len, others.values()))
            reported.append(f"{OF_TEXT}{self.wrapped} is served: {total} tensors are not loaded ({parts})")
        if found := self.skipped.get(PREDICTED):
            tops = sorted({_layer(name) for name in found})
            more = f" and {len(tops) - 3} more" if len(tops) > 3 else ""
            reported.append(f"{len(found)} tensors of {PREDICTED} are not loaded ({', '.join(tops[:3])}{more})")
        if found := self.skipped.get(CACHE_SCALES):
            reported.append(
                f"{len(found)} {CACHE_SCALES} are not used ({found[0]}): kv_format fp8 and int8 have a scale for each "
                "head of each token, which is computed when it is stored"
            )
        return reported

    def _named(self, name: str) -> str | None:
        new = self._of_text(name) if self.wrapped else name
        text = name if new is None else new
        scale = KV_SCALE.fullmatch(text)
        if scale and (scale["linear"] or self.packed or not self.placed(self._rooted(text))):
            self._leave(name, CACHE_SCALES)
            return None
        if not self.placed(self._rooted(text)) and (PREDICTION.search(name) or PREDICTION.search(text)):
            self._leave(name, PREDICTED)
            return None
        if any(self._rooted(text).startswith(layer) for layer in self.beyond):
            self._leave(name, PREDICTED)
            return None
        if new is None:
            self._leave(name, _model_of(name))
        return new

    def _leave(self, name: str, what: str) -> None:
        self.skipped.setdefault(what, []).append(name)

    def _of_text(self, name: str) -> str | None:
        """Return the name of a checkpoint's tensor in the text model; None for a tensor of another model."""
        if not name.startswith(self.prefix):
            return self._beside(name)
        text = self._rooted(name.removeprefix(self.prefix))
        if self.placed(text) or OWN_PREFIX.search(self.prefix):
            return text
        if not text.startswith(tuple(self.roots)):
            return None
        foreign = any(OTHER.fullmatch(word) for word in text.split("."))
        return None if foreign else text

    def _beside(self, name: str) -> str | None:
        """Return the name in the text model of a tensor without the prefix of its layers; None for another model.

        transformers 5.17 saves Voxtral with ``language_model.model.model.layers`` and ``language_model.lm_head``.
        """
        if self.placed(name):
            return name
        outer = self.prefix.removesuffix(".").rpartition(".")[0] + "."
        text = name.removeprefix(outer)
        return text if OWN_PREFIX.search(outer) and text != name and self.placed(text) else None

    def _rooted(self, name: str) -> str:
        """Return a tensor name with the first part that it lacks (such as "model."), as in files of a model without its
        head."""
        if self.placed(name):
            return name
        tried = [root + name for root in self.roots]
        if self.wrapped:
            tried += [text.replace(old, new, 1) for old, new in SPELLINGS for text in (name, *tried) if old in text]
        return next((text for text in tried if self.placed(text)), name)

    def _prefix(self, names: Sequence[str]) -> str:
        """Return the prefix of the names of the text model's tensors in the checkpoint, found by the name of its
        embedding."""
        tails = {source.rpartition(".")[2] for source in self.sources}
        tails = {tail for tail in tails if EMBEDDING.fullmatch(tail)}
        found: dict[str, int] = {}
        for name in names:
            words = name.split(".")
            at = next((i for i, word in enumerate(words) if word in tails), None)
            if at is None or any(OTHER.fullmatch(word) for word in words[:at]):
                continue
            prefix = "".join(word + "." for word in words[:at])
            roots = [root for root in self.roots if prefix == root or prefix.endswith("." + root)]
            longest = max(roots, key=len, default="")
            found.setdefault(prefix.removesuffix(longest), 0)
        for name in names:
            if "0" not in name.split(".") and NUMBER.search(name):
                continue  # one layer suffices
            for prefix in found:
                if not name.startswith(prefix):
                    continue
                text = self._rooted(name[len(prefix) :])
                if self.placed(text):
                    found[prefix] += 1
        return max(found, key=lambda prefix: found[prefix], default="")

    def _beyond(self, names: Sequence[str], cfg: Any) -> tuple[str, ...]:
        """Return the name prefixes of layers for multi-token prediction, which some checkpoints store behind the last
        layer."""
        stems = {source.partition(".*.")[0] + "." for source in self.sources if ".*." in source}
        depth = getattr(cfg, "num_hidden_layers", None)
        if type(depth) is not int:
            return ()
        layers: dict[tuple[str, int], list[str]] = {}
        for name in names:
            text = self._of_text(name) if self.wrapped else self._rooted(name)
            if text is None:
                continue
            for stem in stems:
                if not text.startswith(stem):
                    continue
                number = text.removeprefix(stem).partition(".")[0]
                if LAYER_NUMBER.fullmatch(number) and int(number) >= depth:
                    layers.setdefault((stem, int(number)), []).append(text)
        if not layers:
            return ()
        counts = [getattr(cfg, key, None) for key in PREDICTION_KEYS]
        reported = max((n for n in counts if type(n) is int), default=0)
        prefixes = []
        for (stem, layer), found in layers.items():
            if layer < depth + reported or any(PREDICTION_PART.search(name) for name in found):
                prefixes.append(f"{stem}{layer}.")
        return tuple(prefixes)


def _numberless(name: str) -> str:
    return NUMBER.sub("*", name)


def _model_of(name: str) -> str:
    """Return the part of a tensor's name that names its model, such as "visual" for an image encoder."""
    words = name.split(".")
    return words[1] if words[0] in ("model", "thinker") and len(words) > 1 else words[0]


def _layer(name: str) -> str:
    """Return the beginning of a tensor name up to the index of its layer."""
    match = NUMBER.search(name)
    return name[: match.end()] if match else name.rpartition(".")[0]


def names_in(folder: Path, load_format: str = "auto") -> list[str] | None:
    """Return the names of the tensors in a folder's files of weights; None if they cannot be read without torch.

    ``load_format`` selects the files.  Faulty files give None, because the loader reports them later.
    """
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    pickled = load_format == "pt"
    if pickled:
        index = folder / "pytorch_model.bin.index.json"
    try:
        if load_format == "dummy":
            return None
        if not pickled and files.is_there(single):
            files.check(single, error=ModelError)
            with open(single, "rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size)) if size <= MOST_HEADER else {}
            return [name for name in header if name != "__metadata__"]
        if files.is_there(index):
            return list(files.read_json(index, files.PART, ModelError)["weight_map"])
    except (MinivllmError, OSError, ValueError, struct.error, KeyError, TypeError, RecursionError):
        return None
    return None


def check_names(folder: Path, names: Iterable[str], arch: ModelArch, cfg: Any) -> list[str]:
    """Return notes on tensors of a checkpoint that the text model lacks.  ModelError for any other tensor without a
    rule."""
    found = TensorNames(names, arch.weights(cfg), cfg)
    for name in unplaced(found, arch, cfg):
        match = NUMBER.search(name)
        number = match[0] if match else "0"
        end = name.rpartition(".")[2]
        known = [source.replace("*", number, 1) for source in found.sources]
        if int(number) >= getattr(cfg, "num_hidden_layers", math.inf):
            known = []  # the model has no such layer
        raise no_place(str(folder), name, [f"{source}.{end}" for source in known])
    return found.notes()


def unplaced(found: TensorNames, arch: ModelArch, cfg: Any) -> Iterator[str]:
    """Yield the names of the checkpoint's tensors that no rule of the architecture matches."""
    conversion = arch.conversion(cfg)
    for name in found._names:
        new = found.of(name)
        if new is not None and conversion is not None:
            new = conversion.name(new)
        if new is None or BUFFERS.fullmatch(new):
            continue
        if not found.placed(found._rooted(new)):
            yield new


def no_place(where: str, name: str, known: Iterable[str] | Mapping[str, Any]) -> ModelError:
    return ModelError(f"{where}: tensor {shown(name)} has no place in this architecture.{suggest(name, known, 0.8)}")
