"""The handling of requests that arrive early, in part, in old forms, or that are not HTTP."""

import contextlib
import itertools
import re
import socket
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httptools")

from http_helpers import Running, served

from minivllm.server.http import connection, crowd
from minivllm.server.http.crowd import Crowd

server = served(max_header_bytes=4096)
HOST = b"Host: localhost\r\n"
BODY = b'{"prompt":"a","max_tokens":2,"ignore_eos":true}'
LONG = b'{"prompt":"a","max_tokens":9,"ignore_eos":true}'
CLOSE = b"Connection: close\r\n"
VERSION = b"GET /version HTTP/1.1\r\n" + HOST


def post(body=BODY, more=b"", version=b"1.1"):
    head = b"POST /v1/completions HTTP/" + version + b"\r\n" + HOST + b"Content-Type: application/json\r\n"
    return head + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def reported(server, data, ends=False):
    """Return all bytes from the server until it closes.  With ``ends`` the client closes its sending side."""
    with socket.create_connection((server.host, server.port), timeout=60) as link:
        got = b""
        with contextlib.suppress(ConnectionError):  # it may answer before all is sent
            link.sendall(data)
            if ends:
                link.shutdown(socket.SHUT_WR)
        while part := link.recv(65536):
            got += part
        return got


@pytest.mark.parametrize("many", [65, 66, 300])
def test_every_request_that_is_sent_ahead_is_answered_in_order(server, many):
    got = reported(server, (VERSION + b"\r\n") * (many - 1) + VERSION + CLOSE + b"\r\n")
    assert got.count(b"HTTP/1.1 200 OK") == many and got.count(b'"version"') == many


def test_a_large_body_behind_another_request_waits_for_its_turn(server):
    padded = BODY[:-1] + b" " * (3 * connection.AHEAD_BYTES) + b"}"
    got = reported(server, post(LONG) + post(padded) + post(more=CLOSE))
    assert got.count(b"HTTP/1.1 200 OK") == 3


def test_what_is_no_request_is_answered_behind_the_answers_that_are_due(server):
    got = reported(server, post(LONG) + post() + b"NONSENSE\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d+) ", got) == [b"200", b"200", b"400"]
    assert got.count(b'"usage"') == 2, "both are whole"


@pytest.mark.parametrize("stream", [b"", b',"stream":true'])
def test_a_client_that_ends_its_side_gets_all_answers(server, stream):
    got = reported(server, post(BODY[:-1] + stream + b"}") + post(), ends=True)
    assert got.count(b"HTTP/1.1 200 OK") == 2 and got.count(b"HTTP/1.1 100 Continue") <= 1
    assert (b"[DONE]" in got) == bool(stream)
    assert b"400 Bad Request" in reported(server, post()[:-3], ends=True), "nor is a half body left without a word"


@pytest.mark.parametrize("stream", [b"", b',"stream":true'])
def test_a_client_that_has_left_is_still_noticed(server, stream):
    body = LONG[:-1].replace(b":9,", b":3000,") + stream + b"}"
    for _ in range(3):
        link = socket.create_connection((server.host, server.port), timeout=60)
        link.sendall(post(body))
        time.sleep(0.1)
        link.close()
    end = time.monotonic() + 30
    while server.app.service.door.inside and time.monotonic() < end:
        time.sleep(0.02)
    assert server.app.service.door.inside == 0
    server.at_rest()


def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_its_connection(server):
    for body in (BODY, BODY[:-1] + b',"stream":true}', BODY[:-1] + b',"logprobs":5,"n":3}'):
        head, _, answer = reported(server, post(body, version=b"1.0")).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
        assert answer.endswith((b"}", b"[DONE]\n\n")) and not answer[:1].isdigit()


CODED = {"gzip, chunked": 501, "gzip": 501, "identity": 501, "chunked, gzip": 400, "chunked, chunked": 400}
NONE = {
    "a header of 1 MB": (VERSION + b"X-A: " + b"a" * 1_000_000 + b"\r\n\r\n", 431),
    "a header over the limit": (VERSION + b"X-A: " + b"a" * 5000 + b"\r\n\r\n", 431),
    "a URL of 1 MB": (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
    "a query over the limit": (b"GET /version?" + b"a" * 5000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
    "HTTP/3": (b"GET /version HTTP/3.0\r\n" + HOST + b"\r\n", 505),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "another method": (b"FOO /version HTTP/1.1\r\n" + HOST + b"\r\n", 501),
    "a proxy": (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", 501),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "an expectation": (VERSION + b"Expect: 200-ok\r\n\r\n", 417),
    "two lengths": (post(more=b"Content-Length: 3\r\n"), 400),
    "a folded header": (VERSION + b"X-A: a\r\n b\r\n\r\n", 400),
    "bare line ends": (b"GET /version HTTP/1.1\nHost: localhost\n\n", 400),
    "no chunk": (post(b"zz\r\n\r\n").replace(b"Content-Length: 6", b"Transfer-Encoding: chunked"), 400),
    **{
        f"Transfer-Encoding: {value}": (
            post(b"0\r\n\r\n").replace(b"Content-Length: 5", b"Transfer-Encoding: " + value.encode()), status
        )
        for value, status in CODED.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("url", [b"http://[::1", b"http://a:99999999/", b"http:///"])
def test_a_url_that_cannot_be_read_is_refused_in_these_words(server, url):
    got = reported(server, b"GET " + url + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    assert got.startswith(b"HTTP/1.1 400 ") and b"its URL cannot be read; expected a path such as /v1/models" in got


@pytest.mark.parametrize("size", [40_000, 66_000, 100_000, 1_000_000])
def test_a_url_beyond_the_usual_limit_is_too_long_whatever_the_parser_makes_of_it(unlimited, size):
    got = reported(unlimited, b"GET /" + b"a" * size + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    assert got.startswith(b"HTTP/1.1 414 ") and b"32768" in got


@pytest.fixture(scope="module")
def unlimited():
    """A server with the usual limit of headers."""
    running = Running()
    yield running
    running.close()


@pytest.mark.parametrize("name", NONE)
def test_what_is_not_served_gets_the_status_that_says_so(server, name):
    data, status = NONE[name]
    got = reported(server, data)
    assert got.startswith(b"HTTP/1.1 %d " % status), got[:100]
    assert b'"code": %d' % status in got and got.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_that_offers_http_2_is_served_as_any_other(server, method):
    """As curl --http2 and the client of Java's library send it."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    )
    got = reported(server, post(more=offer) if method == "POST" else VERSION + offer + b"\r\n")
    assert got.startswith(b"HTTP/1.1 200 OK"), got[:200]


def test_the_question_of_a_browser_for_another_page_is_refused_with_what_to_do(server):
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    answer = server.client.options("/v1/chat/completions", headers=ask)
    assert answer.status_code == 403 and "--allowed-origins https://app.example" in answer.json()["error"]["message"]
    assert server.client.options("/v1/chat/completions").status_code == 405


def test_a_crowd_comes_in_turns_and_nobody_is_forgotten():
    import asyncio

    async def main():
        loop, begun, turns = asyncio.get_running_loop(), [], []
        found = Crowd()
        for i in range(100):
            found.begin(lambda i=i: begun.append(i))
        while len(begun) < 100:
            turns.append(len(begun))
            await asyncio.sleep(0)
        assert begun == list(range(100)) and max(b - a for a, b in itertools.pairwise(turns)) <= crowd.EACH
        await asyncio.wait_for(asyncio.gather(*(found.turn() for _ in range(50))), 5)
        assert loop.is_running()

    asyncio.run(main())
