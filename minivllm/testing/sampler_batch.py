"""What may be drawn for a row, alone and beside others that have nothing in common with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.sampling import Sampler

from .base import since
from .sampling_data import unlike
from .sampling_rows import SampledSeq, Stage

MANY, FEW = 1 << 11, 24  # draws in one step, and draws in steps of their own
SPREADS = (2.0, 6.0)  # of the row's logits: a tail that is often drawn, and one that is cut


class Batches:
    """The tests of rows beside others; part of ``SamplerConformance``."""

    if TYPE_CHECKING:
        draws: Any
        keys: Any
        make: Any
        vocab: int
        _tried: Any

    @since(1, 0)
    def test_what_may_be_drawn_does_not_depend_on_the_batch(self) -> None:
        """The same keys draw the same tokens, and ``drawn_from`` says the same, in steps of one row, of three, of many,
        and beside rows of other parameters whose logits are peaked, even, larger, smaller or nearly all -inf: no
        maximum, mean, order or length of the batch goes into the limits of a row."""
        says = type(self.make(self.vocab)).drawn_from is not Sampler.drawn_from
        for asked in self._tried():
            params = SamplingParams.make(**asked)
            for spread in SPREADS:
                row = torch.linspace(-spread, spread, self.vocab).roll(29)
                crowd = list(self._crowd(row))
                if says:
                    self._says_the_same(params, row, crowd)
                keys = self.keys(MANY)
                want = self.draws(params, row, keys)
                ways = [
                    (f"beside {len(crowd)} others", MANY, crowd, MANY),
                    ("alone in a step", FEW, [], 1),
                    ("beside 2 others", FEW, crowd[:2], 1),
                    (f"alone beside {len(crowd)} others", FEW // 4, crowd, 1),
                ]
                for what, n, others, at_once in ways if spread == SPREADS[0] else ways[:1]:
                    got = self.draws(params, row, keys[:n], others, at_once)
                    at = (got != want[:n]).nonzero().flatten().tolist()
                    assert not at, (
                        f"{asked or 'default parameters'}: {what} it draws other tokens in {len(at)} of {n} draws than "
                        f"in a step of {MANY} rows that are alike, such as {got[at[0]]}, not {want[at[0]]}"
                    )

    def _crowd(self, row: Tensor) -> Iterator[SampledSeq]:
        """40 neighbours: each kind of logits with several parameters."""
        tried, kinds = self._tried(), unlike(row)
        for i in range(5 * len(kinds)):
            params = SamplingParams.make(**tried[(i + i // len(tried)) % len(tried)])
            yield SampledSeq(params, (0,), (), kinds[i % len(kinds)], seed=i)

    def _says_the_same(self, params: SamplingParams, row: Tensor, crowd: Sequence[SampledSeq]) -> None:
        """``drawn_from`` of a row alone and among others, first and last."""
        mine, found = SampledSeq(params, (0,), (), row), {}
        for what, seqs in (
            ("alone", [mine]),
            ("before two others", [mine, *crowd[:2]]),
            ("after one other", [crowd[-1], mine]),
            (f"after {len(crowd)} others", [*crowd, mine]),
        ):
            stage, slots = Stage(self, len(seqs)), np.arange(len(seqs))
            stage.join(slots, seqs)
            logits = torch.stack([s.logits for s in seqs]).to(stage.device)
            with torch.inference_mode():
                said = stage.worker.drawn_from(logits, stage.rows(slots, stage.variant(slots)), stage.state.columns)
            found[what] = said[[s is mine for s in seqs].index(True)].double().softmax(0).cpu()
            alone = found["alone"]
            moved = ((alone > 0) != (found[what] > 0)).nonzero().flatten().tolist()
            assert not moved, f"{mine}: drawn_from {what} differs from alone in whether tokens {moved[:8]} may come"
            near = torch.allclose(alone, found[what], rtol=1e-4, atol=1e-7)
            assert near, f"{mine}: drawn_from {what} gives other probabilities than alone"
