"""The resources that the kit counts as left behind by an executor, which exclude other processes."""

import os
import subprocess
import sys

from minivllm.testing.driver import of_others

MAPS = """
import mmap, sys
file = open(sys.argv[1], "w+b")
file.truncate(4096)
kept = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_a_sibling_is_not_ones_own_and_that_of_a_child_is():
    name = f"mv-test-{os.getpid()}"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with (
        subprocess.Popen([sys.executable, "-c", MAPS, f"/dev/shm/{name}"], **pipes) as child,
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], **pipes) as sibling,
    ):
        try:
            assert child.stdout.readline() == b"mapped\n"
            assert of_others([name, "absent"], sibling.pid) == {name}
            assert of_others([name], os.getpid()) == of_others([name], child.pid) == set()
        finally:
            os.unlink(f"/dev/shm/{name}")
            child.stdin.close()
            sibling.stdin.close()
