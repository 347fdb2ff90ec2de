"""Write one page a seam, from its interface and the conformance kit: ``python docs/plugins/make.py``.

A page is what an author must know: the contract as the source states it, with the bodies of methods left out, what a
spec may say, and every rule that the kit holds a plug-in to.  ``tests/docs/test_plugin_pages.py`` checks
that they are up to date.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from minivllm.registration.spec import ASKED, KINDS, OPTION_OF, Kind  # noqa: E402
from minivllm.testing.scaffold import about  # noqa: E402

HERE = Path(__file__).parent
TESTING = ROOT / "minivllm" / "testing"
FACTS = {  # what the values of a fact are
    "architecture": "what config.json calls the model's class",
    "block": "tokens of a KV block; asked only if the user set `kvcache_block_size`",
    "checkpoint": "the quantization method that config.json names, `none` without one",
    "device": "`cpu` or `cuda`",
    "dim_qk": "elements of a head's queries and keys; a set where layers differ, of which each must be allowed",
    "dim_v": "elements of a head's values; a set where layers differ",
    "dtype": "of the activations: `float32`, `bfloat16`, `float16`",
    "holds": "the dtype that must be stored without loss; asked only if the user left the KV format open",
    "kv_format": "`bf16`, `fp16`, `fp32`, `int8`, `fp8`, or `dist/name` of a format from a package",
    "model_type": "which config class of transformers the model has",
    "queries_per_kv": "query heads that share a KV head; a set where layers differ",
    "sm": "10 * major + minor of the GPU's compute capability; asked on CUDA only",
    "tensor_parallel_size": "processes that share a model",
}
PLANS = ("Join", "Delta", "StepPlan", "LateInputs", "LogProbs", "StepError", "StepResult")
VIEWS = (
    "EngineView", "RequestView", "PlannedStep", "FinishedStep", "PreemptionView", "BlocksView", "RequestEnd",
)  # fmt: skip
# seam -> (what its classes or functions are for, their file, their names; none: all public ones) that its contract uses
MORE: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "attention": [("The shape of a layer", "core/interfaces/attnspec.py", ("AttnSpec",))],
    "executor": [
        ("A chosen plug-in", "registration/spec.py", ("Part",)),
        ("Plans and results", "core/interfaces/plan.py", PLANS),
    ],
    "hooks": [("What hooks are given", "runtime/hooks/views.py", VIEWS)],
    "kvformat": [("The layer whose keys and values are stored", "core/interfaces/attnspec.py", ("AttnSpec",))],
    "model": [
        ("A decoder as a table", "core/interfaces/decoder.py", ()),
        ("`fields`: what config.json says, read for the table", "device/layers/fields.py", ()),
    ],
    "quantizer": [
        ("Helpers of a scheme", "device/layers/linear.py", ("part_rows", "no_adapter")),
        ("Checks of a scheme", "device/layers/module.py", ("check_shape",)),
    ],
    "sampler": [("Noise", "device/worker/sampling.py", ("noise_bits", "noise", "gumbel"))],
}


def page(kind: Kind) -> str:
    module, _, base = kind.base.partition(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    file = file if file.is_file() else file.with_suffix("") / "contract.py"
    source = file.read_text(encoding="utf-8")
    name, option = kind.name, OPTION_OF.get(kind.name, kind.name)
    lines = [
        f"# The seam `{name}`: contract {kind.api[0]}.{kind.api[1]}",
        "",
        f"<!-- written by docs/plugins/make.py from {file.relative_to(ROOT)}: do not edit -->",
        "",
        f"A plug-in is a subclass of `minivllm.plugin.{base}`, offered by the entry-point group",
        f"`{kind.group}` and chosen with the option `{option}`. [The overview](../plugins.md) says what a spec is and",
        "how a name is resolved, [the tutorial](tutorial.md) goes from nothing to a package. The classes on this page",
        "are names of `minivllm.plugin`.",
        "",
        f"A package that works, to start from ({about(name)['summary']}):",
        "",
        "```bash",
        f"minivllm plugins new my-{name} --seam {name}",
        "```",
        "",
        "## The contract",
        "",
        *text(ast.get_docstring(ast.parse(source)) or ""),
        "",
        "```python",
        *stubs(source, base),
        "```",
        "",
        *(line for title, path, names in MORE.get(name, ()) for line in more(title, path, names)),
        *claims(kind),
        "## What the conformance kit demands",
        "",
        *suite(name),
        "",
    ]
    return "\n".join(lines)


def text(docstring: str) -> Iterator[str]:
    """A docstring as Markdown: its double backquotes become single ones, what follows '::' a block."""
    for part in re.split(r"\n\n(?! )|(?<=::)\n\n", docstring):
        if part.startswith("    "):
            yield from ("```text", *(line[4:] for line in part.splitlines()), "```", "")
        else:
            yield from (re.sub(r"``(.+?)``", r"`\1`", part.replace("::", ":"), flags=re.S), "")


# ---- source --------------------------------------------------------------------------------------------------------


def stubs(source: str, base: str) -> list[str]:
    """The classes of an interface without the bodies of their methods; of a file with two seams what ``base`` needs."""
    lines, tree = source.splitlines(), ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    other = {"Processor": {"Sampler", "Draw"}}.get(base, set())
    constants = [node for node in tree.body if isinstance(node, ast.Assign)]
    out = [line for node in constants for line in lines[node.lineno - 1 : node.end_lineno]]
    for node in classes:
        if node.name not in other:
            out += ["", *stub(node, lines)]
    return out


def more(title: str, path: str, names: tuple[str, ...]) -> Iterator[str]:
    """Write a section with public classes, functions and constants of another file."""
    source = (ROOT / "minivllm" / path).read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    yield from (f"### {title}", "", f"From `minivllm/{path}`.", "")
    if not names:
        yield from text(ast.get_docstring(tree) or "")
    yield "```python"
    for node in tree.body:
        public = [name for name in defined(node) if not name.startswith("_") and name != "API"]
        if not public or (names and not set(names) & set(public)):
            continue
        if isinstance(node, ast.ClassDef):
            yield from ("", *stub(node, lines), "")
        elif isinstance(node, ast.FunctionDef):
            yield from ("", *(line.replace("        ...", "    ...") for line in method(node, lines, node.lineno - 1)))
        elif not names:
            first = node.lineno - 1
            while lines[first - 1].startswith("# "):  # the comment above a constant
                first -= 1
            yield from lines[first : node.end_lineno]
    yield from ("```", "")


def defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    targets = [name for target in getattr(node, "targets", ()) for name in ast.walk(target)]
    return [name.id for name in targets if isinstance(name, ast.Name)]


def stub(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """One class: its fields with their comments, its methods up to the end of their docstrings."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    out, at = [], first - 1
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            start = min([item.lineno, *(d.lineno for d in item.decorator_list)]) - 1
            out += lines[at:start]
            if item.name != "__post_init__":
                out += method(item, lines, start)
            at = item.end_lineno or start
    out += lines[at : node.end_lineno]
    return [re.sub(r"  # noqa.*$", "", line) for line in "\n".join(out).rstrip().splitlines()]


