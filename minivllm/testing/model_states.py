"""Tests of models with recurrent states: forks, checkpoints, drafts, and the states of other rows.

The engine's own memory of states is used (``device.worker.recurrent``).  It is filled with NaN, so that a read of a
state that was never written is noticed.  The tests skip models without recurrent states.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from .base import Conformance, since
from .model_config import logits

if TYPE_CHECKING:
    from .harness import Harness

TOKENS = [(5 * i * i + 11 * i + 3) % 61 for i in range(40)]
OTHER = [(3 * i * i + 2 * i + 7) % 61 for i in range(40)]
DRAFTS, CHECKPOINTS = 3, 4


class ModelStates(Conformance):
    """The tests of layers with a recurrent state of a fixed size, a base class of ``ModelConformance``."""

    if TYPE_CHECKING:

        def cases(self, tmp_path: Path) -> Iterator[tuple[str, Any]]: ...
        def harness(self, path: Path, **more: Any) -> Harness: ...

    def _models(self, tmp_path: Path) -> Iterator[tuple[str, Any, Harness]]:
        """Yield (name, test model, harness) of each architecture with recurrent states, or skip the test."""
        found = False
        for name, case in self.cases(tmp_path):
            harness = self.harness(case.path, drafts=DRAFTS, checkpoints=CHECKPOINTS)
            if harness.states is not None:
                found = True
                yield name, case, harness
        if not found:
            pytest.skip("the model has no recurrent states")

    @since(2, 4)
    def test_a_fork_of_a_state_continues_as_its_own_sequence(self, tmp_path: Path) -> None:
        """Check that a copied state and its source continue with different tokens as independent sequences.

        Both rows begin at the same position of one step.
        """
        for name, case, model in self._models(tmp_path):
            model.step({0: TOKENS[:9]})
            model.copy(0, 1)
            found = model.step({0: TOKENS[9:14], 1: OTHER[9:14]})
            for slot, x in found.items():
                later = model.step({slot: [17, 4]})[slot]
                found[slot] = torch.cat([x, later])
            for slot, rest in ((0, TOKENS[9:14]), (1, OTHER[9:14])):
                want = logits(case.hf, [*TOKENS[:9], *rest, 17, 4])[9:]
                _near(found[slot], want, case, f"{name}, {'copy' if slot else 'source'} of a state")

    @since(2, 4)
    def test_a_sequence_continues_from_a_checkpoint(self, tmp_path: Path) -> None:
        """Check that ``StepStates.save_at`` copies the state of exactly the tokens before a position.

        The position is in the middle of a step, at its end, after its first token, and two positions are in one step.
        """
        for name, case, model in self._models(tmp_path):
            want = logits(case.hf, TOKENS)
            for positions in ((13,), (20,), (8,), (9, 17)):
                model.clear(0)
                model.step({0: TOKENS[:7]})
                model.save(0, positions)
                model.step({0: TOKENS[7:20], 2: OTHER[:3]})
                model.step({0: TOKENS[20:26]})
                for which, position in enumerate(positions):
                    model.restore(1, which, position, of=0)
                    got = model.step({1: TOKENS[position:30]})[1]
                    what = f"{name}, checkpoint {which} at {position} of a step over 7 to 20"
                    _near(got, want[position:30], case, what)
                model.clear(2)

    @since(2, 4)
    def test_rejected_drafts_leave_no_trace_in_a_state(self, tmp_path: Path) -> None:
        """Check the logits of the drafts and of later tokens when some drafts of a step are accepted and the others
        rejected.

        The recurrent state must contain all accepted drafts and no rejected draft.  A checkpoint must not contain
        drafts of the step that checks them.
        """
        for name, case, model in self._models(tmp_path):
            want = logits(case.hf, TOKENS)
            for accepted in range(DRAFTS + 1):
                model.clear(0)
                model.step({0: TOKENS[:10]})
                for memory in model.states.memory:
                    for x in memory.values():
                        x[model.checkpoint(0)] = torch.nan
                end = 11 + accepted  # number of tokens up to the last accepted one
                drafts = [*TOKENS[11:end], *([50] * (DRAFTS - accepted))]
                model.save(0, (13,))
                got = model.draft(0, [TOKENS[10], *drafts], 1 + accepted)
                what = f"{name}, {accepted} of {DRAFTS} drafts accepted"
                _near(got[: 1 + accepted], want[10:end], case, what)
                early = not _is_unwritten(model, model.checkpoint(0))
                assert not early, f"{what}: a checkpoint at 13 was made of drafts"
                got = model.draft(0, TOKENS[end : end + 2], 2)
                _near(got, want[end : end + 2], case, f"{what}, the next drafts")
                got = model.step({0: TOKENS[end + 2 : 30]})[0]
                _near(got, want[end + 2 : 30], case, f"{what}, later tokens")
                model.restore(1, 0, 13, of=0)
                got = model.step({1: TOKENS[13:20]})[1]
                _near(got, want[13:20], case, f"{what}, a checkpoint at 13")

    @since(2, 4)
    def test_a_step_writes_only_the_states_of_its_rows(self, tmp_path: Path) -> None:
        """Check that a step writes only the states of its rows, its checkpoints, and the null state.

        A row that has ended has the null state.  An entry of ``save_to`` without a position in ``save_at`` must be
        ignored.
        """
        for name, case, model in self._models(tmp_path):
            model.step({0: TOKENS[:9], 1: OTHER[:6], 2: TOKENS[:4]})
            model.save(2, (30, 31))
            model.step({2: TOKENS[4:6]})
            model.states.save_at.fill_(-1)  # cancels the checkpoints; their indices in ``save_to`` stay
            model.stopped = {1}
            before = []
            for memory in model.states.memory:
                copies = {part: x.clone() for part, x in memory.items()}
                before.append(copies)
            found = model.step({0: TOKENS[9:12], 1: [3], 2: TOKENS[6:9]})
            model.stopped = set()
            written = {0, 2, model.states.slots - 1}
            for layer, memory in enumerate(model.states.memory):
                for part, x in memory.items():
                    same = torch.isclose(x, before[layer][part], 0, 0, equal_nan=True)
                    same = same.flatten(1).all(1)
                    wrong = sorted(set((~same).nonzero()[:, 0].tolist()) - written)
                    assert not wrong, f"{name}, recurrent layer {layer}, {part}: states {wrong} of no row were written"
            for slot, first, last in ((0, 9, 12), (2, 6, 9)):
                want = logits(case.hf, TOKENS[:last])[first:]
                _near(found[slot], want, case, f"{name}, beside a row that has ended")

    @since(2, 4)
    def test_a_state_of_other_tokens_gives_nan(self, tmp_path: Path) -> None:
        """Check that a row whose state cannot be used (``StepStates.behind`` is UNUSABLE) has logits of NaN.

        The other row of the step is right.  Wrong tokens would look like an answer.
        """
        for name, case, model in self._models(tmp_path):
            model.step({0: TOKENS[:9], 1: OTHER[:7]})
            model.states.valid[0] += 1
            found = model.step({0: TOKENS[9:12], 1: OTHER[7:12]})
            assert found[0].isnan().all(), f"{name}: a row with an unusable state has logits that are numbers"
            want = logits(case.hf, OTHER[:12])[7:]
            _near(found[1], want, case, f"{name}, beside an unusable state")


def _is_unwritten(model: Harness, index: int) -> bool:
    """Return whether all tensors of a state are NaN."""
    assert model.states is not None
    tensors = [x for memory in model.states.memory for x in memory.values()]
    return all(bool(x[index].isnan().all()) for x in tensors)


def _near(got: Tensor, want: Tensor, case: Any, what: str) -> None:
    """Fail if logits differ from the expected ones by more than the tolerance of the test model, or are NaN."""
    worst = (got - want).abs().max()
    assert bool(worst <= case.tolerance), f"{what}: logits differ by {float(worst):.3g}, at most {case.tolerance:.3g}"
