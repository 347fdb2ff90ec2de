"""The client that runs the engine in a child process: start it, exchange frames, notice its end and restart it."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core import progress
from minivllm.errors import EngineDeadError, RequestError, error_from
from minivllm.registration import fresh
from minivllm.server.logs import event

from .child_log import PrintedLog
from .client import EngineClient, settle
from .engine_process import GRACE, loaded_to_json
from .frames import Frame, Splitter, encode
from .outbox import UNREAD, Outbox

if TYPE_CHECKING:
    from minivllm.config import Loaded

SLICE = 0.002  # seconds of handling frames after which other tasks run
AGAIN = 5.0  # longest time in seconds between two tries to start a child
TAIL = 2000  # number of characters of the end of the process's output that an error message repeats


class ProcessClient(EngineClient):
    """An ``EngineClient`` whose engine runs in a child process.  The task that reads frames never waits for a stream.

    The child ends when this process ends, because only this process holds the write end of the life pipe.
    ``stuck_after`` is the time in seconds after which a step counts as hung.  The child then reports the plug-in in
    which it hangs, and ends.  ``restarts`` is the number of times that an ended engine is started again; ``math.inf``
    means no limit.  Requests that already have a token fail, and the others wait for the new engine.  ``environ`` are
    additional environment variables of the child.
    """

    _name = ""  # prefix of the names of the start's stages

    def __init__(
        self,
        loaded: Loaded,
        stuck_after: float = 120.0,
        restarts: float = 0,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.restarts_left = restarts
        self._environ = environ
        self._restart: asyncio.Task[None] | None = None
        self._was_open = False
        self._loaded = loaded
        self._stuck_after = stuck_after
        self._child: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._outbox: Outbox | None = None
        self._life = -1  # write end of the life pipe
        self._printed = PrintedLog(TAIL)
        self._closing = False
        self._ready: asyncio.Future[dict[str, Any]]
        self._folder: str | None = None
        self._part: dict[str, Any] = {}  # fields of the tokenizer's ``Part``
        self._eos: list[int] = []
        self._ending = asyncio.Lock()  # held while a child is ended or replaced

    @property
    def pid(self) -> int | None:
        """Return the process id of the engine, or None without a process."""
        return None if self._child is None else self._child.pid

    async def open(self) -> None:
        try:
            self._opened(await self._start())
            await self._load_tokenizer()
            self._check_open()  # the engine may have died meanwhile
            self._was_open = True
        except BaseException:
            self._lost("the engine could not be started")
            await self._end(0.0)
            raise

    async def _load_tokenizer(self) -> None:
        """Load the tokenizer of the model, if it has one."""
        if self._folder is not None:
            from minivllm.core.interfaces.executor import Part
            from minivllm.runtime.text.tokenizer import load_tokenizer

            template = self._loaded.engine.chat_template
            part = Part(**self._part)
            self.tokenizer = await asyncio.to_thread(load_tokenizer, self._folder, template, self._eos, part)

    async def _verify(self, description: dict[str, Any]) -> None:
        """Raise a MinivllmError if an engine that was started again may not serve."""

    async def _start(self) -> dict[str, Any]:
        """Start a child process, wait for its engine to start, and return the engine's description."""
        ours, theirs = socket.socketpair()
        read_end, self._life = os.pipe()
        argv = fresh.command("minivllm.server.link.engine_process:main", str(theirs.fileno()), str(read_end))
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            self._child = await asyncio.create_subprocess_exec(
                *argv,
                stdin=null,
                stdout=pipe,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(), read_end),
                env={**os.environ, **self._environ} if self._environ else None,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(read_end)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._outbox = Outbox(self._writer)
        self._ready = asyncio.get_running_loop().create_future()
        printing = asyncio.create_task(self._copy_output())
        self._tasks = [printing, asyncio.create_task(self._read_frames(reader, printing))]
        self._post(encode("open", {**loaded_to_json(self._loaded), "stuck_after": self._stuck_after}))
        description = await self._ready
        self._folder = description["tokenizer"]
        self._part = description["tokenizer_part"]
        self._eos = description["eos_ids"]
        return description

    def _send(self, kind: str, header: dict[str, Any], columns: dict[str, np.ndarray] | None = None) -> None:
        """Send a command.

        Requests wait in the outbox, and all other commands overtake them.  An abort of a waiting request removes it.
        """
        if kind == "add":
            data = encode(kind, header, columns)
            self._open_writer()
            assert self._outbox is not None
            self._outbox.put(header["owner"], header["number"], data)
            if self.restarts_left:
                self._untouched[header["number"]] = header["owner"], data
        elif kind == "abort" and self._outbox is not None and self._outbox.remove(header["number"]):
            self._refuse(header["number"], RequestError("the request was aborted"))
        else:
            self._post(encode(kind, header, columns))

    def _open_writer(self) -> asyncio.StreamWriter:
        """Return the writer of the socket.  Raise EngineDeadError if the socket is closed."""
        writer = self._writer
        if writer is None or writer.is_closing():
            raise EngineDeadError(self._why or "the engine's process is gone")
        return writer

    def _post(self, data: bytes) -> None:
        """Write a frame to the socket.  Raise EngineDeadError if the engine has left too many bytes unread."""
        writer = self._open_writer()
        if writer.transport.get_write_buffer_size() > UNREAD:
            raise EngineDeadError("the engine does not read its commands: too many bytes wait to be sent")
        writer.write(data)

    async def close(self, drain: float = 0.0) -> bool:
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        drained = await self._drain(drain)
        self._lost("the engine was stopped")
        await self._end(GRACE)
        return drained

    async def _end(self, patience: float) -> None:
        """End the process.  It receives the command to stop, and is killed if it still runs after ``patience``
        seconds."""
        self._closing = True
        async with self._ending:
            child = self._child
            if child is not None and child.returncode is None and patience > 0:
                with contextlib.suppress(EngineDeadError):
                    self._post(encode("stop", {}))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(child.wait(), patience)
            await self._clear()

    async def _clear(self) -> None:
        """Kill the child if it still runs, and release its tasks, outbox, socket and pipe."""
        child = self._child
        if child is not None and child.returncode is None:
            self._kill()
            await child.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._outbox is not None:
            self._outbox.close()
        if self._writer is not None:
            self._writer.close()
        if self._life >= 0:
            os.close(self._life)
        self._child = None
        self._writer = None
        self._outbox = None
        self._life = -1
        self._tasks = []

    # ---- restarting ----------------------------------------------------------------------------------------------

    def _died(self, why: str) -> None:
        """Restart an engine that has ended by itself or, if that is not possible, fail all requests."""
        if self.restarting:
            return  # the end is reported twice: by the engine, and by the end of its process
        if self._closing or not self.restarts_left or not self._was_open:
            self._lost(why)
            return
        self.restarting = True
        self._gone = True
        self._why = f"{why}; the engine is being restarted"
        for number, stream in list(self._streams.items()):
            if number not in self._untouched:
                stream.fail(EngineDeadError(why))
                self._forget(stream)
        for waiting in self._questions.values():
            settle(waiting, None, EngineDeadError(why))
        self._restart = asyncio.create_task(self._start_again(why))

    async def _start_again(self, why: str) -> None:
        """Start a new child, trying again while restarts are left, and send it the requests without a token."""
        async with self._ending:
            while True:
                await self._clear()
                self.restarts_left -= 1
                self.restarted += 1
                count = str(self.restarted)
                if self.restarts_left < math.inf:
                    count += f" of {self.restarted + self.restarts_left}"
                event("the engine is started again", logging.WARNING, reason=why, restart=count)
                try:
                    self._printed = PrintedLog(TAIL)
                    description = await self._start()
                    await self._verify(description)
                    break
                except Exception as e:
                    why = str(e)
                    if not self.restarts_left:
                        await self._clear()
                        self.restarting = False
                        self._why = why
                        self._lost(why)
                        return
                    await asyncio.sleep(min(self.restarted, AGAIN))
        self.restarting = False
        waiting = list(self._untouched.items())  # ``_opened`` may add requests, which are sent already
        self._opened(description)
        event("the engine runs again", restart=count, requests=len(waiting))
        for number, (owner, data) in waiting:
            assert self._outbox is not None
            self._outbox.put(owner, number, data)

    # ---- receiving -----------------------------------------------------------------------------------------------

    async def _read_frames(self, reader: asyncio.StreamReader, printing: asyncio.Task[None]) -> None:
        """Handle the child's frames until its socket closes, then the end of the engine."""
        splitter = Splitter()
        why = ""
        try:
            while data := await reader.read(1 << 18):
                begin = time.perf_counter()
                for frame in splitter.feed(data):
                    self._take(frame)
                    if time.perf_counter() - begin > SLICE:  # many frames may have arrived together
                        await asyncio.sleep(0)
                        begin = time.perf_counter()
        except OSError as e:
            why = str(e)
        except Exception as e:  # after a malformed frame, the rest of the bytes is meaningless
            why = f"{type(e).__name__}: {e}"
            self._kill()
        why = await self._cause_of_death(why, printing)
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(why))
        elif not self._closing:
            self._died(why)

    def _take(self, frame: Frame) -> None:
        """Handle a frame of the child: events of requests, progress of the start, or the success or failure of the
        start."""
        if frame.kind == "frame":
            self._on_frame(frame.header, frame.columns)
        elif frame.kind == "progress":
            stage, done, total = frame.header["progress"]
            progress.report(self._name + stage, done, total)
        elif frame.kind == "ready" and not self._ready.done():
            self._ready.set_result(frame.header)
        elif frame.kind == "failed" and not self._ready.done():
            self._ready.set_exception(error_from(*frame.header["error"]))

    async def _cause_of_death(self, why: str, printing: asyncio.Task[None]) -> str:
        """Wait for the process to end, and return its status, ``why`` (if not "") and its last lines as a sentence."""
        child = self._child
        assert child is not None
        try:
            status = await asyncio.wait_for(child.wait(), 2 * GRACE)
        except asyncio.TimeoutError:
            self._kill()
            status = await child.wait()
        await asyncio.wait([printing], timeout=1.0)  # a grandchild may keep the output open
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        cause = f"the engine's process {how}"
        if why:
            cause += f" ({why})"
        last = "; ".join(line.strip() for line in self._printed.last_output.splitlines()[-3:] if line.strip())
        if last:
            cause += f"; the end of its output: {last}"
        return cause

    def _kill(self) -> None:
        """Kill the child if it still runs."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def _copy_output(self) -> None:
        """Copy the output of the child to the server's log, and keep the end of it."""
        assert self._child is not None and self._child.stdout is not None
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        while data := await self._child.stdout.read(1 << 14):
            self._printed.feed(decode(data))
        self._printed.end()


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
