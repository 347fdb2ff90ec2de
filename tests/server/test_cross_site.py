"""The requests that pages of others may make a browser send: hosts, origins, types of bodies, and the routes of
--admin.
"""

import json

import pytest

pytest.importorskip("fastapi")

import httpx
from http_helpers import Running, served
from starlette.testclient import TestClient
from test_websocket import talking
from websockets.exceptions import InvalidStatus

from minivllm.config.server import ServerConfig
from minivllm.errors import ConfigError
from minivllm.server.app import Application
from minivllm.server.errors import ApiError
from minivllm.server.http import cross_site
from minivllm.server.http.auth import admin_token

server = served(admin=True, allowed_origins=["https://app.example"])
ASK = json.dumps({"prompt": "a", "max_tokens": 1})
PAGE = {"prompt": "a", "max_tokens": 1}


def status_of(hosts, host, reached="127.0.0.1"):
    try:
        hosts.check([(b"host", one.encode("latin-1")) for one in ([host] if isinstance(host, str) else host)], reached)
    except ApiError as error:
        return error.status
    return 200


LOOPBACK = [
    "localhost",
    "localhost:8000",
    "LocalHost",
    "localhost.",
    "app.localhost:1",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]",
    "[::1]:8000",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]:80",
]
REBOUND = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil-localhost",
    "evillocalhost",
    "x.localhost.evil",
    "127.0.0.1.nip.io",
    "0x7f.1",
    "1.2.3.4",
    "[2001:db8::1]",
    "[::ffff:1.2.3.4]",
]
MALFORMED = ["", " ", "a b", "localhost, evil.example", "http://localhost", "lo\xe7alhost", "a" * 300, [], ["a", "a"]]
MALFORMED += [["localhost", "evil.example"]]
MALFORMED += [
    "localhost/evil",
    "evil@localhost",
    "localhost:80:80",
    "localhost:x",
    "localhost#",
    "localhost?",
    "[::1",
    "::1",
]


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("listens", ["127.0.0.1", "localhost", "::1"])
def test_a_server_on_loopback_is_asked_for_by_loopback_names_only(listens, keys):
    hosts = cross_site.Hosts([], listens, keys)
    assert {host: status_of(hosts, host) for host in LOOPBACK} == dict.fromkeys(LOOPBACK, 200)
    assert {host: status_of(hosts, host) for host in REBOUND} == dict.fromkeys(REBOUND, 403)
    assert [status_of(hosts, host) for host in MALFORMED] == [400] * len(MALFORMED)


def test_a_server_on_a_network_without_keys_is_asked_for_by_what_cannot_be_rebound():
    hosts = cross_site.Hosts([], "0.0.0.0", False)
    good = [
        "192.168.1.7:8000",
        "[fd00::1]",
        "gpu-box",
        "minivllm:8000",
        "my_service",
        "box.local",
        "a.internal",
        "llm.default.svc",
        "llm.default.svc.cluster.local",
        *LOOPBACK,
    ]
    assert [host for host in good if status_of(hosts, host) != 200] == []
    for host in ("evil.example", "local.evil.example", "127.0.0.1.nip.io", "a.locals"):
        assert status_of(hosts, host) == 403
    assert [status_of(hosts, host) for host in MALFORMED] == [400] * len(MALFORMED)
    assert status_of(cross_site.Hosts([], "0.0.0.0", True), "llm.example.com") == 200  # a page has no key


def test_allowed_hosts_are_those_and_loopback_and_the_address_that_was_reached():
    for listens in ("127.0.0.1", "0.0.0.0"):
        for keys in (False, True):
            hosts = cross_site.Hosts(["LLM.example", "*.corp.example", "fd00::1"], listens, keys)
            for host in (*LOOPBACK, "llm.example:443", "a.corp.example", "a.b.corp.example", "[FD00::1]"):
                assert status_of(hosts, host) == 200, host
            for host in ("corp.example", "evilcorp.example", "a.llm.example", "gpu-box", "10.0.0.1", "evil.example"):
                assert status_of(hosts, host) == 403, host
            assert status_of(hosts, "10.0.0.1", reached="10.0.0.1") == 200  # probes of Kubernetes send this
    assert status_of(cross_site.Hosts(["*"], "127.0.0.1", False), "evil.example") == 200
    cross_site.Hosts([], "127.0.0.1", False).check([], version="1.0")  # no browser sends HTTP/1.0


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "a/b", "", "*.", "a.*", "a b", "a..b", "**"])
def test_an_allowed_host_that_is_none_is_refused_at_the_start(name):
    with pytest.raises(ConfigError, match=r"allowed_hosts.*expected a host name"):
        ServerConfig(allowed_hosts=[name])


