"""Keep responses for later requests: in memory, or as one file each in a folder.

Each API key has its own responses, a limited number of a limited size together; the oldest are dropped.  The name of a
file is made of hashes, so neither an id nor a key becomes a part of a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.errors import ConfigError
from minivllm.server import logs

if TYPE_CHECKING:
    from minivllm.config.server import ServerConfig

ID = re.compile(r"resp_[A-Za-z0-9-]{1,160}")
FILE = re.compile(r"([0-9a-f]{32})-[0-9a-f]{32}\.json")
PART = ".part"  # end of the name of a file that is being written
# Lines of a response's file: before the JSON of the response, before the turns, between two turns, and at the end.
BEGIN, MIDDLE, COMMA, END = b'{"response":', b',"turns":[', b",", b"]}"


@dataclass(frozen=True)
class StoredResponse:
    """A stored response.

    ``response`` is its JSON.  ``turns`` are JSON lists of the items of its conversation: the input and the output of
    each response, alternately.
    """

    id: str
    response: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Return the size of the response in bytes."""
        return len(self.response) + sum(map(len, self.turns))

    def pack(self) -> bytes:
        """Return the content of a file: one JSON object with a line for each part."""
        turns = [line for turn in self.turns for line in (COMMA, turn)][1:]
        return b"\n".join([BEGIN, self.response, MIDDLE, *turns, END])

    @classmethod
    def unpack(cls, ident: str, data: bytes) -> StoredResponse:
        """Return the response in the content of a file.  ValueError if it is damaged."""
        lines = data.split(b"\n")
        whole = len(lines) >= 5 and len(lines) % 2 == 1
        if not whole or (lines[0], lines[2], lines[-1]) != (BEGIN, MIDDLE, END):
            raise ValueError("the file is damaged")
        return cls(ident, lines[1], tuple(lines[3:-1:2]))


