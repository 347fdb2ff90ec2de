"""HTTPS: accepted clients, errors of the others, and that an unfinished handshake delays no client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time

import httpx
import pytest
from http_helpers import GOLDEN, Running

from minivllm.config.server import ServerConfig
from minivllm.errors import ConfigError
from minivllm.server.http import accepting, listening


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) for 127.0.0.1, made by OpenSSL."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1,DNS:localhost -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return str(cert), str(key)


def test_https_serves_with_the_certificate_and_only_with_it(certificate):
    cert, key = certificate
    server = Running(ssl_certfile=cert, ssl_keyfile=key)
    try:
        assert server.url == f"https://127.0.0.1:{server.port}"
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), trust_env=False) as client:
            assert client.get(f"{server.url}/health").status_code == 200
            assert client.post(f"{server.url}/v1/completions", json=GOLDEN).json()["choices"] == server.golden
            with client.stream("POST", f"{server.url}/v1/completions", json={**GOLDEN, "stream": True}) as answer:
                assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
            httpx.get(f"{server.url}/health", trust_env=False)
        for body in (b"", b"x" * 3_000_000):  # the client gets the answer although it has more to send
            requested = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            received = server.raw(requested)
            assert received.startswith(b"HTTP/1.1 400 ") and b"expected a URL that begins with https://" in received
        server.at_rest()
    finally:
        server.close()


def test_clients_that_people_use_speak_https(certificate):
    cert, key = certificate
    openai = pytest.importorskip("openai")
    server = Running(ssl_certfile=cert, ssl_keyfile=key)
    try:
        http = httpx.Client(verify=ssl.create_default_context(cafile=cert), trust_env=False)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0) as client:
            ask = {
                "model": "pocket",
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 4,
                "temperature": 0,
            }
            whole = client.chat.completions.create(**ask).choices[0].message.content
            parts = client.chat.completions.create(**ask, stream=True)
            assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
            plain = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
            with plain, pytest.raises(openai.BadRequestError, match="https://"):
                plain.models.list()
        if shutil.which("curl") is not None:
            for flags, code in ((["--cacert", cert], 0), (["-k"], 0), ([], 60)):
                done = subprocess.run(["curl", "-s", "--noproxy", "*", *flags, f"{server.url}/health"], timeout=20)
                assert done.returncode == code
        server.at_rest()
    finally:
        server.close()


SILENT = {
    "nothing": b"", "half a hello": b"\x16\x03\x01\x02\x00\x01\x00", "SSL 2": b"\x80\x00",
    "no TLS": b"\x16" + b"\xff" * 500, "half a method": b"GE", "a shut door": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", SILENT)
def test_a_handshake_that_does_not_end_holds_up_nobody_and_is_ended(certificate, kind):
    cert, key = certificate
    server = Running(ssl_certfile=cert, ssl_keyfile=key, header_timeout=1.0)
    links = []
    try:
        for _ in range(100):
            link = socket.create_connection((server.host, server.port), timeout=10)
            link.sendall(SILENT[kind] or b"")
            if SILENT[kind] is None:
                link.shutdown(socket.SHUT_WR)
            links.append(link)
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), trust_env=False) as client:
            start = time.monotonic()
            assert client.get(f"{server.url}/health").status_code == 200
            assert time.monotonic() - start < 5  # and not a hundred times a second
        for link in links:
            with contextlib.suppress(ConnectionResetError):
                while link.recv(4096):
                    pass
        (acceptor,) = server.http.servers
        end = time.monotonic() + 10
        while acceptor._opening and time.monotonic() < end:
            time.sleep(0.02)
        assert not acceptor._opening
        server.at_rest()
    finally:
        for link in links:
            link.close()
        server.close()


def tls_link(server, cert):
    """Return a connection whose client has finished the handshake, and then neither reads nor sends."""
    context = ssl.create_default_context(cafile=cert)
    link, come, go = socket.create_connection((server.host, server.port), timeout=10), ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(come, go, server_hostname="127.0.0.1")
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            link.sendall(go.read())
            come.write(link.recv(65536))
        else:
            link.sendall(go.read())
            return link


@pytest.mark.parametrize("kind", ["half a handshake", "a whole one"])
def test_with_tls_silent_connections_make_room_for_those_that_ask(certificate, kind):
    cert, key = certificate
    server = Running(ssl_certfile=cert, ssl_keyfile=key)
    links = []
    try:
        (acceptor,) = server.http.servers
        acceptor.room = server.http.room = 12
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), trust_env=False) as client:
            for _ in range(40):
                whole = kind == "a whole one"
                links.append(tls_link(server, cert) if whole else socket.create_connection((server.host, server.port)))
            start = time.monotonic()
            for _ in range(3):
                assert client.get(f"{server.url}/health").status_code == 200
            assert time.monotonic() - start < 5
            assert acceptor.open <= 12 + accepting.SPARE
    finally:
        for link in links:
            link.close()
        server.close()


def test_who_does_not_end_a_handshake_goes_before_those_whose_requests_are_on_their_way():
    """They are also closed before connections that have been idle for a shorter time, but not in the first moment."""

    class Transport:
        closed = False

        def get_write_buffer_size(self):
            return 0

        def close(self):
            self.closed = True

        abort = close

    class One:
        def __init__(self, idle, since):
            self.idle, self.since, self.transport = idle, since, Transport()

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as bound:
            now = asyncio.get_running_loop().time()
            coming, young, old = One(1, now - 99), One(0, now + 99), One(0, now - 99)
            known = {coming, young, old}
            acceptor = accepting.Acceptor(bound, lambda: None, known, 16, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            with socket.create_connection(bound.getsockname()):
                while not acceptor._opening:
                    await asyncio.sleep(0.01)
                young.since = asyncio.get_running_loop().time()
                assert acceptor._make_room() == 1 and old.transport.closed
                known.discard(old)
                assert acceptor._make_room() == 0 and acceptor._opening
                await asyncio.sleep(2 * accepting.AGAIN)
                assert acceptor._make_room() == 1 and not young.transport.closed and not coming.transport.closed
                while acceptor._opening:
                    await asyncio.sleep(0.01)
                assert acceptor._make_room() == 1 and young.transport.closed and not coming.transport.closed
            acceptor.close()
            await acceptor.wait_closed()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_clients_without_a_certificate_are_sent_away_where_one_is_required(certificate):
    cert, key = certificate
    server = Running(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=2)
    try:
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.TransportError), httpx.Client(verify=context, trust_env=False) as client:
            client.get(f"{server.url}/health")
        server.at_rest()
    finally:
        server.close()


def test_files_that_cannot_be_served_with_are_refused_before_anything_is_loaded(certificate, tmp_path):
    cert, key = certificate
    empty, locked = tmp_path / "empty.pem", tmp_path / "locked.pem"
    empty.write_text("")
    lock = ["openssl", "ec", "-in", key, "-out", str(locked), "-aes128", "-passout", "pass:x"]
    subprocess.run(lock, check=True, capture_output=True)
    other = tmp_path / "other.pem"
    subprocess.run(["openssl", "genrsa", "-out", other, "2048"], check=True, capture_output=True)
    os.mkfifo(tmp_path / "fifo")
    for values, words in (
        ({"ssl_certfile": "/none.pem"}, "/none.pem"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(tmp_path / "fifo")}, "expected a regular file"),
        ({"ssl_certfile": str(empty)}, "the file contains no PEM"),
        ({"ssl_certfile": cert}, "give the key as --ssl-keyfile"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(locked)}, "passphrase"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(other)}, "another certificate"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": str(empty), "ssl_cert_reqs": 1}, "ssl_ca_certs"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ciphers": "none-such"}, "openssl ciphers"),
    ):
        with pytest.raises(ConfigError, match=r"server\.ssl_") as refusal:
            listening.tls(ServerConfig(**values))
        assert words in str(refusal.value)
