"""Drafters: what they propose, and that the engine gives the same tokens with them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter, DrafterContext, DraftModel
from minivllm.core.interfaces.sampling import Rows
from minivllm.registry import import_target

from .base import Seen, since
from .kept import Lasting
from .spec import SpecConformance
from .waiting import no_wait, waits

VOCAB, MAX_LEN, SLOTS = 61, 96, 9
MANY = 40  # rows of a large step
STALE = 53  # what stands behind the known tokens


class FakeModel(DraftModel):
    """Its next token is a function of the last two; it holds a drafter to the order of its calls."""

    def __init__(self) -> None:
        self.done = 0

    def logits(self, ask: Ask, j: int) -> Tensor:
        assert j == 0 or j == self.done, f"logits for draft {j} were asked for after {self.done} were drawn"
        self.done = self.done if j else 0
        at = ask.rows.position - 1 + j
        history = ask.rows.tokens[ask.rows.slots].long()
        last, before = (history.gather(1, (at - back).clamp(min=0)[:, None])[:, 0] for back in (0, 1))
        likely = (last * 7 + before * 3 + 1) % VOCAB
        return (likely[:, None] == torch.arange(VOCAB, device=likely.device)).float()

    def draw(self, ask: Ask, logits: Tensor, j: int) -> Tensor:
        assert j == self.done, f"draft {j} was drawn after {self.done} were"
        self.done = j + 1
        tokens = logits.argmax(dim=1)
        ask.rows.tokens[ask.rows.slots, ask.rows.position + j] = tokens.int()
        return tokens


@st.composite
def histories(draw: Any) -> list[list[int]]:
    """Known tokens of 1 to 5 rows; few kinds of tokens, so that what was there before comes again."""
    token = st.integers(0, draw(st.sampled_from([1, 3, VOCAB - 1])))
    return draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=5))


class DrafterConformance(Lasting, SpecConformance):
    """A drafter that claims ``draft_model`` gets a simple one here, and a small real one in the engine."""

    kind = "drafter"

    def context(self) -> tuple[Any, ...]:
        model = FakeModel() if self.claims("draft_model") else None
        return (DrafterContext(VOCAB, MAX_LEN, self.place(), model),)

    def exercise(self, instance: Drafter) -> Any:
        return self.drafts(instance, [[1, 2, 3, 1, 2, 3, 1], [4] * 9, [5, 6]], 3)

    def once_more(self, instance: Drafter, number: int) -> None:
        """Ask about rows that have not been there before."""
        rng = np.random.default_rng(number)
        self.drafts(instance, [rng.integers(0, VOCAB, n).tolist() for n in (3, 9 + number % 40, 17)], 3)

    def ask(
        self, rows: Sequence[Sequence[int]], k: int, slots: Sequence[int] = (), stale: int = STALE, spare: int = 0
    ) -> Ask:
        """The question as the engine puts it: histories in slots of a larger table, ``stale`` tokens behind them."""
        at = list(slots) or [(2 * i + 1) % max(SLOTS, 2 * len(rows)) for i in range(len(rows))]
        tokens = torch.full((max(SLOTS, 2 * len(rows)), MAX_LEN + 1), stale, dtype=torch.int32)
        for slot, row in zip(at, rows, strict=True):
            tokens[slot, : len(row)] = torch.tensor(row, dtype=torch.int32)
        known = np.array([len(row) for row in rows], np.int32)
        put = lambda x: torch.as_tensor(x, dtype=torch.int64, device=self.place())  # noqa: E731
        column = put([0] * len(rows))
        device = Rows(
            put(at), put(known), column + 1, column, column, 0, tokens.to(self.place()), int(known.max()) + spare
        )
        return Ask(device, k, np.array(at, np.int32), known)

    def drafts(self, instance: Drafter, rows: Sequence[Sequence[int]], k: int, **more: Any) -> list[list[int]]:
        """What it drafts for each of some histories; the form of the answer is checked."""
        ask = self.ask(rows, k, **more)
        tokens, count = instance.propose(ask)
        device = ask.rows.slots.device
        for name, got, shape in (("tokens", tokens, (len(rows), k)), ("count", count, (len(rows),))):
            assert isinstance(got, Tensor) and tuple(got.shape) == shape, f"{name}: want a tensor of shape {shape}"
            assert got.dtype == torch.int64, f"{name} is {got.dtype}: want int64"
            assert got.device == device, f"{name} is on {got.device}: want {device}, where the rows are"
        n = count.tolist()
        assert all(0 <= c <= k for c in n), f"count={n} of k={k}: want 0 to k"
        out = [row[:c] for row, c in zip(tokens.tolist(), n, strict=True)]
        wrong = [t for row in out for t in row if not 0 <= t < VOCAB]
        assert not wrong, f"drafts {wrong[:8]} are no tokens: want 0 to {VOCAB - 1}"
        return out

    @since(1, 0)
    def test_drafts_are_tokens_at_most_k_for_each_row(self) -> None:
        """Of the form that the engine wants, for histories of every length; and there are drafts, unless the spec says
        ``drafts: 0``."""
        seen, none = Seen(), self.spec.traits.get("drafts") == 0

        @self.for_all(60, histories(), st.sampled_from([1, 2, 4, 9]))
        def form(rows: list[list[int]], k: int) -> None:
            found = self.drafts(self.build(*self.context()), rows, k)
            seen["drafts"] += sum(map(len, found))

        if none:
            assert not seen["drafts"], "the spec says drafts: 0, and it drafts"
        else:
            seen.require(drafts=1)

    @since(1, 0)
    def test_a_rows_drafts_are_its_own(self) -> None:
        """The rows beside it, its slot, how long the longest row is and what was asked before change nothing."""

        @self.for_all(60, histories(), st.sampled_from([1, 4]), st.integers(0, 8))
        def alone(rows: list[list[int]], k: int, shift: int) -> None:
            instance = self.build(*self.context())
            together = self.drafts(instance, rows, k)
            for row, want in zip(rows, together, strict=True):
                got = self.drafts(instance, [row], k, slots=[shift], spare=shift)
                assert got == [want], f"{row} gets the drafts {want} beside others, and {got[0]} alone"
            assert self.drafts(instance, rows, k) == together, "the same rows get other drafts when asked again"

    @since(1, 0)
    def test_large_steps_and_long_rows_are_as_small_ones(self) -> None:
        """40 rows of up to as many tokens as the model takes but one, and 1 to 24 drafts: each row's are its own, as
        alone, and of its own tokens."""
        rng = np.random.default_rng(6)
        lengths = [MAX_LEN - 1, MAX_LEN - 2, 64, 65, *rng.integers(1, MAX_LEN, MANY - 4).tolist()]
        rows = [rng.integers(0, 3, n).tolist() for n in lengths]
        instance = self.build(*self.context())
        for k in (1, 10, 24):
            fits = [row for row in rows if len(row) + k <= MAX_LEN] if self.claims("draft_model") else rows
            together = self.drafts(instance, fits, k)
            other = self.drafts(instance, fits, k, stale=1)
            for i, row in enumerate(fits):
                assert together[i] == other[i], f"{len(row)} tokens, k={k}: it reads what stands behind them"
                if i < 4 or i % 9 == 8:
                    got = self.drafts(instance, [row], k)[0]
                    want = f"row {i} of {len(fits)} with {len(row)} tokens gets the drafts {together[i]}"
                    assert got == together[i], f"{want} and {got} alone"

    @since(1, 0)
    def test_what_stands_behind_the_known_tokens_is_not_read(self) -> None:
        """There are rejected drafts, and tokens of the slot's former owner."""

        @self.for_all(60, histories(), st.sampled_from([1, 4]))
        def stale(rows: list[list[int]], k: int) -> None:
            one, other = (self.drafts(self.build(*self.context()), rows, k, stale=s) for s in (STALE, rows[0][-1]))
            assert one == other, f"{rows} get {one} or {other}: it depends on what stands behind the known tokens"

    @since(1, 0)
    def test_what_it_is_given_stays_as_it_is(self) -> None:
        """The history is the engine's; a draft model's ``draw`` writes behind the known tokens, nobody else does."""

        @self.for_all(30, histories(), st.sampled_from([1, 4]))
        def unwritten(rows: list[list[int]], k: int) -> None:
            ask = self.ask(rows, k)
            before = {name: getattr(ask.rows, name).clone() for name in ("slots", "position", "tokens", "prompt")}
            host = ask.slots.copy(), ask.known.copy()
            self.build(*self.context()).propose(ask)
            assert all((a == b).all() for a, b in zip(host, (ask.slots, ask.known), strict=True)), "slots or known"
            for name, was in before.items():
                now = getattr(ask.rows, name)
                if name == "tokens" and self.claims("draft_model"):
                    for slot, n in zip(ask.slots.tolist(), ask.known.tolist(), strict=True):
                        now[slot, n : n + k] = was[slot, n : n + k]
                assert torch.equal(now, was), f"rows.{name} was written to"

    @since(1, 0)
    def test_it_does_not_wait_for_the_device(self) -> None:
        """``propose`` reads no tensor's value on the host (``int``, ``bool``, ``tolist``, ``cpu``) and makes no tensor
        whose shape depends on values.  What the host knows is in ``ask.known`` and ``ask.slots``."""
        if "cuda" not in self.values("device", "cpu", "cuda"):
            pytest.skip("it claims the CPU alone, for which nobody waits")
        instance = self.build(*self.context())
        for rows, k in (([[1, 2, 3, 1, 2, 3, 1], [4] * 9, [5, 6]], 3), ([[7]], 1)):
            ask = self.ask(rows, k)
            with waits(self.place()) as found:
                instance.propose(ask)
            no_wait(found, "propose()")

    @since(1, 0, spec_only=True)
    def test_a_draft_model_is_named_by_an_option(self) -> None:
        """The engine loads what the option ``model`` names."""
        self.need("draft_model")
        assert self.spec.options, "draft_model is claimed, and there are no options: want one called model"
        assert "model" in import_target(self.spec.options).model_fields, "draft_model is claimed: want an option model"

    @since(1, 0)
    def test_the_engine_gives_the_same_tokens(self) -> None:
        """Greedy or drawn, with penalties, a smallest length and log-probabilities: a drafter changes no token."""
        prompts = [[3, 4, 5, 6] * 5, [7, 8, 9], [10] * 12, list(range(11, 40))]
        params = [
            {"temperature": 0.0, "max_tokens": 20},
            {"temperature": 0.7, "top_k": 9, "seed": 5, "max_tokens": 24, "logprobs": 1},
            {"temperature": 1.0, "top_p": 0.9, "seed": 6, "max_tokens": 20, "repetition_penalty": 1.2},
            {"temperature": 0.0, "max_tokens": 16, "min_tokens": 12, "frequency_penalty": 0.4, "n": 2},
        ]
        plain, drafted = self.serve(prompts, params, False), self.serve(prompts, params, True)
        for prompt, a, b in zip(prompts, plain, drafted, strict=True):
            assert a == b, f"prompt {prompt}: without drafts {a}, with drafts {b}"

    def serve(self, prompts: Sequence[list[int]], params: Sequence[Mapping[str, Any]], drafts: bool) -> list[Any]:
        """Token ids of an engine with a small model, with the drafter or without."""
        from minivllm import LLM, SamplingParams

        from .tiny import tiny_dir

        device = self.place()
        if device != "cpu":
            pytest.skip("compared on a CPU, where batch_invariant has the same bits for every step")
        with tempfile.TemporaryDirectory() as folder:
            path, _, _ = tiny_dir(Path(folder) / "model", eos_token_id=60)
            options = dict(self.options)
            if self.claims("draft_model"):
                options["model"] = str(tiny_dir(Path(folder) / "draft", num_hidden_layers=1)[0])
            named = {"name": self.plugin, "options": options} if drafts else "none"
            llm = LLM(
                str(path),
                device="cpu",
                dtype="float32",
                skip_tokenizer_init=True,
                batch_invariant=True,
                num_kvcache_blocks=40,
                max_num_seqs=4,
                max_num_batched_tokens=48,
                drafter=named,
                speculate="always",
                allow_targets=[self.plugin.partition(":")[0]] if ":" in self.plugin else [],
            )
            with llm:
                outs = llm.generate(list(prompts), [SamplingParams(**p) for p in params], use_tqdm=False)
            assert not any(o.error for o in outs), [o.error for o in outs]
            return [[c.token_ids for c in o.outputs] for o in outs]
