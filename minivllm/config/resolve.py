"""Choose all plug-ins of a configuration.  Each choice adds facts for the next ones.

    hooks → tokenizer → device → executor → model → drafter → quantizer → KV format → processors → attention
        → block size → evictor → scheduler → sampler → strategies → grammar → kvstore → compressor → adapters → encoder

The result is data (import targets and options as JSON), so that a worker process builds exactly the chosen plug-ins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from minivllm.core import declared_params
from minivllm.core.interfaces.executor import CacheWiring, DraftWiring, ParallelWiring, Part, SpeculationWiring, Wiring
from minivllm.device.hardware import Device, choose_dtype, find_device
from minivllm.device.loading.generation import read_generation
from minivllm.device.loading.hf_config import Checkpoint, describe_context, longest_context
from minivllm.device.loading.overrides import in_words, refuse_unread
from minivllm.device.loading.plain_config import two_ropes
from minivllm.device.loading.tensor_names import check_names, names_in
from minivllm.device.loading.text_model import holds_text_model
from minivllm.device.native import library
from minivllm.errors import ConfigError, ModelError, PluginError, raised_at, shown
from minivllm.registration.spec import OPTION_OF, Needs
from minivllm.registry import Candidate, Catalog, PluginQuery, Registry, Selection, build_part
from minivllm.runtime.text.tokenizer_files import describe_files
from minivllm.validation import begins, source_of

from . import tensor_parallel
from .adapters import wire_adapters
from .auto_drafter import choose_drafter
from .compression import CompressedModel, wire_compression
from .draft_limits import DraftLimits, refuse_split
from .images import wire_images
from .kv_groups import attention_layers, group_layers
from .own_models import OwnModels, Served
from .places import ModelPlaces, describe_folder
from .resolved import Resolved
from .states import second_states_explained, states_explained
from .steps import captures_drafts, wire_steps
from .unused import method_read, online_counterpart, refuse_unused
from .values import PluginChoice

if TYPE_CHECKING:
    from pathlib import Path

    from minivllm.core.interfaces.attention import AttnSpec
    from minivllm.core.interfaces.states import Recurrent

    from .values import EngineConfig

log = logging.getLogger("minivllm")

DEFAULT_MAX_LEN = 4096
DEFAULT_BLOCK = 16
NO_GRAMMAR = "structured output needs a library (pip install llguidance)"


def resolve(
    config: EngineConfig, catalog: Catalog, origins: Mapping[str, str] | None = None, weights: bool = True
) -> Resolved:
    """Choose all plug-ins and return the result, after downloading missing files of a model on the hub.

    ``weights`` False downloads no weights.

    ConfigError, ModelError, PluginError or ResourceError.  A PluginError of a choice has the attributes ``selections``
    and ``notes`` with the choices so far.
    """
    return choose_drafter(config, lambda chosen, again: _resolve(chosen, catalog, origins, weights, again))


def _resolve(
    config: EngineConfig, catalog: Catalog, origins: Mapping[str, str] | None, weights: bool, again: bool
) -> Resolved:
    """Choose all plug-ins and return the result as ``resolve``, but without the automatic choice of a drafter.

    ``again`` means that a first call has logged the warnings."""
    fold = _fold(config, catalog, origins, weights)
    fold.warns = not again
    try:
        return fold.run()
    except PluginError as exc:
        selections = list(fold.selections)
        last = getattr(exc, "selection", None)
        if last:
            selections.append(last)
        exc.selections = tuple(selections)  # type: ignore[attr-defined]
        exc.notes = tuple(fold.notes)  # type: ignore[attr-defined]
        raise


def choose_hooks(config: EngineConfig, catalog: Catalog) -> tuple[Part, ...]:
    """Return the hooks only, for callers that need them before the other choices."""
    fold = _fold(config, catalog, None)
    return tuple(fold._several("hooks", config.hooks, ()))


def choose_seams(
    config: EngineConfig, catalog: Catalog, seams: Sequence[str], origins: Mapping[str, str] | None = None
) -> dict[str, Part]:
    """Return the chosen plug-in of each of ``seams`` (kinds of plug-ins), without a model or a device.

    The choice of these seams must not depend on facts of the model or the device."""
    fold = _fold(config, catalog, origins)
    for seam in seams:
        fold._pick(seam, getattr(config, seam))
    return fold.parts


def _fold(config: EngineConfig, catalog: Catalog, origins: Mapping[str, str] | None, weights: bool = True) -> _Fold:
    """Return a ``_Fold`` in which no plug-in is chosen yet.  Its catalog accepts the targets of ``allow_targets``."""
    allowed = catalog.allow(config.allow_targets)
    return _Fold(config, allowed, dict(origins or {}), weights)


@dataclass
class _Fold:
    """The plug-ins chosen so far, with the facts for the next choices.  ``origins`` maps options to their sources."""

    config: EngineConfig
    catalog: Catalog
    origins: Mapping[str, str]
    weights: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    states: tuple[Recurrent, ...] = ()
    warns: bool = True  # whether warnings are logged

    def run(self) -> Resolved:
        """Choose all plug-ins in order, and return the result."""
        config = self.config
        hooks = tuple(self._several("hooks", config.hooks, ()))
        places = ModelPlaces(config, self.weights)
        name = places.model(hooks, self.notes)
        checkpoint = places.served(name)
        tokenizer = self._tokenizer(places.tokenizer(name, checkpoint.folder))
        sampling = self._generation(checkpoint)
        device = self._device()
        invariant = self._invariant(device)
        size = {"tensor_parallel_size": config.tensor_parallel_size}
        refuse_unused(config, self._pick("executor", config.executor, ("device",), size), self.origins)
        dtype, reason = choose_dtype(config.dtype, checkpoint.dtype, device, library.load() is not None)
        self._learn("dtype", dtype, f"{dtype} ({reason})")
        specs, hf_config, switch = self._model(checkpoint, invariant)
        tensor_parallel.check(config.tensor_parallel_size, specs, device, self.parts["executor"], self.origins)
        max_len = self._max_len(hf_config)
        reached = switch is not None and switch < max_len
        limits = DraftLimits(hf_config.vocab_size, max_len, switch if reached else None)
        choosers = partial(self._model_parts, invariant), partial(self._quantizer_part, invariant)
        second_models = OwnModels(limits, *choosers, places, notes=self.notes)
        speculation = self._drafter(second_models, self._served(checkpoint, hf_config))
        method = method_read(checkpoint, self.catalog["quantizer"], config.quantizer)
        quantizer = self._quantizer_for(method)
        self._pick("quantizer", quantizer, ("device", "sm", "dtype"), {"checkpoint": method}, invariant)
        self._kv_format(dtype)
        processors = tuple(self._several("processor", config.processors, ("device",)))
        models = second_models.of_processors(processors, begins(source_of(self.origins, "processors")))
        block = self._attention(specs, second_models.layers, invariant)
        for seam in ("evictor", "scheduler", "predictor"):
            self._pick(seam, getattr(config, seam))
        features = frozenset({"multi_position"} if speculation.num_speculative_tokens else ())
        self._pick("sampler", config.sampler, ("device",), {}, features)
        strategies = tuple(self._several("strategy", config.strategies, ()))
        self._grammar()
        groups = group_layers(specs)
        room = config.num_kvcache_blocks, config.gpu_memory_utilization
        cache = CacheWiring(block, *room, groups, self._checkpoints(), bool(self.states), self._stores())
        cache = self._compression(cache, specs, speculation, bool(models), hf_config)
        wiring = self._wiring(checkpoint, device, dtype, limits, processors, cache, speculation, models)
        self._tell_states(len(specs), second_models, wiring)
        return Resolved(
            config=config,
            wiring=wiring,
            hf_config=hf_config,
            device=device,
            attention=specs,
            states=self.states,
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

    def _tell_states(self, attention: int, own: OwnModels, wiring: Wiring) -> None:
        """Note the memory of recurrent states of the served model, with ``attention`` layers of attention, and of the
        second models."""
        if self.states:
            layers = attention + len(self.states)
            self.notes.append(("model.states", states_explained(self.states, layers, wiring)))
        for claim, states, layers in own.states:
            self.notes.append((f"{claim}.states", second_states_explained(states, layers, wiring)))

    def _tokenizer(self, path: Path | None) -> Path | None:
        """Choose the tokenizer plug-in for the files at ``path``, unless it is None.  Return ``path`` unchanged."""
        if path is not None:
            self._pick("tokenizer", self.config.tokenizer_mode, more=describe_files(path))
        return path

    def _stores(self) -> tuple[Part, ...]:
        """Choose the tiers of the KV cache.  Raise ConfigError if the prefix cache is off, or keeps no recurrent
        states."""
        if not self.config.kvstore:
            return ()
        reason = ""
        if not self.config.enable_prefix_caching:
            reason = "enable_prefix_caching=false finds no stored block; remove the one or the other"
        elif self.states and self.config.num_state_checkpoints == 0:
            reason = (
                "num_state_checkpoints=0 stores no recurrent states, without which no stored block of this model is "
                "used; expected 1 or more, or -1 for as many as fit; raise it, or remove kvstore"
            )
        if reason:
            label = begins(source_of(self.origins, "kvstore"))
            raise ConfigError(f"{label}kvstore: {reason}")
        return tuple(self._several("kvstore", self.config.kvstore, ()))

    def _compression(
        self, cache: CacheWiring, specs: Sequence[AttnSpec], speculation: SpeculationWiring, own: bool, hf: Any
    ) -> CacheWiring:
        """Choose the compressor, and return the cache options with the options of compression."""
        self._pick("compressor", self.config.compressor, ("device",))
        model = CompressedModel(specs, hf, bool(self.states), speculation.num_speculative_tokens, own, self.facts)
        cache, notes = wire_compression(cache, self.config, self.origins, self.parts, model)
        self.notes += notes
        return cache

    def _checkpoints(self) -> int:
        """Return the number of checkpoints of recurrent states, -1 for as many as fit.

        Raise ConfigError for a number if the model has no such states, or if the prefix cache is off."""
        requested = self.config.num_state_checkpoints
        cached = self.config.enable_prefix_caching
        reason = ""
        if requested >= 0 and not self.states:
            reason = "the model has no recurrent states; remove the option"
        elif requested > 0 and not cached:
            reason = "enable_prefix_caching=false uses no checkpoints; remove the one or the other"
        if reason:
            label = begins(source_of(self.origins, "num_state_checkpoints"))
            raise ConfigError(f"{label}num_state_checkpoints={requested}: {reason}")
        return requested if cached else 0

    def _wiring(
        self,
        checkpoint: Checkpoint,
        device: Device,
        dtype: str,
        limits: DraftLimits,
        processors: tuple[Part, ...],
        cache: CacheWiring,
        speculation: SpeculationWiring,
        own_models: Mapping[str, DraftWiring],
    ) -> Wiring:
        """Return the wiring of the chosen plug-ins."""
        config = self.config
        kinds = ("model", "quantizer", "kvformat", "attention", "sampler", "drafter", "compressor")
        wiring = Wiring(
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
            parts={kind: self.parts[kind] for kind in kinds},
            processors=processors,
            cache=cache,
            steps=wire_steps(config, self.facts["device"], self.origins),
            speculation=speculation,
            parallel=ParallelWiring(config.tensor_parallel_size),
            adapters=wire_adapters(config, self.origins, self._several),
            logprobs_mode=config.logprobs_mode,
            max_logprobs=config.max_logprobs,
            max_tap_bytes=config.max_tap_bytes,
            hf_overrides=config.hf_overrides,
            own_models=own_models,
        )
        found = self._select("encoder", config.encoder, ("device", "dtype"), {"model_type": checkpoint.model_type})
        return wire_images(config, self.origins, checkpoint, wiring, self.parts, self.notes, found, self._keep)

    def _warn(self, text: str, *values: object) -> None:
        """Log a warning, unless an earlier attempt has logged it."""
        if self.warns:
            log.warning(text, *values)

    def _learn(self, name: str, value: Any, sentence: str) -> None:
        """Store a fact for the next choices, and a note about it."""
        self.facts[name] = value
        self.notes.append((name, sentence))

    def _device(self) -> Device:
        """Choose the device, store the facts about it for the next choices, and return it."""
        device = find_device(self.config.device)
        memory = f"{device.memory / 2**30:.1f} GiB"
        self._learn("device", device.kind, f"{device.kind}: {device.name}, {memory} ({device.why})")
        if device.sm:
            self.facts["sm"] = device.sm
        if device.kind == "cpu":
            self.notes.append(("native", library.summary()))
        return device

    def _invariant(self, device: Device) -> frozenset[str]:
        """Return the features that plug-ins must have for ``batch_invariant``.  ConfigError if the engine's own kernels
        cannot provide it."""
        config = self.config
        if not config.batch_invariant:
            return frozenset()
        setting = f"{begins(source_of(self.origins, 'batch_invariant'))}batch_invariant=true"
        tensor_parallel.refuse_invariant(config.tensor_parallel_size, setting)
        if device.kind != "cpu":
            if not config.fuse:
                problem = "torch's products depend on the number of rows"
                raise ConfigError(f"{setting} with fuse=false: {problem}; set fuse=true")
            if not 90 <= (device.sm or 0) < 120:
                capability = f"{device.sm / 10:.1f}" if device.sm else "none"
                raise ConfigError(
                    f"{setting} on {device.kind}: its matrix product needs a GPU of compute capability 9.0 to 11, "
                    f"and {device.name} has {capability}; use such a GPU, or device=cpu"
                )
            missing = Needs("triton", "3.4", 'pip install "minivllm[triton]"').missing()
            if missing is not None:
                raise ConfigError(f"{setting} on {device.kind}: {missing}")
        return frozenset({"batch_invariant"})

    def _model(self, checkpoint: Checkpoint, features: frozenset[str]) -> tuple[tuple[AttnSpec, ...], Any, int | None]:
        """Choose the plug-in of the model.

        Return (attention layers, config object, length in tokens above which requests use other rotary frequencies or
        None).  ModelError if no plug-in serves the architecture, or if the model cannot be served.
        """
        choice = self.config.model_arch
        file = f"{checkpoint.folder}/config.json"
        self.notes.append(("model", f"{describe_folder(checkpoint.folder)} ({checkpoint.architecture})"))
        selection = self._select_model(choice, checkpoint, features)
        if selection.chosen is None and choice.name == "auto":
            served: set[Any] = set()
            for candidate in selection.candidates:
                if candidate.spec:
                    served.update(candidate.spec.listed("architecture"))
            if not checkpoint.model_type:
                raise ModelError(_without_type(checkpoint))
            if selection.request.facts["architecture"] not in served:
                raise ModelError(
                    f"{file}: no plug-in serves the architecture {shown(checkpoint.architecture)}. "
                    f"Available: {', '.join(sorted(served))}"
                )
        chosen = selection.require()
        part = self._keep(selection, choice)
        if not checkpoint.model_type and "any_architecture" in part.features:
            raise ModelError(_without_type(checkpoint))
        hf_config = checkpoint.hf_config()
        self._tell_config(checkpoint, hf_config, chosen)
        arch = build_part("model", part)
        try:
            specs = attention_layers(arch, hf_config)
            switch = arch.switch(hf_config)
            self.states = tuple(arch.states(hf_config))
        except ModelError as exc:
            raise ModelError(f"{file}: {exc}") from exc
        except AttributeError as exc:  # the architecture reads a field that the config lacks
            raise ModelError(f"{file}: {chosen.entry.label} misses a field: {exc}{raised_at(exc)}") from exc
        if not specs:
            raise ModelError(f"{file}: the model has no attention layer, and such models are not served")
        if "any_architecture" in part.features:
            forced = self.config.model_impl == "transformers"
            reason = "asked for" if forced else "no other plug-in serves the model"
            self.notes.append(("model.impl", f"{part.name}: {reason}"))
        for subject, text in arch.notes(hf_config).items():
            self.notes.append((f"model.{subject}", text))
        names = names_in(checkpoint.folder, self.config.load_format)
        if names is not None:
            for text in check_names(checkpoint.folder, names, arch, hf_config):
                self.notes.append(("model.skipped", text))
        return specs, hf_config, switch

    def _generation(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Return the sampling defaults of generation_config.json, and note them.  ConfigError or ModelError."""
        try:
            found = read_generation(self.config.generation_config, checkpoint.folder)
        except ConfigError as exc:
            place = begins(source_of(self.origins, "generation_config"))
            raise ConfigError(f"{place}{exc}") from None
        text = found.in_words()
        if text:
            self.notes.append(("sampling", text))
        return found.values

    def _tell_config(self, checkpoint: Checkpoint, hf_config: Any, chosen: Candidate) -> None:
        """Note unexpected values of config.json.  ConfigError for ``hf_overrides`` that no code reads."""
        overrides = self.config.hf_overrides
        if overrides:
            ignores = chosen.require_spec().traits.get("ignores", ())
            try:
                refuse_unread(overrides, checkpoint.raw, hf_config, tuple(ignores), chosen.entry.label)
            except ConfigError as exc:
                place = begins(source_of(self.origins, "hf_overrides"))
                raise ConfigError(f"{place}{exc}") from None
            self.notes.append(("model.hf_overrides", in_words(overrides)))
        note = two_ropes(checkpoint.raw)
        if note:
            self.notes.append(("model.rope", note))
            self._warn("%s/config.json: %s", checkpoint.folder, note)

    def _select_model(self, choice: PluginChoice, checkpoint: Checkpoint, features: frozenset[str]) -> Selection:
        """Choose the plug-in of a model, and return the selection.

        The first that exists is chosen: a plug-in that names the architecture; for a multimodal checkpoint, a plug-in
        that names the architecture of its text model; a plug-in for any architecture.  ``model_impl`` restricts this.
        """
        impl = self.config.model_impl
        any_architecture = features | {"any_architecture"}
        select = partial(self._select, "model", choice, ("device", "dtype"))
        named = {"architecture": checkpoint.architecture, "model_type": checkpoint.model_type}
        if holds_text_model(checkpoint.raw):
            whole = select(named, features)
            if whole.chosen is not None and impl != "transformers":
                return whole
            text = checkpoint.text
            if text is not None:
                named = {"architecture": text.architecture, "model_type": text.model_type}
        if impl == "transformers":
            return select(named, any_architecture)
        first = select(named, features)
        if first.chosen is None and impl == "auto":
            last = select(named, any_architecture)
            if last.chosen is not None:
                return last
        return first

    def _quantizer_for(self, method: str) -> PluginChoice:
        """Return the quantizer to choose for a checkpoint that is quantized with ``method``."""
        choice, note = online_counterpart(self.catalog["quantizer"], self.config.quantizer, method)
        if note:
            self.notes.append(("quantizer", note))
        return choice

    def _max_len(self, hf_config: Any) -> int:
        """Return the longest sequence in tokens.  ConfigError if the option exceeds the model's context length."""
        option = self.config.max_model_len
        most = longest_context(hf_config)
        if option is not None:
            if most is not None and option > most:
                raise ConfigError(
                    f"max_model_len={option}: the model has {describe_context(hf_config)}; expected at most that"
                )
            value = option
            reason = "asked for"
        else:
            value = min(DEFAULT_MAX_LEN, most or DEFAULT_MAX_LEN)
            reason = "the model's" if value == most else f"the model's is {most}"
        self._learn("max_model_len", value, f"{value} ({reason})")
        return value

    def _served(self, checkpoint: Checkpoint, hf_config: Any) -> Served:
        """Return the facts about the served model with which the head of a drafter is compared."""
        names = names_in(checkpoint.folder, self.config.load_format)
        return Served(checkpoint.folder, build_part("model", self.parts["model"]), hf_config, names)

    def _drafter(self, second_models: OwnModels, served: Served) -> SpeculationWiring:
        """Choose the drafter, the number of drafts per step, and the drafter's second model or head if it has one.

        Return the options of speculative decoding."""
        choice = self.config.drafter
        self._pick("drafter", choice, ("device",))
        part = self.parts["drafter"]
        option = self.config.num_speculative_tokens
        drafts = min(option, int(part.traits.get("drafts", option)))
        model = None
        label = begins(source_of(self.origins, "drafter"))
        refuse_split(part, self.config.tensor_parallel_size, label)
        if "draft_model" in part.features:
            model = second_models.add(part, "draft_model", f"{label}the draft model")
        if "target_head" in part.features:
            model = second_models.add_head(part, served, f"{label}drafter {part.name}")
        captured = captures_drafts(self.config, drafts, str(self.facts["device"]), self.origins)
        return SpeculationWiring(drafts, self.config.speculate, model, captured, self.config.drafts_ahead)

    def _model_parts(self, invariant: frozenset[str], checkpoint: Checkpoint) -> dict[str, Part]:
        """Return the model and quantizer plug-ins of a second model, chosen in the same way as those of the served
        model."""
        auto = PluginChoice()
        model = self._select_model(auto, checkpoint, invariant).require()
        part = make_part(self.catalog["model"], model, auto, "model", {})
        return {"model": part, **self._quantizer_part(invariant, checkpoint)}

    def _quantizer_part(self, invariant: frozenset[str], checkpoint: Checkpoint) -> dict[str, Part]:
        """Return the quantizer plug-in of a second model or of a head."""
        auto = PluginChoice()
        registry = self.catalog["quantizer"]
        method = {"checkpoint": method_read(checkpoint, registry, auto)}
        selection = self._select("quantizer", auto, ("device", "dtype", "sm"), method, invariant)
        return {"quantizer": make_part(registry, selection.require(), auto, "quantizer", {})}

    def _kv_format(self, dtype: str) -> None:
        """Choose the KV format.  Unless the user names one, it must store the model's dtype without loss."""
        choice = self.config.kv_format
        unset = choice.name == "auto" and not choice.prefer
        facts = {"holds": dtype} if unset else {}
        entry = self._pick("kvformat", choice, ("device", "sm", "dtype"), facts).entry
        self.facts["kv_format"] = entry.name if entry.builtin else entry.label

    def _grammar(self) -> None:
        """Choose the grammar plug-in: the named one, or one whose library is installed.

        Without a suitable plug-in, only requests with structured outputs are refused.
        """
        choice = self.config.grammar
        selection = self._select("grammar", choice)
        if selection.chosen is None and choice.name == "auto" and not choice.prefer:
            self.notes.append(("grammar", "none: " + NO_GRAMMAR))
        else:
            self._pick("grammar", choice)

    def _attention(self, served: Sequence[AttnSpec], second: Sequence[AttnSpec], invariant: frozenset[str]) -> int:
        """Choose the attention back end for all layers, and the block size.

        Return the block size.  Several processes share the ``served`` model, and one has the ``second`` models (of
        drafters and processors) whole.  PluginError if the back end does not support a block size that the user has
        not set."""
        specs = (*served, *second)
        more: dict[str, Any] = {"dim_qk": frozenset(s.dim_qk for s in specs)}
        more["dim_v"] = frozenset(s.dim_v for s in specs)
        shared = tensor_parallel.queries_per_kv(self.config.tensor_parallel_size, served)
        more["queries_per_kv"] = shared | tensor_parallel.queries_per_kv(1, second)
        option = self.config.kvcache_block_size
        if option is not None:
            more["block"] = option
        needed = set()
        for feature in ("window", "sinks", "softcap", "alibi", "v_in_k"):
            values = [getattr(spec, feature) for spec in specs]
            if any(value is not None and value is not False for value in values):
                needed.add(feature)
        features = invariant | needed
        facts = ("device", "sm", "dtype", "kv_format")
        chosen = self._pick("attention", self.config.attention, facts, more, features)
        supplied = self.selections[-1].supplied.get("block")
        block = DEFAULT_BLOCK
        reason = "the engine's default"
        label = "the default"
        if option is not None:
            block = option
            reason = "asked for"
        elif supplied is not None:
            block = supplied
            reason = f"supplied by {chosen.entry.label}"
            label = "its own"
        spec = chosen.require_spec()
        reasons = spec.refuse(PluginQuery({"block": block}), self.catalog["attention"].kind)
        if reasons:
            raise PluginError(
                f"{chosen.entry}: the configuration sets no block size, and the plug-in's spec does not support "
                f"{label}: {'; '.join(map(str, reasons))}"
            )
        self._learn("block", block, f"{block} ({reason})")
        return block

    def _select(
        self,
        kind: str,
        choice: PluginChoice,
        names: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
        features: frozenset[str] = frozenset(),
        at: str = "",
    ) -> Selection:
        """Return the selection of a plug-in of a kind that supports the given facts and features, within the choice.

        The facts are those resolved so far whose names are in ``names``, and ``more``.  ``features`` are required.
        ``at`` is the path of the choice in the configuration, by default the option of the kind.  The message of a
        PluginError begins with the source of the choice, such as a file.
        """
        facts = {name: self.facts[name] for name in names if name in self.facts}
        facts.update(more or {})
        registry = self.catalog[kind]
        path = at or OPTION_OF.get(kind, kind)
        try:
            selection = registry.select(PluginQuery(facts, features), choice.name, choice.prefer)
        except PluginError as exc:
            named = path if choice.name == "auto" else f"{path}.name"
            raise PluginError(f"{begins(source_of(self.origins, named))}{exc}") from exc
        for name in choice.prefer:
            if not registry.installed(name):
                note = f"{shown(name)} is not installed, and is skipped"
                self.notes.append((f"{path}.prefer", note))
                self._warn("%s%s.prefer: %s", begins(source_of(self.origins, f"{path}.prefer")), path, note)
        return selection

    def _pick(
        self,
        kind: str,
        choice: PluginChoice,
        names: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
        features: frozenset[str] = frozenset(),
    ) -> Candidate:
        """Choose a plug-in of a kind, store the choice, and return the plug-in.  PluginError if none is suitable."""
        selection = self._select(kind, choice, names, more, features)
        chosen = selection.require()
        self._keep(selection, choice)
        return chosen

    def _keep(self, selection: Selection, choice: PluginChoice, at: str = "") -> Part:
        """Store a selection and return its chosen plug-in with checked options.  Parameters that its spec declares
        become parameters of requests."""
        kind = selection.kind
        chosen = selection.require()
        if chosen.spec is not None and chosen.spec.params:
            from minivllm.core.interfaces.params import is_own

            declared_params.choose(kind, chosen, is_own)
        self.selections.append(selection)
        path = at or OPTION_OF.get(kind, kind)
        part = make_part(self.catalog[kind], chosen, choice, path, self.origins)
        if not at:
            self.parts[kind] = part
        return part

    def _several(self, kind: str, choices: Sequence[PluginChoice], names: Sequence[str]) -> list[Part]:
        """Choose the plug-ins of a kind that allows several, and return them.  ConfigError if one is there twice."""
        parts: list[Part] = []
        option = OPTION_OF.get(kind, kind)
        for i, choice in enumerate(choices):
            at = f"{option}.{i}"
            selection = self._select(kind, choice, names, at=at)
            label = selection.require().entry.label
            if any(part.name == label for part in parts):  # named once as NAME and once as PACKAGE/NAME
                place = begins(source_of(self.origins, at))
                raise ConfigError(f"{place}{option}: {shown(label)} is there twice; remove one of them")
            parts.append(self._keep(selection, choice, at))
        return parts


def _without_type(checkpoint: Checkpoint) -> str:
    """Return the message for a config.json without ``model_type``, by which transformers chooses the config class."""
    return (
        f"{checkpoint.folder}/config.json: model_type is missing: expected the type that transformers has for "
        f'{shown(checkpoint.architecture)}, as in "model_type": "llama" for LlamaForCausalLM'
    )


def make_part(registry: Registry, chosen: Candidate, choice: PluginChoice, at: str, origins: Mapping[str, str]) -> Part:
    """Return a chosen plug-in and its checked options as plain data, which a worker process can receive.

    ``at`` is the path of the choice in the configuration, and ``origins`` has the source of each value.  The error of
    invalid options names both.
    """
    spec = chosen.require_spec()
    entry = chosen.entry
    options = registry.options(chosen, choice.options, f"{at}.options", origins)
    values = {} if options is None else options.model_dump(mode="json")
    features = tuple(sorted(spec.features))
    return Part(entry.label, spec.impl, values, spec.options, features, spec.plain_traits, entry.source)
