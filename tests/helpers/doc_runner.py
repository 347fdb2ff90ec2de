"""Run the examples of a documentation page and compare the shown output with the printed one.

Blocks run in order, in one folder and one Python namespace:

    console     each ``$ minivllm ...`` and ``$ python -m minivllm.testing ...`` is run; the lines below it are its
                output on both streams, in order.  A line ``...`` stands for any lines, and ``...`` at the end of a line
                for the rest of it.  Other commands (pip, git) are only parsed
    python      is run; ``print(...)  # → text`` must print exactly this text.  With ``# name.ext`` as its first line it
                is a file of that name, and so is a ``toml`` block
    text        after a Python block, the lines that it printed, except those that ``# →`` shows
    bash        commands that are not run; they must parse, and files that they name must be in the repository
    py          Python for a running server, which is not run; it must compile
    json, html  data and pages, which other tests use; a block without a kind is a picture

A block of another kind is a fault of the page.  Output that differs between runs is compared in shape: times and rates,
dates, hashes, the folder (``MASKS``).  A block that is not compared has the line ``<!-- not compared: reason -->``
before it, and a block with measured figures ``<!-- measured: date, machine -->``.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from packages import write_metadata

from minivllm.cli import main, make_parser
from minivllm.cli.plugins import with_verb
from minivllm.testing import base
from minivllm.testing.cli import main as conformance

ROOT = Path(__file__).resolve().parents[2]
PARTED = ": first difference at "  # at the end of the output of a command that reports a difference by its exit code
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:not compared|measured): [^>]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
FILE = re.compile(r"# ([\w/.-]+\.\w+)\n")
EXPECTED = re.compile(r"^\s*print\(.*\)  # → (.*)$|^# → (.*)$", re.M)
SHOWN = ("json", "html", "")  # kinds of blocks that have nothing to run
MASKS = (
    (r"\d{4}-\d\d-\d\dT[\d:+]+", "DATE"),
    (r"\b[0-9a-f]{12}\b", "HASH"),
    (r"\b[\d.]+( ?)(s|ms|tok/s)\b", r"#\1\2"),
    (r"^(  \w*(?:seconds|_ms)\w* +)\S.*", r"\1#"),
    (r"('\w+_ms': )[\d.]+", r"\1#"),
    (r" +$", ""),
    (r"(?<=\S)  +", "  "),  # because columns are as wide as their longest cell
)


@dataclass(frozen=True)
class Block:
    """A block of a page.

    ``mark`` is the text of the comment before it, "" without one, and ``line`` its first line.
    """

    kind: str
    text: str
    mark: str
    line: int

    @property
    def file(self) -> str:
        found = FILE.match(self.text) if self.kind in ("toml", "python") else None
        return found[1] if found else ""


def blocks(path: Path) -> list[Block]:
    page = path.read_text(encoding="utf-8")
    return [
        Block(m["kind"], m["text"], m["mark"] or "", page[: m.start("text")].count("\n")) for m in BLOCK.finditer(page)
    ]


def masked(text: str) -> list[str]:
    text = text.replace(str(Path.cwd()) + "/", ".../")
    for pattern, instead in MASKS:
        text = re.sub(pattern, instead, text, flags=re.M)
    return text.splitlines()


def agrees(shown: list[str], printed: list[str]) -> bool:
    """Return whether all printed lines are shown, in order, where ``...`` stands for further ones."""
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(agrees(shown[1:], printed[n:]) for n in range(len(printed) + 1))
    if not printed:
        return False
    want, begins = shown[0], shown[0].endswith(" ...")
    same = printed[0].startswith(want[:-4]) if begins else printed[0] == want
    return same and agrees(shown[1:], printed[1:])


class Page:
    """A page that is run in the current folder.

    ``count`` is the number of commands and Python blocks that were run.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        self.wrong: list[str] = []  # differences from the page
        self._space = {"__name__": path.stem}
        self._printed: list[str] | None = None  # output of the preceding block if it is a Python block

    def run(self) -> int:
        """Run all blocks.  AssertionError lists all differences."""
        for block in blocks(self.path):
            before, self._printed = self._printed, None
            at = f"{self.path.name}:{block.line}"
            if block.file:
                file = Path(block.file)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text)
                if file.name == "pyproject.toml":
                    write_metadata(file, Path("."))
            elif block.mark.startswith("not compared"):
                continue
            elif block.kind == "python":
                self._python(block, at)
            elif block.kind == "console":
                self._console(block, at)
            elif block.kind == "bash":
                self.wrong += [f"{at}: {why}" for why in parse(block.text)]
            elif block.kind == "py":
                compile(block.text, str(self.path), "exec")
            elif block.kind == "text" and not block.mark:
                same = before is not None and masked(block.text) == masked("\n".join(before))
                if not same:
                    self.wrong.append(f"{at} shows\n{block.text}printed were {before}")
            elif block.kind not in ("text", "toml", *SHOWN) or block.text.startswith(("$ ", "minivllm ")):
                self.wrong.append(f"{at}: a block of the kind {block.kind!r} is not run")
        assert not self.wrong, "\n\n".join(self.wrong)
        return self.count

    def _python(self, block: Block, at: str) -> None:
        with both() as out:
            exec(compile(block.text, str(self.path), "exec"), self._space)
        printed = out.getvalue().splitlines()
        for want in (a or b for a, b in EXPECTED.findall(block.text)):
            if want in printed:
                printed.remove(want)
            else:
                self.wrong.append(f"{at} promises {want!r}; printed were {printed}")
        self._printed = printed
        self.count += 1

    def _console(self, block: Block, at: str) -> None:
        parts = re.split(r"^\$ ", block.text, flags=re.M)[1:]
        for command, _, shown in (part.partition("\n") for part in parts):
            words = shlex.split(command)
            if words[:2] == ["pip", "install"] and words[-1].startswith("./"):
                folder = Path(words[-1].partition("[")[0])
                write_metadata(folder / "pyproject.toml", Path("."))
                sys.path.insert(1, str((folder / "src").resolve()))
            kit = words[:3] == ["python", "-m", "minivllm.testing"]
            if not kit and words[0] != "minivllm":
                continue
            with both() as out:
                code = run_kit(words[3:]) if kit else run_cli(words[1:])
            want, printed = masked(shown), masked(out.getvalue())
            if block.mark:  # measured blocks have the same lines with figures of another day
                want, printed = ([re.sub(r"\d[\d.,]*", "#", line) for line in lines] for lines in (want, printed))
            if not agrees(want, printed):
                self.wrong.append(f"{at}: $ {command}\nshows\n" + "\n".join(want) + "\nprints\n" + "\n".join(printed))
            failed = any(line.startswith(("minivllm: error:", "  FAIL  ")) or PARTED in line for line in want)
            if bool(code) != failed:
                self.wrong.append(f"{at}: $ {command} ended with {code}")
            self.count += 1


@contextlib.contextmanager
def both():
    """Collect the output of both streams, in order."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


def run_kit(words: list[str]) -> int:
    base.find.cache_clear()
    forget("my_")  # the files of these modules may have changed
    return conformance(words)


def run_cli(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as end:
        return end.code or 0


def forget(*names, known=()):
    """Remove modules of packages whose names begin with ``names``."""
    for name in set(sys.modules) - set(known):
        if name.partition(".")[0].startswith(names):
            del sys.modules[name]


def parse(text: str) -> list[str]:
    """Return the faults of commands that are shown and not run."""
    wrong = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words = words[1:]
        if words[:1] == ["minivllm"]:
            with both() as out:
                try:
                    make_parser().parse_args(with_verb(words[1:]))
                except SystemExit as end:
                    wrong += [f"{line}: {out.getvalue()}"] if end.code else []
        elif words[:1] in (["python"], ["bash"]) and len(words) > 1 and "/" in words[1]:
            wrong += [] if (ROOT / words[1]).exists() else [f"{line}: there is no {words[1]}"]
    return wrong
