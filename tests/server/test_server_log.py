"""The server's log: the events that get a line, and their levels."""

import json
import logging

import pytest

pytest.importorskip("fastapi")

from http_helpers import Running

from minivllm.server import logs


class Lines(logging.Handler):
    """The rows of the log as they would be written."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def emit(self, record):
        self.rows.append(json.loads(logs.JsonLines().format(record)))

    def take(self):
        rows, self.rows = self.rows, []
        return [(row["level"], row["path"], row["status"]) for row in rows if row["message"] == "request"]


@pytest.fixture
def lines():
    handler, level = Lines(), logs.log.level
    logs.log.addHandler(handler)
    yield handler
    logs.log.removeHandler(handler)
    logs.log.setLevel(level)


@pytest.mark.parametrize("root", ["", "/llm"])
def test_polls_are_logged_at_debug_whether_the_server_is_ready_or_not_and_requests_always(lines, root):
    server = Running(root_path=root)
    try:
        for level in ("debug", "info"):
            logs.log.setLevel(level.upper())
            lines.take()
            wanted = []
            for service in (server.app.service, None):
                server.app.service, kept = service, server.app.service
                for path in ("/health", "/ready", "/metrics", "/health?a=1"):
                    status = server.client.get(path).status_code
                    assert status == (503 if service is None else 200)
                    wanted += [("debug", root + path.partition("?")[0], status)] * (level == "debug")
                server.client.get("/v1/models")
                wanted.append(("info", f"{root}/v1/models", 503 if service is None else 200))
                server.app.service = kept
            assert server.client.get("/health", headers={"Host": "evil.example"}).status_code == 403
            assert server.client.post("/health").status_code == 405
            wanted += [("info", f"{root}/health", 403), ("info", f"{root}/health", 405)]
            assert lines.take() == wanted
    finally:
        server.close()


def test_the_level_of_the_configuration_is_that_of_the_log():
    loggers = [logging.getLogger(name) for name in ("minivllm", "uvicorn.error", "asyncio", logs.log.name)]
    kept = [(one, one.handlers, one.propagate, one.level) for one in loggers]
    try:
        for level in ("debug", "info", "warning"):
            logs.set_up("json", level)
            assert logs.log.getEffectiveLevel() == getattr(logging, level.upper())
    finally:
        for logger, handlers, propagate, level in kept:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
