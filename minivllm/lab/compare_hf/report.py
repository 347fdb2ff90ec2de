"""A comparison as text: a table of errors, the tokens, and the first place that parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .errors import DtypeComparison, EngineRun, PointError, TokenTally, explained
from .points import RESIDUAL, layer_point, place, split

MOST_NAMED = 8  # places, and tokens


def lines(found: DtypeComparison, prompts: Sequence[EngineRun]) -> Iterator[str]:
    """A dtype's table and verdict."""
    tokens = sum(len(run.ids) for run in prompts)
    many = f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}, {tokens} tokens"
    yield f"{found.dtype}: {many}; relative errors of each operation, bound {found.bound:g}"
    yield from table(found)
    for why in dict.fromkeys(found.missing.values()):
        names = ", ".join(operation for operation, other in found.missing.items() if other == why)
        yield f"not compared: {names} ({why})"
    yield from _tokens(found.tokens)
    if not (beyond := found.beyond):
        yield f"{found.dtype}: every operation is within the bound" + (", the tokens are not" * (not found.within))
        return
    first = beyond[0]
    where = f"from token {first.position} of prompt {first.prompt + 1} on"
    yield f"{found.dtype}: parts first at {first.point}: {explained(found)}"
    bound = found.bound_of(first.point)
    yield f"  relative {first.relative:.1e}, bound {bound:.2g}, largest difference {first.largest:.1e}, {where}"
    if rest := [e.point for e in beyond[1:]]:
        more = f" and {len(rest) - MOST_NAMED} more" if len(rest) > MOST_NAMED else ""
        yield f"  beyond the bound too: {', '.join(rest[:MOST_NAMED])}{more}"


def _tokens(tally: TokenTally) -> Iterator[str]:
    ties = f", {tally.ties} within the bound of it" * bool(tally.ties)
    yield f"greedy tokens: {tally.same} of {tally.count} are transformers' best{ties}"
    for prompt, at, ours, theirs, more in tally.differing[:MOST_NAMED]:
        yield f"  prompt {prompt + 1}, token {at}: {ours} here, {theirs} there, whose logit is higher by {more:.2g}"


def table(found: DtypeComparison) -> list[str]:
    """A row a layer, a column an operation; then the largest of each column, relative and absolute."""
    layers: dict[int, dict[str, PointError]] = {}
    single: dict[str, PointError] = {}
    for point, error in sorted(found.errors.items(), key=lambda item: place(item[0])):
        layer, operation = split(point)
        (single if layer is None else layers.setdefault(layer, {}))[operation] = error
    columns = list(dict.fromkeys(name for row in layers.values() for name in row))
    rows = [["layer", *columns, "along"]]
    for layer, row in layers.items():
        along = _along(found, layer_point(layer, RESIDUAL))
        rows.append([str(layer), *(_number(row[name].relative) if name in row else "-" for name in columns), along])
    for title, kind in (("largest", "relative"), ("absolute", "largest")):
        most = [max(getattr(row[name], kind) for row in layers.values() if name in row) for name in columns]
        rows.append([title, *map(_number, most), ""])
    rest = [["", "relative", "absolute", "along"]]
    for operation, error in single.items():
        rest.append([operation, _number(error.relative), _number(error.largest), _along(found, operation)])
    return [*aligned(rows), *aligned(rest)]


def _along(found: DtypeComparison, point: str) -> str:
    return _number(found.along[point].relative) if point in found.along else ""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"
