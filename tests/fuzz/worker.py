"""A process that plays cases.  It reads one JSON line for each, and writes JSON lines (``stage`` for progress, ``done``
at the end).

Other output goes to its log.  A process whose CUDA context may be damaged reports this and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuzz import delays, power
from fuzz.cases import KINDS, Case
from fuzz.configs import rounds
from fuzz.drive import Answer, Run
from fuzz.invariants import check, kind_of, may_run_dry
from fuzz.oracle import STEPPED, Fault, Oracle, differences, differs
from fuzz.ties import Ties

MOST_MEMORY = 6 << 30  # bytes of a process, or of its device memory, above which it is replaced
MOST_FAULTS = 12  # reported faults of a case


class Player:
    """Plays cases one after another, and stores the answers of requests alone."""

    def __init__(self, folder: Path, shared: Path | None = None, stage: Any = None) -> None:
        self.folder, self.shared = folder, shared
        self._told = stage or (lambda text: None)
        self.seconds: Counter[str] = Counter()  # seconds by the first word of a stage
        self._doing, self._since = "", time.monotonic()
        self.oracles: dict[tuple[str, str], Oracle] = {}

    def stage(self, text: str) -> None:
        """Begin a new stage."""
        now = time.monotonic()
        self.seconds[self._doing] += now - self._since  # type: ignore[assignment]
        self._doing, self._since = text.split()[0].strip(","), now
        self._told(text)

    def close(self) -> None:
        for oracle in self.oracles.values():
            oracle.close()
        self.oracles.clear()

    def oracle(self, case: Case) -> Oracle:
        key = (case.device, case.dtype)
        if key not in self.oracles:
            self.oracles[key] = Oracle(*key, self.folder, self.shared)
        return self.oracles[key]

    def play(self, case: Case) -> dict[str, Any]:
        """Run a case and compare the answers.

        Return ``faults``, ``requests``, the compared ``tokens``, ``met`` with the number of times that each feature
        occurred, and ``replace``, which tells whether the process must be replaced.
        """
        begun = time.monotonic()
        self.stage("alone")
        self.seconds.clear()
        played = Play(case, self)
        faults = played.faults
        try:
            played.run()
        except Exception as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            reported = f"{type(e).__name__}: {e} ({Path(where.filename).name}:{where.lineno})"
            traceback.print_exc()
            faults.append(Fault(kind_of(reported), reported))
        doubt = any(f.kind == "device assert" for f in faults) or not _device_is_well(case.device, faults)
        if faults and not doubt:
            self.close()  # the plain engines may be damaged
        played.met["configurations"] += 1
        self.stage("idle")
        return {
            "seed": case.seed,
            "dtype": case.dtype,
            "requests": len(case.asks),
            "tokens": played.tokens,
            "met": dict(played.met),
            "faults": [[f.kind, f.message[:600], f.ask] for f in sorted(faults, key=_gravity)[:MOST_FAULTS]],
            "replace": doubt or _memory(case.device) > MOST_MEMORY,
            "seconds": time.monotonic() - begun,
            "spent": dict(self.seconds),
        }


class Play:
    """A case and its results."""

    def __init__(self, case: Case, player: Player) -> None:
        self.case, self.oracle, self.stage = case, player.oracle(case), player.stage
        self.prompts: dict[int, list[int]] = {}
        self.faults: list[Fault] = []
        self.tokens, self.computed = 0, self.oracle.computed
        self.met: Counter[str] = Counter()
        self.driven = Run(case, player.folder, self.prompt_of, player.stage)

    def prompt_of(self, i: int) -> list[int]:
        """Return a request's prompt.  The next turn of a conversation includes the earlier answer."""
        if i not in self.prompts:
            ask = self.case.asks[i]
            before: list[int] = []
            if ask.after is not None:
                earlier = self.case.asks[ask.after]
                prompt = self.prompt_of(ask.after)
                alone = self.oracle.answer(self.case.options_of(earlier), prompt, earlier.params)
                before = [*prompt, *(alone.outputs[0].tokens if alone.outputs else [])]
            self.prompts[i] = [*before, *ask.prompt]
        return self.prompts[i]

    def run(self) -> None:
        for i in range(len(self.case.asks)):
            self.prompt_of(i)
        with delays.planted(self.case.late, self.case.seed, self.case.device):
            self.driven.play()
        self.faults += [
            Fault(kind_of(reported) if kind == "dead" and kind_of(reported) != "exception" else kind, reported)
            for kind, reported in self.driven.broken
        ]
        for i, answer in enumerate(self.driven.answers):
            self.stage(f"request {i} is compared")
            self.faults += [Fault(kind, f"request {i}: {reported}", i) for kind, reported in self.judge(i, answer)]
            if any(f.kind == "device assert" for f in self.faults):
                break  # nothing more can run in this process
        self.met += power.count(self.case, self.driven, self.prompts)
        self.met["computed alone"] = self.oracle.computed - self.computed

    def judge(self, i: int, answer: Answer) -> list[tuple[str, str]]:
        """Return (kind, message) for each fault of an answer."""
        ask = self.case.asks[i]
        options, prompt, params = self.case.options_of(ask), self.prompts[i], ask.params
        if answer.refused is not None:
            return [("exception", f"refused: {answer.refused}")]
        if not answer.ended and not answer.left:
            return [("count", "the request has not ended")] if not self.driven.broken else []
        device = [("device assert", answer.error)] if answer.error and kind_of(answer.error) == "device assert" else []
        if device:
            return device
        mode, most = options["logprobs_mode"], options["max_model_len"]
        found = check(params, options["model"], prompt, most, mode, answer)
        exact = options["batch_invariant"]
        if answer.mixed:  # no engine without changes of its weights has this answer
            return found if may_run_dry(params) or not answer.error else [*found, (kind_of(answer.error), answer.error)]
        if not exact and self.case.dtype != "float32":
            return found + ([(kind_of(answer.error), answer.error)] if answer.error and not may_run_dry(params) else [])
        alone = self.oracle.answer(options, prompt, params)
        if alone.error and not may_run_dry(params):
            found.append((kind_of(alone.error), f"alone: {alone.error}"))
        if answer.error != alone.error and not answer.left:
            if not (exact is False and may_run_dry(params)):
                found.append((kind_of(answer.error or ""), f"error {answer.error!r}, alone {alone.error!r}"))
            return found
        self.tokens += sum(len(o.tokens) for o in answer.outputs) or sum(map(len, answer.pieces.values()))
        found += self.compare(options, prompt, params, answer, alone)
        return found

    def compare(
        self, options: dict[str, Any], prompt: list[int], params: dict[str, Any], answer: Answer, alone: Answer
    ) -> list[tuple[str, str]]:
        exact = options["batch_invariant"]
        if not exact and {"beam_width", "best_of"} & params.keys():
            return []  # the last bits decide their order
        tie = None if exact else Ties(self.oracle, options, prompt, params)
        times = 1 if tie is None else tie.times
        found = differences(answer, alone, self.case.dtype, answer.left, tie, times)
        if not exact and rounds(options) and any(kind in STEPPED for kind, _ in found):
            # where a last bit becomes a step of rounding, it may decide which tokens attention reads
            moved = self.oracle.answer(options, prompt, params, other=True)
            length = max(map(len, answer.pieces.values()), default=0) if answer.left else None
            if differs(moved, alone, length, self.case.dtype, tie, times):
                self.met["undecided"] += 1
                found = [one for one in found if one[0] not in STEPPED]
        if found:
            again = self.oracle.answer(options, prompt, params, anew=True)
            if differences(again, alone, self.case.dtype):
                found.append(("wrong token", "the plain engine itself answers now this and now that"))
        return found


