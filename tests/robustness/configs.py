"""C1 to C11: wrong configurations.  Each ends with status 2 and one line that names the error and its place."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from .ground import ROOT
from .lines import line
from .tools import Tools

CONFIG, MODEL, PLUGIN, MACHINE = 2, 3, 4, 5
POCKET = ROOT / "minivllm" / "pocket" / "draft"


def ways(rng: random.Random, path: Path) -> list[str]:
    """Return a command that reads the file."""
    return rng.choice(
        [["config", "show", str(path)], ["serve", "--config", str(path)], ["generate", "a", "--config", str(path)]]
    )


def config(
    tools: Tools, rng: random.Random, text: str | bytes, *words: str, name: str = "", code: int = CONFIG
) -> None:
    path = tools.folder() / (name or rng.choice(["x.yaml", "x.yml"]))
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    tools.run(*ways(rng, path)).ended(code, *words)


@line("C1", "no such file", "tools")
def c1(tools: Tools, rng: random.Random) -> Any:
    for name in ("no.yaml", "no/no.toml", "é.toml", "a" * 300 + ".yaml", "", " ", "x\ny.toml"):
        path = tools.folder() / name
        yield repr(name[:20]), lambda path=path: tools.run(*ways(rng, path)).ended(CONFIG)


@line("C2", "YAML and TOML that cannot be read", "tools")
def c2(tools: Tools, rng: random.Random) -> Any:
    for text, name in (
        ("seed: [1\n", "x.yaml"),
        ("a: b: c\n", "x.yaml"),
        ("\tseed: 1\n", "x.yaml"),
        ("seed = \n", "x.toml"),
        ("[a\nb = 1", "x.toml"),
        ("seed: &a *a\n", "x.yaml"),
        ("%YAML 9\n---\nseed: 1", "x.yaml"),
        ("seed = '''", "x.toml"),
        ("{" * 5000, "x.yaml"),
        ("[" * 5000, "x.yaml"),
        ("seed = " + "[" * 5000, "x.toml"),
        ("? " * 3000, "x.yaml"),
        ("a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b,*c]\n", "x.yaml"),
    ):
        deep = len(text) > 1000
        words = [] if deep else ["x."]
        yield repr(text[:20]), lambda text=text, name=name, words=words: config(tools, rng, text, *words, name=name)

    def bomb() -> None:
        """Write aliases that would expand to more than 10 ** 12 words, which must never be built."""
        text = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
        config(tools, rng, text, name="x.yaml")

    yield "aliases without end", bomb


@line("C3", "unknown keys", "tools")
def c3(tools: Tools, rng: random.Random) -> Any:
    for right in rng.sample(
        ["max_num_seqs", "gpu_memory_utilization", "max_model_len", "enforce_eager", "scheduler", "attention"], 3
    ):
        at = rng.randrange(1, len(right) - 1)
        wrong = right[:at] + right[at + 1 :]
        yield (
            wrong,
            lambda wrong=wrong, right=right: config(tools, rng, f"{wrong}: 1\n", "Did you mean", repr(right), ":1:"),
        )
    for text, word in (
        ("server: {prot: 1}", "'port'"),
        ("scheduler: {nam: x}", "'name'"),
        ("sampling: {temprature: 1}", "'temperature'"),
    ):
        yield text, lambda text=text, word=word: config(tools, rng, text, "Did you mean", word)
    for key in ("", "é", "a.b", "__class__", "x" * 5000, "seed "):
        yield (
            repr(key[:9]),
            lambda key=key: config(
                tools, rng, f"{json.dumps(key)}: 1\n", "unknown option" if 0 < len(key) < 1000 else ""
            ),
        )


@line("C4", "values of a wrong type", "tools")
def c4(tools: Tools, rng: random.Random) -> Any:
    fields = ["max_num_seqs", "max_model_len", "seed", "tensor_parallel_size", "num_kvcache_blocks", "server.port",
    "server.max_queue",
              "server.body_timeout", "enforce_eager", "dtype", "model"]  # fmt: skip
    values = ["many", True, [1], {"a": 1}, None, 1.5, "1e3x", {}, []]
    for _ in range(8):
        field, value = rng.choice(fields), rng.choice(values)
        if (
            (value is None)
            or (field in ("dtype", "model") and isinstance(value, str))
            or (field == "enforce_eager" and value is True)
        ):
            value = [[1]]
        if field == "server.body_timeout" and value == 1.5:
            value = "slow"
        table, _, key = field.rpartition(".")
        text = json.dumps({table: {key: value}} if table else {key: value})
        yield text, lambda text=text, key=key: config(tools, rng, text, key, "expected")


@line("C5", "values out of range", "tools")
def c5(tools: Tools, rng: random.Random) -> Any:
    for field, value in (
        ("kvcache_block_size", 0),
        ("kvcache_block_size", -rng.randrange(1, 999)),
        ("tensor_parallel_size", 0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("server.port", 70000),
        ("server.port", -1),
        ("max_num_seqs", 0),
        ("max_num_seqs", -1),
        ("max_model_len", 0),
        ("num_kvcache_blocks", 0),
        ("server.max_body_bytes", 0),
        ("server.header_timeout", 0),
        ("server.header_timeout", -1.0),
        ("server.max_n", 10**6),
        ("gpu_memory_utilization", float("nan")),
        ("server.body_timeout", float("inf")),
        ("max_num_seqs", -(10**30)),
        ("kvcache_block_size", 2**63),
    ):
        table, _, key = field.rpartition(".")
        shown = ".nan" if value != value else ".inf" if value == float("inf") else json.dumps(value)
        text = f"{table}: {{{key}: {shown}}}" if table else f"{key}: {shown}"
        yield text[:50], lambda text=text, key=key: config(tools, rng, text, key)


@line("C6", "plug-ins that nobody has", "tools")
def c6(tools: Tools, rng: random.Random) -> Any:
    for seam in rng.sample(["scheduler", "evictor", "attention", "drafter", "executor", "sampler"], 3):
        yield (
            seam,
            lambda seam=seam: tools.run(
                "generate", "a", "--model", str(POCKET), "--set", f"{seam}.name=no_such_{rng.randrange(99)}"
            ).ended(PLUGIN, seam, "no_such"),
        )


@line("C7", "a file that would run code", "tools")
def c7(tools: Tools, rng: random.Random) -> Any:
    touch = f"touch {tools.canary}"
    for text in (
        f"a: !!python/object/apply:os.system ['{touch}']",
        f"!!python/object/apply:os.system ['{touch}']",
        "a: !!python/name:os.system",
        f"seed: !!python/object/new:os.system ['{touch}']",
        "a: !!python/module:os",
        f"model: !ruby/object:Gem {{a: '{touch}'}}",
        f"? !!python/object/apply:subprocess.call [['sh', '-c', '{touch}']]\n: 1",
        "a: !!python/tuple [1]",
        "a: !!set {x}",
    ):
        yield text[:40], lambda text=text: config(tools, rng, text)


@line("C8", "one key twice", "tools")
def c8(tools: Tools, rng: random.Random) -> Any:
    for text, name in (
        ("seed: 1\nseed: 2\n", "x.yaml"),
        ("scheduler:\n  name: fcfs\n  name: sjf\n", "x.yaml"),
        ("seed = 1\nseed = 2\n", "x.toml"),
        ("[server]\nport = 1\n[server]\nport = 2\n", "x.toml"),
        ('"seed": 1\nseed: 1\n', "x.yaml"),
    ):
        yield repr(text[:20]), lambda text=text, name=name: config(tools, rng, text, name=name)


@line("C9", "no table at the top", "tools")
def c9(tools: Tools, rng: random.Random) -> Any:
    for text in ("- a\n", "[1, 2]", "5", "'x'", "true", "- - - 1", "--- 1\n--- 2\n", "seed: 1\n---\nseed: 2\n"):
        yield repr(text), lambda text=text: config(tools, rng, text)


@line("C10", "options that contradict each other", "tools")
def c10(tools: Tools, rng: random.Random) -> Any:
    few = rng.randrange(2, 64)
    for words in (
        [f"max_num_batched_tokens={few}", f"max_num_seqs={few + 1}"],
        ["tensor_parallel_size=3"],
        ["max_model_len=100000000"],
        ["scheduler.options.a=1"],
        ["seed.x=1"],
    ):
        sets = [part for word in words for part in ("--set", word)]

        def check(sets: list[str] = sets) -> None:
            done = tools.run("generate", "a", "--model", str(POCKET), *sets)
            assert done.code in (CONFIG, MODEL, PLUGIN, MACHINE), done
            done.ended(done.code)

        yield " ".join(words), check


@line("C11", "files that are no text, or cannot be read", "tools")
def c11(tools: Tools, rng: random.Random) -> Any:
    for name, data in (
        ("x.toml", b"seed = '\xff'"),
        ("x.yaml", b"seed: \xff\xfe"),
        ("x.yaml", b"\x00\x01\x02"),
        ("x.toml", b"\x00"),
        ("x.yaml", os.urandom(rng.randrange(100, 5000))),
        ("x.json", b"{}"),
        ("x.ini", b"[a]"),
        ("x", b"seed: 1"),
    ):
        yield f"{name} {data[:6]!r}", lambda name=name, data=data: config(tools, rng, data, name=name)

    def special(path: Path) -> None:
        tools.run(*ways(rng, path)).ended(CONFIG)

    made = tools.folder()
    (made / "dir.toml").mkdir()
    (made / "loop.yaml").symlink_to(made / "loop.yaml")
    yield "a folder", lambda: special(made / "dir.toml")
    yield "a link to itself", lambda: special(made / "loop.yaml")
    if os.geteuid():
        (made / "shut.toml").write_text("seed = 1")
        (made / "shut.toml").chmod(0)
        yield "no permission", lambda: special(made / "shut.toml")
