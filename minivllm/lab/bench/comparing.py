"""A table of configurations against the first of them, from stored runs: figures, paired tests, sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import quality, state, trials
from .lm_tasks import LOWER
from .repeats import merged, result, with_bounds
from .statistics import NAN, Paired, Shift, paired, percentile, shifted

QUALITY = {"perplexity": "perplexity", "kl": "KL", "top1_agreement": "top-1"}
Stored = Mapping[str, Any]


class ComparedRuns:
    """``stored``: of each configuration, in the order of ``names``, its ``runs`` by seed and its ``quality``."""

    def __init__(
        self, names: Sequence[str], stored: Sequence[Stored], seeds: Sequence[int], settings: Mapping[str, Any]
    ) -> None:
        self.names, self.stored, self.seeds, self.settings = names, stored, seeds, settings
        self.runs = [[one["runs"][str(seed)] for seed in seeds] for one in stored]
        tasks = [key for key in self.runs[0][0]["figures"] if key.startswith("task_")]
        self.tasks = [
            trials.Metric(key, key.removeprefix("task_").removeprefix(LOWER), not key.startswith(f"task_{LOWER}"), 3)
            for key in tasks
        ]
        self.counted = trials.counted(self.runs)
        tested = [one for one in self.counted if one.key in ("prefix_hit_rate", "draft_acceptance")]
        self.metrics = (*trials.SPEED, *tested, *self.tasks)  # evictions and preemptions are why, no outcome

    def result(self, bills: Mapping[str, Any], verdicts: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Of each name the bill of materials, and what differs from the first one's, as ``minivllm diff`` says it."""
        compared = [self._against_first(i) for i in range(1, len(self.names))]
        judged = [{}, *trials.judged(compared)]
        rows = []
        for i, (name, stored, runs) in enumerate(zip(self.names, self.stored, self.runs, strict=True)):
            if apart := self._clocks_apart(i):
                for metric in trials.SPEED:
                    judged[i][metric.key] |= {"says": f"not compared: {apart}"}
            rows.append(
                {
                    "name": name,
                    **merged([run["figures"] for run in runs]),
                    "quality": stored["quality"],
                    "same_tokens": trials.same_tokens(self.runs[0], runs),
                    "first_divergence": trials.first_divergence(self.runs[0], runs),
                    "verdict": (verdicts or {}).get(name, ""),
                    "against_first": judged[i],
                }
            )
        states = [run["state"] for run in self.runs[0]]
        figures = [run["figures"] for run in self.runs[0]]
        runs_of = dict(zip(self.names, self.runs, strict=True))
        return result(
            "compare", figures, states, self.settings, None, rows=rows, runs_by_name=runs_of, bills_of_materials=bills
        )

    def _against_first(self, i: int) -> dict[str, Paired | Shift]:
        found: dict[str, Paired | Shift]
        found = {**trials.against(self.runs[0], self.runs[i], self.metrics)}
        a, b = self.stored[0]["quality"], self.stored[i]["quality"]
        return found | of_quality(a or {}, b or {})

    def _clocks_apart(self, i: int) -> str:
        """Why speeds cannot be compared, "" if they can."""
        clocks = [
            percentile([run["state"]["mhz"] for run in runs if run["state"].get("mhz")], 50)
            for runs in (self.runs[0], self.runs[i])
        ]
        one, two = ({} if math.isnan(mhz) else {"mhz": mhz} for mhz in clocks)
        return f"clocks of {clocks[0]:.0f} and {clocks[1]:.0f} MHz" if state.clocks_apart(one, two) else ""

    def lines(self, whole: Mapping[str, Any], workload: str) -> list[str]:
        """The table, and below it a sentence for each thing that is compared; ``workload`` says of what."""
        rows = whole["rows"]
        wide = max(13, *(len(name) for name in self.names))
        out = [
            workload,
            f"{len(self.seeds)} runs each, seeds {','.join(map(str, self.seeds))}; intervals of 95 %",
            f"{'configuration':{wide}} {'tokens/s':>16} {'TTFT ms':>14} {'TPOT ms':>14} {'weights MiB':>11} "
            f"{'perplexity':>10} {'KL':>9} {'top-1':>7} same tokens",
        ]
        for row in rows:
            own = row["quality"] or {}
            share = f"{100 * row['same_tokens']:.0f} %"
            if row["first_divergence"]:
                share += f", first at token {row['first_divergence']}"
            agree = f"{100 * own['top1_agreement']:.1f} %" if "top1_agreement" in own else "-"
            out.append(
                f"{row['name']:{wide}} {with_bounds(row, 'output_throughput'):>16} "
                f"{with_bounds(row, 'median_ttft_ms'):>14} {with_bounds(row, 'median_tpot_ms', 2):>14} "
                f"{row['weight_bytes'] / 2**20:>11.1f} {_number(own, 'perplexity', 3):>10} {_number(own, 'kl', 5):>9} "
                f"{agree:>7} {share}"
            )
        names = {metric.key: metric.name for metric in self.metrics} | QUALITY
        for row in rows if self.counted else ():
            known = [one for one in self.counted if row.get(one.key) is not None]
            counts = [f"{one.name} {with_bounds(row, one.key, one.digits)}" for one in known]
            out.append(f"counted of {row['name']}: {', '.join(counts)}")
        for row in rows if self.tasks else ():
            scores = [f"{one.name} {with_bounds(row, one.key, one.digits)}" for one in self.tasks]
            out.append(f"scores of {row['name']}: {', '.join(scores)}")
        most = max(12, *(len(name) for name in names.values()))
        for row in rows[1:]:
            out.append(f"{row['name']} over {self.names[0]}: {row['verdict']}")
            for key, verdict in row["against_first"].items():
                if verdict["says"] != "not measured":
                    out.append(f"  {names[key]:{most}} {trials.ratio_text(verdict):>20}  {verdict['says']}")
            quality_of = [one["quality"] or {} for one in (rows[0], row)]
            if len({one["tokens"] for one in quality_of if "tokens" in one}) > 1:
                out.append("  perplexity: not compared: other tokens (each is that of a token of its own tokenizer)")
            if why := quality_of[1].get("not_measured"):
                out.append(f"  quality of a text: not measured: {why}")
        joules = whole["joules_per_output_token"]
        unknown = whole["machine_states"][0].get("energy_unknown", "no counter")
        return [*out, *([] if joules is not None else [f"energy: unknown: {unknown}"])]


def of_quality(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Paired | Shift]:
    """Return the tests of two qualities of one text, in pairs of its pieces; none if the tokens are others."""
    found: dict[str, Paired | Shift] = {}
    if "losses" not in a or "losses" not in b or a["tokens"] != b["tokens"]:
        return found
    found["perplexity"] = paired(quality.perplexities(a), quality.perplexities(b))
    for key, pieces in (("kl", "kl_pieces"), ("top1_agreement", "top1_pieces")):
        if a.get(pieces) and b.get(pieces):
            found[key] = shifted(a[pieces], b[pieces])
    return found


def _number(own: Mapping[str, Any], key: str, digits: int) -> str:
    value = own.get(key, NAN)
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