def _gravity(fault: Fault) -> int:
    """Return the sort key of a fault, the most serious first."""
    return KINDS.index(fault.kind) if fault.kind in KINDS else 0


def _device_is_well(device: str, faults: list[Fault]) -> bool:
    """Wait for all enqueued work, and return False if the device has a fault."""
    if device != "cuda":
        return True
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as e:
        faults.append(Fault("device assert", str(e).splitlines()[0]))
        return False
    return True


def _memory(device: str) -> int:
    """Return the bytes of the process, or of its device memory in torch, whichever is larger."""
    held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device == "cuda":
        import torch

        return max(held, torch.cuda.memory_reserved())
    return held


def main() -> None:
    """Run ``worker.py FOLDER SHARED``, with models in FOLDER and shared answers in SHARED."""
    talk = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of other code goes to the log
    faulthandler.enable(all_threads=True)
    # the parent requests the stacks before it ends this process
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def tell(what: str, value: Any) -> None:
        talk.write(json.dumps({what: value}) + "\n")

    import torch

    torch.set_num_threads(1)
    player = Player(Path(sys.argv[1]), Path(sys.argv[2]), lambda text: tell("stage", text))
    tell("stage", "ready")
    for line in sys.stdin:
        case = Case.from_json(line)
        print(f"== seed {case.seed} {case.dtype} {case.drive}", file=sys.stderr, flush=True)
        result = player.play(case)
        tell("done", result)
        if result["replace"]:
            break
    talk.flush()
    os._exit(0)  # releasing a broken CUDA context may hang


if __name__ == "__main__":
    main()
