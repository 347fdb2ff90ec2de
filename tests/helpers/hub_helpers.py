"""A Hugging Face cache that is made by hand, and a hub on the loopback interface that serves the files of a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


def put_into_cache(cache, name, source, commit=COMMIT, refs=("main",), without=()):
    """Write a snapshot in the layout of the hub's library (blobs, links, refs), and return its folder."""
    home = Path(cache) / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (snapshot, home / "blobs", home / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(source).iterdir()):
        if file.name not in without:
            blob = home / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copy(file, blob)
            (snapshot / file.name).unlink(missing_ok=True)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    for ref in refs:
        (home / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (home / "refs" / ref).write_text(commit)
    return snapshot


class Hub:
    """A hub.

    ``served`` maps an id to (folder, {revision: commit}).  ``requested`` has the paths of all requests.
    ``refuses`` maps an id to the code (``GatedRepo``) with which its files are refused.  ``broken`` is the status of
    every answer, if not 0.
    """

    def __init__(self):
        self.served, self.requested, self.refuses, self.broken = {}, [], {}, 0

    def answer(self, path):
        """Return (status, headers, body) for a path."""
        if self.broken:
            return self.broken, {}, b""
        api = path.removeprefix("/api/models/")
        for name, (folder, revisions) in self.served.items():
            if path.startswith(f"/{name}/resolve/"):
                if name in self.refuses:
                    return 403, {"X-Error-Code": self.refuses[name]}, b""
                commit, _, file = path.removeprefix(f"/{name}/resolve/").partition("/")
                data = (Path(folder) / file).read_bytes()
                return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}, data
            files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
            names = {str(p.relative_to(folder)): p.stat().st_size for p in files}
            if api.startswith(f"{name}/revision/"):
                commit = revisions.get(api.removeprefix(f"{name}/revision/"))
                siblings = [{"rfilename": file} for file in names]
                found = {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
                return (200, {}, found) if commit else (404, {"X-Error-Code": "RevisionNotFound"}, b"")
            if api.startswith(f"{name}/tree/"):
                rows = [{"type": "file", "path": f, "size": n, "oid": "0" * 40} for f, n in names.items()]
                return 200, {}, rows
        return 401, {"X-Error-Code": "RepoNotFound"}, b""


@contextlib.contextmanager
def served_hub():
    """Yield (hub, its URL)."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, with_body):
            path = unquote(urlsplit(self.path).path)
            hub.requested.append(path)
            status, headers, body = hub.answer(path)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def do_GET(self):
            self._reply(True)

        def do_HEAD(self):
            self._reply(False)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
