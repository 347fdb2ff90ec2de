"""The conformance suite of model architectures: logits equal those of transformers, or a config is refused by name.

The models are tiny and random.  Transformers makes them from the architectures and model types that the spec claims.
They are saved as Hugging Face directories and loaded by the code that the engine uses.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
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
from .model_config import (
    IGNORED,
    UNCHANGED,
    field_names,
    largest,
    logits,
    other_values,
    record_reads,
    tolerance_of,
    unstable,
)
from .model_states import ModelStates
from .model_taps import ModelTaps
from .tiny import VARIANTS, attention_of, edits, quiet, read_tensors, save, small_config, tiny_model, write_tensors

PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(48)]
NEW_TOKENS = 32
LARGEST = 3_000_000  # most parameters of a test model, because hundreds of models are built
# config variants that must be implemented, not refused, if the config class has the field
MUST_SERVE = ("mha", "mqa", "one layer", "three layers", "64 tokens", "tied")
FLOATS = ("float32", "bfloat16", "float16")  # floating dtypes to test, the most precise one first
Judgement = tuple[str, str]  # (status: "equal" | "refused" | "no such config" | "wrong", reason)


@dataclass(frozen=True)
class ModelCase:
    """A saved test model: its directory, the same model in transformers, and the expected logits of a prompt."""

    path: Path
    hf: Any
    want: Tensor  # expected logits by transformers, float32 [tokens, vocabulary]
    tolerance: float  # largest allowed difference of a logit


class ModelConformance(ModelTaps, ModelStates):
    """The conformance suite of a model architecture.

    Override ``families``, ``config`` or ``variants`` if their defaults make no valid config of the architecture.
    """

    kind = "model"

    # ---- methods that a test class may override ------------------------------------------------------------------

    def families(self) -> dict[str, Any]:
        """Return architecture name -> model class of transformers.  By default the class has the claimed name."""
        import transformers

        if self.spec.limits == ANY:
            limit = {}
        else:
            limit = self.spec.limits.get("architecture")
        if not isinstance(limit, (set, frozenset)) or not limit:
            pytest.skip("claims no architecture by name: override families()")
        unknown = sorted(name for name in limit if not hasattr(transformers, name))
        assert not unknown, f"claims {unknown}, which transformers has no class for: override families()"
        return {name: getattr(transformers, name) for name in sorted(limit)}

    def config(self, cls: Any, **values: Any) -> Any:
        """Return a small config (2 layers, 61 tokens) of a model class, with some fields set."""
        return small_config(cls.config_class, **values)

    def variants(self) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        """Return the config values to test, as axis -> name of a variant -> fields to set.

        With each variant alone, and with one variant of each axis together, logits must equal those of transformers,
        or the config must be refused.
        """
        return VARIANTS

    def harness(self, path: Path, **more: Any) -> Harness:
        """Return the plug-in's model with the weights of a directory; ``more`` are arguments of ``Harness``."""
        facts = {"dtype": self.dtype(), "device": self.place()}
        more = {**facts, **more}
        with quiet():
            cfg = more.pop("cfg", None) or open_checkpoint(str(path)).from_transformers()
            return Harness(path, self.build(), cfg, **more)

    # ---- comparison with transformers ----------------------------------------------------------------------------

    def context(self) -> tuple[Any, ...]:
        return ()

    def exercise(self, instance: ModelArch) -> Any:
        cfg = self.config(self.first())
        harness = Harness(".", instance, cfg, self.dtype(), device=self.place(), load_format="dummy")
        step = harness.step({0: PROMPT[:5]})
        return step[0].tolist()

    def first(self) -> Any:
        """Return the model class of transformers for the first claimed architecture."""
        return next(iter(self.families().values()))

    def dtype(self) -> str:
        """Return the most exact dtype that the plug-in claims."""
        claimed = self.values("dtype", *FLOATS)
        return claimed[0] if claimed else pytest.skip("claims no floating dtype that is known here")

    def case(self, cls: Any, path: Path, *, seed: int = 0, shard: str | None = None, **values: Any) -> ModelCase:
        """Save a random model of a small config, and return it with its expected logits.

        ``values`` are config fields.  ``shard="20KB"`` splits the weights over several files of at most that size.
        """
        with quiet():
            cfg = self.config(cls, **values)
            self.check_size(cls, cfg)
            hf = tiny_model(cfg, seed, cls)
            saved = save(hf, path, shard)
            return self.case_of(saved, hf)

    def cases(self, tmp_path: Path) -> Iterator[tuple[str, ModelCase]]:
        """Yield (architecture name, saved random model) for each claimed architecture."""
        for name, cls in self.families().items():
            yield name, self.case(cls, tmp_path / name)

    def check_size(self, cls: Any, cfg: Any) -> None:
        """Fail if a config makes a model that is too large to be built hundreds of times."""
        with torch.device("meta"):
            make = getattr(cls, "from_config", None) or cls._from_config
            model = make(copy.deepcopy(cfg))
        size = sum(p.numel() for p in model.parameters())
        if size <= LARGEST:
            return
        not_sizes = ("_token_id", "max_position_embeddings", "model_max_length")
        numbers = {}
        for k, v in cfg.to_dict().items():
            if type(v) is int and v > 64:
                numbers[k] = v
        parts = (f"{k}={v}" for k, v in sorted(numbers.items()) if not k.endswith(not_sizes))
        large = ", ".join(parts)
        pytest.fail(
            f"config() makes a {cls.__name__} of {size:,} parameters, expected at most {LARGEST:,}: override config() "
            f"and set these fields to small values: {large}",
            pytrace=False,
        )

    def case_of(self, path: Path, hf: Any, tokens: Sequence[int] = PROMPT, dtype: str = "") -> ModelCase:
        """Return a saved model with its expected logits, which transformers computes, and their tolerance.

        In half precision the tolerance is four times the error that transformers makes in that dtype.  An empty
        ``dtype`` means the most exact claimed one.
        """
        want = logits(hf, tokens)
        dtype = dtype or self.dtype()
        half = None
        if dtype != "float32":
            model = self._reload(path, type(hf), dtype)
            half = logits(model, tokens)
        tolerance = tolerance_of(want, half)
        return ModelCase(path, hf, want, tolerance)

    def _reload(self, path: Path, cls: Any, dtype: str = "float32") -> Any:
        with quiet():
            attention = attention_of(cls.config_class())
            target = getattr(torch, dtype)
            model = cls.from_pretrained(path, dtype=target, attn_implementation=attention)
            return model.eval()

    def difference(self, got: Tensor, case: ModelCase) -> str:
        """Describe how logits [tokens, vocabulary] differ from the expected ones; empty if within the tolerance."""
        finite = got.isfinite().all(-1)
        if not finite.all():
            return f"logits of {int((~finite).sum())} of {len(got)} positions are not finite"
        if got.shape != case.want.shape:
            return f"logits have shape {list(got.shape)}, expected {list(case.want.shape)}"
        off = (got.cpu() - case.want).abs()
        if off.max() <= case.tolerance:
            return ""
        position, token = divmod(int(off.argmax()), off.shape[1])
        wrong = (off > case.tolerance).any(-1)
        first = int(wrong.nonzero()[0])
        return (
            f"the logit of token {token} at position {position} is {got[position, token]:.5f}, transformers computes "
            f"{case.want[position, token]:.5f} (tolerance {case.tolerance:.1e}; wrong from position {first} on)"
        )

    def check_logits(self, got: Tensor, case: ModelCase, label: str) -> None:
        """Fail if logits differ from the expected ones; ``label`` begins the message."""
        wrong = self.difference(got, case)
        assert not wrong, f"{label}: {wrong}"

    def judge(self, cls: Any, path: Path, values: Mapping[str, Any], cuts: Sequence[int] = ()) -> Judgement:
        """Compare the plug-in with transformers on a config with some fields set, and return (status, reason).

        With ``cuts`` the prompt is also computed in several steps, the later of which begin at these token indices.
        If rounding alone changes the logits of the model much, a difference does not count, and other random weights
        are tried.
        """
        for seed in range(3):
            try:
                case = self.case(cls, path, seed=seed, **values)
                assert case.want.isfinite().all()
            except Exception as exc:  # transformers refuses configs with errors of many types
                return "no such config", f"{type(exc).__name__}: {exc}"
            status, why = self._judge(case, path, values, cuts)
            if status != "wrong" or not unstable(case.hf, PROMPT, 10 * case.tolerance):
                break
        return status, why

    def _judge(self, case: ModelCase, path: Path, values: Mapping[str, Any], cuts: Sequence[int]) -> Judgement:
        try:
            harness = self.harness(path, max_len=len(PROMPT))  # the rope type "dynamic" depends on the longest sequence
            got = harness.step({0: PROMPT})[0]
            wrong = self.difference(got, case)
            if not wrong and cuts:
                wrong = self.difference(harness.chunked(1, PROMPT, cuts), case)
                wrong = wrong and f"cut before {list(cuts)}: {wrong}"
        except ModelError as exc:
            if any(re.search(rf"\b{name}\b", str(exc)) for name in field_names(values)):
                return "refused", str(exc)
            return "wrong", f"refused without naming a field that is set: {exc}"
        except Exception as exc:
            name = type(exc).__name__
            return "wrong", f"raises {name} where transformers computes logits; expected a ModelError: {exc}"
        return ("wrong", wrong) if wrong else ("equal", "")

    def named_variants(self) -> dict[str, Mapping[str, Any]]:
        """Return the variants of all axes as one dict, name of a variant -> fields to set."""
        found = {}
        for axis in self.variants().values():
            found |= axis
        return found

    def verdicts(self, cls: Any, tmp_path: Path) -> dict[str, Judgement]:
        """Return (status, reason) of the plain config and of each variant alone, by name (see ``judge``)."""
        found = {}
        variants = {"the plain config": {}, **self.named_variants()}
        cuts = (5, 6, 23)
        for i, (name, values) in enumerate(variants.items()):
            folder = tmp_path / f"{cls.__name__}-{i}"
            found[name] = self.judge(cls, folder, values, cuts)
        return found

    # ---- equal to transformers -----------------------------------------------------------------------------------

    @since(1, 0)
    def test_every_claimed_architecture_and_model_type_is_served(self, tmp_path: Path) -> None:
        """Check that the plug-in serves each architecture and model type that it claims.  The engine chooses a plug-in
        by these two values of config.json, so a claim without an implementation fails for the user."""
        served = set()
        for name, cls in self.families().items():
            model_type = cls.config_class.model_type
            served.add(model_type)
            assert self.values("model_type", model_type), (
                f"claims architecture {name}, whose model_type {model_type!r} it does not claim"
            )
            status, why = self.judge(cls, tmp_path / name, {})
            assert status == "equal", f"{name}, plain config: {status}, {why}"
        if self.spec.limits == ANY:
            limit = {}
        else:
            limit = self.spec.limits["model_type"]
        if isinstance(limit, (set, frozenset)):
            rest = sorted(limit - served)
        else:
            rest = []
        assert not rest, f"claims model_type {rest}, but no architecture of that type"

    @since(1, 0)
    def test_each_config_gives_the_logits_of_transformers_or_is_refused(self, tmp_path: Path) -> None:
        """Check that a config value that changes the arithmetic is implemented, or refused with a ModelError that names
        the field.  Numbers of heads, sizes and tied embeddings must be implemented."""
        for name, cls in self.families().items():
            found = self.verdicts(cls, tmp_path)
            wrong = []
            seen = Seen()
            for variant, (status, why) in found.items():
                seen[status] += 1
                if status == "wrong":
                    wrong.append(f"{name}, {variant}: {why}")
            assert not wrong, "\n".join(wrong)
            fields = set(vars(self.config(cls)))
            for variant, values in self.named_variants().items():
                if variant in MUST_SERVE and set(values) <= fields:
                    status, why = found[variant]
                    assert status != "refused", f"{name}, {variant}: must be served, but is refused: {why}"
            assert seen["equal"] >= 4, f"the test itself is too weak: {dict(seen)}"

    @since(1, 0)
    def test_config_values_go_together(self, tmp_path: Path) -> None:
        """Check that variants that are right alone are right together, such as tied embeddings with biases."""
        for cls in self.families().values():
            self._mix(cls, tmp_path)

    def _mix(self, cls: Any, tmp_path: Path) -> None:
        found = self.verdicts(cls, tmp_path)
        seen = Seen()
        axes = []
        for axis in self.variants().values():
            equal = []
            for name, values in axis.items():
                status, _ = found[name]
                if status == "equal":
                    equal.append(values)
            axes.append(st.sampled_from([{}, *equal]))
        places = st.integers(1, len(PROMPT) - 1)

        @self.for_all(40, st.tuples(*axes), st.sets(places))
        def _(chosen: tuple, cuts: set) -> None:
            values = {}
            for variant in chosen:
                values |= variant
            folder = tmp_path / f"mix-{seen.total()}"
            few = sorted(cuts)[:4]
            status, why = self.judge(cls, folder, values, few)
            seen[status] += 1
            assert status != "wrong", f"{cls.__name__} with {values}: {why}"

        self.meet(seen, equal=15)

    @since(1, 0)
    def test_32_greedy_tokens_equal_transformers(self, tmp_path: Path) -> None:
        """Check that each of 32 greedy tokens is the best token of transformers after the tokens before it.  Tokens
        whose logits differ by less than the tolerance count as equally good."""
        for name, cls in self.families().items():
            seeds = 4 if self.long else 1
            for seed in range(seeds):
                case = self.case(cls, tmp_path / f"{name}-{seed}", seed=seed)
                harness = self.harness(case.path)
                tokens = harness.greedy(0, PROMPT, NEW_TOKENS)
                every = logits(case.hf, PROMPT + tokens)
                want = every[len(PROMPT) - 1 : -1]
                ids = torch.tensor(tokens)[:, None]
                taken = want.gather(1, ids)[:, 0]
                short = want.max(-1).values - taken
                near = short <= case.tolerance
                late = int((~near).float().argmax())
                assert near.all(), (
                    f"{name}: new token {late} is {tokens[late]}, transformers takes {int(want[late].argmax())}, "
                    f"whose logit is higher by {short[late]:.4f}"
                )

    @since(1, 0)
    def test_hidden_states_that_are_asked_for_are_those_among_all(self, tmp_path: Path) -> None:
        """Check that a model that takes logits indices returns the hidden states of exactly these tokens.

        The results have the order of the indices, one of which comes twice.  The other tokens must still enter the
        cache.
        """
        supported = []
        for _, case in self.cases(tmp_path):
            harness = self.harness(case.path)
            supported.append(takes_logits_indices(harness.model))
            if supported[-1]:
                self._check_indices(harness, case.tolerance)
        if not any(supported):
            pytest.skip("takes no logits indices: returns the hidden states of all tokens")

    def _check_indices(self, harness: Harness, tolerance: float) -> None:
        """Fail unless a step with logits indices returns the same logits as the same step without them."""
        # slot 1 is the first row of the step, so its only token has index 0
        n = len(PROMPT)
        indices = [n, 3, 0, n, 7]
        got, _ = harness.logits({0: PROMPT, 1: [9]}, indices)
        assert len(got) == len(indices), f"{len(indices)} hidden states are requested, the model returns {len(got)}"
        every, _ = harness.logits({2: PROMPT, 3: [9]})
        off = largest(got - every[indices])
        assert off <= tolerance, f"logits of the requested tokens are off by {off:.1e} (tolerance {tolerance:.1e})"
        with_indices = harness.step({0: [5]})
        without = harness.step({2: [5]})
        off = largest(with_indices[0] - without[2])
        assert off <= tolerance, f"after a step with indices, logits are off by {off:.1e} (tolerance {tolerance:.1e})"

    @since(1, 0)
    def test_logits_do_not_depend_on_how_a_sequence_is_cut_nor_on_its_neighbours(self, tmp_path: Path) -> None:
        """Check that a sequence has the same logits in one step, token by token, and beside other sequences.

        Positions come with the step, keys and values from the cache.  If ``batch_invariant`` is claimed, the logits of
        that mode on a CPU are equal bit for bit.
        """
        modes = [False]
        if self.claims("batch_invariant") and self.place() == "cpu":
            modes.append(True)
        for name, cls in self.families().items():
            for invariant in modes:
                case = self.case(cls, tmp_path / name)
                harness = self.harness(case.path, batch_invariant=invariant)
                places = range(1, len(PROMPT))
                runs = {"whole": _of_prompt(harness)}
                runs["token by token"] = harness.chunked(1, PROMPT, places)
                runs["among other sequences"] = self._among_others(harness)
                for cut, got in runs.items():
                    self.check_logits(got, case, f"{name}, {cut}")
                    if invariant:
                        same = torch.equal(got, runs["whole"])
                        assert same, f"{name}, {cut}: other bits with batch_invariant"

    def _among_others(self, harness: Harness) -> Tensor:
        """Return the logits of ``PROMPT`` in slot 2, computed in four steps that hold other sequences too."""
        first = harness.step({2: PROMPT[:5], 3: [9] * 11, 4: [3]})
        second = harness.step({2: PROMPT[5:6], 3: [4], 4: [7]})
        third = harness.step({2: PROMPT[6:12], 3: [8], 4: [6, 6], 5: [11, 12, 13]})
        last = harness.step({2: PROMPT[12:], 4: [1] * 7, 5: [2]})
        parts = [step[2] for step in (first, second, third, last)]
        return torch.cat(parts)

    @since(1, 0)
    def test_a_long_sequence_is_right_to_its_end(self, tmp_path: Path) -> None:
        """Check the logits of 700 tokens that come in chunks.

        No table of positions and no buffer may end before ``max_position_embeddings``.
        """
        tokens = (PROMPT * 15)[:700]
        for name, cls in self.families().items():
            case = self.case(cls, tmp_path / name, max_position_embeddings=1024)
            hf = case.hf
            dtypes = {self.dtype()}
            if self.long:
                dtypes |= set(self.values("dtype", "bfloat16"))
            for dtype in dtypes:
                case = self.case_of(tmp_path / name, hf, tokens, dtype)
                harness = self.harness(case.path, dtype=dtype, max_len=704, slots=2)
                cuts = (130, 131, 500)
                got = harness.chunked(1, tokens, cuts)
                self.check_logits(got, case, f"{name} in {dtype}, 700 tokens")

    @since(1, 0)
    def test_half_precision_is_at_most_twice_as_far_as_transformers(self, tmp_path: Path) -> None:
        """Check that the error in half precision is at most twice that of transformers.

        The reference is float32 arithmetic on the same rounded weights.  The error of a token is the root mean square
        over its logits.  The median over all tokens counts, because rounding may make a router choose other experts
        for a few tokens.
        """
        seeds = 8 if self.long else 2
        for name, cls in self.families().items():
            for dtype in self.values("dtype", "bfloat16", "float16"):
                ours = []
                theirs = []
                for seed in range(seeds):
                    path = tmp_path / f"{name}-{dtype}-{seed}"
                    model = tiny_model(self.config(cls), seed, cls)
                    save(model.to(getattr(torch, dtype)), path)
                    exact = self._reload(path, cls)
                    rounded = self._reload(path, cls, dtype)
                    want = logits(exact, PROMPT)
                    their = logits(rounded, PROMPT) - want
                    theirs.append(their)
                    harness = self.harness(path, dtype=dtype)
                    got = _of_prompt(harness)
                    ours.append(got.cpu() - want)
                error = _median_rms(ours)
                allowed = _median_rms(theirs)
                assert error <= 2 * allowed + 1e-3, (
                    f"{name} in {dtype}: error {error:.2e}, that of transformers is {allowed:.2e}"
                )

    @since(1, 0)
    def test_processes_that_share_a_model_compute_it_together(self, tmp_path: Path) -> None:
        """Check that two tensor-parallel ranks, simulated by two threads, compute the logits of the whole model.

        Each rank holds one shard of every split layer; sizes come from ``parts.heads`` and the splits.
        """
        for name, case in self.cases(tmp_path):
            group = seats(2)
            try:
                shares = [self.harness(case.path, group=seat) for seat in group]
            except ModelError as exc:
                pytest.skip(f"refuses to be split over 2 processes: {exc}")
            steps = [partial(share.step, {0: PROMPT}) for share in shares]
            for rank, got in enumerate(play(group, steps)):
                self.check_logits(got[0], case, f"{name}, process {rank} of 2")

    # ---- the checkpoint ------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_each_checkpoint_tensor_does_what_it_does_in_transformers(self, tmp_path: Path) -> None:
        """Check that a change of one checkpoint tensor changes the logits as it does in transformers, for each tensor.

        So each tensor is used once and in the right place.
        """
        for name, case in self.cases(tmp_path):
            seen = Seen()
            for tensor in edits(case.path, lambda t: t + 0.3 * torch.randn(t.shape)):
                harness = self.harness(case.path)
                got = _of_prompt(harness)
                reloaded = self._reload(case.path, type(case.hf))
                changed = self.case_of(case.path, reloaded)
                self.check_logits(got, changed, f"{name}: after a change of {tensor}")
                effect = largest(changed.want - case.want)
                seen["effect"] += effect > 10 * changed.tolerance
            seen.require(effect=10)

    @since(1, 0)
    def test_a_tensor_that_is_missing_misshapen_or_unknown_is_refused_by_name(self, tmp_path: Path) -> None:
        """Check that a checkpoint with a missing, cut or unknown tensor is refused with an error that names the tensor.
        A weight that is silently left out would keep the old contents of its memory."""
        for name, case in self.cases(tmp_path):
            path = case.path
            faults = {"missing": lambda t: None, "cut short": lambda t: t[:-1].clone()}
            for fault, change in faults.items():
                for tensor in edits(path, change):
                    self._refuses(path, tensor, f"{name}: {tensor} is {fault}")
            tensors = read_tensors(path)
            surplus = _surplus(list(tensors))
            for tensor in sorted(surplus):
                unknown = {tensor: torch.zeros(3)}
                write_tensors(path, {**tensors, **unknown})
                self._refuses(path, tensor, f"{name}: {tensor} is in the checkpoint but not in this architecture")

    def _refuses(self, path: Path, tensor: str, fault: str) -> None:
        try:
            self.harness(path)
        except ModelError as exc:
            assert tensor in str(exc), f"{fault}, and the error does not name it: {exc}"
        else:
            pytest.fail(f"{fault}, and it is not refused: look at weights()")

    @since(1, 0)
    def test_every_parameter_is_filled_also_from_several_files(self, tmp_path: Path) -> None:
        """Check that loading fills every parameter, from one file or several.

        All memory holds NaN before.
        """
        for name, cls in self.families().items():
            case = self.case(cls, tmp_path / name)
            sharded = self.case(cls, tmp_path / f"{name}-shards", shard="20KB")
            files = list(sharded.path.glob("*.safetensors"))
            assert len(files) > 1, "the test itself is too weak: only one file"
            single = self.harness(case.path).parts.modules
            several = self.harness(sharded.path).parts.modules
            for module, other in zip(single.values(), several.values(), strict=True):
                for key, tensor in module.tensors.items():
                    assert tensor.isfinite().all(), f"{name}: {module.name}.{key} is not filled from the checkpoint"
                    same = torch.equal(tensor, other.tensors[key])
                    assert same, f"{name}: {module.name}.{key} differs in shards"

    @since(1, 0)
    def test_dummy_weights_depend_on_the_seed_alone(self) -> None:
        """Check that dummy weights (``load_format: dummy``, which reads no files) are a function of the seed."""
        for name, cls in self.families().items():
            cfg = self.config(cls)
            runs = []
            for seed in (1, 1, 2):
                harness = self.harness(Path("nowhere"), cfg=cfg, load_format="dummy", seed=seed)
                runs.append(_of_prompt(harness))
            first, again, changed = runs
            same = first.isfinite().all() and torch.equal(first, again)
            assert same, f"{name}: two loads with one seed differ"
            assert not torch.equal(first, changed), f"{name}: the seed changes nothing"

    # ---- the config ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_every_field_of_the_config_is_read_or_ignored_for_a_reason(self, tmp_path: Path) -> None:
        """Check that the plug-in reads every config field.

        A field that no code reads is a setting that is silently ignored.  If it is right to ignore the field, name it
        in the trait ``ignores``.
        """
        ignores = set(self.spec.traits.get("ignores", ()))
        for name, case in self.cases(tmp_path):
            path = case.path
            cfg = open_checkpoint(str(path)).from_transformers()
            fields = {k for k in vars(cfg) if not k.startswith("_")}
            stale = sorted(ignores - fields)
            assert not stale, f"{name}: traits ignores={stale}: the config has no such field"
            read = record_reads(cfg)
            self.harness(path, cfg=cfg)
            silent = sorted(fields - read - ignores - set(IGNORED))
            assert not silent, f"{name}: no code reads {silent}: read or refuse them, or name them in traits['ignores']"

    @since(1, 0)
    def test_a_changed_number_changes_what_it_changes_in_transformers(self, tmp_path: Path) -> None:
        """Check each number and switch of the config, also of the rope parameters, with another value.

        The logits equal those of transformers, or the config is refused.
        """
        for name, cls in self.families().items():
            seen = Seen()
            changes = []
            for c in self._changes(cls):
                if not any(k.startswith("_") for k in c):
                    changes.append(c)
            for i, values in enumerate(changes, 1):
                status, why = self.judge(cls, tmp_path / f"{name}-{i}", values)
                seen[status] += 1
                assert status != "wrong", f"{name} with {values}: {why}"
            seen.require(equal=8)

    def _changes(self, cls: Any) -> Iterator[dict[str, Any]]:
        """Yield changes of one number or switch of a config: the plain config, or a rope or window variant."""
        config = self.config(cls)
        for key, value in vars(config).items():
            if key not in UNCHANGED:
                yield from _one_changed({}, key, value)
        axes = self.variants()
        for values in axes.get("rope", {}).values():
            rope = values.get("rope_parameters", {})
            for key, value in rope.items():
                for changed in _one_changed(rope, key, value):
                    yield {**values, "rope_parameters": changed}
        for values in axes.get("window", {}).values():
            for key, value in values.items():
                yield from _one_changed(values, key, value)

    @since(1, 0)
    def test_attention_describes_the_layers_that_are_built(self, tmp_path: Path) -> None:
        """Check that ``attention`` returns the spec of each layer with attention that ``build`` makes, in order.

        ``states`` must return the recurrent state of each other layer.  The engine lays out the KV cache by both
        before the model exists.
        """
        variants = self.named_variants()
        for name, cls in self.families().items():
            for variant in ("the plain config", "three layers", "mqa"):
                values = variants.get(variant, {})
                cfg = self.config(cls, **values)
                self._check_specs(cfg, f"{name}, {variant}")

    def _check_specs(self, cfg: Any, label: str) -> None:
        """Fail unless the specs that ``attention`` returns are those of the layers that are built from the config."""
        arch = self.build()
        specs = list(arch.attention(cfg))
        states = list(arch.states(cfg))
        harness = self.harness(Path("nowhere"), cfg=cfg, load_format="dummy")
        parts = harness.parts
        count = f"{len(specs)} specs" + (f", and states() {len(states)} states," if states else "")
        found = len(specs) + len(states)
        assert found == cfg.num_hidden_layers, (
            f"{label}: attention() returns {count} for {cfg.num_hidden_layers} layers"
        )
        built = [layer.spec for layer in parts.layers]
        assert specs == built, f"{label}: attention() returns {specs}, build() makes {built}"
        made = [layer.state for layer in parts.states]
        assert states == made, f"{label}: states() returns {states}, build() makes {made}"
        for i, spec in enumerate(specs):
            assert spec.heads % spec.kv_heads == 0, f"{label}, layer {i}: {spec.heads} heads over {spec.kv_heads}"


def _surplus(names: list[str]) -> set[str]:
    """Return names of tensors that this model does not have: of a layer after the last, or with another ending."""
    first = names[0]
    layer = next(name for name in names if re.search(r"\.1\.", name))
    of_seventh = re.sub(r"\.1\.", ".7.", layer)
    surplus = {first + "_surplus", of_seventh, layer + ".surplus.weight"}
    for name in names:
        surplus.add(re.sub(r"[^.]+\.weight$", "surplus.weight", name))
    return surplus - set(names)


def _one_changed(values: Mapping[str, Any], key: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yield the values of config fields with other values of one of them."""
    for new in other_values(value):
        yield {**values, key: new}


def _of_prompt(harness: Harness) -> Tensor:
    """Return the logits of ``PROMPT``, computed in one step."""
    step = harness.step({0: PROMPT})
    return step[0]


def _median_rms(errors: list[Tensor]) -> float:
    """Return the median over tokens of the root mean square of a token's errors [tokens, vocabulary]."""
    squares = torch.cat(errors).square()
    mean_square = squares.mean(-1)
    return float(mean_square.sqrt().median())
