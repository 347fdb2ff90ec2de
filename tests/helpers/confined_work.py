"""The work of confined processes in tests (``minivllm.runtime.processes.confined``)."""

import json
import os
import signal
import time


def make(hello):
    if hello == b"broken":
        raise ValueError("no work to do")
    state = {"done": 0}

    def work(job, parts):
        kind = job["kind"]
        state["done"] += 1
        if kind == "loop":
            while True:
                pass
        if kind == "sleep":
            time.sleep(job["sleep"])
        if kind == "memory":
            parts = [b"x" * (1 << 34)]
        if kind == "regex":
            import re

            re.fullmatch("(a*)*b", "a" * 64)  # runs in C code, in which no Python signal handler runs
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise ValueError("it cannot")
        return [json.dumps({"pid": os.getpid(), "done": state["done"], "say": job.get("say")}).encode(), *parts]

    return work
