"""Write the lists in the pages of the seams and in docs/plugins.md: ``python docs/plugins/make.py``.

A list stands between the lines ``<!-- table: name -->`` and ``<!-- end -->``.  Its items come from the interface of the
seam, from the kind in ``registration/spec.py`` and from the tests of the conformance kit.  The text outside the lists
is written by hand.  ``tests/docs/test_plugin_pages.py`` checks that the lists are up to date.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from minivllm.registration.spec import KINDS, OPTION_OF, REQUESTED, Kind  # noqa: E402
from minivllm.testing.scaffold import about  # noqa: E402

HERE = Path(__file__).parent
OVERVIEW = HERE.parent / "plugins.md"
PACKAGE = ROOT / "minivllm"
TESTING = PACKAGE / "testing"
PLANS = ("Join", "Delta", "StepPlan", "LateInputs", "LogProbs", "StepError", "StepForm", "StepResult")
VIEWS = (
    "EngineView", "RequestView", "PlannedStep", "FinishedStep", "PreemptionView", "BlocksView", "RequestEnd",
)  # fmt: skip
# seam -> names that its contract uses from other files: (file, names); no names means all public names
MORE: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "adapter": [("core/interfaces/quantizer.py", ("ModuleInfo", "Shard"))],
    "attention": [("core/interfaces/attnspec.py", ("AttnSpec",))],
    "executor": [("registration/spec.py", ("Part",)), ("core/interfaces/plan.py", PLANS)],
    "hooks": [("runtime/hooks/views.py", VIEWS)],
    "kvformat": [("core/interfaces/attnspec.py", ("AttnSpec",))],
    "model": [("core/interfaces/decoder.py", ())],
    "parser": [
        ("runtime/replies/described.py", ("DescribedParser",)),
        ("runtime/replies/description.py", ()),
        ("runtime/replies/parts.py", ("Said", "Thought", "Begun", "Written", "Ended")),
    ],
    "quantizer": [
        ("device/layers/linear.py", ("part_rows", "no_adapter")),
        ("device/layers/module.py", ("check_shape",)),
    ],
    "sampler": [("device/worker/sampling.py", ("noise_bits", "noise", "gumbel"))],
}
# further classes of a contract that a plug-in implements
IMPLEMENTED = {
    "adapter": ("AdapterMemory",),
    "model": ("Conversion",),
    "quantizer": ("WeightScheme",),
    "strategy": ("Search",),
}
ELSEWHERE = {  # seam -> classes of the interface that another page shows
    "hooks": {"HookContracts"},
    "processor": {"Sampler", "Draw"},
    "sampler": {"Processor", "Column", "Row", "Rows", "SamplingContext"},
}
# attributes and methods of all test classes, which docs/plugins.md explains
COMMON = {"device", "known_failures", "lasting", "once_more", "options", "profile"}
PARENT = {"sampler": "processor"}  # seam -> seam whose rules it has too
SHARED = "[rules of all seams](../plugins.md#rules-of-all-seams)"
TEMPLATE = "[Template](../plugins.md)"  # of ``minivllm plugins new``
MANY = 8  # docs/plugins.md shows the rules (tests of the kit) of at least so many seams


def page(kind: Kind) -> str:
    """Return the page of a seam with up-to-date lists."""
    return filled(HERE / f"{kind.name}.md", tables(kind))


def overview() -> str:
    """Return docs/plugins.md with up-to-date rules."""
    return filled(OVERVIEW, {"rules": rule_names(shared_rules(), with_seams=True)})


def filled(path: Path, found: Mapping[str, Iterable[str]]) -> str:
    """Return the text of a file with each of the lists replaced by new lines."""
    text = path.read_text(encoding="utf-8")
    for name, lines in found.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        head, mark, tail = text.partition(begin)
        if not mark or end not in tail:
            raise ValueError(f"{path.name} has no table {name}")
        text = head + begin + "".join(f"{line}\n" for line in lines) + tail[tail.index(end) :]
    return text


def tables(kind: Kind) -> dict[str, list[str]]:
    """Return the lines of each list of a seam's page."""
    return {
        "seam": list(identity(kind)),
        "contract": list(contract(kind)),
        "spec": list(claims(kind)),
        "kit": list(overridden(kind.name)),
    }


def identity(kind: Kind) -> Iterator[str]:
    """Yield the names of a seam and its template."""
    base, option = kind.base.partition(":")[2], OPTION_OF.get(kind.name, kind.name)
    yield ""
    source = f"Base class `{base}` of {link(interface(kind))}, whose docstrings state the contract"
    names = f"{source}; option `{option}`, entry-point group `{kind.group}`"
    contract = f"contract {kind.api[0]}.{kind.api[1]}"
    yield from wrapped(f"{names}, {contract}. {TEMPLATE}: {about(kind.name)['summary']}.")
    yield ""


# ---- the contract --------------------------------------------------------------------------------------------------