class ResponseNames:
    """The names of the stored responses of one API key with their sizes in bytes, oldest first.

    ``most`` limits their number and ``most_bytes`` their total size."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.sizes: OrderedDict[str, int] = OrderedDict()
        self.total = 0

    def add(self, name: str, size: int) -> Iterator[str]:
        """Add the name of a response of ``size`` bytes.  Remove and yield the oldest names beyond the limits."""
        self.remove(name)
        self.sizes[name] = size
        self.total += size
        while len(self.sizes) > self.most or self.total > self.most_bytes:
            oldest = next(iter(self.sizes))
            self.remove(oldest)
            yield oldest

    def remove(self, name: str) -> bool:
        """Remove the name of a response, and return whether it was there."""
        size = self.sizes.pop(name, None)
        self.total -= size or 0
        return size is not None


class MemoryFiles:
    """The contents of kept responses in memory, with the methods of ``FolderFiles``."""

    def __init__(self) -> None:
        self._held: dict[str, StoredResponse] = {}

    async def read(self, name: str, ident: str) -> StoredResponse | None:
        """Return the response that is stored under a name, or None if there is none."""
        return self._held.get(name)

    async def write(self, name: str, stored: StoredResponse, dropped: Sequence[str]) -> None:
        """Store a response under a name, and delete the responses with the names ``dropped``."""
        self._held[name] = stored
        for old in dropped:
            self._held.pop(old, None)

    async def remove(self, name: str) -> None:
        """Delete the response with a name."""
        self._held.pop(name, None)


class FolderFiles:
    """The contents of stored responses as files.  A file is replaced atomically, so a reader never sees a part of
    it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._turn = asyncio.Lock()  # files are changed one after another, in the order of the requests
        if not os.path.isdir(self.folder):
            raise ConfigError(f"server.responses_dir={folder!r}: no such folder; create it")

    def existing(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the size of each file, oldest first.  Files that were not completed are removed."""
        found = []
        for entry in os.scandir(self.folder):
            if FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                found.append((about.st_mtime_ns, entry.name, about.st_size))
            elif FILE.fullmatch(entry.name.removesuffix(PART)):
                os.unlink(entry.path)
        for _, name, size in sorted(found):
            yield name, size

    async def read(self, name: str, ident: str) -> StoredResponse | None:
        """Return a response, or None if its file is missing or damaged."""
        try:
            data = await asyncio.to_thread((self.folder / name).read_bytes)
            return StoredResponse.unpack(ident, data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            logs.event("a stored response cannot be read", 30, file=name, reason=str(exc))
            return None

    async def write(self, name: str, stored: StoredResponse, dropped: Sequence[str]) -> None:
        """Write the file of a response, and remove the files of dropped responses.

        A cancelled caller does not interrupt it, because the names of the files have changed already.
        """
        await asyncio.shield(self._change(lambda: self._write(name, stored), dropped))

    async def _change(self, write: Callable[[], None], dropped: Sequence[str]) -> None:
        """Call ``write`` in a thread, and then delete the files of the responses ``dropped`` there."""

        def change() -> None:
            write()
            for name in dropped:
                with contextlib.suppress(OSError):
                    os.unlink(self.folder / name)

        async with self._turn:
            await asyncio.to_thread(change)

    def _write(self, name: str, stored: StoredResponse) -> None:
        """Write a file under another name and rename it.  Only the user of the server may read it."""
        part = self.folder / (name + PART)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(stored.pack())
            os.replace(part, self.folder / name)
        except OSError as exc:
            logs.event("a response cannot be stored", 30, file=name, reason=str(exc))
            with contextlib.suppress(OSError):
                part.unlink()

    async def remove(self, name: str) -> None:
        """Remove the file of a response."""
        await asyncio.shield(self._change(lambda: None, [name]))


class ResponseStore:
    """The stored responses of all API keys.

    ``most`` and ``most_bytes`` limit the number and the total size of the responses of one key.  ``folder`` is None to
    store them in memory."""

    def __init__(self, most: int, most_bytes: int, folder: str | None = None) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._names: dict[str, ResponseNames] = {}
        self._files: MemoryFiles | FolderFiles = MemoryFiles()
        if folder is None:
            return
        files = self._files = FolderFiles(folder)
        for name, size in files.existing():
            for dropped in self._of(name[:32]).add(name, size):
                (files.folder / dropped).unlink(missing_ok=True)

    @classmethod
    def of(cls, server: ServerConfig) -> ResponseStore:
        """Return the store that a configuration describes."""
        return cls(server.max_responses, server.max_responses_bytes, server.responses_dir)

    def _of(self, key: str) -> ResponseNames:
        """Return the table of the names of an API key's responses.  ``key`` is the first part of these names."""
        if key not in self._names:
            self._names[key] = ResponseNames(self.most, self.most_bytes)
        return self._names[key]

    async def get(self, identity: str, ident: str) -> StoredResponse | None:
        """Return the response with an id that an API key has stored, or None.  ``identity`` identifies the key."""
        name = _name(identity, ident)
        if not ID.fullmatch(ident) or name not in self._of(name[:32]).sizes:
            return None
        return await self._files.read(name, ident)

    async def put(self, identity: str, stored: StoredResponse) -> None:
        """Store a response of an API key, and delete the key's oldest responses beyond the limits.

        A response that exceeds the limit alone is not stored.  ``identity`` identifies the key."""
        name = _name(identity, stored.id)
        if stored.size > self.most_bytes:
            logs.event("a response is too large to be stored", 30, response=stored.id, bytes=stored.size)
            return
        dropped = list(self._of(name[:32]).add(name, stored.size))
        await self._files.write(name, stored, dropped)

    async def delete(self, identity: str, ident: str) -> bool:
        """Delete a response of an API key, and return whether it was there.  ``identity`` identifies the key."""
        name = _name(identity, ident)
        if not ID.fullmatch(ident) or not self._of(name[:32]).remove(name):
            return False
        await self._files.remove(name)
        return True


def _name(identity: str, ident: str) -> str:
    """Return the name under which a response of an API key is stored: a hash of the key's ``identity``, and a hash of
    the identity and the id of the response."""
    parts = [hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() for text in (identity, f"{identity}/{ident}")]
    return f"{parts[0][:32]}-{parts[1][:32]}.json"


class KeyResponses:
    """The responses that are kept for the WebSocket connections of one API key, at most ``most_bytes`` together."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        # (number of a connection, id) -> response
        self._held: OrderedDict[tuple[int, str], StoredResponse] = OrderedDict()
        self._size = 0
        self._connections = itertools.count()

    def connection(self) -> int:
        """Return a new number, which identifies a WebSocket connection in this object."""
        return next(self._connections)

    def get(self, connection: int, ident: str) -> StoredResponse | None:
        """Return the response with an id that is kept for a connection, or None."""
        return self._held.get((connection, ident))

    def put(self, connection: int, stored: StoredResponse) -> None:
        """Keep a response for a connection, unless it exceeds ``most_bytes`` alone.

        Drop the oldest responses of all connections of the key while they exceed ``most_bytes`` together."""
        self.remove(connection, stored.id)
        if stored.size > self.most_bytes:
            return
        self._held[connection, stored.id] = stored
        self._size += stored.size
        while self._size > self.most_bytes:
            oldest = next(iter(self._held))
            self.remove(*oldest)

    def remove(self, connection: int, ident: str) -> None:
        """Drop the response with an id that is kept for a connection, if there is one."""
        old = self._held.pop((connection, ident), None)
        if old is not None:
            self._size -= old.size
