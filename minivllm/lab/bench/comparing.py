"""Compare configurations with the first of them, from stored runs: results, paired tests and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import Result, Row, Rows, quality, state, trials
from .lm_tasks import LOWER
from .repeats import merged, result, with_bounds
from .statistics import NAN, Paired, Shift, paired, percentile, shifted

TESTED = ("prefix_hit_rate", "draft_acceptance", "mean_rows", "kv_peak_mib")
QUALITY = {"perplexity": "perplexity", "kl": "KL", "top1_agreement": "top-1"}


@dataclass
class ComparedRuns:
    """The stored runs of several configurations, compared with those of the first.

    ``stored`` holds, for each configuration in the order of ``names``, its ``runs`` by seed and its ``quality``.
    """

    names: Sequence[str]
    stored: Rows
    seeds: Sequence[int]
    settings: Row

    def __post_init__(self) -> None:
        self.runs = []
        for stored in self.stored:
            by_seed = stored["runs"]
            self.runs.append([by_seed[str(seed)] for seed in self.seeds])
        self.tasks: list[trials.Metric] = []
        for key in self.runs[0][0]["figures"]:
            if key.startswith("task_"):
                task = key.removeprefix("task_")
                name = task.removeprefix(LOWER)
                self.tasks.append(trials.Metric(key, name, name == task, 3))
        self.counted = trials.counted(self.runs)
        # Evictions and preemptions explain a speed but are no results, so only TESTED counters are tested.
        tested = [metric for metric in self.counted if metric.key in TESTED]
        self.metrics = (*trials.SPEED, *tested, *self.tasks)

    def result(self, bills: Row, verdicts: Mapping[str, str] | None = None) -> Result:
        """Return the comparison as a result file holds it.

        ``bills`` maps each name to its bill of materials, ``verdicts`` to the difference from the first that
        ``minivllm diff`` reports.
        """
        tests = [self._against_first(i) for i in range(1, len(self.names))]
        judged = [{}, *trials.judged(tests)]
        first = self.runs[0]
        by_name = dict(zip(self.names, self.runs, strict=True))
        rows = []
        for i, (name, runs) in enumerate(by_name.items()):
            difference = self._clock_difference(i)
            if difference:
                for metric in trials.SPEED:
                    judged[i][metric.key]["says"] = f"not compared: {difference}"
            figures = [run["figures"] for run in runs]
            row = {"name": name, **merged(figures), "quality": self.stored[i]["quality"]}
            row["same_tokens"] = trials.same_tokens(first, runs)
            row["first_divergence"] = trials.first_divergence(first, runs)
            row["verdict"] = (verdicts or {}).get(name, "")
            row["against_first"] = judged[i]
            rows.append(row)
        states = [run["state"] for run in first]
        figures = [run["figures"] for run in first]
        more = {"rows": rows, "runs_by_name": by_name, "bills_of_materials": bills}
        return result("compare", figures, states, self.settings, None, **more)

    def _against_first(self, i: int) -> dict[str, Paired | Shift]:
        """Return the statistical tests of configuration i against the first, by the key of the result."""
        first, other = (self.stored[row]["quality"] or {} for row in (0, i))
        tests: dict[str, Paired | Shift] = {**trials.against(self.runs[0], self.runs[i], self.metrics)}
        return tests | of_quality(first, other)

    def _clock_difference(self, i: int) -> str:
        """Return why the speeds of configuration i and the first cannot be compared, "" if they can."""
        first = _clock(self.runs[0])
        other = _clock(self.runs[i])
        if math.isnan(first) or math.isnan(other):
            return ""
        if not state.clocks_apart({"mhz": first}, {"mhz": other}):
            return ""
        return f"clocks of {first:.0f} and {other:.0f} MHz"

    def lines(self, whole: Row, workload: str) -> list[str]:
        """Return the lines of a table of the result ``whole``, and a sentence for each compared figure.

        ``workload`` describes the requests.
        """
        rows = whole["rows"]
        width = max(13, *(len(name) for name in self.names))
        out = [
            workload,
            f"{len(self.seeds)} runs each, seeds {','.join(map(str, self.seeds))}; intervals of 95 %",
            f"{'configuration':{width}} {'tokens/s':>16} {'TTFT ms':>14} {'TPOT ms':>14} {'weights MiB':>11} "
            f"{'perplexity':>10} {'KL':>9} {'top-1':>7} same tokens",
        ]
        out += [_table_line(row, width) for row in rows]
        if self.counted:
            for row in rows:
                known = [metric for metric in self.counted if row.get(metric.key) is not None]
                out.append(f"counted of {row['name']}: {_values_text(row, known)}")
        if self.tasks:
            out += [f"scores of {row['name']}: {_values_text(row, self.tasks)}" for row in rows]
        for row in rows[1:]:
            out += self._verdict_lines(rows[0], row)
        if whole["joules_per_output_token"] is None:
            machine = whole["machine_states"][0]
            out.append(f"energy: unknown: {machine.get('energy_unknown', 'no counter')}")
        return out

    def _verdict_lines(self, first: Row, row: Row) -> list[str]:
        """Return the lines that compare a row with the first."""
        names = {metric.key: metric.name for metric in self.metrics} | QUALITY
        width = max(12, *map(len, names.values()))
        out = [f"{row['name']} over {self.names[0]}: {row['verdict']}"]
        for key, verdict in row["against_first"].items():
            if verdict["says"] != "not measured":
                out.append(f"  {names[key]:{width}} {trials.ratio_text(verdict):>20}  {verdict['says']}")
        own = row["quality"] or {}
        qualities = (first["quality"] or {}, own)
        texts = {quality["tokens"] for quality in qualities if "tokens" in quality}
        if len(texts) > 1:
            out.append("  perplexity: not compared: other tokens (the tokenizers cut the text differently)")
        if own.get("not_measured"):
            out.append(f"  quality of a text: not measured: {own['not_measured']}")
        return out


def _clock(runs: Rows) -> float:
    """Return the median clock rate of the device during some runs, in MHz; NaN if it is unknown."""
    clocks = [run["state"].get("mhz") for run in runs]
    return percentile([mhz for mhz in clocks if mhz], 50)


def _values_text(row: Row, metrics: Sequence[trials.Metric]) -> str:
    """Return the values of some metrics with their names."""
    return ", ".join(f"{metric.name} {with_bounds(row, metric.key, metric.digits)}" for metric in metrics)


def _table_line(row: Row, width: int) -> str:
    """Return the line of a configuration in the table.  Its name takes ``width`` characters."""
    own = row["quality"] or {}
    same = f"{100 * row['same_tokens']:.0f} %"
    if row["first_divergence"]:
        same += f", first at token {row['first_divergence']}"
    agreement = "-"
    if "top1_agreement" in own:
        agreement = f"{100 * own['top1_agreement']:.1f} %"
    speed = with_bounds(row, "output_throughput")
    ttft = with_bounds(row, "median_ttft_ms")
    tpot = with_bounds(row, "median_tpot_ms", 2)
    weights = row["weight_bytes"] / 2**20
    return (
        f"{row['name']:{width}} {speed:>16} {ttft:>14} {tpot:>14} {weights:>11.1f} "
        f"{_number(own, 'perplexity', 3):>10} {_number(own, 'kl', 5):>9} {agreement:>7} {same}"
    )


def of_quality(a: Row, b: Row) -> dict[str, Paired | Shift]:
    """Return the tests of two qualities, in pairs of the text's pieces; {} if they were measured on other tokens."""
    found: dict[str, Paired | Shift] = {}
    if "losses" not in a or "losses" not in b or a["tokens"] != b["tokens"]:
        return found
    found["perplexity"] = paired(quality.perplexities(a), quality.perplexities(b))
    for key, pieces in (("kl", "kl_pieces"), ("top1_agreement", "top1_pieces")):
        if a.get(pieces) and b.get(pieces):
            found[key] = shifted(a[pieces], b[pieces])
    return found


def _number(own: Row, key: str, digits: int) -> str:
    """Return a number as text, "-" if it is unknown."""
    value = own.get(key, NAN)
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{digits}f}"