def interface(kind: Kind) -> Path:
    """Return the file with the base class of a seam."""
    file = ROOT / (kind.base.partition(":")[0].replace(".", "/") + ".py")
    return file if file.is_file() else file.with_suffix("") / "contract.py"


def contract(kind: Kind) -> Iterator[str]:
    """Yield the methods that a plug-in implements, and the other names of the contract."""
    base, file = kind.base.partition(":")[2], interface(kind)
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    implemented = (base, *IMPLEMENTED.get(kind.name, ()))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    prefixes = {name: "" if name == base else f"{name}." for name in implemented}
    members = [member for name, prefix in prefixes.items() for member in members_of(classes[name], source, prefix)]
    required = [line for wanted, line in members if wanted]
    if required:
        yield from ("", "A plug-in must define:", "", *required)
    optional = [name_of(line) for wanted, line in members if not wanted]
    if optional:
        yield from ("", *wrapped(f"A plug-in may define: {', '.join(optional)}."))
    hidden = {*implemented, *ELSEWHERE.get(kind.name, ())}
    others = {file: [name for name in classes if name not in hidden and not name.startswith("_")]}
    for path, names in MORE.get(kind.name, ()):
        others.setdefault(PACKAGE / path, []).extend(names_of(PACKAGE / path, names))
    lines = [f"* {link(path)}: {', '.join(f'`{name}`' for name in names)}" for path, names in others.items() if names]
    if lines:
        yield from ("", "Other names:", "", *lines)
    yield ""


def link(file: Path) -> str:
    """Return a link from a page of a seam to a file of the package."""
    return f"[`{file.relative_to(PACKAGE)}`](../../{file.relative_to(ROOT)})"


def names_of(file: Path, names: tuple[str, ...]) -> Iterator[str]:
    """Yield each public class and function of a file with its arguments, or the given ones."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in (names or public(node)):
            yield f"{node.name}({arguments(node)})" if isinstance(node, ast.FunctionDef) else node.name


def public(node: ast.ClassDef | ast.FunctionDef) -> tuple[str, ...]:
    """Return the name of a class or function, or nothing if it is private."""
    return () if node.name.startswith("_") else (node.name,)


def members_of(node: ast.ClassDef, source: str, prefix: str) -> Iterator[tuple[bool, str]]:
    """Yield each attribute and method of a class that plug-ins implement: (required, line of a list)."""
    protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and (meaning := comment(item, source)):
            yield item.value is None, f"* `{prefix}{ast.unparse(item)}`: {plain(meaning)}."
        if not isinstance(item, ast.FunctionDef) or item.name in ("__init__", "__post_init__"):
            continue
        marks = {ast.unparse(mark) for mark in item.decorator_list}
        required = protocol or "abstractmethod" in marks
        yield required, f"* `{prefix}{item.name}({arguments(item)})`: {first_sentence(item)}."


def name_of(line: str) -> str:
    """Return the code at the beginning of a list item: a method with its arguments, or an attribute."""
    return re.match(r"\* (`[^`]+`)", line)[1]  # type: ignore[index]


def comment(item: ast.AnnAssign, source: str) -> str:
    """Return the comment above or behind an attribute."""
    lines = source.splitlines()
    behind = re.search(r"  # (.*)$", lines[(item.end_lineno or item.lineno) - 1])
    first = item.lineno - 1
    while lines[first - 1].lstrip().startswith("# "):
        first -= 1
    above = [line.strip().removeprefix("# ") for line in lines[first : item.lineno - 1]]
    return " ".join([*above, *([behind[1]] if behind else [])])


def arguments(item: ast.FunctionDef) -> str:
    """Return the names of a function's arguments, with defaults, without ``self``."""
    plain = ast.parse(ast.unparse(item.args).join(("def f(", "): ..."))).body[0].args  # type: ignore[attr-defined]
    for arg in (*plain.posonlyargs, *plain.args, *plain.kwonlyargs):
        arg.annotation = None
    return re.sub(r"^self(, )?", "", ast.unparse(plain))


