"""Compare two bills: what differs, what follows from what, and one line that says it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import values
from .nodes import GROUPS, LOOK_ON, SEVERAL, DiffNode, nodes, show

NOTHING = "nothing that decides the tokens differs"
PLURAL = ("prompts", *SEVERAL)
MOST_NAMED, MOST_VALUES = 6, 2  # in the verdict; the groups below it name all
SAME, OTHER, UNKNOWN = "same", "other", "unknown"


@dataclass(frozen=True)
class Difference:
    """``follows``: it is a consequence of these, and no difference of its own.  ``counts``: it is part of the verdict,
    by the name ``subject``.  ``asked``: two different things were asked for, so somebody wanted it."""

    name: str
    group: str
    subject: str
    a: str
    b: str
    follows: tuple[str, ...] = ()
    counts: bool = True
    asked: bool = False


@dataclass(frozen=True)
class Comparison:
    differences: tuple[Difference, ...]
    tokens: str  # same | other | unknown
    tokens_text: str
    results: tuple[tuple[str, Any, Any], ...]  # what was measured, where it differs
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # parts that a change in cannot be seen of: nobody knows their source or a value
    values: tuple[str, ...] = ()  # "name: a -> b" of what a part read, where nothing else of the part differs

    @property
    def subjects(self) -> tuple[str, ...]:
        """What differs by itself, each once."""
        return tuple(dict.fromkeys(d.subject for d in self.differences if d.counts and not d.follows))

    @property
    def verdict(self) -> str:
        names = list(self.subjects)
        if self.unknown:
            known = f"{', '.join(names)} differ{'s' * (len(names) == 1)}" if names else "nothing else differs"
            return f"unknown whether {' and '.join(self.unknown)} differ{'s' * (len(self.unknown) == 1)}; {known}"
        if not names:
            return NOTHING
        some = [*self.values[:MOST_VALUES], *(["..."] if len(self.values) > MOST_VALUES else [])]
        read = f" ({', '.join(some)})" if some else ""
        if len(names) == 1:
            return f"only {names[0]} {'differ' if names[0] in PLURAL else 'differs'}{read}"
        if len(names) > MOST_NAMED:
            names = [*names[: MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} more"]
        return f"{', '.join(names[:-1])} and {names[-1]} differ{read}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "subjects": list(self.subjects),
            "unknown": list(self.unknown),
            "tokens": self.tokens,
            "differences": [asdict(d) for d in self.differences],
            "results": {name: {"a": a, "b": b} for name, a, b in self.results},
            "warnings": list(self.warnings),
        }


def compare(a: Mapping[str, Any], b: Mapping[str, Any], results: bool = True) -> Comparison:
    """``results=False`` leaves out what was asked of the engine and what came out, for a run that has not begun."""
    left, right = nodes(a), nodes(b)
    names = [n for n in dict.fromkeys([*left, *right]) if results or n not in ("prompts", "sampling")]
    pairs = {n: (left.get(n), right.get(n)) for n in names}
    differing = {n for n, (x, y) in pairs.items() if _differ(x, y)}
    found = []
    for name in names:
        x, y = pairs[name]
        node = x or y
        if name not in differing or node is None or node.owner in differing:
            continue
        causes = _causes(x, y, differing, pairs)
        asked = x is None or y is None or x.asked != y.asked
        found.append(Difference(name, node.group, node.label, *_told_apart(x, y), causes, node.counts, asked))
    tokens, text = _tokens(a.get("results"), b.get("results")) if results else (UNKNOWN, "")
    measured = tuple(_measured(a.get("results") or {}, b.get("results") or {})) if results else ()
    read, not_known = _values(a, b)
    alone = [d for d in read if d.counts and d.subject not in {other.subject for other in found}]
    out = Comparison(
        (*found, *read),
        tokens,
        text,
        measured,
        (*_warnings(a, b), *(text for texts in not_known.values() for text in texts)),
        values=(*(f"{d.a.replace(' = ', ': ', 1)} -> {d.b}" for d in alone), *_of_machine(found)),
    )
    unknown = dict.fromkeys([*_unknown(a, b), *(seam for seam in not_known if _decides(seam))])
    return replace(out, unknown=tuple(n for n in unknown if n not in out.subjects))


def _of_machine(found: Iterable[Difference]) -> Iterator[str]:
    """Yield what differs of machine and environment, which the verdict calls by one name."""
    for d in found:
        if d.counts and not d.follows and d.subject == "the machine":
            name = d.name.removeprefix("machine.").removeprefix("environment.")
            yield f"{name}: {d.a} -> {d.b}"


def _differ(x: DiffNode | None, y: DiffNode | None) -> bool:
    if x is None or y is None:
        node = x or y
        return node is not None and not node.both
    return x.value != y.value


def _causes(x: DiffNode | None, y: DiffNode | None, differing: set[str], pairs: Mapping[str, tuple]) -> tuple[str, ...]:
    """What a difference follows from; nothing if somebody asked for it."""
    if not _left_open(x, y):
        return ()
    assert x is not None and y is not None
    causes = [n for n in dict.fromkeys([*x.follows, *y.follows]) if n in differing]
    # of two that may follow from each other (attention, block size) only the one that was asked for is a cause
    causes = [n for n in causes if not (_left_open(*pairs[n]) and x.name in (pairs[n][0] or x).follows)]
    return tuple(dict.fromkeys((pairs[n][0] or pairs[n][1]).label for n in causes))


def _left_open(x: DiffNode | None, y: DiffNode | None) -> bool:
    return x is not None and y is not None and x.asked == y.asked and x.open and y.open


def _told_apart(x: DiffNode | None, y: DiffNode | None) -> tuple[str, str]:
    shown = ("not set" if x is None else x.text, "not set" if y is None else y.text)
    if shown[0] == shown[1] and x is not None and y is not None:  # what differs is in what is not shown, say, a version
        return show(x.value), show(y.value)
    return shown


def _tokens(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> tuple[str, str]:
    """Whether both runs gave the same token ids to the same prompts."""
    if not a or not b:
        return UNKNOWN, "the tokens cannot be compared: a record holds no results"
    if not a["requests"] or not b["requests"]:
        return UNKNOWN, "the tokens cannot be compared: a run had no requests"
    count = f"{b['output_tokens']:,} in {b['requests']:,} requests"
    unfinished = a["unfinished"] or b["unfinished"]
    if a["tokens_hash"] == b["tokens_hash"] and not unfinished:
        return SAME, f"the tokens are the same: {count}"
    if a["prompts_hash"] != b["prompts_hash"]:
        return UNKNOWN, "the tokens cannot be compared: the prompts differ"
    if unfinished:
        return UNKNOWN, "the tokens cannot be compared: a run has requests that have not ended"
    if not a["outputs"] or not b["outputs"]:
        return OTHER, f"the tokens are not the same: {count}"
    differ = sum((Counter(a["outputs"]) - Counter(b["outputs"])).values())
    first = next((i for i, (x, y) in enumerate(zip(a["outputs"], b["outputs"], strict=False), 1) if x != y), 1)
    of = f"{differ:,} of {a['requests']:,} requests"
    return OTHER, f"the tokens are not the same: {of} differ, the first is request {first:,}"


def _measured(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    left, right = dict(_leaves(a)), dict(_leaves(b))
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) != right.get(name):
            yield name, left.get(name), right.get(name)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if key.endswith("_hash") or key in ("outputs", "joules"):  # a value a request
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}." if key != "stats" else prefix)
        else:
            yield f"{prefix}{key}", value


def _unknown(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Seams of the parts whose source is not known, or not all of it; those that look on decide nothing."""
    parts = [part for bill in (a, b) for part in bill["parts"]]
    return list(dict.fromkeys(p["seam"] for p in parts if _hidden(p["source"]) and _decides(p["seam"])))


