"""Write ``TODO.md``: for each function of ``Device``, the tests of the conformance kit that pass once it is written.

    python tests/todo.py

The tests run with the reference in place of the functions that come earlier in the list.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

import minivllm_accelerator.attention as package
from minivllm_accelerator.device import Device
from minivllm_accelerator.reference import Reference

from minivllm.testing import run

FILE = Path(__file__).resolve().parents[1] / "TODO.md"
NAME = "minivllm-accelerator-template"
# seam -> plug-in, and the functions of ``Device`` that it calls, in the order in which to write them
ORDER = {
    "attention": (f"{NAME}/accelerator-attention", ("store", "attend")),
    "executor": (f"{NAME}/accelerator", ("open", "wait")),
}
# a test of the spec, which calls no function of ``Device`` and may fail on a busy machine
TIMED = "test_the_spec_is_imported_in_50_ms_and_without_torch"
HEAD = """# The list of work

The functions of `Device` in `src/minivllm_accelerator/device.py`, in the order in which to write them. Below each
function are the tests of minivllm's conformance kit that fail until it is written. The tests of later functions fail
as well. `python tests/todo.py` writes this file.
"""


def device_without(missing: Collection[str]) -> type[Device]:
    """Return the reference device without some of its functions."""
    return type("Partial", (Reference,), {name: getattr(Device, name) for name in missing})


@cache
def failures(seam: str, missing: tuple[str, ...]) -> dict[str, str]:
    """Return the tests of the kit that fail without some functions, and the first sentence of each test's rule."""
    if not missing:
        return {}  # ``test_accelerator.py`` runs the kit with all functions
    plugin, _ = ORDER[seam]
    before = package.Device
    package.Device = device_without(missing)
    try:
        outcomes = run([(seam, plugin)], shrink=False)
    finally:
        package.Device = before
    failed = [one for one in outcomes if one.status == "failed" and not one.test.endswith(TIMED)]
    return {one.test: " ".join(one.rule.split()).split(". ")[0] for one in failed}


def render() -> str:
    """Return the text of ``TODO.md``."""
    lines = [HEAD]
    for seam, (plugin, functions) in ORDER.items():
        lines.append(f"## {seam}: `python -m minivllm.testing {plugin}`\n")
        for i, name in enumerate(functions):
            failing = failures(seam, functions[i:])
            later = failures(seam, functions[i + 1 :])
            lines.append(f"### `Device.{name}`\n")
            lines += [f"- [ ] `{test}`: {rule.rstrip('.')}" for test, rule in failing.items() if test not in later]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
