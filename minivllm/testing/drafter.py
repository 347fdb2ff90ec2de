"""The conformance suite of drafters, which propose tokens (drafts) that the engine verifies.

The tests check the drafts themselves, and that the engine gives the same tokens with and without the drafter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter, DrafterContext, DraftModel
from minivllm.core.interfaces.sampling import Rows
from minivllm.errors import ModelError
from minivllm.registry import import_target

from .base import Seen, since
from .kept import Lasting
from .spec import SpecConformance
from .waiting import no_wait, waits

if TYPE_CHECKING:
    from minivllm import LLM

VOCAB = 61
MAX_LEN = 96  # most tokens of a sequence
SLOTS = 9
MANY = 40  # number of rows of a large step
STALE = 53  # token at all positions after the known tokens of a row
REPEATING = [[1, 2, 3, 1, 2, 3, 1], [4] * 9, [5, 6]]  # prompts that repeat tokens
# (prompt, parameters) of each request of the test with an engine
REQUESTS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([3, 4, 5, 6] * 5, {"temperature": 0.0, "max_tokens": 20}),
    ([7, 8, 9], {"temperature": 0.7, "top_k": 9, "seed": 5, "max_tokens": 24, "logprobs": 1}),
    ([10] * 12, {"temperature": 1.0, "top_p": 0.9, "seed": 6, "max_tokens": 20, "repetition_penalty": 1.2}),
    (
        list(range(11, 40)),
        {"temperature": 0.0, "max_tokens": 16, "min_tokens": 12, "frequency_penalty": 0.4, "n": 2},
    ),
)
Known = Sequence[Sequence[int]]  # the known tokens of each row


class FakeModel(DraftModel):
    """A draft model whose next token is a function of the last two tokens.

    It fails if a drafter calls its methods in a wrong order.
    """

    def __init__(self) -> None:
        self.drawn = 0  # drafts drawn so far in this step

    def logits(self, ask: Ask, j: int) -> Tensor:
        assert j in (0, self.drawn), f"logits for draft {j} were requested after {self.drawn} drafts were drawn"
        if j == 0:
            self.drawn = 0
        history = ask.rows.tokens[ask.rows.slots].long()
        last = ask.rows.position - 1 + j

        def known(position: Tensor) -> Tensor:
            at = position.clamp(min=0)
            return history.gather(1, at[:, None])

        newest = known(last)
        previous = known(last - 1)
        likely = (newest * 7 + previous * 3 + 1) % VOCAB
        every_token = torch.arange(VOCAB, device=likely.device)
        return (likely == every_token).float()

    def draw(self, ask: Ask, logits: Tensor, j: int) -> Tensor:
        assert j == self.drawn, f"draft {j} was drawn after {self.drawn} drafts"
        self.drawn = j + 1
        tokens = logits.argmax(dim=1)
        position = ask.rows.position + j
        ask.rows.tokens[ask.rows.slots, position] = tokens.int()
        return tokens


@st.composite
def histories(draw: Any) -> list[list[int]]:
    """Draw the known tokens of 1 to 5 rows, often from few different tokens, so that they repeat."""
    largest = draw(st.sampled_from([1, 3, VOCAB - 1]))
    token = st.integers(0, largest)
    row = st.lists(token, min_size=1, max_size=40)
    return draw(st.lists(row, min_size=1, max_size=5))


class DrafterConformance(Lasting, SpecConformance):
    """The conformance suite of drafters.

    A drafter that claims ``draft_model`` or ``target_head`` gets a fake draft model.  In the test of the engine the
    first gets a small draft model with random weights, and the second a small Llama with a random head.
    """

    kind = "drafter"

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        model = FakeModel() if self.has_model() else None
        return (DrafterContext(VOCAB, MAX_LEN, self.place(), model),)

    def made(self) -> Drafter:
        """Create an instance of the plug-in."""
        return self.build(*self.context())

    def has_model(self) -> bool:
        """Return whether the drafter's constructor receives a model: a draft model, or a head."""
        return self.claims("draft_model") or self.claims("target_head")

    def exercise(self, instance: Drafter) -> Any:
        """Return the drafts for rows whose tokens repeat."""
        return self.drafts(instance, REPEATING, 3)

    def once_more(self, instance: Drafter, number: int) -> None:
        """Propose drafts for new random rows."""
        rng = np.random.default_rng(number)
        if self.claims("host_tokens"):
            learned = rng.integers(0, VOCAB, 400)
            instance.learn(number % 3, learned.astype(np.int32), 9)
        rows = []
        for n in (3, 9 + number % 40, 17):
            row = rng.integers(0, VOCAB, n)
            rows.append(row.tolist())
        self.drafts(instance, rows, 3)

    def ask(
        self, rows: Known, k: int, slots: Sequence[int] = (), stale: int = STALE, spare: int = 0, owner: int = 0
    ) -> Ask:
        """Return the argument of ``propose`` for up to k drafts after each row of known tokens.

        The rows are in slots of a larger token table; ``slots`` chooses them.  The token ``stale`` fills the rest of
        the table.  ``spare`` is added to the length of the longest row.  ``owner`` is the owner of all rows.
        """
        n = len(rows)
        table = max(SLOTS, 2 * n)
        chosen = list(slots) or [(2 * i + 1) % table for i in range(n)]
        arrays = [np.array(row, np.int32) for row in rows]
        tokens = torch.full((table, MAX_LEN + 1), stale, dtype=torch.int32)
        for slot, row in zip(chosen, arrays, strict=True):
            row.flags.writeable = False
            tokens[slot, : len(row)] = torch.tensor(row)
        known = np.array([len(row) for row in rows], np.int32)
        device = self.place()

        def int64(values: Any) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int64, device=device)

        zeros = int64([0] * n)
        longest = int(known.max()) + spare
        on_device = Rows(int64(chosen), int64(known), zeros + 1, zeros, zeros, 0, tokens.to(device), longest)
        numbers = np.array(chosen, np.int32)  # the slots, on the host
        if not self.claims("host_tokens"):
            return Ask(on_device, k, numbers, known)
        owners = np.full(n, owner)
        return Ask(on_device, k, numbers, known, arrays, owners)

    def drafts(self, instance: Drafter, rows: Known, k: int, **options: Any) -> list[list[int]]:
        """Return the drafts that a drafter proposes for each row of known tokens, after a check of their form.

        ``options`` has keyword arguments of ``ask``.
        """
        ask = self.ask(rows, k, **options)
        tokens, count = instance.propose(ask)
        device = ask.rows.slots.device
        n = len(rows)
        for name, x, shape in (("tokens", tokens, (n, k)), ("count", count, (n,))):
            right = isinstance(x, Tensor) and tuple(x.shape) == shape
            assert right, f"{name}: expected a tensor of shape {shape}"
            assert x.dtype == torch.int64, f"{name} is {x.dtype}: expected int64"
            assert x.device == device, f"{name} is on {x.device}: expected {device}, the device of the rows"
        counts = count.tolist()
        assert all(0 <= n <= k for n in counts), f"count={counts} of k={k}: expected 0 to k"
        drafts = []
        wrong: list[int] = []
        for row, n in zip(tokens.tolist(), counts, strict=True):
            of_row = row[:n]
            drafts.append(of_row)
            wrong += [token for token in of_row if not 0 <= token < VOCAB]
        assert not wrong, f"drafts {wrong[:8]} are no tokens: expected 0 to {VOCAB - 1}"
        return drafts

    @since(1, 0)
    def test_drafts_are_tokens_at_most_k_for_each_row(self) -> None:
        """Check that a drafter proposes at most k valid tokens for each row, for rows of many lengths.

        It proposes some drafts, unless its spec has the trait ``drafts: 0``.
        """
        seen = Seen()
        most = st.sampled_from([1, 2, 4, 9])

        @self.for_all(60, histories(), most)
        def form(rows: list[list[int]], k: int) -> None:
            drafts = self.drafts(self.made(), rows, k)
            seen["drafts"] += sum(map(len, drafts))

        if self.spec.traits.get("drafts") == 0:
            assert not seen["drafts"], "the spec has the trait drafts: 0, but there are drafts"
        else:
            assert seen["drafts"], "no row gets drafts: expected some, or the trait drafts: 0 in the spec"

    @since(1, 0)
    def test_a_rows_drafts_are_its_own(self) -> None:
        """Check that the drafts of a row depend on its tokens only.

        They do not depend on the other rows, the slot, the length of the longest row or earlier calls.
        """
        most = st.sampled_from([1, 4])
        shifts = st.integers(0, 8)

        @self.for_all(60, histories(), most, shifts)
        def alone(rows: list[list[int]], k: int, shift: int) -> None:
            instance = self.made()
            together = self.drafts(instance, rows, k)
            for row, expected in zip(rows, together, strict=True):
                (drafts,) = self.drafts(instance, [row], k, slots=[shift], spare=shift)
                assert drafts == expected, f"{row} gets the drafts {expected} beside other rows, and {drafts} alone"
            again = self.drafts(instance, rows, k)
            assert again == together, "the same rows get other drafts in a second call"

    @since(1, 0)
    def test_large_steps_and_long_rows_are_as_small_ones(self) -> None:
        """Check 40 rows, some of them one token shorter than the model's limit, with 1 to 24 drafts for each row.

        The drafts of a row are the same as without other rows, and depend on its tokens only.
        """
        rng = np.random.default_rng(6)
        random_lengths = rng.integers(1, MAX_LEN, MANY - 4).tolist()
        lengths = [MAX_LEN - 1, MAX_LEN - 2, 64, 65, *random_lengths]
        rows = [rng.integers(0, 3, n).tolist() for n in lengths]
        instance = self.made()
        for k in (1, 10, 24):
            fitting = rows
            if self.has_model():
                fitting = [row for row in rows if len(row) + k <= MAX_LEN]
            together = self.drafts(instance, fitting, k)
            other = self.drafts(instance, fitting, k, stale=1)
            for i, (row, drafts) in enumerate(zip(fitting, together, strict=True)):
                n = len(row)
                assert drafts == other[i], f"{n} tokens, k={k}: it reads positions after the known tokens"
                if i < 4 or i % 9 == 8:
                    (alone,) = self.drafts(instance, [row], k)
                    assert alone == drafts, (
                        f"row {i} of {len(fitting)} with {n} tokens gets the drafts {drafts} and {alone} alone"
                    )

    @since(1, 0)
    def test_what_stands_behind_the_known_tokens_is_not_read(self) -> None:
        """Check that the contents of the token table after the known tokens of a row do not change its drafts.

        Rejected drafts and tokens of an earlier sequence stay there.
        """
        most = st.sampled_from([1, 4])

        @self.for_all(60, histories(), most)
        def stale(rows: list[list[int]], k: int) -> None:
            last = rows[0][-1]
            expected = self.drafts(self.made(), rows, k)
            found = self.drafts(self.made(), rows, k, stale=last)
            assert found == expected, (
                f"{rows} get the drafts {expected} or {found}, depending on the tokens after the known ones"
            )

    @since(1, 0)
    def test_what_it_is_given_stays_as_it_is(self) -> None:
        """Check that ``propose`` does not change its argument.

        Only ``draw`` of a draft model may write tokens after the known ones.
        """
        names = ("slots", "position", "tokens", "prompt")

        @self.for_all(30, histories(), st.sampled_from([1, 4]))
        def unwritten(rows: list[list[int]], k: int) -> None:
            ask = self.ask(rows, k)
            before = {name: getattr(ask.rows, name).clone() for name in names}
            slots = ask.slots.copy()
            known = ask.known.copy()
            drafter = self.made()
            drafter.propose(ask)
            assert (ask.slots == slots).all(), "slots was written to"
            assert (ask.known == known).all(), "known was written to"
            if self.has_model():
                table = ask.rows.tokens
                old_table = before["tokens"]
                for slot, n in zip(slots.tolist(), known.tolist(), strict=True):
                    table[slot, n : n + k] = old_table[slot, n : n + k]
            for name, old in before.items():
                new = getattr(ask.rows, name)
                assert torch.equal(new, old), f"rows.{name} was written to"

    @since(1, 0)
    def test_it_does_not_wait_for_the_device(self) -> None:
        """Check that ``propose`` does not wait for the device.

        It reads no value of a tensor on the host (``int``, ``bool``, ``tolist``, ``cpu``) and creates no tensor whose
        shape depends on values.  The host's own values are in ``ask.known`` and ``ask.slots``.
        """
        if "cuda" not in self.values("device", "cpu", "cuda"):
            pytest.skip("it claims only the CPU, for which nothing waits")
        instance = self.made()
        for rows, k in ((REPEATING, 3), ([[7]], 1)):
            ask = self.ask(rows, k)
            with waits(self.place()) as found:
                instance.propose(ask)
            no_wait(found, "propose()")

    @since(1, 1)
    def test_learned_tokens_belong_to_their_owner(self) -> None:
        """Check that tokens that ``learn`` stores for one owner do not change the drafts for another owner."""
        self.need("host_tokens")

        @self.for_all(30, histories(), histories())
        def separate(rows: list[list[int]], texts: list[list[int]]) -> None:
            drafter = self.made()
            expected = self.drafts(drafter, rows, 4, owner=7)
            instance = self.made()
            for i, text in enumerate([*texts, *rows]):
                twice = np.array(text + text, np.int32)
                prompt = len(text) // 2
                instance.learn(-i, twice, prompt)
            found = self.drafts(instance, rows, 4, owner=7)
            assert found == expected, f"{rows} of owner 7 get {found} after tokens of other owners; expected {expected}"

    @since(1, 0, spec_only=True)
    def test_a_draft_model_is_named_by_an_option(self) -> None:
        """Check that a drafter with a draft model has the option ``model``, which names the model to load."""
        self.need("draft_model")
        assert self.spec.options, "draft_model is claimed, but there are no options: expected one called model"
        fields = import_target(self.spec.options).model_fields
        assert "model" in fields, "draft_model is claimed: expected an option called model"

    @since(1, 0)
    def test_the_engine_gives_the_same_tokens(self) -> None:
        """Check that the engine gives the same tokens with and without the drafter.

        The requests are greedy or sampled, with penalties, a least length and log-probabilities.
        """
        prompts, params = zip(*REQUESTS, strict=True)
        without = self.serve(prompts, params, False)
        drafted = self.serve(prompts, params, True)
        for prompt, expected, tokens in zip(prompts, without, drafted, strict=True):
            assert tokens == expected, f"prompt {prompt}: without drafts {expected}, with drafts {tokens}"

    def serve(self, prompts: Sequence[list[int]], params: Sequence[Mapping[str, Any]], drafts: bool) -> list[Any]:
        """Return the token ids that an engine with a small model generates, with the drafter if ``drafts``."""
        from minivllm import SamplingParams

        if self.place() != "cpu":
            pytest.skip("compared on a CPU, where batch_invariant has the same bits for every step")
        if self.claims("target_head") and self.options.get("model"):
            pytest.skip("its head has files of its own, which fit one model only")
        with tempfile.TemporaryDirectory() as folder, self._engine(Path(folder), drafts) as llm:
            sampling = [SamplingParams(**p) for p in params]
            results = llm.generate(list(prompts), sampling, use_tqdm=False)
        errors = [result.error for result in results]
        assert not any(errors), errors
        tokens = []
        for result in results:
            branches = [output.token_ids for output in result.outputs]
            tokens.append(branches)
        return tokens

    def _engine(self, folder: Path, drafts: bool) -> LLM:
        """Start an engine with a small model, which is written to a folder; with the drafter if ``drafts``."""
        from minivllm import LLM

        from .tiny import tiny_dir

        path, *_ = tiny_dir(folder / "model", eos_token_id=60)
        drafter = self.choice()
        if self.claims("draft_model"):
            draft_path, *_ = tiny_dir(folder / "draft", num_hidden_layers=1)
            drafter["options"]["model"] = str(draft_path)
        options = dict(
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            batch_invariant=True,
            num_kvcache_blocks=40,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            speculate="always",
        )
        if self.claims("target_head"):
            # the checkpoint has no weights of the head, so these are random too
            options["load_format"] = "dummy"
        try:
            return LLM(str(path), drafter=drafter if drafts else "none", allow_targets=self.own_targets(), **options)
        except ModelError as error:
            if "'model' is not set" not in str(error):
                raise
            pytest.skip("its head has files of its own, which fit one model only")
