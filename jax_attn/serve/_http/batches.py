"""/v1/batches: runs files of requests beside the others, after them, and on after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel
from starlette.types import ASGIApp

from jax_attn.serve._http.batch_run import BatchError, BatchRun, answered, read_input
from jax_attn.serve._http.files import Files, remove_parts, write_json
from jax_attn.serve._openai.batch_schemas import Batch, BatchRequest, BatchStatus, RequestCounts
from jax_attn.serve._openai.errors import ApiError, bad_field

log = logging.getLogger("jax_attn.serve")

MAX_REQUESTS = 50_000  # of a batch, counted by lines
MAX_UNENDED = 100  # batches of one key that wait or run
_MAX_BATCHES = 1000  # of one key; beyond them the oldest that has ended is forgotten
_PRIORITY = 1000  # the last of the key's requests
_RETRY_AFTER_SECONDS = 60
_RUNNING = ("validating", "in_progress", "cancelling")


class Entry(BaseModel):
    """A batch on the disk."""

    owner: str
    batch: Batch


class Batches:
    """The batches of all owners. One of each runs at a time. For one event loop."""

    def __init__(
        self,
        directory: Path,
        files: Files,
        app: ASGIApp,
        tenants: Mapping[str, str],
        window: int,
        most_bytes: int,
    ):
        """app: answers requests of a tenant. tenants: those of the owners that have a key.

        window: requests of a batch in flight. most_bytes: of a request's line.

        Raises OSError: the directory cannot be made or read.
        """
        self._directory = directory / "batches"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files, self._app, self._window = files, app, window
        self._tenants, self._most_bytes = tenants, most_bytes
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        remove_parts(self._directory)
        found = []
        for path in self._directory.glob("*.json"):
            with contextlib.suppress(ValueError):  # a kill has cut it
                found.append(Entry.model_validate_json(path.read_bytes()))
        found.sort(key=lambda entry: entry.batch.created_at)
        self._entries = {entry.batch.id: entry for entry in found}

    def resume(self) -> None:
        """Goes on with the batches that had not ended."""
        for entry in self._entries.values():
            if entry.batch.status in _RUNNING:
                self._start(entry)

    async def close(self) -> None:
        """Stops what runs; `resume` goes on with it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def create(self, owner: str, body: BatchRequest) -> Batch:
        """Raises ApiError, also for a file that is none of requests."""
        file = self._files.get(owner, body.input_file_id, "input_file_id")
        self._files.check_room(owner)
        try:
            lines = await asyncio.to_thread(
                self._read_checked, self._files.path(file.id), file.filename, body.endpoint
            )
        except BatchError as error:
            raise bad_field("input_file_id", str(error)) from None
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=file.id,
            created_at=int(time.time()),
            request_counts=RequestCounts(total=lines),
            metadata=body.metadata,
        )
        self._check_unended(owner)
        entry = Entry(owner=owner, batch=batch)
        self._save(entry)
        self._entries[batch.id] = entry
        self._forget_old(owner)
        self._start(entry)
        return batch

    def get(self, owner: str, id: str) -> Batch:
        """Raises ApiError, 404."""
        return self._find(owner, id).batch

    def list(self, owner: str) -> list[Batch]:
        """Those of an owner, oldest first."""
        return [entry.batch for entry in self._entries.values() if entry.owner == owner]

    def check_unused(self, file_id: str) -> None:
        """Raises ApiError if a batch that has not ended reads the file."""
        for id in self._tasks:
            if self._entries[id].batch.input_file_id == file_id:
                raise bad_field("file_id", f"the batch {id!r} reads it; cancel that first")

    async def cancel(self, owner: str, id: str) -> Batch:
        """Ends a batch; its answers so far are kept. Raises ApiError, 404, or 400 if it ended."""
        entry = self._find(owner, id)
        if (task := self._tasks.get(id)) is None:
            if entry.batch.status == "cancelled":
                return entry.batch
            raise bad_field("batch_id", f"the batch has ended: {entry.batch.status}")
        self._enter(entry, "cancelling")
        task.cancel()
        await asyncio.wait([task])
        if entry.batch.status == "cancelling":
            self._finish(entry, "cancelled")
        return entry.batch

    def _check_unended(self, owner: str) -> None:
        """Raises ApiError, 429, if too many of the owner's batches have not ended."""
        if sum(batch.status in _RUNNING for batch in self.list(owner)) >= MAX_UNENDED:
            raise ApiError(
                429,
                f"batches: expected at most {MAX_UNENDED} batches of one key that have not ended;"
                " try again when some of them have",
                code="too_many_batches",
                retry_after=_RETRY_AFTER_SECONDS,
            )

    def _read_checked(self, path: Path, name: str, endpoint: str) -> int:
        """The number of requests in a file. Raises BatchError."""
        lines = read_input(path, name, self._most_bytes, MAX_REQUESTS)
        if not lines:
            raise BatchError(f"{name}: expected requests, got none")
        for line in lines.values():
            if line.url != endpoint:
                raise BatchError(
                    f"{name}: url: expected that of endpoint, {endpoint}, got {line.url} in the"
                    f" request {line.custom_id[:100]!r}"
                )
        return len(lines)

    def _find(self, owner: str, id: str) -> Entry:
        entry = self._entries.get(id)
        if entry is None or entry.owner != owner:
            raise ApiError(
                404,
                f"batch {id[:64]!r} not found: it is not yours, or had to make room for newer ones",
                param="batch_id",
                code="batch_not_found",
            )
        return entry

    def _start(self, entry: Entry) -> None:
        id = entry.batch.id
        task = self._tasks[id] = asyncio.create_task(self._run(entry))
        task.add_done_callback(lambda _: self._tasks.pop(id, None))

    async def _run(self, entry: Entry) -> None:
        if entry.batch.status == "cancelling":  # the server ended meanwhile
            self._finish(entry, "cancelled")
            return
        try:
            async with self._turns[entry.owner]:
                if not await self._answer_all(entry):
                    return
        except BatchError as error:
            self._fail(entry, str(error))
            return
        except Exception:
            log.exception("the batch %s has failed", entry.batch.id)
            self._fail(entry, "internal error")
            return
        self._finish(entry, "completed")

    async def _answer_all(self, entry: Entry) -> bool:
        """Returns whether every request has an answer: the engine may have failed."""
        batch, counts = entry.batch, entry.batch.request_counts
        if (tenant := self._tenants.get(entry.owner)) is None:
            raise BatchError("the key that made the batch is none of the server's any more")
        source = self._files.path(batch.input_file_id)
        lines = await asyncio.to_thread(read_input, source, batch.input_file_id, self._most_bytes)
        with contextlib.ExitStack() as stack:
            output, errors = (
                stack.enter_context(path.open("a+b")) for path in self._parts(batch.id)
            )
            done = [
                await asyncio.to_thread(answered, file, batch.id, log.warning)
                for file in (output, errors)
            ]
            for custom_id in (*done[0], *done[1]):
                lines.pop(custom_id, None)
            counts.completed, counts.failed = map(len, done)
            self._enter(entry, "in_progress")

            def write(status: int, line: bytes) -> None:
                file = output if status == 200 else errors
                file.write(line)
                file.flush()
                counts.completed += status == 200
                counts.failed += status != 200

            run = BatchRun(
                self._app,
                source,
                list(lines.values()),
                write,
                self._window,
                state=lambda: {"tenant": tenant},
                defaults={"priority": _PRIORITY},
            )
            await run.run()
        return not run.has_failed

    def _fail(self, entry: Entry, message: str) -> None:
        entry.batch.errors = {"object": "list", "data": [{"message": message}]}
        self._finish(entry, "failed")

    def _finish(self, entry: Entry, status: BatchStatus) -> None:
        batch = entry.batch
        output, errors = (
            self._files.adopt(entry.owner, path, f"{batch.id}_{path.suffix[1:]}.jsonl").id
            if path.is_file() and path.stat().st_size
            else None
            for path in self._parts(batch.id)
        )
        batch.output_file_id, batch.error_file_id = output, errors
        for path in self._parts(batch.id):
            path.unlink(missing_ok=True)
        self._enter(entry, status)

    def _enter(self, entry: Entry, status: BatchStatus) -> None:
        entry.batch.status = status
        setattr(entry.batch, f"{status}_at", int(time.time()))
        self._save(entry)

    def _parts(self, id: str) -> tuple[Path, Path]:
        """Where answers, and errors, are written while a batch runs."""
        return self._directory / f"{id}.output", self._directory / f"{id}.error"

    def _save(self, entry: Entry) -> None:
        write_json(self._path(entry.batch.id), json.loads(entry.model_dump_json()))

    def _path(self, id: str) -> Path:
        return self._directory / f"{id}.json"

    def _forget_old(self, owner: str) -> None:
        ended = [batch.id for batch in self.list(owner) if batch.id not in self._tasks]
        for id in ended[: max(0, len(self.list(owner)) - _MAX_BATCHES)]:
            del self._entries[id]
            self._path(id).unlink(missing_ok=True)
