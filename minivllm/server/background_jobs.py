"""The responses that are generated in the background at present."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol


class BackgroundJob(Protocol):
    """A response in the background (``responses.background.Job``)."""

    task: asyncio.Task[None]
    work: Any


class Jobs:
    """The running jobs by the identity of their key and the id of their response."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], BackgroundJob] = {}

    def start(self, identity: str, job: BackgroundJob) -> None:
        """Add a job until it ends."""
        key = identity, job.work.id
        self._jobs[key] = job
        job.task.add_done_callback(lambda _: self._jobs.pop(key, None))

    def get(self, identity: str, ident: str) -> Any:
        """Return the running job of a response, or None."""
        return self._jobs.get((identity, ident))

    async def cancel(self, identity: str, ident: str) -> None:
        """End a job and wait until its response is kept."""
        job = self.get(identity, ident)
        if job is not None:
            job.task.cancel()
            await asyncio.wait({job.task})

    async def close(self) -> None:
        """End all jobs."""
        tasks = [job.task for job in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
