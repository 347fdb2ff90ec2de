"""Results of ``bench``, ``ablate`` and ``compare`` as one HTML file that needs nothing beside it.

No script, no font, no picture from elsewhere; light and dark by the reader's setting, from the width of a phone on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .charts import Bar, DrawnLine, bars, lines, number, stack
from .serving import knee_text
from .trials import ratio_text

MOST_STEPS = 200  # of a distribution that is drawn
MOST_LINES = 4  # of one chart
STYLE = """
:root{--f:#1b1f24;--g:#fff;--h:#667;--r:#d5dae1;--a:#2f6fb3;--b:#c2571a;--c:#2e8b57;--d:#8a4fa3}
@media(prefers-color-scheme:dark){:root{--f:#e6e9ee;--g:#14171b;--h:#99a;--r:#343b45;--a:#6aa9e9;--b:#f0955c;--c:#6cc596;
--d:#c59be0}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--f);background:var(--g);max-width:52rem;margin:auto;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.5rem;border-top:1px solid var(--r);padding-top:1rem}
h3{font-size:1rem}.t{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;width:100%}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--r)}
td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto;max-width:40rem}text{font:12px system-ui,sans-serif;fill:var(--f)}
small,p.s{color:var(--h);font-size:.85rem;overflow-wrap:anywhere}
.a{fill:var(--a)}.b{fill:var(--b)}.c{fill:var(--c)}.d{fill:var(--d)}path{fill:none}
.la{stroke:var(--a)}.lb{stroke:var(--b)}.lc{stroke:var(--c)}.ld{stroke:var(--d)}.la,.lb,.lc,.ld{stroke-width:2}
.e{stroke:var(--f);stroke-width:1.5}.m{stroke:var(--h);stroke-dasharray:4 3}.x{stroke:var(--h)}
"""

Row = Mapping[str, Any]


def page(results: Sequence[tuple[str, Row]]) -> str:
    """``results`` with their names."""
    body = "".join(section(name, found) for name, found in results)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>minivllm measurements</title><style>{STYLE}</style></head>\n"
        f"<body><h1>Measurements</h1>{body}</body></html>\n"
    )


def section(name: str, found: Row) -> str:
    """One result: charts of its kind, a table, what it was measured on."""
    kinds = {"serve": _serve, "ablate": _ablate, "compare": _compare, "latency": _latency, "memory": _memory}
    title = f"{found['kind']}: {found.get('model_id') or name}"
    inside = kinds.get(found["kind"], _figures)(found)
    return f"<h2>{escape(title)}</h2>{inside}<p class=s>{escape(_about(name, found))}</p>"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [f"<th>{escape(one)}</th>" for one in heads]
    body = ["".join(f"<td>{escape(_cell(one))}</td>" for one in row) for row in rows]
    inside = "".join(f"<tr>{row}</tr>" for row in ("".join(cells), *body))
    return f'<div class="t"><table>{inside}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)


def _bar(name: str, row: Row, key: str) -> Bar:
    low, high = row.get("intervals", {}).get(key) or (None, None)
    return Bar(name, math.nan if row.get(key) is None else float(row[key]), low, high)


def _figures(found: Row) -> str:
    intervals = found.get("intervals", {})
    own = [(key, value) for key, value in found.items() if type(value) in (int, float) and key != "format_version"]
    rows = [(key, value, *(intervals.get(key) or (None, None))) for key, value in own]
    return table(("figure", "median", "95 % from", "to"), rows)


def _distribution(name: str, values: Sequence[float]) -> DrawnLine:
    """The share of requests that took at most so many milliseconds."""
    ordered = sorted(1e3 * value for value in values)
    steps = sorted({round(i * (len(ordered) - 1) / MOST_STEPS) for i in range(MOST_STEPS + 1)}) if ordered else []
    return DrawnLine(name, tuple((ordered[i], (i + 1) / len(ordered)) for i in steps))


def _answered(row: Row, word: str) -> list[float]:
    """Times of the requests of a load that did not fail."""
    asked = row["requests"]
    return [seconds for seconds, error in zip(asked[word], asked["errors"], strict=True) if not error]


def _serve(found: Row) -> str:
    rows = found["rows"]
    rated = all(not isinstance(row["request_rate"], str) for row in rows)
    key, name = ("request_rate", "requests/s offered") if rated else ("max_concurrency", "streams")
    label = lambda row: f"{number(float(row[key]))} {'a second' if rated else 'streams'}" if row[key] else "all"  # noqa: E731
    out = ""
    if len(rows) > 1:
        of = lambda y: tuple((float(row[key]), float(row[y])) for row in rows if row.get(y) is not None)  # noqa: E731
        out += lines([DrawnLine("", of("output_throughput"))], name, "tokens/s")
        times = [DrawnLine(f"{word} {q}", of(f"{q}_{word}_ms")) for word in ("ttft", "tpot") for q in ("median", "p99")]
        out += lines(times, name, "milliseconds")
    for word, text in (("ttfts", "to the first token"), ("e2els", "to the last")):
        drawn = [_distribution(label(row), took) for row in rows[:MOST_LINES] if (took := _answered(row, word))]
        out += f"<h3>Share of requests, time {text}</h3>{lines(drawn, 'milliseconds', 'share')}"
    if len(rows) > MOST_LINES:
        out += f"<p class=s>Distributions are those of the first {MOST_LINES} of {len(rows)} loads.</p>"
    heads = (name, "requests/s", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "failed")
    keys = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    knee = f"<p>Knee: {knee_text(found['knee'], found['knee_below'])}</p>" if "knee" in found else ""
    return out + knee + table(heads, [(label(row), *(row[k] for k in keys), row["failed"]) for row in rows])


def _ablate(found: Row) -> str:
    worth = [(row["part"], row["worth"]["output_throughput"]) for row in found["rows"]]
    drawn = [Bar(name, one["ratio"], one["low"], one["high"]) for name, one in worth if one["ratio"] is not None]
    rows = [
        (
            row["part"],
            row["output_throughput"],
            ratio_text(row["worth"]["output_throughput"]),
            row["worth"]["output_throughput"]["says"],
            ", ".join(row["sets"]),
        )
        for row in found["rows"]
    ]
    head = "<h3>Throughput with the part over that without it</h3>"
    return head + bars(drawn, "what each part is worth", 1.0) + table(("without", "tokens/s", "worth", "", "by"), rows)


def _compare(found: Row) -> str:
    rows = found["rows"]
    out = "<h3>Tokens a second</h3>" + bars([_bar(row["name"], row, "output_throughput") for row in rows], "tokens/s")
    scored = [row for row in rows if (row["quality"] or {}).get("perplexity")]
    if scored:
        points = [DrawnLine(r["name"], ((r["output_throughput"], r["quality"]["perplexity"]),)) for r in scored]
        drawn = lines(points, "tokens/s", "perplexity (lower is better; not from 0)", joined=False)
        out += f"<h3>Quality and speed</h3>{drawn}"
    heads = ("configuration", "tokens/s", "over the first", "", "TTFT ms", "weights MiB", "perplexity", "KL", "top-1")
    told = []
    for row in rows:
        one = row["against_first"].get("output_throughput")
        own = row["quality"] or {}
        scores = map(own.get, ("perplexity", "kl", "top1_agreement"))
        over = (ratio_text(one), one["says"]) if one else ("", "")
        sizes = (row["median_ttft_ms"], row["weight_bytes"] / 2**20)
        told.append((row["name"], row["output_throughput"], *over, *sizes, *scores))
    return out + table(heads, told)


def _latency(found: Row) -> str:
    rows = found["rows"]
    drawn = [_bar(f"{row['input_len']} tokens, batch {row['batch_size']}", row, "latency") for row in rows]
    keys = ("input_len", "batch_size", "latency", "median_ttft_ms", "median_tpot_ms")
    heads = ("prompt", "batch", "latency s", "TTFT ms", "TPOT ms")
    return "<h3>Seconds of a batch</h3>" + bars(drawn, "latency") + table(heads, [[r[k] for k in keys] for r in rows])


def _memory(found: Row) -> str:
    names = (
        ("weight_bytes", "weights"),
        ("kv_peak_bytes", "KV cache, held"),
        ("rest_bytes", "activations and the rest"),
    )
    drawn = [Bar(f"{text}, MiB", found[key] / 2**20) for key, text in names if found.get(key) is not None]
    return stack(drawn, "memory at the peak") + _figures(found)


def _about(name: str, found: Row) -> str:
    """What was measured, where and when."""
    bill = found.get("bill_of_materials") or next(iter((found.get("bills_of_materials") or {}).values()), None)
    parts = [name, str(found.get("date", ""))]
    if bill:
        own = bill["machine"]
        parts += [
            own.get("gpu") or own["cpu"],
            f"torch {bill['versions']['torch']}",
            f"fingerprint {bill['fingerprint'][:12]}",
        ]
    states = found.get("machine_states") or [{}]
    if others := [state["cores_of_others"] for state in states if state.get("cores_of_others") is not None]:
        parts.append(f"others used {max(others):.2f} cores at most")
    if found.get("joules_per_output_token") is None:
        parts.append("energy unknown")
    return "; ".join(filter(None, parts))
