"""The quick lines of the suite on a server in this process; ``run.py`` plays all of them on real processes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("websockets")

from http_helpers import Running

from . import api, bodies, routes, sockets, wire  # noqa: F401
from .ground import KEY, Ground, disorder
from .lines import LINES, Line, play

QUICK = ("A1", "A12", "A13", "A24", "A40", "A47", "A48", "A50", "pipeline", "frames")


@pytest.fixture(scope="module")
def ground():
    running = Running([KEY], {"max_num_seqs": 8}, admin=True, header_timeout=1.0, body_timeout=1.5, write_timeout=2.0)
    made = Ground(running.url, KEY)
    made.learn()
    yield made
    made.close()
    running.close()


@pytest.mark.parametrize("id", QUICK)
def test_a_line_leaves_the_server_as_it_was(ground, id):
    result = play(LINES[id], {"server": ground}, random.randrange(10**6))
    assert not result.failures, "\n".join(result.failures)
    assert result.passed == result.total > 0


def test_the_suite_notices_what_is_not_given_back(ground):
    """Check that every check of rest notices a request that stays."""
    with ground.connect() as link:
        link.sendall(ground.request({"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}))
        link.recv(4096)
        found = " ".join(disorder(ground.state()))
        assert all(word in found for word in ("held", "engine's rows: 1", "server's streams: 1", "inside: 1", "I12"))
    ground.at_rest()


def test_a_case_that_fails_is_counted_and_named():
    def cases(ground, rng):
        yield "good", lambda: None
        yield "bad", lambda: (_ for _ in ()).throw(AssertionError("planned"))
        raise ValueError("the generator itself")

    result = play(Line("X1", "for a test", cases, ""), {}, 5)
    assert (result.passed, result.total) == (1, 3)
    assert "X1 seed 5, bad: AssertionError" in result.failures[0] and "the generator itself" in result.failures[1]
