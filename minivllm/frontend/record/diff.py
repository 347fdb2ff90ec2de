"""Compare the bills of materials of two runs: the differences, their consequences, and a summary in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from minivllm.errors import brief

from . import Entries, JsonObject, values
from .nodes import GROUPS, LOOK_ON, SEVERAL, DiffNode, nodes, show

NOTHING = "nothing that decides the tokens differs"
PLURAL = ("prompts", *SEVERAL)
MOST_NAMED = 6  # largest number of differing plug-ins that the verdict names; the list below names all
LONGEST_LINE = 10_000  # largest number of characters of a line of the report
MOST_VALUES = 2  # largest number of values that the verdict shows
SAME, OTHER, UNKNOWN = "same", "other", "unknown"


@dataclass(frozen=True)
class Difference:
    """A difference between the bills of materials of two runs; ``a`` and ``b`` are its values as text.

    ``follows`` names the differences that caused it; a difference with a cause is not part of the verdict.  ``counts``
    is whether it can change the tokens; the verdict then calls it ``subject``.  ``requested`` means that the user set
    different values, so that the difference is intended.
    """

    name: str
    group: str
    subject: str
    a: str
    b: str
    follows: tuple[str, ...] = ()
    counts: bool = True
    requested: bool = False


@dataclass(frozen=True)
class Comparison:
    """The result of comparing the bills of materials of two runs."""

    differences: tuple[Difference, ...]
    tokens: str  # "same", "other" or "unknown"
    tokens_text: str
    results: tuple[tuple[str, Any, Any], ...]  # (name, a, b) of measurements that differ
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # plug-ins without known source or values, which may hide a change
    # "name: a -> b" for each value that a plug-in read, if the plug-in differs in nothing else
    values: tuple[str, ...] = ()

    @property
    def subjects(self) -> tuple[str, ...]:
        """Return the names of the differences that count and are not consequences, without duplicates."""
        return tuple(dict.fromkeys(d.subject for d in self.differences if d.counts and not d.follows))

    @property
    def verdict(self) -> str:
        """Return the summary in one line: which parts of the runs differ, with values, and whether anything is
        unknown."""
        names = list(self.subjects)
        if self.unknown:
            unknown = f"unknown whether {' and '.join(self.unknown)} {_differ_verb(self.unknown)}"
            others = f"{', '.join(names)} {_differ_verb(names)}" if names else "nothing else differs"
            return f"{unknown}; {others}"
        if not names:
            return NOTHING
        shown = list(self.values[:MOST_VALUES])
        if len(self.values) > MOST_VALUES:
            shown.append("...")
        values = f" ({', '.join(shown)})" if shown else ""
        if len(names) == 1:
            verb = "differ" if names[0] in PLURAL else "differs"
            return f"only {names[0]} {verb}{values}"
        if len(names) > MOST_NAMED:
            rest = len(names) - MOST_NAMED + 1
            names = [*names[: MOST_NAMED - 1], f"{rest} more"]
        return f"{', '.join(names[:-1])} and {names[-1]} differ{values}"

    def as_dict(self) -> Entries:
        """Return the comparison as a JSON object."""
        found: Entries = {"verdict": self.verdict, "subjects": list(self.subjects)}
        found["unknown"] = list(self.unknown)
        found["tokens"] = self.tokens
        found["differences"] = [asdict(difference) for difference in self.differences]
        found["results"] = {name: {"a": a, "b": b} for name, a, b in self.results}
        found["warnings"] = list(self.warnings)
        return found


def _differ_verb(names: Sequence[str]) -> str:
    """Return "differs" for one name, else "differ"."""
    return "differs" if len(names) == 1 else "differ"


def compare(a: JsonObject, b: JsonObject, results: bool = True) -> Comparison:
    """Return the differences between the bills of materials (records of all that affects a run) of two runs.

    ``results`` False leaves out requests and results, for a run that has not begun."""
    left = nodes(a)
    right = nodes(b)
    names = [name for name in {**left, **right} if results or name not in ("prompts", "sampling")]
    pairs = {name: (left.get(name), right.get(name)) for name in names}
    found = _differences(pairs)
    tokens = UNKNOWN
    text = ""
    measured: tuple[tuple[str, Any, Any], ...] = ()
    if results:
        tokens, text = _tokens(a.get("results"), b.get("results"))
        measured = tuple(_measured(a.get("results") or {}, b.get("results") or {}))
    values_found, not_known = _values(a, b)
    other_subjects = {difference.subject for difference in found}
    alone = [d for d in values_found if d.counts and d.subject not in other_subjects]
    value_texts = [f"{d.a.replace(' = ', ': ', 1)} -> {d.b}" for d in alone]
    warnings = list(_warnings(a, b))
    for sentences in not_known.values():
        warnings += sentences
    differences = (*found, *values_found)
    texts = (*value_texts, *_of_machine(found))
    out = Comparison(differences, tokens, text, measured, tuple(warnings), values=texts)
    seams = dict.fromkeys([*_unknown(a, b), *filter(_decides, not_known)])
    subjects = out.subjects
    unknown = tuple(seam for seam in seams if seam not in subjects)
    return replace(out, unknown=unknown)


def _differences(pairs: Mapping[str, tuple[DiffNode | None, DiffNode | None]]) -> list[Difference]:
    """Return the differences of pairs of nodes (comparable values of two bills of materials).  A node is left out if
    the node that owns it differs as well."""
    differing = {name for name, (x, y) in pairs.items() if _differ(x, y)}
    found = []
    for name, (x, y) in pairs.items():
        node = x or y
        if name not in differing or node is None or node.owner in differing:
            continue
        causes = _causes(x, y, differing, pairs)
        requested = x is None or y is None or x.requested != y.requested
        a, b = _shown(x, y)
        found.append(Difference(name, node.group, node.label, a, b, causes, node.counts, requested))
    return found


def _of_machine(found: Iterable[Difference]) -> Iterator[str]:
    """Yield a text "name: a -> b" for each difference of machine or environment that counts and has no cause.

    The verdict calls all of these "the machine"."""
    for difference in found:
        if difference.counts and not difference.follows and difference.subject == "the machine":
            name = difference.name.removeprefix("machine.").removeprefix("environment.")
            yield f"{name}: {difference.a} -> {difference.b}"


def _differ(x: DiffNode | None, y: DiffNode | None) -> bool:
    """Return whether two nodes (comparable values of two bills of materials) differ.  None stands for a node that one
    bill does not have."""
    if x is None or y is None:
        node = x or y
        return node is not None and not node.both
    return x.value != y.value


def _causes(x: DiffNode | None, y: DiffNode | None, differing: set[str], pairs: Mapping[str, tuple]) -> tuple[str, ...]:
    """Return the labels of the differences that caused a difference.  There are none if the user set the value."""
    if x is None or y is None or not _left_open(x, y):
        return ()
    causes = []
    for name in dict.fromkeys([*x.follows, *y.follows]):
        if name not in differing:
            continue
        cause_x, cause_y = pairs[name]
        cause = cause_x or cause_y
        # Attention and block size may be chosen from each other. The one that the user set is then the cause.
        mutual = x.name in (cause_x or x).follows
        if not (mutual and _left_open(cause_x, cause_y)):
            causes.append(cause.label)
    return tuple(dict.fromkeys(causes))


def _left_open(x: DiffNode | None, y: DiffNode | None) -> bool:
    """Return whether the users of both runs left the choice of a value to minivllm, with the same request."""
    return x is not None and y is not None and x.requested == y.requested and x.open and y.open


def _shown(x: DiffNode | None, y: DiffNode | None) -> tuple[str, str]:
    """Return two differing values as text."""
    a = "not set" if x is None else x.text
    b = "not set" if y is None else y.text
    if a == b and x is not None and y is not None:  # the short texts leave out the difference, such as a version
        return show(x.value), show(y.value)
    return a, b


def _tokens(a: JsonObject | None, b: JsonObject | None) -> tuple[str, str]:
    """Return whether both runs generated the same token ids for the same prompts, and a sentence about it."""
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
    only_a: Counter[str] = Counter(a["outputs"]) - Counter(b["outputs"])
    outputs = zip(a["outputs"], b["outputs"], strict=False)
    first = next((number for number, (x, y) in enumerate(outputs, 1) if x != y), 1)
    share = f"{sum(only_a.values()):,} of {a['requests']:,} requests"
    return OTHER, f"the tokens are not the same: {share} differ, the first is request {first:,}"


def _measured(a: JsonObject, b: JsonObject) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, a, b) of the measurements that differ."""
    left = dict(_leaves(a))
    right = dict(_leaves(b))
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            yield name, left.get(name), right.get(name)


