"""What any model architecture must do: compute what transformers computes, or refuse the config by name.

Models are tiny and random, made by transformers from the architectures and model types that the spec claims, written
as a Hugging Face directory and read back as the engine reads them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.model import ModelArch, takes_logits_indices
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.errors import ModelError
from minivllm.registration.spec import ANY

from .base import Seen, since
from .harness import Harness, play, seats
from .model_config import IGNORED, UNCHANGED, jumps, logits, names, others, record
from .model_taps import ModelTaps
from .tiny import VARIANTS, attention_of, edits, quiet, read_tensors, save, small_config, tiny_model, write_tensors

PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(48)]
NEW_TOKENS = 32
LARGEST = 3_000_000  # parameters of a model that is built hundreds of times
MUST_SERVE = ("mha", "mqa", "one layer", "three layers", "64 tokens", "tied")  # if the config class has the field


@dataclass(frozen=True)
class ModelCase:
    """A model as a directory, as transformers' object, and the logits [tokens, V] of ``PROMPT`` that it gives."""

    path: Path
    hf: Any
    want: Tensor
    room: float  # largest difference of a logit


class ModelConformance(ModelTaps):
    """Override ``families``, ``config`` or ``variants`` if the defaults make no right config of the architecture."""

    kind = "model"

    # ---- what an author may override -----------------------------------------------------------------------------

    def families(self) -> dict[str, Any]:
        """Architecture -> transformers' model class.  Default: the class of the claimed name."""
        import transformers

        limit = {} if self.spec.limits == ANY else self.spec.limits.get("architecture")
        if not isinstance(limit, (set, frozenset)) or not limit:
            pytest.skip("claims no architecture by name: override families()")
        unknown = sorted(name for name in limit if not hasattr(transformers, name))
        assert not unknown, f"claims {unknown}, which transformers has no class for: override families()"
        return {name: getattr(transformers, name) for name in sorted(limit)}

    def config(self, cls: Any, **values: Any) -> Any:
        """A small config (2 layers, 61 tokens) for a model class, with some fields set."""
        return small_config(cls.config_class, **values)

    def variants(self) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        """Axis -> name -> fields to set; each alone and one of each axis together equal transformers or are refused."""
        return VARIANTS

    def harness(self, path: Path, **more: Any) -> Harness:
        """The plug-in's model with the weights of a directory."""
        more = {"dtype": self.dtype(), "device": self.place(), **more}
        with quiet():
            return Harness(
                path, self.build(), more.pop("cfg", None) or open_checkpoint(str(path)).from_transformers(), **more
            )

    # ---- comparing -----------------------------------------------------------------------------------------------

    def context(self) -> tuple[Any, ...]:
        return ()

    def exercise(self, instance: ModelArch) -> Any:
        cfg = self.config(self.first())
        made = Harness(".", instance, cfg, self.dtype(), device=self.place(), load_format="dummy")
        return made.step({0: PROMPT[:5]})[0].tolist()

    def first(self) -> Any:
        return next(iter(self.families().values()))

    def dtype(self) -> str:
        """The most exact dtype that is claimed."""
        found = self.values("dtype", "float32", "bfloat16", "float16")
        return found[0] if found else pytest.skip("claims no floating dtype that is known here")

    def case(self, cls: Any, path: Path, *, seed: int = 0, shard: str | None = None, **values: Any) -> ModelCase:
        """A random model of a small config with some fields set; in several files with ``shard="20KB"``."""
        with quiet():
            cfg = self.config(cls, **values)
            self.check_size(cls, cfg)
            hf = tiny_model(cfg, seed, cls)
            return self.case_of(save(hf, path, shard), hf)

    def check_size(self, cls: Any, cfg: Any) -> None:
        """Fail at once where a config makes a model so large that the tests, which build hundreds, would take hours."""
        with torch.device("meta"):
            model = (getattr(cls, "from_config", None) or cls._from_config)(copy.deepcopy(cfg))
        n = sum(p.numel() for p in model.parameters())
        if n > LARGEST:
            plain = {k: v for k, v in cfg.to_dict().items() if type(v) is int and v > 64}
            ids = ("_token_id", "max_position_embeddings", "model_max_length")
            large = ", ".join(f"{k}={v}" for k, v in sorted(plain.items()) if not k.endswith(ids))
            pytest.fail(
                f"config() makes a {cls.__name__} of {n:,} parameters, want at most {LARGEST:,}: override config() and "
                f"set these fields to small values: {large}",
                pytrace=False,
            )

    def case_of(self, path: Path, hf: Any, tokens: Sequence[int] = PROMPT, dtype: str = "") -> ModelCase:
        want, dtype = logits(hf, tokens), dtype or self.dtype()
        room = max(1e-4, 2e-5 * float(want.abs().max()))
        if dtype != "float32":
            half = logits(self._reload(path, type(hf), dtype), tokens)
            room = 4 * float((half - want).abs().max()) + 1e-3
        return ModelCase(path, hf, want, room)

    def _reload(self, path: Path, cls: Any, dtype: str = "float32") -> Any:
        with quiet():
            attention = attention_of(cls.config_class())
            return cls.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention).eval()

    def difference(self, got: Tensor, case: ModelCase) -> str:
        """What is wrong with logits; "" if nothing is."""
        if not got.isfinite().all():
            return f"logits of {int((~got.isfinite()).any(-1).sum())} of {len(got)} positions are not finite"
        if got.shape != case.want.shape:
            return f"logits have shape {list(got.shape)}, want {list(case.want.shape)}"
        off = (got.cpu() - case.want).abs()
        if off.max() <= case.room:
            return ""
        position, token = divmod(int(off.argmax()), off.shape[1])
        first = int((off > case.room).any(-1).nonzero()[0])
        return (
            f"the logit of token {token} at position {position} is {got[position, token]:.5f}, transformers gives "
            f"{case.want[position, token]:.5f} (allowed {case.room:.1e}; wrong from position {first} on)"
        )

    def judge(self, cls: Any, path: Path, values: Mapping[str, Any], cuts: Sequence[int] = ()) -> tuple[str, str]:
        """("equal" | "refused" | "no such config" | "wrong", why) of a config with some fields set."""
        for seed in range(3):
            try:
                case = self.case(cls, path, seed=seed, **values)
                assert case.want.isfinite().all()
            except Exception as exc:  # transformers refuses configs with errors of many types
                return "no such config", f"{type(exc).__name__}: {exc}"
            status, why = self._judge(case, path, values, cuts)
            if status != "wrong" or not jumps(case.hf, PROMPT, 10 * case.room):
                break
        return status, why

    def _judge(self, case: ModelCase, path: Path, values: Mapping[str, Any], cuts: Sequence[int]) -> tuple[str, str]:
        try:
            harness = self.harness(path, max_len=len(PROMPT))  # by which "dynamic" goes
            wrong = self.difference(harness.step({0: PROMPT})[0], case)
            if not wrong and cuts:
                wrong = self.difference(harness.chunked(1, PROMPT, cuts), case)
                wrong = wrong and f"cut before {list(cuts)}: {wrong}"
        except ModelError as exc:
            named = any(re.search(rf"\b{name}\b", str(exc)) for name in names(values))
            return ("refused", str(exc)) if named else ("wrong", f"refused without naming a field that is set: {exc}")
        except Exception as exc:
            return "wrong", f"raises {type(exc).__name__} where transformers computes logits; want ModelError: {exc}"
        return ("wrong", wrong) if wrong else ("equal", "")

    def verdicts(self, cls: Any, tmp_path: Path) -> dict[str, tuple[str, str]]:
        """Of the plain config and of each variant alone."""
        singles = {"the plain config": {}, **{k: v for axis in self.variants().values() for k, v in axis.items()}}
        return {
            name: self.judge(cls, tmp_path / f"{cls.__name__}-{i}", values, (5, 6, 23))
            for i, (name, values) in enumerate(singles.items())
        }

    # ---- equal to transformers -----------------------------------------------------------------------------------

    @since(1, 0)
    def test_every_claimed_architecture_and_model_type_is_served(self, tmp_path: Path) -> None:
        """What config.json calls a model chooses the plug-in, so a claim that is not served breaks at a user's."""
        met = set()
        for name, cls in self.families().items():
            met.add(cls.config_class.model_type)
            assert self.values("model_type", cls.config_class.model_type), (
                f"claims architecture {name}, whose model_type {cls.config_class.model_type!r} it does not claim"
            )
            status, why = self.judge(cls, tmp_path / name, {})
            assert status == "equal", f"{name}, plain config: {status}, {why}"
        limit = {} if self.spec.limits == ANY else self.spec.limits["model_type"]
        rest = sorted(limit - met) if isinstance(limit, (set, frozenset)) else []
        assert not rest, f"claims model_type {rest}, of which it claims no architecture"

    @since(1, 0)
    def test_each_config_gives_the_logits_of_transformers_or_is_refused(self, tmp_path: Path) -> None:
        """A config value that changes the arithmetic is implemented or refused with a ModelError that names it; heads,
        sizes and tied embeddings are always implemented."""
        for name, cls in self.families().items():
            found = self.verdicts(cls, tmp_path)
            wrong = [f"{name}, {what}: {why}" for what, (status, why) in found.items() if status == "wrong"]
            assert not wrong, "\n".join(wrong)
            own = set(vars(self.config(cls)))
            for what, values in ((k, v) for axis in self.variants().values() for k, v in axis.items()):
                must = what in MUST_SERVE and set(values) <= own
                assert not must or found[what][0] != "refused", f"{name}, {what}: want it served: {found[what][1]}"
            seen = Seen(status for status, _ in found.values())
            assert seen["equal"] >= 4, f"the test itself is too weak: {dict(seen)}"

    @since(1, 0)
    def test_config_values_go_together(self, tmp_path: Path) -> None:
        """What is served alone is served right in company: tied embeddings with biases, windows with scaled rope."""
        for cls in self.families().values():
            self._mix(cls, tmp_path)

    def _mix(self, cls: Any, tmp_path: Path) -> None:
        found, seen = self.verdicts(cls, tmp_path), Seen()
        axes = [[{}, *(v for k, v in axis.items() if found[k][0] == "equal")] for axis in self.variants().values()]

        @self.for_all(40, st.tuples(*map(st.sampled_from, axes)), st.sets(st.integers(1, len(PROMPT) - 1)))
        def _(chosen: tuple, cuts: set) -> None:
            values = {k: v for one in chosen for k, v in one.items()}
            status, why = self.judge(cls, tmp_path / f"mix-{seen.total()}", values, sorted(cuts)[:4])
            seen[status] += 1
            assert status != "wrong", f"{cls.__name__} with {values}: {why}"

        seen.require(equal=15)

    @since(1, 0)
    def test_32_greedy_tokens_equal_transformers(self, tmp_path: Path) -> None:
        """Each is the best token of transformers, given those before it; a tie within the tolerance is none."""
        for name, cls in self.families().items():
            for seed in range(4 if self.long else 1):
                case = self.case(cls, tmp_path / f"{name}-{seed}", seed=seed)
                tokens = self.harness(case.path).greedy(0, PROMPT, NEW_TOKENS)
                want = logits(case.hf, PROMPT + tokens)[len(PROMPT) - 1 : -1]
                short = want.max(-1).values - want.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                late = int((short > case.room).float().argmax())
                assert (short <= case.room).all(), (
                    f"{name}: new token {late} is {tokens[late]}, transformers takes {int(want[late].argmax())}, "
                    f"whose logit is higher by {short[late]:.4f}"
                )

    @since(1, 0)
    def test_hidden_states_that_are_asked_for_are_those_among_all(self, tmp_path: Path) -> None:
        """In the order in which they are wanted, one of them twice; the other tokens are in the cache all the same."""
        found = []
        for name, cls in self.families().items():
            case = self.case(cls, tmp_path / name)
            harness = self.harness(case.path)
            found.append(takes_logits_indices(harness.model))
            if not found[-1]:
                continue
            wanted = [len(PROMPT), 3, 0, len(PROMPT), 7]  # slot 1 comes first, of its one token is 0
            got, _ = harness.logits({0: PROMPT, 1: [9]}, wanted)
            assert len(got) == len(wanted), f"{len(wanted)} tokens are wanted, the model gives {len(got)}"
            every, _ = harness.logits({2: PROMPT, 3: [9]})
            off = float((got - every[wanted]).abs().max())
            assert off <= case.room, f"logits of wanted tokens are off by {off:.1e} (allowed {case.room:.1e})"
            after = [harness.step({slot: [5]})[slot] for slot in (0, 2)]
            off = float((after[0] - after[1]).abs().max())
            assert off <= case.room, f"after a step that picked, logits are off by {off:.1e} (allowed {case.room:.1e})"
        if not any(found):
            pytest.skip("takes no indices: gives the hidden states of all")

    @since(1, 0)
    def test_logits_do_not_depend_on_how_a_sequence_is_cut_nor_on_its_neighbours(self, tmp_path: Path) -> None:
        """Whole, token by token and among strangers: positions come with the step, keys and values from the cache; bit
        for bit where ``batch_invariant`` is claimed, in that mode on a CPU."""
        modes = {False, self.claims("batch_invariant") and self.place() == "cpu"}
        for name, cls, bits in [(*item, bits) for item in self.families().items() for bits in modes]:
            case = self.case(cls, tmp_path / name)
            harness, ones = self.harness(case.path, batch_invariant=bits), range(1, len(PROMPT))
            ways = {"whole": harness.step({0: PROMPT})[0], "token by token": harness.chunked(1, PROMPT, ones)}
            strangers = (
                {2: PROMPT[:5], 3: [9] * 11, 4: [3]},
                {2: PROMPT[5:6], 3: [4], 4: [7]},
                {2: PROMPT[6:12], 3: [8], 4: [6, 6], 5: [11, 12, 13]},
                {2: PROMPT[12:], 4: [1] * 7, 5: [2]},
            )
            ways["among strangers"] = torch.cat([harness.step(feed)[2] for feed in strangers])
            for way, got in ways.items():
                assert not (wrong := self.difference(got, case)), f"{name}, {way}: {wrong}"
                assert not bits or torch.equal(got, ways["whole"]), f"{name}, {way}: other bits with batch_invariant"

    @since(1, 0)
    def test_a_long_sequence_is_right_to_its_end(self, tmp_path: Path) -> None:
        """700 tokens in chunks: no table of positions and no buffer ends before ``max_position_embeddings``."""
        tokens = (PROMPT * 15)[:700]
        for name, cls in self.families().items():
            hf = self.case(cls, tmp_path / name, max_position_embeddings=1024).hf
            for dtype in {self.dtype(), *(self.values("dtype", "bfloat16") if self.long else ())}:
                case = self.case_of(tmp_path / name, hf, tokens, dtype)
                got = self.harness(case.path, dtype=dtype, max_len=704, slots=2).chunked(1, tokens, (130, 131, 500))
                assert not (wrong := self.difference(got, case)), f"{name} in {dtype}, 700 tokens: {wrong}"

    @since(1, 0)
    def test_half_precision_is_at_most_twice_as_far_as_transformers(self, tmp_path: Path) -> None:
        """Root mean square over the logits of a token, and of that the median over all tokens, as a router may send one
        elsewhere; from float32 arithmetic on the same rounded weights."""
        for name, cls in self.families().items():
            for dtype in self.values("dtype", "bfloat16", "float16"):
                ours, theirs = [], []
                for seed in range(8 if self.long else 2):
                    path = tmp_path / f"{name}-{dtype}-{seed}"
                    save(tiny_model(self.config(cls), seed, cls).to(getattr(torch, dtype)), path)
                    want = logits(self._reload(path, cls), PROMPT)
                    theirs.append(logits(self._reload(path, cls, dtype), PROMPT) - want)
                    ours.append(self.harness(path, dtype=dtype).step({0: PROMPT})[0].cpu() - want)
                a, b = (float(torch.cat(x).square().mean(-1).sqrt().median()) for x in (ours, theirs))
                assert a <= 2 * b + 1e-3, f"{name} in {dtype}: error {a:.2e}, transformers' {b:.2e}"

    @since(1, 0)
    def test_processes_that_share_a_model_compute_it_together(self, tmp_path: Path) -> None:
        """Two shares of every split layer, played by two threads; sizes come from ``parts.heads`` and the splits."""
        for name, cls in self.families().items():
            case = self.case(cls, tmp_path / name)
            group = seats(2)
            try:
                shares = [self.harness(case.path, group=seat) for seat in group]
            except ModelError as exc:
                pytest.skip(f"refuses to be split over 2 processes: {exc}")
            for rank, got in enumerate(play(group, [partial(h.step, {0: PROMPT}) for h in shares])):
                wrong = self.difference(got[0], case)
                assert not wrong, f"{name}, process {rank} of 2: {wrong}"

    # ---- the checkpoint ------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_each_checkpoint_tensor_does_what_it_does_in_transformers(self, tmp_path: Path) -> None:
        """One tensor is changed at a time: it has the same effect, so it is used, once and in its place."""
        for name, cls in self.families().items():
            case, seen = self.case(cls, tmp_path / name), Seen()
            for tensor in edits(case.path, lambda t: t + 0.3 * torch.randn(t.shape)):
                got = self.harness(case.path).step({0: PROMPT})[0]
                changed = self.case_of(case.path, self._reload(case.path, cls))
                wrong = self.difference(got, changed)
                assert not wrong, f"{name}: after a change of {tensor}: {wrong}"
                seen["effect"] += bool((changed.want - case.want).abs().max() > 10 * changed.room)
            seen.require(effect=10)

    @since(1, 0)
    def test_a_tensor_that_is_missing_misshapen_or_unknown_is_refused_by_name(self, tmp_path: Path) -> None:
        """Silently left out, a weight would keep whatever was in its memory."""
        for name, cls in self.families().items():
            path = self.case(cls, tmp_path / name).path
            for what, change in (("missing", lambda t: None), ("cut short", lambda t: t[:-1].clone())):
                for tensor in edits(path, change):
                    self._refuses(path, tensor, f"{name}: {tensor} is {what}")
            tensors = read_tensors(path)
            known = [next(iter(tensors)), next(k for k in tensors if re.search(r"\.1\.", k)), list(tensors)[-1]]
            surplus = {known[0] + "_surplus", re.sub(r"\.1\.", ".7.", known[1]), known[1] + ".surplus.weight"}
            surplus |= {re.sub(r"[^.]+\.weight$", "surplus.weight", k) for k in tensors}
            for tensor in sorted(surplus - set(tensors)):
                write_tensors(path, {**tensors, tensor: torch.zeros(3)})
                self._refuses(path, tensor, f"{name}: {tensor} is there, which this architecture does not have")

    def _refuses(self, path: Path, tensor: str, what: str) -> None:
        try:
            self.harness(path)
        except ModelError as exc:
            assert tensor in str(exc), f"{what}, and the error does not name it: {exc}"
        else:
            pytest.fail(f"{what}, and it is not refused: look at weights()")

    @since(1, 0)
    def test_every_parameter_is_filled_also_from_several_files(self, tmp_path: Path) -> None:
        """All memory holds NaN before the load."""
        for name, cls in self.families().items():
            one = self.harness(self.case(cls, tmp_path / name).path).parts.modules
            many = self.case(cls, tmp_path / f"{name}-shards", shard="20KB").path
            assert len(list(many.glob("*.safetensors"))) > 1, "the test itself is too weak: one file"
            for module, other in zip(one.values(), self.harness(many).parts.modules.values(), strict=True):
                for key, tensor in module.tensors.items():
                    assert tensor.isfinite().all(), f"{name}: {module.name}.{key} is not filled from the checkpoint"
                    assert torch.equal(tensor, other.tensors[key]), f"{name}: {module.name}.{key} differs in shards"

    @since(1, 0)
    def test_dummy_weights_depend_on_the_seed_alone(self) -> None:
        """``load_format: dummy`` starts a model without its files."""
        for name, cls in self.families().items():
            cfg = self.config(cls)
            made = [self.harness(Path("nowhere"), cfg=cfg, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
            a, b, c = (h.step({0: PROMPT})[0] for h in made)
            assert a.isfinite().all() and torch.equal(a, b), f"{name}: two loads with one seed differ"
            assert not torch.equal(a, c), f"{name}: the seed changes nothing"

    # ---- the config ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_every_field_of_the_config_is_read_or_ignored_for_a_reason(self, tmp_path: Path) -> None:
        """A field that nobody reads is a setting that is silently ignored; name it in the trait ``ignores`` if that is
        right."""
        ignores = set(self.spec.traits.get("ignores", ()))
        for name, cls in self.families().items():
            path = self.case(cls, tmp_path / name).path
            cfg = open_checkpoint(str(path)).from_transformers()
            fields = {k for k in vars(cfg) if not k.startswith("_")}
            stale = sorted(ignores - fields)
            assert not stale, f"{name}: traits ignores={stale}: the config has no such field"
            read = record(cfg)
            self.harness(path, cfg=cfg)
            silent = sorted(fields - read - ignores - set(IGNORED))
            assert not silent, f"{name}: nobody reads {silent}: read, refuse, or name them in traits['ignores']"

    @since(1, 0)
    def test_a_changed_number_changes_what_it_changes_in_transformers(self, tmp_path: Path) -> None:
        """Every number and switch of the config, those of the rope parameters too: same logits, or refused."""
        for name, cls in self.families().items():
            plain, seen, i = {k: v for k, v in vars(self.config(cls)).items() if k not in UNCHANGED}, Seen(), 0
            ropes = list(self.variants().get("rope", {}).values())
            changes = [{k: new} for k, v in plain.items() for new in others(v)]
            changes += [
                {**v, "rope_parameters": {**v["rope_parameters"], k: new}}
                for v in ropes
                for k, old in v.get("rope_parameters", {}).items()
                for new in others(old)
            ]
            windows = self.variants().get("window", {}).values()
            changes += [{**v, k: new} for v in windows for k, old in v.items() for new in others(old)]
            for values in changes:
                if any(k.startswith("_") for k in values):
                    continue
                status, why = self.judge(cls, tmp_path / f"{name}-{(i := i + 1)}", values)
                seen[status] += 1
                assert status != "wrong", f"{name} with {values}: {why}"
            seen.require(equal=8)

    @since(1, 0)
    def test_attention_describes_the_layers_that_are_built(self, tmp_path: Path) -> None:
        """One spec per layer, of the whole model: memory is laid out by it before the model exists."""
        for name, cls in self.families().items():
            for what in ("the plain config", "three layers", "mqa"):
                values = next((axis[what] for axis in self.variants().values() if what in axis), {})
                cfg = self.config(cls, **values)
                specs = list(self.build().attention(cfg))
                layers = self.harness(Path("nowhere"), cfg=cfg, load_format="dummy").parts.layers
                assert len(specs) == cfg.num_hidden_layers, (
                    f"{name}, {what}: attention() gives {len(specs)} specs for {cfg.num_hidden_layers} layers"
                )
                built = [layer.spec for layer in layers]
                assert specs == built, f"{name}, {what}: attention() says {specs}, build() makes {built}"
                for i, spec in enumerate(specs):
                    assert spec.heads % spec.kv_heads == 0, (
                        f"{name}, layer {i}: {spec.heads} heads over {spec.kv_heads}"
                    )
