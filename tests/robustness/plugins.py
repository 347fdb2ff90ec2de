"""P1 to P8: broken or hostile plug-ins.  Each ends with status 4 and one line that names the package."""

from __future__ import annotations

import random
from typing import Any

from plugin_helpers import install, spec_text

from .ground import ROOT
from .lines import line
from .tools import Tools

CONFIG, MODEL, PLUGIN, MACHINE = 2, 3, 4, 5
POCKET = ROOT / "minivllm" / "pocket" / "draft"


IMPL = """
from minivllm.core.interfaces.evictor import Evictor
class Good(Evictor):
    add = hold = free = victims = drop = hit = lambda *a: None
class Half(Evictor):
    pass
class Bad(Good):
    def __init__(self, *a):
        raise ValueError("planned")
"""


def plugin(
    tools: Tools,
    spec: str,
    *words: str,
    impl: str = IMPL,
    name: str = "acme/x",
    seconds: float = 0.0,
    real: bool = False,
    others: Any = (),
) -> None:
    """Check the refusal of a package with an evictor ``x`` that a configuration names."""
    folder = tools.folder()
    for dist in ("acme", *others):
        install(
            folder, dist, {"minivllm.evictor": {"x": f"{dist}_spec:S"}}, **{f"{dist}_spec": spec, "acme_impl": impl}
        )
    argv = ["--set", f"evictor.name={name}"]
    env = {"MINIVLLM_PLUGIN_TIMEOUT": str(seconds)} if seconds else {}
    if real:
        done = tools.really("serve", str(POCKET), "--port", "0", *argv, path=[folder], env=env)
    else:
        done = tools.run("generate", "a", "--model", str(POCKET), "--max-tokens", "1", *argv, path=[folder], env=env)
    done.ended(PLUGIN, "acme", *words)
    assert not seconds or done.seconds < seconds + 30, done


def fine(cls: str = "Good", **more: Any) -> str:
    return spec_text(impl=f"acme_impl:{cls}", **more)


@line("P1", "a plug-in whose import raises", "tools")
def p1(tools: Tools, rng: random.Random) -> Any:
    for text in (
        "raise ValueError('planned')",
        "import no_such_module",
        "1/0",
        "def (",
        "\x00",
        "raise BaseException('planned')",
        "assert False",
        "class E(BaseException): pass\nraise E",
        "raise GeneratorExit",
        "import minivllm.no_such",
    ):
        where = rng.choice(["spec", "impl"])
        yield (
            f"{where}: {text[:20]!r}",
            lambda text=text, where=where: plugin(
                tools,
                text if where == "spec" else fine(),
                "could not be imported",
                impl=text if where == "impl" else IMPL,
            ),
        )
    yield "serve", lambda: plugin(tools, fine(), "planned", impl="raise ValueError('planned')", real=True)


@line("P2", "an entry point to nothing", "tools")
def p2(tools: Tools, rng: random.Random) -> Any:
    for text, word in (
        ("", "'S'"),
        ("S = 5", "expected an object of class minivllm.plugin.Spec"),
        ("S = None", "expected an object of class minivllm.plugin.Spec"),
        ("class S: pass", "expected an object of class minivllm.plugin.Spec"),
    ):
        yield repr(text), lambda text=text, word=word: plugin(tools, text, word)
    yield "no class", lambda: plugin(tools, fine("Missing"), "Missing")
    yield "no module", lambda: plugin(tools, spec_text(impl="acme_nothing:X"), "acme_nothing")


@line("P3", "a class that lacks a method, or is none", "tools")
def p3(tools: Tools, rng: random.Random) -> Any:
    yield "half of it", lambda: plugin(tools, fine("Half"), "does not implement")
    for text in (
        "class Good: pass",
        "Good = 5",
        "def Good(*a): pass",
        "from minivllm.core.interfaces.scheduler import SchedulerPolicy as Good",
    ):
        yield text[:30], lambda text=text: plugin(tools, fine(), "not a subclass", impl=text)


@line("P4", "another version of the contract", "tools")
def p4(tools: Tools, rng: random.Random) -> Any:
    for api in ((rng.randrange(2, 99), 0), (1, rng.randrange(9, 99)), (0, rng.randrange(1, 9))):
        yield str(api), lambda api=api: plugin(tools, fine(api=api), "contract version")


@line("P5", "one name of two packages", "tools")
def p5(tools: Tools, rng: random.Random) -> Any:
    yield "two", lambda: plugin(tools, fine(), "zeta", name="x", others=("zeta",))
    yield "three", lambda: plugin(tools, fine(), "zeta", "beta", name="x", others=("zeta", "beta"))


@line("P6", "a plug-in whose import takes for ever", "tools")
def p6(tools: Tools, rng: random.Random) -> Any:
    from minivllm.registration import deadline

    def standard() -> None:
        assert deadline.SECONDS == 30.0 and deadline.seconds() == 30.0

    wait = [
        "import time\ntime.sleep(120)",
        "while True: pass",
        "import threading\nthreading.Event().wait(120)",
        "import time\nwhile True:\n    try:\n        time.sleep(120)\n    except Exception:\n        pass",
        "import socket\na, b = socket.socketpair()\na.recv(1)",
    ]
    yield "30 s", standard
    for text in rng.sample(wait, 3):
        where = rng.choice(["spec", "impl"])
        yield (
            f"{where}: {text[:30]!r}",
            lambda text=text, where=where: plugin(
                tools,
                text if where == "spec" else fine(),
                "had not ended after 1 s",
                impl=text if where == "impl" else IMPL,
                seconds=1.0,
            ),
        )
    yield (
        "serve",
        lambda: plugin(
            tools, fine(), "had not ended after 1 s", impl="import time\ntime.sleep(120)", seconds=1.0, real=True
        ),
    )


@line("P7", "a plug-in that ends the process", "tools")
def p7(tools: Tools, rng: random.Random) -> Any:
    for text in (
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "exit(0)",
        "raise SystemExit('done')",
        "import sys\nsys.exit(3)",
    ):
        where = rng.choice(["spec", "impl"])
        yield (
            f"{where}: {text[-20:]!r}",
            lambda text=text, where=where: plugin(
                tools, text if where == "spec" else fine(), "SystemExit", impl=text if where == "impl" else IMPL
            ),
        )
    yield "serve", lambda: plugin(tools, fine(), "SystemExit", impl="import sys\nsys.exit(0)", real=True)


@line("P8", "a plug-in whose instance cannot be made", "tools")
def p8(tools: Tools, rng: random.Random) -> Any:
    yield "raises", lambda: plugin(tools, fine("Bad"), "planned")