def _leaves(values: JsonObject, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (dotted name, value) of results, without hashes and values of single requests."""
    for key, value in values.items():
        if key.endswith("_hash") or key in ("outputs", "joules"):
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}." if key != "stats" else prefix)
        else:
            yield f"{prefix}{key}", value


def _unknown(a: JsonObject, b: JsonObject) -> list[str]:
    """Return the seams (kinds) of the plug-ins that affect tokens and have an unknown or incomplete source."""
    parts = [*a["parts"], *b["parts"]]
    return list(dict.fromkeys(p["seam"] for p in parts if _hidden(p["source"]) and _decides(p["seam"])))


def _decides(seam: str) -> bool:
    """Return whether a plug-in of a seam (kind of plug-in) can change tokens.  Hooks, named ``hooks.NAME``, only
    observe."""
    return seam.partition(".")[0] not in LOOK_ON


def _values(a: JsonObject, b: JsonObject) -> tuple[list[Difference], dict[str, list[str]]]:
    """Compare the values that the code of plug-ins reads, for plug-ins that are in both bills of materials.

    Return the values that differ, and for each kind of plug-in sentences about values that cannot be compared.
    """
    first = bool(a.get("first_engine") and b.get("first_engine"))
    others = {(part["seam"], part["name"]): part for part in b["parts"]}
    found: list[Difference] = []
    not_known: dict[str, list[str]] = {}
    for x in a["parts"]:
        y = others.get((x["seam"], x["name"]))
        if y is None or "values_of" not in x or "values_of" not in y:
            continue
        seam = x["seam"]
        same_source = x["source"]["hash"] == y["source"]["hash"]
        for name, left, right in _value_pairs(x, y, same_source):
            verdict = values.verdict(left, right, first)
            shown = [values.NOT_THERE if value is None else value["shown"] for value in (left, right)]
            if verdict == values.OTHER:
                of_clock = any(value is not None and value["begins"] == values.CLOCK for value in (left, right))
                counts = _decides(seam) and not of_clock
                a_text, b_text = shown
                found.append(Difference(f"{seam} {name}", "parts", seam, f"{name} = {a_text}", b_text, (), counts))
            elif verdict == values.UNKNOWN and same_source:
                texts = " and ".join(dict.fromkeys(shown))
                sentence = f"{name}, which {seam} reads, is {texts}: whether it is the same is not known"
                not_known.setdefault(seam, []).append(sentence)
    return found, not_known


def _value_pairs(x: JsonObject, y: JsonObject, same_source: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value in x, value in y) of the values that a plug-in's code reads, None for a missing value.

    ``x`` and ``y`` are the entries of the plug-in in two bills of materials.  Values of modules that one run had not
    loaded are skipped.  If the sources differ, names that only one entry has are skipped too, because the other source
    does not contain them.
    """
    for name in {**x["values"], **y["values"]}:
        left = x["values"].get(name)
        right = y["values"].get(name)
        if not _has_loaded(x, name) or not _has_loaded(y, name):
            continue
        if same_source or (left is not None and right is not None):
            yield name, left, right


def _has_loaded(part: JsonObject, name: str) -> bool:
    """Return whether a plug-in had loaded the module of a value."""
    return any(name.startswith(f"{module}.") for module in part["values_of"])


def _hidden(source: JsonObject) -> bool:
    """Return whether a plug-in may have changed in something that its hash does not cover."""
    return not source["hash"] or "missing" in source


def _warnings(a: JsonObject, b: JsonObject) -> Iterator[str]:
    """Yield sentences about unknown sources, sources that changed during a run, and errors of a run."""
    for which, bill in (("a", a), ("b", b)):
        for part in bill["parts"]:
            if _hidden(part["source"]):
                reason = part["source"].get("missing", "no source")
                yield f"{which}: the source of {part['seam']} is not known ({reason}), so a change in it cannot be seen"
        if bill["changed_sources"]:
            names = ", ".join(bill["changed_sources"])
            yield f"{which}: files of {names} changed during the run: it may have used the older text"
        results = bill.get("results") or {}
        if error := results.get("error"):
            yield f"{which}: not all went well: {error}"


def report(found: Comparison, title_a: str, title_b: str) -> str:
    """Return the text of ``minivllm diff``: the verdict, the tokens, then the differences, group by group."""
    lines = [found.verdict]
    if found.tokens_text:
        lines.append(found.tokens_text)
    lines += ["", f"  a  {title_a}", f"  b  {title_b}"]
    rows: dict[str, list[tuple[str, str]]] = {}
    for difference in found.differences:
        name = difference.name.removeprefix("versions.").removeprefix("machine.")
        if difference.group == "parts":
            name = difference.subject
        rows.setdefault(difference.group, []).append((name, _line(difference)))
    for name, x, y in found.results:
        text = _noted(f"{show(x)} -> {show(y)}", _change(x, y))
        rows.setdefault("results", []).append((name, text))
    width = max((len(name) for group in rows.values() for name, _ in group), default=0)
    for group in (*GROUPS, "results"):
        if group in rows:
            lines += ["", group]
            lines += [f"  {name:{width}}  {text}" for name, text in rows[group]]
    if found.warnings:
        lines += ["", *found.warnings]
    # a value of a record may contain control characters of terminals
    return "\n".join(brief(line, LONGEST_LINE) for line in lines)


def _line(difference: Difference) -> str:
    """Return the values of a difference, with a note if it is not part of the verdict."""
    note = "" if difference.counts else "not counted"
    if difference.follows:
        note = f"follows from {', '.join(difference.follows)}"
    return _noted(f"{difference.a} -> {difference.b}", note)


def _noted(text: str, note: str) -> str:
    """Return a text with a note in parentheses, unless the note is empty."""
    return f"{text}   ({note})" if note else text


def _change(x: Any, y: Any) -> str:
    """Return the relative change of a measured number, "" for values that are not numbers."""
    if isinstance(x, (int, float)) and isinstance(y, (int, float)) and x > 0:
        return f"{100 * (y - x) / x:+.1f} %"
    return ""
