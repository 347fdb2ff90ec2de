"""Tests that the tokens that may be drawn for one row do not depend on the other rows of a step."""

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
from .sampling_rows import SampledSeq, Stage, stack_logits

MANY, FEW = 1 << 11, 24  # number of draws in one large step, and number of steps of a single draw
# Largest logits of the tested row, whose logits are evenly spaced from -spread to spread.  With the first value,
# unlikely tokens are often drawn.  With the second one, limits such as top_p exclude them.
SPREADS = (2.0, 6.0)


class Batches:
    """The tests of rows in a batch, a base class of ``SamplerConformance``."""

    if TYPE_CHECKING:
        draws: Any
        keys: Any
        make: Any
        vocab: int
        tried_rows: Any

    @since(1, 0)
    def test_what_may_be_drawn_does_not_depend_on_the_batch(self) -> None:
        """Check that the same keys draw the same tokens in steps of one row, of three and of many.

        ``drawn_from`` must return the same distribution too.  The other rows have other parameters, and logits that
        are peaked, even, larger, smaller or nearly all -inf.  No maximum, mean, order or length of the batch may enter
        the limits of a row.
        """
        for requested in self.tried_rows():
            for spread in SPREADS:
                self._check_row(SamplingParams.make(**requested), spread)

    def _check_row(self, params: SamplingParams, spread: float) -> None:
        """Compare the draws for one row of logits, evenly spaced from -spread to spread, in several batches."""
        row = torch.linspace(-spread, spread, self.vocab).roll(29)
        crowd = list(self._crowd(row))
        seq = SampledSeq(params, (0,), (), row)
        if type(self.make(self.vocab)).drawn_from is not Sampler.drawn_from:
            self._check_drawn_from(seq, crowd)
        keys = self.keys(MANY)
        want = self.draws(params, row, keys)
        batches = [(f"beside {len(crowd)} others", MANY, crowd, MANY)]
        if spread == SPREADS[0]:
            batches.append(("alone in a step", FEW, [], 1))
            batch = ("beside 2 others", FEW, crowd[:2], 1)
            batches.append(batch)
            batches.append((f"alone beside {len(crowd)} others", FEW // 4, crowd, 1))
        for batch, n, others, at_once in batches:
            got = self.draws(params, row, keys[:n], others, at_once)
            differ = got != want[:n]
            wrong = differ.nonzero().flatten().tolist()
            assert not wrong, (
                f"{seq}: {batch} it draws other tokens in {len(wrong)} of {n} draws than in a step of {MANY} rows "
                f"that are alike, such as {got[wrong[0]]}, not {want[wrong[0]]}"
            )

    def _crowd(self, row: Tensor) -> Iterator[SampledSeq]:
        """Yield 40 sequences to put into a batch with the tested row.

        Their logits are the eight kinds of ``unlike(row)``, each with several sampling parameters.
        """
        tried = self.tried_rows()
        kinds = unlike(row)
        for i in range(5 * len(kinds)):
            requested = tried[(i + i // len(tried)) % len(tried)]
            params = SamplingParams.make(**requested)
            yield SampledSeq(params, (0,), (), kinds[i % len(kinds)], seed=i)

    def _check_drawn_from(self, seq: SampledSeq, crowd: Sequence[SampledSeq]) -> None:
        """Fail unless ``drawn_from`` returns the same for a row alone, before other rows and after them."""
        alone = self._distribution([seq], 0)
        for batch, before, after in (
            ("before two others", (), crowd[:2]),
            ("after one other", crowd[-1:], ()),
            (f"after {len(crowd)} others", crowd, ()),
        ):
            seqs = [*before, seq, *after]
            found = self._distribution(seqs, len(before))
            differ = (alone > 0) != (found > 0)
            moved = differ.nonzero().flatten().tolist()
            assert not moved, f"{seq}: drawn_from {batch} differs from alone in whether tokens {moved[:8]} may come"
            near = torch.allclose(alone, found, rtol=1e-4, atol=1e-7)
            assert near, f"{seq}: drawn_from {batch} returns other probabilities than alone"

    def _distribution(self, seqs: Sequence[SampledSeq], at: int) -> Tensor:
        """Return the probabilities f64 [V] that ``drawn_from`` gives for sequence ``at`` in a step of all sequences."""
        stage = Stage(self, len(seqs))  # type: ignore[arg-type]
        slots = np.arange(len(seqs))
        stage.join(slots, seqs)
        logits = stack_logits(seqs).to(stage.device)
        with torch.inference_mode():
            rows = stage.rows(slots, stage.variant(slots))
            drawn = stage.worker.drawn_from(logits, rows, stage.state.columns)
        return drawn[at].double().softmax(0).cpu()
