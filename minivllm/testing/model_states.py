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
from .model_config import largest, logits

if TYPE_CHECKING:
    from .harness import Harness

TOKENS = [(5 * i * i + 11 * i + 3) % 61 for i in range(40)]
OTHER = [(3 * i * i + 2 * i + 7) % 61 for i in range(40)]
DRAFTS = 3
CHECKPOINTS = 4


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
        first = TOKENS[:9]
        rest = (TOKENS[9:14], OTHER[9:14])
        for name, case, model in self._models(tmp_path):
            model.step({0: first})
            model.copy(0, 1)
            found = model.step(dict(enumerate(rest)))
            for slot in (0, 1):
                later = model.step({slot: [17, 4]})
                got = torch.cat([found[slot], later[slot]])
                every = logits(case.hf, [*first, *rest[slot], 17, 4])
                role = "copy" if slot else "source"
                _near(got, every[9:], case, f"{name}, {role} of a state")

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
                    step = model.step({1: TOKENS[position:30]})
                    what = f"{name}, checkpoint {which} at {position} of a step over 7 to 20"
                    _near(step[1], want[position:30], case, what)
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
                checkpoint = model.checkpoint(0)
                for _, x in _tensors(model):
                    x[checkpoint] = torch.nan
                end = 11 + accepted  # number of tokens up to the last accepted one
                rejected = [50] * (DRAFTS - accepted)
                drafts = [*TOKENS[11:end], *rejected]
                model.save(0, (13,))
                got = model.draft(0, [TOKENS[10], *drafts], 1 + accepted)
                kept = got[: 1 + accepted]
                what = f"{name}, {accepted} of {DRAFTS} drafts accepted"
                _near(kept, want[10:end], case, what)
                early = not _is_unwritten(model, model.checkpoint(0))
                assert not early, f"{what}: a checkpoint at 13 was made of drafts"
                next_end = end + 2
                got = model.draft(0, TOKENS[end:next_end], 2)
                _near(got, want[end:next_end], case, f"{what}, the next drafts")
                step = model.step({0: TOKENS[next_end:30]})
                _near(step[0], want[next_end:30], case, f"{what}, later tokens")
                model.restore(1, 0, 13, of=0)
                step = model.step({1: TOKENS[13:20]})
                _near(step[1], want[13:20], case, f"{what}, a checkpoint at 13")

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
            before = {place: x.clone() for place, x in _tensors(model)}
            found = model.step({0: TOKENS[9:12], 1: [3], 2: TOKENS[6:9]})
            model.stopped = set()
            written = {0, 2, model.states.slots - 1}
            for place, x in _tensors(model):
                same = torch.isclose(x, before[place], 0, 0, equal_nan=True)
                same_states = same.flatten(1).all(1)
                changed = (~same_states).nonzero()[:, 0]
                wrong = sorted(set(changed.tolist()) - written)
                assert not wrong, f"{name}, {place}: states {wrong} of no row were written"
            for slot, first, last in ((0, 9, 12), (2, 6, 9)):
                want = logits(case.hf, TOKENS[:last])
                _near(found[slot], want[first:], case, f"{name}, beside a row that has ended")

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
            want = logits(case.hf, OTHER[:12])
            _near(found[1], want[7:], case, f"{name}, beside an unusable state")


def _tensors(model: Harness) -> Iterator[tuple[str, Tensor]]:
    """Yield (recurrent layer and part of its state, tensor with an entry for each state)."""
    assert model.states is not None
    for layer, memory in enumerate(model.states.memory):
        for part, x in memory.items():
            yield f"recurrent layer {layer}, {part}", x


def _is_unwritten(model: Harness, index: int) -> bool:
    """Return whether all tensors of a state are NaN."""
    return all(bool(x[index].isnan().all()) for _, x in _tensors(model))


def _near(got: Tensor, want: Tensor, case: Any, what: str) -> None:
    """Fail if logits differ from the expected ones by more than the tolerance of the test model, or are NaN."""
    worst = largest(got - want)
    assert worst <= case.tolerance, f"{what}: logits differ by {worst:.3g}, at most {case.tolerance:.3g}"