def method(item: ast.FunctionDef, lines: list[str], start: int) -> list[str]:
    body = item.body[0]
    if ast.get_docstring(item) is not None:
        return [*lines[start : body.end_lineno], *(["        ..."] if len(item.body) > 1 else [])]
    if body.lineno == item.lineno:
        return lines[start : item.lineno]
    return [*lines[start : body.lineno - 1], "        ..."]


def claims(kind: Kind) -> Iterator[str]:
    yield from ("## What a spec says", "")
    if kind.facts:
        yield "`limits` names each of these facts, with the values that it serves (`ANY` for all); what is left out"
        yield "is refused:"
        yield ""
        yield from (f"- `{fact}`: {FACTS[fact]}" for fact in kind.facts)
        yield ""
    else:
        yield from ("Nothing is asked of `limits`.", "")
    for title, names in (("`features`, promises that the kit tests", kind.features), ("`traits`", kind.traits)):
        if names:
            yield from (f"{title}:", "", *(f"- `{name}`: {meaning}" for name, meaning in names.items()), "")
    if kind.name in ASKED:
        yield "`params` declares the parameters of requests that are its own, each a `Param` with kind, default, range"
        yield "and meaning ([what a spec says](../plugins.md#what-a-spec-says)); `reads = SPEC.reads` names them."
        yield ""


