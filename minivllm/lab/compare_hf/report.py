"""Format a comparison as text: a table of errors, the tokens, and the first point that differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .errors import DtypeComparison, EngineRun, PointError, TokenTally, explain
from .points import RESIDUAL, layer_point, place, split

MOST_NAMED = 8  # largest number of points, and of tokens, that the report names


def lines(found: DtypeComparison, prompts: Sequence[EngineRun]) -> Iterator[str]:
    """Yield the lines of the report for one dtype: its table, its tokens and its verdict."""
    tokens = sum(len(run.ids) for run in prompts)
    plural = "s" if len(prompts) != 1 else ""
    size = f"{len(prompts)} prompt{plural}, {tokens} tokens"
    yield f"{found.dtype}: {size}; relative errors of each operation, bound {found.bound:g}"
    yield from table(found)
    for reason in dict.fromkeys(found.missing.values()):
        names = [operation for operation, other in found.missing.items() if other == reason]
        yield f"not compared: {', '.join(names)} ({reason})"
    yield from _tokens(found.tokens)
    beyond = found.beyond
    if not beyond:
        tokens_too = "" if found.within else ", the tokens are not"
        yield f"{found.dtype}: every operation is within the bound{tokens_too}"
        return
    first = beyond[0]
    yield f"{found.dtype}: first difference at {first.point}: {explain(found)}"
    bound = found.bound_of(first.point)
    where = f"from token {first.position} of prompt {first.prompt + 1} on"
    yield f"  relative {first.relative:.1e}, bound {bound:.2g}, largest difference {first.largest:.1e}, {where}"
    others = [e.point for e in beyond[1:]]
    if others:
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        yield f"  beyond the bound too: {', '.join(others[:MOST_NAMED])}{more}"


def _tokens(tally: TokenTally) -> Iterator[str]:
    """Yield the lines about greedy tokens."""
    ties = f", {tally.ties} within the bound of it" if tally.ties else ""
    yield f"greedy tokens: {tally.same} of {tally.count} are transformers' best{ties}"
    for prompt, number, ours, theirs, margin in tally.differing[:MOST_NAMED]:
        yield f"  prompt {prompt + 1}, token {number}: {ours} here, {theirs} there; its logit is higher by {margin:.2g}"


def table(found: DtypeComparison) -> list[str]:
    """Return a table with a row per layer and a column per operation, and a table of the points outside the layers.

    The last rows of the first table hold the largest error of each column, relative and absolute.
    """
    layers: dict[int, dict[str, PointError]] = {}
    outside: dict[str, PointError] = {}
    for point in sorted(found.errors, key=place):
        layer, operation = split(point)
        row = outside if layer is None else layers.setdefault(layer, {})
        row[operation] = found.errors[point]
    columns = list(dict.fromkeys(name for row in layers.values() for name in row))
    rows = [["layer", *columns, "along"]]
    for layer, row in layers.items():
        cells = [_number(row[name].relative) if name in row else "-" for name in columns]
        along = _along(found, layer_point(layer, RESIDUAL))
        rows.append([str(layer), *cells, along])
    relative = ["largest"]
    absolute = ["absolute"]
    for name in columns:
        errors = [row[name] for row in layers.values() if name in row]
        relative.append(_number(max(e.relative for e in errors)))
        absolute.append(_number(max(e.largest for e in errors)))
    rows += [[*relative, ""], [*absolute, ""]]
    rest = [["", "relative", "absolute", "along"]]
    for operation, error in outside.items():
        numbers = [_number(error.relative), _number(error.largest)]
        rest.append([operation, *numbers, _along(found, operation)])
    return [*align(rows), *align(rest)]


def _along(found: DtypeComparison, point: str) -> str:
    """Return the error ``along`` of a point (a named tensor of the model), "" if it has none."""
    if point not in found.along:
        return ""
    return _number(found.along[point].relative)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines whose columns have equal width."""
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        columns.append([cell.ljust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"
