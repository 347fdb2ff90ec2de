"""From a configuration to everything that is needed to build the engine: one choice after another, each adding facts.

    hooks → device → executor → model → drafter → quantizer → KV format → processors → attention → block size → evictor
           → scheduler → sampler → strategies → grammar

The result is data: import targets and options as JSON, so that a worker process builds exactly what was chosen here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from minivllm.core import declared_params
from minivllm.core.interfaces.executor import (
    CacheWiring,
    ParallelWiring,
    Part,
    SpeculationWiring,
    Wiring,
)
from minivllm.device.hardware import Device, choose_dtype, find_device
from minivllm.device.loading.generation import read_generation
from minivllm.device.loading.hf_config import Checkpoint, context_said, longest_context
from minivllm.device.loading.overrides import in_words, refuse_unread
from minivllm.device.loading.plain_config import two_ropes
from minivllm.device.loading.tensor_names import check_names, names_in
from minivllm.device.loading.text_model import holds_text_model
from minivllm.device.native import library
from minivllm.errors import ConfigError, ModelError, PluginError, raised_at, shown
from minivllm.registration.spec import OPTION_OF, Needs
from minivllm.registry import Candidate, Catalog, PluginQuery, Registry, Selection, build_part
from minivllm.validation import begins, source_of

from . import tensor_parallel
from .draft_limits import DraftLimits
from .explanation import Explanation
from .kv_groups import attention_layers, group_layers
from .own_models import OwnModels
from .places import ModelPlaces, told
from .steps import wire_steps
from .unused import method_read, online_counterpart, refuse_unused
from .values import PluginChoice

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnSpec

    from .values import EngineConfig

log = logging.getLogger("minivllm")

DEFAULT_MAX_LEN = 4096
DEFAULT_BLOCK = 16
NO_GRAMMAR = "structured output needs a library (pip install llguidance)"


@dataclass(frozen=True)
class Resolved:
    """What was chosen and why.  ``parts`` has one entry per seam that takes one plug-in, those of ``wiring.parts`` and
    executor, evictor and scheduler; ``facts`` is what the last choice knew."""

    config: EngineConfig
    wiring: Wiring
    hf_config: Any
    device: Device
    attention: tuple[AttnSpec, ...]  # per layer
    groups: tuple[tuple[int, ...], ...]  # layers of each KV group; a group of full attention comes first
    parts: Mapping[str, Part]
    strategies: tuple[Part, ...]
    hooks: tuple[Part, ...]
    selections: tuple[Selection, ...]
    facts: Mapping[str, Any]
    notes: tuple[tuple[str, str], ...]  # (what, sentence) for what is not a plug-in: device, dtype, block ...
    catalog: Catalog
    tokenizer_dir: str | None  # None with skip_tokenizer_init
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of the model's generation_config.json

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each KV group."""
        return tuple(self.attention[layers[0]].window for layers in self.groups)

    @property
    def explanation(self) -> Explanation:
        return Explanation(self.selections, self.notes, self.catalog)

    def explain(self, seam: str | None = None, all: bool = False) -> str:
        """Why each choice was made; with ``all`` also what the plug-ins say that were not looked at."""
        return self.explanation.text(seam, all)


def resolve(
    config: EngineConfig, catalog: Catalog, origins: Mapping[str, str] | None = None, weights: bool = True
) -> Resolved:
    """Choose everything; of a model that is on the hub, fetch what is missing, ``weights`` too.  ConfigError,
    ModelError, PluginError or ResourceError; a PluginError of a choice carries the ``selections`` and ``notes`` so far.
    """
    fold = _Fold(config, catalog.allow(config.allow_targets), dict(origins or {}), weights)
    try:
        return fold.run()
    except PluginError as exc:
        last = getattr(exc, "selection", None)
        exc.selections = (*fold.selections, last) if last else tuple(fold.selections)  # type: ignore[attr-defined]
        exc.notes = tuple(fold.notes)  # type: ignore[attr-defined]
        raise


def choose_hooks(config: EngineConfig, catalog: Catalog) -> tuple[Part, ...]:
    """The hooks alone, for those that are asked before there is anything else to choose."""
    return tuple(_Fold(config, catalog.allow(config.allow_targets), {})._several("hooks", config.hooks, ()))


def choose_seams(
    config: EngineConfig, catalog: Catalog, seams: Sequence[str], origins: Mapping[str, str] | None = None
) -> dict[str, Part]:
    """What fills these seams, for who needs no model and no device; of seams that ask for no facts."""
    fold = _Fold(config, catalog.allow(config.allow_targets), dict(origins or {}))
    for seam in seams:
        fold._pick(seam, getattr(config, seam))
    return fold.parts


