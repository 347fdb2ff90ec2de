"""An engine in a process of its own, and the client that starts it, speaks to it and notices when it is gone."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.errors import EngineDeadError, RequestError, error_from
from minivllm.registration import fresh
from minivllm.server.logs import event

from .child_log import PrintedLog
from .client import FrameClient, settle
from .engine_process import GRACE, loaded_to_json
from .frames import Frame, Splitter, encode
from .outbox import UNREAD, Outbox

if TYPE_CHECKING:
    from minivllm.config import Loaded

SLICE = 0.002  # seconds for frames before the event loop does something else
AGAIN = 5.0  # seconds between two tries to start a child, at most
TAIL = 2000  # characters of what the process said last, for the error


class ProcessClient(FrameClient):
    """``EngineClient`` over an engine in a child process.  One task reads its frames; it waits for no stream.

    The child ends with this process, however that ends: the write end of the life pipe is open here only.
    ``stuck_after``: seconds that one step may take before the child ends itself and says which plug-in it hangs in.
    ``restarts``: how often another child is started where one has ended.  Requests that had a token by then fail, the
    others wait for it.
    """

    def __init__(self, loaded: Loaded, stuck_after: float = 120.0, restarts: int = 0) -> None:
        super().__init__()
        self.restarts_left = restarts
        self._restart: asyncio.Task[None] | None = None
        self._was_open = False
        self._loaded, self._stuck_after = loaded, stuck_after
        self._child: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._outbox: Outbox | None = None
        self._life = -1
        self._printed = PrintedLog(TAIL)
        self._closing = False
        self._ready: asyncio.Future[dict[str, Any]]
        self._folder: str | None = None
        self._eos: list[int] = []
        self._ending = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._child is None else self._child.pid

    async def open(self) -> None:
        try:
            self._opened(await self._start())
            if self._folder is not None:
                from minivllm.runtime.text.tokenizer import load_tokenizer

                template = self._loaded.engine.chat_template
                self.tokenizer = await asyncio.to_thread(load_tokenizer, self._folder, template, self._eos)
            self._check_open()  # it may have died meanwhile
            self._was_open = True
        except BaseException:
            self._lost("the engine could not be started")
            await self._end(0.0)
            raise

    async def _start(self) -> dict[str, Any]:
        """Start the process; what it says of itself once its engine has started."""
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
        said = asyncio.create_task(self._listen())
        self._tasks = [said, asyncio.create_task(self._hear(reader, said))]
        self._post(encode("open", {**loaded_to_json(self._loaded), "stuck_after": self._stuck_after}))
        told = await self._ready
        self._folder, self._eos = told["tokenizer"], told["eos_ids"]
        return told

    def _send(self, kind: str, header: dict[str, Any], columns: dict[str, np.ndarray] | None = None) -> None:
        """What ends a request overtakes those that wait to be sent; if it waits itself, it is not sent at all."""
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
        writer = self._writer
        if writer is None or writer.is_closing():
            raise EngineDeadError(self._why or "the engine's process is gone")
        return writer

    def _post(self, data: bytes) -> None:
        writer = self._open_writer()
        if writer.transport.get_write_buffer_size() > UNREAD:
            raise EngineDeadError("the engine does not read what it is told")
        writer.write(data)

    async def close(self, drain: float = 0.0) -> bool:
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        whole = await self._drain(drain)
        self._lost("the engine was stopped")
        await self._end(GRACE)
        return whole

    async def _end(self, patience: float) -> None:
        """End the process: it is asked to, and killed if it does not within ``patience`` seconds."""
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
        """Give back what belongs to a child, which is killed if it lives."""
        if (child := self._child) is not None and child.returncode is None:
            self._kill()
            await child.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._outbox is not None:
            self._outbox.close()
        if self._writer is not None:
            self._writer.close()
        if self._life >= 0:
            os.close(self._life)
        self._child, self._writer, self._outbox, self._life, self._tasks = None, None, None, -1, []

    # ---- another child -------------------------------------------------------------------------------------------

    def _died(self, why: str) -> None:
        """The engine has ended: start another one, or tell everybody."""
        if self.restarting:
            return  # the engine has said so, and now its process has ended
        if self._closing or not self.restarts_left or not self._was_open:
            self._lost(why)
            return
        self.restarting = self._gone = True
        self._why = f"{why}; the engine is started again"
        for number, stream in list(self._streams.items()):
            if number not in self._untouched:
                stream.fail(EngineDeadError(why))
                self._forget(stream)
        for waiting in self._asked.values():
            settle(waiting, None, EngineDeadError(why))
        self._restart = asyncio.create_task(self._start_again(why))

    async def _start_again(self, why: str) -> None:
        """Start a child, as often as may be, and give it the requests that have waited."""
        async with self._ending:
            while True:
                await self._clear()
                self.restarts_left -= 1
                self.restarted += 1
                left = f"{self.restarted} of {self.restarted + self.restarts_left}"
                event("the engine is started again", logging.WARNING, reason=why, restart=left)
                try:
                    self._printed = PrintedLog(TAIL)
                    told = await self._start()
                    break
                except Exception as e:
                    why = str(e)
                    if not self.restarts_left:
                        await self._clear()
                        self.restarting, self._why = False, why
                        self._lost(why)
                        return
                    await asyncio.sleep(min(self.restarted, AGAIN))
        self.restarting = False
        self._opened(told)
        event("the engine runs again", restart=left, requests=len(self._untouched))
        for number, (owner, data) in list(self._untouched.items()):
            assert self._outbox is not None
            self._outbox.put(owner, number, data)

    # ---- what comes ----------------------------------------------------------------------------------------------

    async def _hear(self, reader: asyncio.StreamReader, said: asyncio.Task[None]) -> None:
        splitter, why = Splitter(), ""
        try:
            while data := await reader.read(1 << 18):
                begin = time.perf_counter()
                for frame in splitter.feed(data):
                    self._take(frame)
                    if time.perf_counter() - begin > SLICE:  # many may have come at once: others have their turn
                        await asyncio.sleep(0)
                        begin = time.perf_counter()
        except OSError as e:
            why = str(e)
        except Exception as e:  # a frame that nobody understands: nothing that follows can be trusted
            why = f"{type(e).__name__}: {e}"
            self._kill()
        why = await self._post_mortem(why, said)
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(why))
        elif not self._closing:
            self._died(why)

    def _take(self, frame: Frame) -> None:
        if frame.kind == "frame":
            self._on_frame(frame.header, frame.columns)
        elif frame.kind == "ready" and not self._ready.done():
            self._ready.set_result(frame.header)
        elif frame.kind == "failed" and not self._ready.done():
            self._ready.set_exception(error_from(*frame.header["error"]))

    async def _post_mortem(self, why: str, said: asyncio.Task[None]) -> str:
        """The socket is closed: how did the process end, and what did it say last?"""
        child = self._child
        assert child is not None
        try:
            status = await asyncio.wait_for(child.wait(), 2 * GRACE)
        except asyncio.TimeoutError:
            self._kill()
            status = await child.wait()
        await asyncio.wait([said], timeout=1.0)  # a grandchild may hold its output open
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        last = "; ".join(line.strip() for line in self._printed.said.splitlines()[-3:] if line.strip())
        return f"the engine's process {how}" + (f" ({why})" if why else "") + (f"; it said: {last}" if last else "")

    def _kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def _listen(self) -> None:
        """Write what the process prints to our log; the end of it is kept."""
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
