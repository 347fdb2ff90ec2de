"""Run ``minivllm`` commands that arrive as lines of JSON, and report the result of each to ``tools``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys


def run(requested: dict) -> dict:
    from minivllm.cli import main

    before, modules, environ = list(sys.path), set(sys.modules), dict(os.environ)
    out, err = io.StringIO(), io.StringIO()
    sys.path[:0] = requested["path"]
    os.environ.update(requested["env"])
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(requested["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.path[:] = before
        os.environ.clear()
        os.environ.update(environ)
        for name in set(sys.modules) - modules:  # remove the modules of the case's package
            if any((getattr(sys.modules[name], "__file__", None) or "").startswith(p) for p in requested["path"]):
                del sys.modules[name]
    return {"code": code, "out": out.getvalue()[-4000:], "err": err.getvalue()[-4000:]}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    questions = os.fdopen(os.dup(0))  # ``exit()`` closes sys.stdin
    for line in questions:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()