def _decides(seam: str) -> bool:
    return seam.partition(".")[0] not in LOOK_ON  # one of several is ``hooks.NAME``


def _values(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[Difference], dict[str, list[str]]]:
    """What the code of a part that both have reads: values that differ, and, by seam, sentences about those of which
    nobody knows.  Where the sources differ too, it is no wonder that a name of one is not in the other."""
    first = bool(a.get("first_engine") and b.get("first_engine"))
    others = {(part["seam"], part["name"]): part for part in b["parts"]}
    found: list[Difference] = []
    not_known: dict[str, list[str]] = {}
    for x in a["parts"]:
        y = others.get((x["seam"], x["name"]))
        if y is None or "values_of" not in x or "values_of" not in y:
            continue
        seam, same = x["seam"], x["source"]["hash"] == y["source"]["hash"]
        for name in dict.fromkeys([*x["values"], *y["values"]]):
            one, other = x["values"].get(name), y["values"].get(name)
            known = all(any(name.startswith(f"{module}.") for module in part["values_of"]) for part in (x, y))
            if not known or (not same and (one is None or other is None)):
                continue  # its module was not loaded in one of them
            says = values.verdict(one, other, first)
            shown = [values.NOT_THERE if v is None else v["shown"] for v in (one, other)]
            if says == values.OTHER:
                clock = any(v is not None and v["begins"] == values.CLOCK for v in (one, other))
                counts = _decides(seam) and not clock
                found.append(Difference(f"{seam} {name}", "parts", seam, f"{name} = {shown[0]}", shown[1], (), counts))
            elif says == values.UNKNOWN and same:
                what = " and ".join(dict.fromkeys(shown))
                text = f"{name}, which {seam} reads, is {what}: whether it is the same is not known"
                not_known.setdefault(seam, []).append(text)
    return found, not_known