def first_sentence(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return the first sentence of a docstring without its full stop."""
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return plain(re.split(r"(?<=\.)\s+(?=[A-Z(`])", paragraph)[0])


def plain(docstring: str) -> str:
    """Return a docstring as Markdown without its full stop."""
    text = " ".join(docstring.split()).removesuffix("::").removesuffix(".")
    return re.sub(r"``(.+?)``", r"`\1`", text)


def wrapped(text: str) -> list[str]:
    """Return the lines of a paragraph."""
    return textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False)


# ---- specs ---------------------------------------------------------------------------------------------------------


def claims(kind: Kind) -> Iterator[str]:
    """Yield what a spec of the seam may name in ``limits``, ``features``, ``traits`` and ``params``."""
    facts = ", ".join(f"`{fact}`" for fact in kind.facts)
    text = f"A spec states its `limits` for these facts: {facts}." if facts else "A spec of this seam has no `limits`."
    yield from ("", *wrapped(text), "")
    for head, names in (("Features:", kind.features), ("Traits:", kind.traits)):
        if names:
            yield from (head, "", *(f"* `{name}`: {meaning}" for name, meaning in names.items()), "")
    if kind.name in REQUESTED:
        parameters = "[parameters of requests](../plugins.md#what-a-spec-says)"
        yield from (f"A spec may declare {parameters} in `params`; the class then has `reads = SPEC.reads`.", "")


# ---- the kit -------------------------------------------------------------------------------------------------------


@cache
def suite(seam: str) -> list[ast.ClassDef]:
    """Return the test class of a seam and its bases in the kit."""
    from minivllm.testing import SUITES

    module, name = SUITES[seam]
    return list(lineage(name, dict(classes(module))))


@cache
def rules(seam: str) -> dict[str, str]:
    """Return the tests of a seam: name without ``test_`` -> docstring."""
    tests: dict[str, str] = {}
    for node in suite(seam):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name.startswith("test_"):
                tests.setdefault(item.name.removeprefix("test_"), ast.get_docstring(item) or "")
    return tests


@cache
def shared_rules() -> dict[tuple[str, str], list[str]]:
    """Return the rules of many seams: (name, docstring) -> seams."""
    found = [(rule, seam) for seam in KINDS for rule in rules(seam).items()]
    count = Counter(rule for rule, _ in found)
    return {rule: [seam for other, seam in found if other == rule] for rule in count if count[rule] >= MANY}


def rule_names(found: Mapping[tuple[str, str], list[str]], with_seams: bool = False) -> list[str]:
    """Return a paragraph with the names of tests."""
    names = []
    for (name, _), seams in found.items():
        missing = [f"`{seam}`" for seam in KINDS if seam not in seams] if with_seams else []
        names.append(f"`{name}`" + (f" (not of {', '.join(missing)})" if missing else ""))
    return ["", *wrapped(", ".join(names) + "."), ""]


def lineage(name: str, found: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield a class of the kit and its bases there, the last bases first among them."""
    todo = [name]
    while todo:
        if (node := found.get(todo.pop())) is not None:
            yield node
            todo += [base.id for base in node.bases if isinstance(base, ast.Name)]


def overridden(seam: str) -> Iterator[str]:
    """Yield the text about a suite, and the signature or the default of each name that a test class may override.

    These names are the methods and attributes that docstrings of the suite name, without those of all suites.
    """
    chain = suite(seam)
    named = {word for node in chain for word in re.findall(r"``(\w+)``", ast.get_docstring(node) or "")} - COMMON
    found: dict[str, str] = {}
    for node in chain:
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name in named and not item.decorator_list:
                found.setdefault(item.name, signature(item))
            elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id in named:
                lines = node.lines[item.lineno - 1 : item.end_lineno]  # type: ignore[attr-defined]
                line = " ".join(line.strip() for line in lines).replace("( ", "(").replace(", )", ",)")
                found.setdefault(item.target.id, line)
    from minivllm.testing import SUITES

    yield ""
    if parent := PARENT.get(seam):
        absent = ", ".join(f"`{name}`" for name in rules(parent) if name not in rules(seam))
        text = f"The [rules of the seam `{parent}`]({parent}.md) hold too, except {absent}."
        yield from (*wrapped(text), "")
    module = SUITES[seam][0]
    yield from (
        *wrapped(f"The tests are in {link(TESTING / f'{module}.py')}; the {SHARED} hold too."),
        "",
    )
    yield from about_suite(chain[0])
    if not found:
        return
    yield from ("A test class may override these names:", "", "```python")
    yield from (found[name] for name in sorted(found))
    yield from ("```", "")


def about_suite(node: ast.ClassDef) -> Iterator[str]:
    """Yield the docstring of a suite without a first sentence that only names the suite."""
    doc = re.sub(r"^(The (conformance )?s|S)uite of [^.]*\.\s*", "", ast.get_docstring(node) or "")
    for part in filter(None, doc.split("\n\n")):
        yield from (*wrapped(re.sub(r"``(.+?)``", r"`\1`", " ".join(part.split()))), "")


def signature(item: ast.FunctionDef) -> str:
    """Return ``def`` up to the colon."""
    bare = ast.FunctionDef(item.name, item.args, [ast.Expr(ast.Constant(...))], [], item.returns)
    bare.type_params = []  # a field of Python 3.12
    return ast.unparse(ast.fix_missing_locations(bare)).split("\n")[0] + " ..."


def classes(module: str, seen: set[str] | None = None) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the classes of a module of the kit and of the modules that it imports its bases from."""
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
    """Return the new text of each page with tables."""
    return {OVERVIEW: overview(), **{HERE / f"{name}.md": page(kind) for name, kind in KINDS.items()}}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(ROOT))
