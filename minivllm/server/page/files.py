"""The static files of the page, in memory, with a strict content security policy.

They hold nothing secret, so a browser gets them without a key.  All that they show comes from other routes, with the
key that the user typed into the page.  No file refers to another host, and no script is inline.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from starlette.responses import Response

KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
# Trusted types: in browsers that support them, scripts can convert text to markup only by the sanitizer's policy.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}
ADDRESSES = {"index.html": "/", "docs.html": "/docs"}  # file -> path; all other files are below /page/


@dataclass(frozen=True)
class StaticFile:
    """A static file: its content, content type and entity tag."""

    content: bytes
    kind: str
    tag: str


class Page:
    """The files of the page, by path."""

    def __init__(self, files: dict[str, StaticFile]) -> None:
        self.files = files

    @staticmethod
    def load() -> Page:
        """Return the page with its files, read from the package."""
        files: dict[str, StaticFile] = {}
        folder = resources.files(__package__) / "static"
        for entry in folder.iterdir():
            kind = KINDS.get(entry.name.rpartition(".")[2])
            if kind is None:
                continue
            content = entry.read_bytes()
            tag = hashlib.sha256(content).hexdigest()[:16]
            path = ADDRESSES.get(entry.name, f"/page/{entry.name}")
            files[path] = StaticFile(content, kind, f'"{tag}"')
        return Page(files)

    def serves(self, scope: Any, path: str) -> bool:
        """Return whether a request is for a file.  ``path`` is its path without ``root_path``.

        ``/`` is a file only for browsers.  Other clients expect Ollama's greeting there.
        """
        if scope["method"] not in ("GET", "HEAD") or path not in self.files:
            return False
        return path != "/" or b"text/html" in dict(scope["headers"]).get(b"accept", b"")

    def before(self, app: Any) -> Any:
        """Return an ASGI application that serves the files, and passes other requests on to ``app``."""

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                path = scope["path"].removeprefix(scope.get("root_path", ""))
                if self.serves(scope, path):
                    await self._answer(scope, path)(scope, receive, send)
                    return
            await app(scope, receive, send)

        return serve

    def _answer(self, scope: Any, path: str) -> Response:
        """Return the response with a file and its ETag, or 304 if the client has it."""
        file = self.files[path]
        headers = {**HEADERS, "ETag": file.tag}
        if path == "/":
            headers["Vary"] = "Accept"
        if dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.kind, headers=headers)