def _hidden(source: Mapping[str, Any]) -> bool:
    """Whether a part may differ in what the hash does not cover."""
    return not source["hash"] or "missing" in source


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for which, bill in (("a", a), ("b", b)):
        for part in bill["parts"]:
            if _hidden(part["source"]):
                why = part["source"].get("missing", "no source")
                yield f"{which}: the source of {part['seam']} is not known ({why}), so a change in it cannot be seen"
        if bill["changed_sources"]:
            names = ", ".join(bill["changed_sources"])
            yield f"{which}: files of {names} were changed while the run went on: what ran may be the older text"
        if error := (bill.get("results") or {}).get("error"):
            yield f"{which}: not all went well: {error}"


def report(found: Comparison, title_a: str, title_b: str) -> str:
    """The text of ``minivllm diff``: the verdict, the tokens, then what differs, group by group."""
    lines = [*filter(None, [found.verdict, found.tokens_text]), "", f"  a  {title_a}", f"  b  {title_b}"]
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for d in found.differences:
        name = d.subject if d.group == "parts" else d.name.removeprefix("versions.").removeprefix("machine.")
        note = f"follows from {', '.join(d.follows)}" if d.follows else "" if d.counts else "not counted"
        rows.setdefault(d.group, []).append((name, f"{d.a} -> {d.b}", note))
    rows["results"] = [(name, f"{show(x)} -> {show(y)}", _change(x, y)) for name, x, y in found.results]
    width = max([len(row[0]) for group in rows.values() for row in group] + [0])
    for group in (*GROUPS, "results"):
        if rows.get(group):
            lines += ["", group]
            lines += [f"  {name:{width}}  {text}{f'   ({note})' if note else ''}" for name, text, note in rows[group]]
    return "\n".join([*lines, *(["", *found.warnings] if found.warnings else [])])


def _change(x: Any, y: Any) -> str:
    """By how much a measured number moved."""
    if isinstance(x, (int, float)) and isinstance(y, (int, float)) and x > 0:
        return f"{100 * (y - x) / x:+.1f} %"
    return ""