def test_a_rebound_name_reaches_no_route(server):
    paths = {route.path: min(route.methods) for route in server.app.api.routes if hasattr(route, "methods")}
    assert {"/health", "/v1/models", "/debug/state", "/openapi.json", "/metrics"} <= paths.keys()
    for path, method in paths.items():
        answer = server.client.request(method, path.replace("{model:path}", "x"), headers={"Host": "evil.example"})
        error = answer.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert answer.status_code == 403 and "--allowed-hosts evil.example" in message
        assert path.startswith("/api/") or error["type"] in ("PermissionDeniedError", "permission_error")
    answer = server.client.get("/health", headers={"Host": "evil.example", "X-Forwarded-Host": "localhost"})
    assert answer.status_code == 403
    with pytest.raises(InvalidStatus) as refused, talking(server, additional_headers={"Host": "evil.example"}):
        pass
    assert refused.value.response.status_code in (400, 403)  # two hosts, as this client adds its own
    lines = ["GET /v1/ws HTTP/1.1", "Host: evil.example", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {'A' * 22}==", "", ""]
    got = server.raw("\r\n".join(lines).encode(), 2)
    assert got.startswith(b"HTTP/1.1 403") and b"evil.example is not a name" in got


POSTS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/start_profile",
    "/stop_profile",
    "/reset_prefix_cache",
    "/v1/nowhere",
]
ELSEWHERE = [
    "https://elsewhere.example",
    "null",
    "http://localhost:1",
    "http://127.0.0.1.evil.example",
    "chrome-extension://abc",
    "http://[::1",
    "https://app.example.evil",
    "https://app.example:444",
    "http://app.example",
]
FOREIGN = [{"Origin": origin} for origin in (*ELSEWHERE, "")]
FOREIGN += [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": ""}]
FOREIGN += [{"Sec-Fetch-Site": "cross-site", "Origin": "https://elsewhere.example"}]


@pytest.mark.parametrize("path", POSTS)
def test_a_page_of_another_origin_changes_nothing(server, path):
    for headers in FOREIGN:
        answer = server.client.post(path, json=PAGE, headers=headers)
        assert answer.status_code == 403, headers
        assert "allowed_origins" in answer.json()["error"]["message"]


def test_a_page_of_another_origin_opens_no_socket_and_one_that_is_allowed_does(server):
    for headers in FOREIGN:
        with pytest.raises(InvalidStatus) as refused, talking(server, additional_headers=headers):
            pass
        assert refused.value.response.status_code == 403
    for headers in ({"Origin": "https://app.example"}, {"Origin": server.url}):
        with talking(server, additional_headers=headers) as talk:
            talk.ask("a")
            assert talk.until("a")[-1]["type"] == "done"


def test_own_pages_allowed_ones_and_programs_are_served(server):
    good = [{}, {"Origin": server.url}, {"Origin": "https://app.example"}]
    good += [{"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}]
    good += [{"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}]
    good += [{"Origin": "https://seen.example", "Sec-Fetch-Site": "same-origin"}]  # a proxy has changed the host
    for headers in good:
        assert server.client.post("/v1/completions", json=PAGE, headers=headers).status_code == 200, headers
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert server.client.options("/v1/completions", headers=ask).headers["access-control-allow-origin"]
    refused = server.client.options("/v1/completions", headers={**ask, "Origin": "https://no.example"})
    assert refused.status_code == 403 and "--allowed-origins https://no.example" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_a_form_could_send_is_refused_in_words_that_help(server, path):
    kinds = ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "text/json"]
    for kind in [*kinds, "application/jsonp", "text/plain; application/json", "", None]:
        headers = {} if kind is None else {"Content-Type": kind}
        for content in (ASK.encode(), iter([ASK.encode()])):  # in one piece, and in chunks
            answer = server.client.post(path, content=content, headers=headers)
            error = answer.json()["error"]
            assert answer.status_code == 415 and error["type"] == "UnsupportedMediaTypeError", (kind, answer.text)
            assert "-H 'Content-Type: application/json'" in error["message"]
    twice = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    assert server.client.post(path, content=ASK, headers=twice).status_code == 415


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_ollamas_routes_take_any_content_type_from_programs_and_only_json_from_pages(server, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    ask = "/api/pull"
    own = f"http://{server.host}:{server.port}"
    from_program = server.client.post(ask, content=b"{}", headers=headers)
    from_page = server.client.post(ask, content=b"{}", headers={**headers, "Origin": own})
    sent_by_browser = server.client.post(ask, content=b"{}", headers={**headers, "Sec-Fetch-Site": "same-origin"})
    assert from_program.status_code != 415 and from_page.status_code == sent_by_browser.status_code == 415


def test_every_type_that_is_json_is_taken(server):
    for kind in (
        "application/json",
        "APPLICATION/JSON; charset=utf-8",
        "application/vnd.api+json",
        "application/json;",
    ):
        answer = server.client.post("/v1/completions", content=ASK, headers={"Content-Type": kind})
        assert answer.status_code == 200, kind
    answer = server.client.post("/v1/completions", headers={"Content-Type": ""})
    assert answer.status_code == 415 and "no body" in answer.json()["error"]["message"]


def test_without_keys_the_routes_of_admin_want_the_token_of_the_start(server):
    token = server.app.admin_token
    assert len(token) >= 32
    bare = httpx.Client(base_url=server.url, trust_env=False)
    paths = ("/debug/state", "/reset_prefix_cache", "/start_profile", "/stop_profile")
    for path, method in zip(paths, ("GET", "POST", "POST", "POST"), strict=True):
        for headers in ({}, {"Authorization": f"Bearer {token[:-1]}"}, {"x-api-key": "none"}, {"Authorization": token}):
            answer = bare.request(method, path, headers=headers)
            assert answer.status_code == 401 and "token" in answer.json()["error"]["message"], path
        assert bare.request(method, path, params={"token": token}).status_code == 401
    for right in ({"Authorization": f"Bearer {token}"}, {"x-api-key": token}):
        assert bare.get("/debug/state", headers=right).status_code == 200
        assert bare.post("/reset_prefix_cache", headers=right).json() == {"reset": True}
    assert bare.get("/v1/models").status_code == 200
    assert bare.get("/v1/models", headers={"Authorization": "Bearer none"}).status_code == 200
    bare.close()


def test_admin_without_a_key_is_refused_where_others_could_ask():
    for host in ("0.0.0.0", "::", "192.168.1.7", "gpu-box"):
        with pytest.raises(ConfigError, match=r"expected a key .*or --host 127.0.0.1"):
            admin_token(ServerConfig(host=host, admin=True), [])
        assert admin_token(ServerConfig(host=host, admin=True), ["k"]) is None
        assert admin_token(ServerConfig(host=host, admin=True), ["k", "k"]) is None
        assert admin_token(ServerConfig(host=host, admin=True), [], "own") == "own"
        assert admin_token(ServerConfig(host=host), []) is None
    tokens = {admin_token(ServerConfig(host=host, admin=True), []) for host in ("127.0.0.1", "localhost", "::1")}
    assert len(tokens) == 3 and None not in tokens


@pytest.mark.parametrize("given", ["", "operator"])
def test_the_keys_of_several_users_are_no_operators_keys(given):
    config = ServerConfig(admin=True)
    app = Application(config, ["one", "two"], given)
    token = app.admin_token
    assert (token == given) == bool(given) and app.generated_token == (None if given else token)
    assert token not in ("one", "two") and len(token) >= 8
    client = TestClient(app, base_url="http://localhost")
    for path, method in (("/debug/state", "GET"), ("/reset_prefix_cache", "POST"), ("/start_profile", "POST")):
        for key in ("one", "two", "three", ""):
            assert client.request(method, path, headers={"x-api-key": key}).status_code == 401, (path, key)
        # 503 means that the request passed the checks, but there is no engine
        assert client.request(method, path, headers={"x-api-key": token}).status_code == 503, path
    for key in ("one", "two", token):
        assert client.get("/v1/models", headers={"x-api-key": key}).status_code == 503
    for key in ("one", ""):  # the only key is the operator's, unless there is one of its own
        alone = TestClient(Application(config, ["one"], given), base_url="http://localhost")
        allowed = key == "one" and not given
        assert alone.get("/debug/state", headers={"x-api-key": key}).status_code == (503 if allowed else 401)


def test_under_a_root_path_health_needs_no_key_and_nothing_else_is_open():
    running = Running(keys=["k"], root_path="/llm")
    try:
        bare = httpx.Client(base_url=running.url, trust_env=False)
        assert bare.get("/health").status_code == 200
        assert bare.get("/ready").status_code == bare.get("/llm/ready").status_code == 401
        assert bare.get("/llm/health").status_code == 401  # the route does not exist, but the key is checked first
        bare.close()
    finally:
        running.close()