# ---- the kit -------------------------------------------------------------------------------------------------------


def suite(seam: str) -> Iterator[str]:
    from minivllm.testing import SUITES

    module, name = SUITES[seam]
    found = dict(classes(module))
    yield f"`python -m minivllm.testing my-{seam}/my-{seam}`, or in a test file of the package:"
    yield from ("", "```python", f"from minivllm.testing import {name}", "", "", "class TestMine(" + name + "):")
    yield from (f'    plugin = "my-{seam}/my-{seam}"', "```", "")
    doc = ast.get_docstring(found[name])
    yield from text(doc) if doc else ()
    chain = list(lineage(name, found))
    yield from overridden(chain)
    tests: dict[str, str] = {}
    for node in chain:
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name.startswith("test_"):
                tests.setdefault(item.name, ast.get_docstring(item) or "")
    yield from ("Every rule, by the name of its test:", "")
    for test, doc in tests.items():
        rule = " ".join(re.sub(r"``(.+?)``", r"`\1`", doc).split())
        yield f"- **{test.removeprefix('test_').replace('_', ' ')}**{'. ' + rule if rule else ''}"


def lineage(name: str, found: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """A class of the kit and its bases there, the last bases first among them."""
    todo = [name]
    while todo:
        if (node := found.get(todo.pop())) is not None:
            yield node
            todo += [base.id for base in node.bases if isinstance(base, ast.Name)]


def overridden(chain: list[ast.ClassDef]) -> Iterator[str]:
    """What a test class may override, with its signature or its default: the methods and attributes that the docstrings
    of the suite name, and what all suites have."""
    named = {word for node in chain for word in re.findall(r"``(\w+)``", ast.get_docstring(node) or "")}
    found: dict[str, list[str]] = {}
    for node in chain:
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name in named and not item.decorator_list:
                found.setdefault(item.name, signature(item))
            elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                name = item.target.id
                if name in named or (node.name == "Conformance" and name not in ("kind", "plugin")):
                    lines = node.lines[item.lineno - 1 : item.end_lineno]  # type: ignore[attr-defined]
                    found.setdefault(name, [line.strip() for line in lines])
    yield from ("A test class may override:", "", "```python")
    yield from (line for name in sorted(found) for line in found[name])
    yield from ("```", "")


def signature(item: ast.FunctionDef) -> list[str]:
    """``def`` up to the colon, and its docstring as a comment."""
    bare = ast.FunctionDef(item.name, item.args, [ast.Expr(ast.Constant(...))], [], item.returns)
    bare.type_params = []  # a field of Python 3.12
    said = " ".join((ast.get_docstring(item) or "").split())
    notes = textwrap.wrap(re.sub(r"``(.+?)``", r"`\1`", said), 112, initial_indent="    # ", subsequent_indent="    # ")
    return [ast.unparse(ast.fix_missing_locations(bare)).split("\n")[0] + " ...", *notes]


def classes(module: str, seen: set[str] | None = None) -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes of a module of the kit and of those that it imports its bases from."""
    seen = set() if seen is None else seen
    if module in seen or not (TESTING / f"{module}.py").is_file():
        return
    seen.add(module)
    source = (TESTING / f"{module}.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            node.lines = source.splitlines()  # type: ignore[attr-defined]
            yield node.name, node
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            yield from classes(node.module, seen)


def pages() -> dict[Path, str]:
    return {HERE / f"{name}.md": page(kind) for name, kind in KINDS.items()}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(ROOT))