@dataclass
class _Fold:
    config: EngineConfig
    catalog: Catalog
    origins: Mapping[str, str]
    weights: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)

    def run(self) -> Resolved:
        config = self.config
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is less than "
                f"max_num_seqs={config.max_num_seqs}: a decode step would not fit; raise the one or lower the other"
            )
        hooks = tuple(self._several("hooks", config.hooks, ()))
        places = ModelPlaces(config, self.weights)
        name = places.model(hooks, self.notes)
        checkpoint = places.served(name)
        tokenizer = places.tokenizer(name, checkpoint.folder)
        sampling = self._generation(checkpoint)
        device = self._device()
        invariant = self._invariant(device)
        size = {"tensor_parallel_size": config.tensor_parallel_size}
        refuse_unused(config, self._pick("executor", config.executor, ("device",), size), self.origins)
        dtype, why = choose_dtype(config.dtype, checkpoint.dtype, device)
        self._learn("dtype", dtype, f"{dtype} ({why})")
        specs, hf_config, switch = self._model(checkpoint, invariant)
        tensor_parallel.check(config.tensor_parallel_size, specs, device, self.parts["executor"], self.origins)
        max_len = self._max_len(hf_config)
        switch = None if switch is None or switch >= max_len else switch
        limits = DraftLimits(hf_config.vocab_size, max_len, switch)
        own = OwnModels(limits, partial(self._model_parts, invariant), places, notes=self.notes)
        speculation = self._drafter(own)
        known = ("device", "sm", "dtype")
        method = method_read(checkpoint, self.catalog["quantizer"], config.quantizer)
        self._pick("quantizer", self._quantizer_for(method), known, {"checkpoint": method}, invariant)
        self._kv_format(dtype)
        processors = tuple(self._several("processor", config.processors, ("device",)))
        models = own.of_processors(processors, begins(source_of(self.origins, "processors")))
        block = self._attention((*specs, *own.layers), invariant)
        self._pick("evictor", config.evictor)
        self._pick("scheduler", config.scheduler)
        several = frozenset({"multi_position"} if speculation.num_speculative_tokens else ())
        self._pick("sampler", config.sampler, ("device",), {}, several)
        strategies = tuple(self._several("strategy", config.strategies, ()))
        self._grammar()
        groups = group_layers(specs)
        cache = CacheWiring(block, config.num_kvcache_blocks, config.gpu_memory_utilization, groups)
        return Resolved(
            config=config,
            wiring=replace(
                self._wiring(checkpoint, device, dtype, limits, processors, cache, speculation), own_models=models
            ),
            hf_config=hf_config,
            device=device,
            attention=specs,
            groups=groups,
            parts=self.parts,
            strategies=strategies,
            hooks=hooks,
            selections=tuple(self.selections),
            facts=self.facts,
            notes=tuple(self.notes),
            catalog=self.catalog,
            tokenizer_dir=None if tokenizer is None else str(tokenizer),
            sampling=sampling,
        )

    def _wiring(
        self,
        checkpoint: Checkpoint,
        device: Device,
        dtype: str,
        limits: DraftLimits,
        processors: tuple[Part, ...],
        cache: CacheWiring,
        speculation: SpeculationWiring,
    ) -> Wiring:
        config = self.config
        return Wiring(
            model_dir=str(checkpoint.folder),
            load_format=config.load_format,
            device=device.kind,
            dtype=dtype,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=limits.max_len,
            rope_switch=limits.switch,
            batch_invariant=config.batch_invariant,
            seed=config.seed,
            parts={k: self.parts[k] for k in ("model", "quantizer", "kvformat", "attention", "sampler", "drafter")},
            processors=processors,
            cache=cache,
            steps=wire_steps(config, self.facts["device"], self.origins),
            speculation=speculation,
            parallel=ParallelWiring(config.tensor_parallel_size),
            logprobs_mode=config.logprobs_mode,
            max_logprobs=config.max_logprobs,
            max_tap_bytes=config.max_tap_bytes,
            hf_overrides=config.hf_overrides,
        )

    def _learn(self, name: str, value: Any, sentence: str) -> None:
        self.facts[name] = value
        self.notes.append((name, sentence))

    def _device(self) -> Device:
        device = find_device(self.config.device)
        self._learn(
            "device", device.kind, f"{device.kind}: {device.name}, {device.memory / 2**30:.1f} GiB ({device.why})"
        )
        if device.sm:
            self.facts["sm"] = device.sm
        if device.kind == "cpu":
            self.notes.append(("native", library.told()))
        return device

    def _invariant(self, device: Device) -> frozenset[str]:
        """The feature that parts must have for ``batch_invariant``; ConfigError where the engine's own lack it."""
        config = self.config
        if not config.batch_invariant:
            return frozenset()
        said = f"{begins(source_of(self.origins, 'batch_invariant'))}batch_invariant=true"
        tensor_parallel.refuse_invariant(config.tensor_parallel_size, said)
        if device.kind != "cpu":
            if not config.fuse:
                raise ConfigError(f"{said} with fuse=false: torch's products go by the number of rows; want fuse=true")
            if not 90 <= (device.sm or 0) < 120:
                have = f"{device.name} has {device.sm / 10:.1f}" if device.sm else f"{device.name} has none"
                raise ConfigError(
                    f"{said} on {device.kind}: its product is made for compute capability 9.0 to 11, and {have}; "
                    "want such a GPU, or device=cpu"
                )
            if (missing := Needs("triton", "3.4", 'pip install "minivllm[triton]"').missing()) is not None:
                raise ConfigError(f"{said} on {device.kind}: {missing}")
        return frozenset({"batch_invariant"})

    def _model(self, checkpoint: Checkpoint, features: frozenset[str]) -> tuple[tuple[AttnSpec, ...], Any, int | None]:
        """Return the attention layers of the model, its configuration, and the length at which its rotary embedding
        is another one."""
        asked = self.config.model_arch
        self.notes.append(("model", f"{told(checkpoint.folder)} ({checkpoint.architecture})"))
        selection = self._select_model(asked, checkpoint, features)
        if selection.chosen is None and asked.name == "auto":
            served = {a for c in selection.candidates if c.spec for a in c.spec.listed("architecture")}
            if not checkpoint.model_type:
                raise ModelError(_without_type(checkpoint))
            if selection.request.facts["architecture"] not in served:
                raise ModelError(
                    f"{checkpoint.folder}/config.json: no plug-in serves the architecture "
                    f"{shown(checkpoint.architecture)}. "
                    f"Available: {', '.join(sorted(served))}"
                )
        chosen = selection.require()
        part = self._keep(selection, asked)
        if not checkpoint.model_type and "any_architecture" in part.features:
            raise ModelError(_without_type(checkpoint))
        hf_config = checkpoint.hf_config()
        self._tell_config(checkpoint, hf_config, chosen)
        arch = build_part("model", part)
        try:
            specs, switch = attention_layers(arch, hf_config), arch.switch(hf_config)
        except ModelError as exc:
            raise ModelError(f"{checkpoint.folder}/config.json: {exc}") from exc
        except AttributeError as exc:  # a field that the architecture needs
            raise ModelError(
                f"{checkpoint.folder}/config.json: {chosen.entry.label} misses a field: {exc}{raised_at(exc)}"
            ) from exc
        if not specs:
            raise ModelError(f"{checkpoint.folder}/config.json: the model has no attention layer")
        if "any_architecture" in part.features:
            why = "asked for" if self.config.model_impl == "transformers" else "no other plug-in serves the model"
            self.notes.append(("model.impl", f"{part.name}: {why}"))
        self.notes += [(f"model.{what}", text) for what, text in arch.notes(hf_config).items()]
        names = names_in(checkpoint.folder, self.config.load_format)
        if names is not None:
            self.notes += [("model.skipped", text) for text in check_names(checkpoint.folder, names, arch, hf_config)]
        return specs, hf_config, switch

    def _generation(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Return the sampling defaults of generation_config.json, and note them.  ConfigError, ModelError."""
        try:
            found = read_generation(self.config.generation_config, checkpoint.folder)
        except ConfigError as exc:
            raise ConfigError(f"{begins(source_of(self.origins, 'generation_config'))}{exc}") from None
        if text := found.in_words():
            self.notes.append(("sampling", text))
        return found.values

    def _tell_config(self, checkpoint: Checkpoint, hf_config: Any, chosen: Candidate) -> None:
        """Note what is read of config.json in a way that a user may not expect; ConfigError for overrides without
        effect."""
        overrides = self.config.hf_overrides
        if overrides:
            ignores = chosen.require_spec().traits.get("ignores", ())
            try:
                refuse_unread(overrides, checkpoint.raw, hf_config, tuple(ignores), chosen.entry.label)
            except ConfigError as exc:
                raise ConfigError(f"{begins(source_of(self.origins, 'hf_overrides'))}{exc}") from None
            self.notes.append(("model.hf_overrides", in_words(overrides)))
        if note := two_ropes(checkpoint.raw):
            self.notes.append(("model.rope", note))
            log.warning("%s/config.json: %s", checkpoint.folder, note)

    def _select_model(self, asked: PluginChoice, checkpoint: Checkpoint, features: frozenset[str]) -> Selection:
        """Choose a plug-in that names the architecture, of this package or another; where there is none, one for the
        text model of a checkpoint that holds other models, too; where there is none, one for any architecture."""
        known, impl, last = ("device", "dtype"), self.config.model_impl, features | {"any_architecture"}
        named = {"architecture": checkpoint.architecture, "model_type": checkpoint.model_type}
        if holds_text_model(checkpoint.raw):
            whole = self._select("model", asked, known, named, features)
            if whole.chosen is not None and impl != "transformers":
                return whole
            if (text := checkpoint.text) is not None:
                named = {"architecture": text.architecture, "model_type": text.model_type}
        first = self._select("model", asked, known, named, last if impl == "transformers" else features)
        second = first if first.chosen or impl != "auto" else self._select("model", asked, known, named, last)
        return second if second.chosen is not None else first

    def _quantizer_for(self, method: str) -> PluginChoice:
        """Return the quantizer to choose for a checkpoint that is quantized with ``method``."""
        choice, note = online_counterpart(self.catalog["quantizer"], self.config.quantizer, method)
        if note:
            self.notes.append(("quantizer", note))
        return choice

    def _max_len(self, hf_config: Any) -> int:
        asked, most = self.config.max_model_len, longest_context(hf_config)
        if asked is not None and most is not None and asked > most:
            raise ConfigError(f"max_model_len={asked}: the model has {context_said(hf_config)}; want at most that")
        value = asked if asked is not None else min(DEFAULT_MAX_LEN, most or DEFAULT_MAX_LEN)
        why = "asked for" if asked is not None else ("the model's" if value == most else f"the model's is {most}")
        self._learn("max_model_len", value, f"{value} ({why})")
        return value

    def _drafter(self, own: OwnModels) -> SpeculationWiring:
        """How many drafts a step may have, and the drafter's model, if it has one."""
        self._pick("drafter", self.config.drafter, ("device",))
        part, asked = self.parts["drafter"], self.config.num_speculative_tokens
        drafts = min(asked, int(part.traits.get("drafts", asked)))
        if "draft_model" not in part.features:
            return SpeculationWiring(drafts, self.config.speculate)
        said = f"{begins(source_of(self.origins, 'drafter'))}the draft model"
        model = own.add(part, "draft_model", "draft_model", said)
        return SpeculationWiring(drafts, self.config.speculate, model)

    def _model_parts(self, invariant: frozenset[str], checkpoint: Checkpoint) -> dict[str, Part]:
        """Return the parts of a model beside the one that is served, chosen as those of the served one are."""
        known, registry = ("device", "dtype"), self.catalog
        model = self._select_model(PluginChoice(), checkpoint, invariant)
        method = {"checkpoint": method_read(checkpoint, registry["quantizer"], PluginChoice())}
        quantizer = self._select("quantizer", PluginChoice(), (*known, "sm"), method, invariant)
        return {
            s.kind: make_part(registry[s.kind], s.require(), PluginChoice(), s.kind, {}) for s in (model, quantizer)
        }

    def _kv_format(self, dtype: str) -> None:
        choice = self.config.kv_format
        open_ = choice.name == "auto" and not choice.prefer
        entry = self._pick("kvformat", choice, ("device", "sm", "dtype"), {"holds": dtype} if open_ else {}).entry
        self.facts["kv_format"] = entry.name if entry.builtin else entry.label

    def _grammar(self) -> None:
        """The one that is named, or one whose library is installed; none is no fault until a request asks for one."""
        choice = self.config.grammar
        selection = self._select("grammar", choice)
        if selection.chosen is None and choice.name == "auto" and not choice.prefer:
            self.notes.append(("grammar", "none: " + NO_GRAMMAR))
        else:
            self._pick("grammar", choice)

    def _attention(self, specs: Sequence[AttnSpec], invariant: frozenset[str]) -> int:
        """Choose the back end and with it the block size."""
        more: dict[str, Any] = {
            "dim_qk": frozenset(s.dim_qk for s in specs),
            "dim_v": frozenset(s.dim_v for s in specs),
            "queries_per_kv": tensor_parallel.queries_per_kv(self.config.tensor_parallel_size, specs),
        }
        asked = self.config.kvcache_block_size
        if asked is not None:
            more["block"] = asked
        wanted = {
            "window": any(s.window is not None for s in specs),
            "sinks": any(s.sinks for s in specs),
            "softcap": any(s.softcap is not None for s in specs),
            "alibi": any(s.alibi is not None for s in specs),
            "v_in_k": any(s.v_in_k for s in specs),
        }
        features = frozenset(name for name, want in wanted.items() if want) | invariant
        known = ("device", "sm", "dtype", "kv_format")
        chosen = self._pick("attention", self.config.attention, known, more, features)
        assert chosen.spec is not None
        supplied = self.selections[-1].supplied.get("block")
        block = asked if asked is not None else supplied if supplied is not None else DEFAULT_BLOCK
        if reasons := chosen.spec.refuse(PluginQuery({"block": block}), self.catalog["attention"].kind):
            raise PluginError(
                f"{chosen.entry}: the block size was left open, and its spec does not support "
                f"{'its own' if supplied is not None else 'the default'}: {'; '.join(map(str, reasons))}"
            )
        own = f"supplied by {chosen.entry.label}" if supplied is not None else "the engine's default"
        self._learn("block", block, f"{block} ({'asked for' if asked is not None else own})")
        return block

    def _select(
        self,
        kind: str,
        choice: PluginChoice,
        known: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
        features: frozenset[str] = frozenset(),
        at: str = "",
    ) -> Selection:
        facts = {k: self.facts[k] for k in known if k in self.facts}
        registry, path = self.catalog[kind], at or OPTION_OF.get(kind, kind)
        try:
            selection = registry.select(PluginQuery({**facts, **(more or {})}, features), choice.name, choice.prefer)
        except PluginError as exc:
            named = path if choice.name == "auto" else f"{path}.name"
            raise PluginError(f"{begins(source_of(self.origins, named))}{exc}") from exc
        for name in choice.prefer:
            if not registry.installed(name):
                note = f"{shown(name)} is not installed, and is passed over"
                self.notes.append((f"{path}.prefer", note))
                log.warning("%s%s.prefer: %s", begins(source_of(self.origins, f"{path}.prefer")), path, note)
        return selection

    def _pick(
        self,
        kind: str,
        choice: PluginChoice,
        known: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
        features: frozenset[str] = frozenset(),
    ) -> Candidate:
        selection = self._select(kind, choice, known, more, features)
        chosen = selection.require()
        self._keep(selection, choice)
        return chosen

    def _keep(self, selection: Selection, choice: PluginChoice, at: str = "") -> Part:
        chosen, registry = selection.require(), self.catalog[selection.kind]
        if chosen.spec is not None and chosen.spec.params:
            from minivllm.core.interfaces.params import is_own

            declared_params.choose(selection.kind, chosen, is_own)
        self.selections.append(selection)
        part = make_part(registry, chosen, choice, at or OPTION_OF.get(selection.kind, selection.kind), self.origins)
        if not at:
            self.parts[selection.kind] = part
        return part

    def _several(self, kind: str, choices: Sequence[PluginChoice], known: Sequence[str]) -> list[Part]:
        parts: list[Part] = []
        for i, choice in enumerate(choices):
            at = f"{OPTION_OF.get(kind, kind)}.{i}"
            selection = self._select(kind, choice, known, at=at)
            label = selection.require().entry.label
            if any(part.name == label for part in parts):  # once by its name, once as package/name
                place = begins(source_of(self.origins, at))
                raise ConfigError(f"{place}{OPTION_OF.get(kind, kind)}: {shown(label)} is there twice")
            parts.append(self._keep(selection, choice, at))
        return parts


def _without_type(checkpoint: Checkpoint) -> str:
    """Return the message for a config.json without ``model_type``, which says of which class its fields are."""
    return (
        f"{checkpoint.folder}/config.json: model_type is missing: want the type that transformers has for "
        f'{shown(checkpoint.architecture)}, as in "model_type": "llama" for LlamaForCausalLM'
    )


def make_part(registry: Registry, chosen: Candidate, choice: PluginChoice, at: str, origins: Mapping[str, str]) -> Part:
    """Check the options and write down the choice as data."""
    spec, path = chosen.require_spec(), f"{at}.options"
    options = registry.options(chosen, choice.options, path, origins)
    values = {} if options is None else options.model_dump(mode="json")
    return Part(
        chosen.entry.label,
        spec.impl,
        values,
        spec.options,
        tuple(sorted(spec.features)),
        spec.plain_traits,
        chosen.entry.source,
    )
