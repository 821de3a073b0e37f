"""/v1/files: files of clients, in a directory. Each has an owner, and a file beside it says which.

Only what has both files counts, so a kill leaves no half of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from jax_attn.serve._openai.batch_schemas import FileObject
from jax_attn.serve._openai.errors import ApiError, bad_field

MAX_FILE_BYTES = 100 << 20
MAX_OWNER_BYTES = 1 << 30  # of all files of one key
MAX_FILES = 1000  # of one key
_MAX_UPLOADS = 2  # of one key at a time; others wait
_UPLOAD_SECONDS = 600  # for a client to send a file
_MAX_NAME_CHARS = 200
_ID = re.compile(r"file-[0-9a-f]{24}")


class Files:
    """The files of all owners, in memory but for their contents. For one event loop.

    The directory is locked until `close`.
    """

    def __init__(self, directory: Path):
        """Raises ValueError: the directory cannot be used, or another server does."""
        self._directory = directory / "files"
        self._files: dict[str, tuple[str, FileObject]] = {}  # id -> (owner, file), oldest first
        self._uploads = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(_MAX_UPLOADS))
        try:
            self._open(directory / "lock")
        except BlockingIOError:
            raise ValueError(
                "--files-directory: expected a directory that no other server uses, got"
                f" {directory}"
            ) from None
        except OSError as error:
            raise ValueError(
                f"--files-directory: expected a directory to read and write, got {directory}:"
                f" {error.strerror}"
            ) from None

    def _open(self, lock: Path) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = lock.open("ab")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_parts(self._directory)
        for path in self._directory.glob("file-*"):
            if _ID.fullmatch(path.name) and not self._described(path.name).is_file():
                path.unlink()
        found = []
        for path in self._directory.glob("*.json"):
            with contextlib.suppress(ValueError, KeyError):  # a kill has cut it
                raw = json.loads(path.read_text(encoding="utf-8"))
                found.append((raw["owner"], FileObject.model_validate(raw["file"])))
        for owner, file in sorted(found, key=lambda each: each[1].created_at):
            if self.path(file.id).is_file():
                self._files[file.id] = owner, file

    def close(self) -> None:
        self._lock.close()

    def path(self, id: str) -> Path:
        return self._directory / id

    def get(self, owner: str, id: str, param: str = "file_id") -> FileObject:
        """Raises ApiError, 404."""
        found = self._files.get(id)
        if _ID.fullmatch(id) is None or found is None or found[0] != owner:
            raise ApiError(
                404,
                f"file {id[:64]!r} not found: it is not yours, or was deleted",
                param=param,
                code="file_not_found",
            )
        return found[1]

    def list(self, owner: str) -> list[FileObject]:
        """Those of an owner, oldest first."""
        return [file for whose, file in self._files.values() if whose == owner]

    def delete(self, owner: str, id: str) -> None:
        """Raises ApiError, 404."""
        self.get(owner, id)
        del self._files[id]
        self._described(id).unlink(missing_ok=True)
        self.path(id).unlink(missing_ok=True)

    def check_room(self, owner: str, num_bytes: int = 0) -> None:
        """Raises ApiError, 400, if the owner has too many files, or files that are too large."""
        files = self.list(owner)
        if len(files) >= MAX_FILES:
            raise bad_field("file", f"expected at most {MAX_FILES} files of one key; delete some")
        if (held := sum(file.bytes for file in files)) + num_bytes > MAX_OWNER_BYTES:
            raise bad_field(
                "file",
                f"expected at most {MAX_OWNER_BYTES} bytes of all files of one key, got {held} and"
                f" {num_bytes} more; delete some",
            )

    async def upload(self, owner: str, request: Request) -> FileObject:
        """Stores the file of a form. Raises ApiError."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "multipart/form-data":
            raise ApiError(415, "Content-Type: expected multipart/form-data", param="Content-Type")
        # One key's slow uploads delay no other's.
        async with self._uploads[owner]:
            try:
                async with asyncio.timeout(_UPLOAD_SECONDS):
                    return await self._receive(owner, request)
            except TimeoutError:
                raise ApiError(
                    408, f"the body took longer than {_UPLOAD_SECONDS} s", code="timeout"
                ) from None

    async def _receive(self, owner: str, request: Request) -> FileObject:
        self.check_room(owner)
        parser = MultiPartParser(request.headers, _bounded(request), max_files=1, max_fields=16)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError) as error:
            raise ApiError(400, f"body: {error}", code="invalid_form") from None
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(form.close)
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                raise bad_field("file", "a file is needed")
            if purpose != "batch":
                raise bad_field("purpose", f"expected 'batch', got {str(purpose)[:64]!r}")
            file = self._made(upload.size or 0, upload.filename or "file", "batch")
            try:
                await asyncio.to_thread(_copy, upload.file, self.path(file.id))
                self.check_room(owner, file.bytes)
                self._describe(owner, file)
            except BaseException:
                self.path(file.id).unlink(missing_ok=True)
                raise
            self._files[file.id] = owner, file
            return file

    def adopt(self, owner: str, path: Path, name: str) -> FileObject:
        """Makes a file of the server's one of the owner's."""
        file = self._made(path.stat().st_size, name, "batch_output")
        # First, as contents without it are removed at the next start.
        self._describe(owner, file)
        os.replace(path, self.path(file.id))
        self._files[file.id] = owner, file
        return file

    def _made(
        self, num_bytes: int, name: str, purpose: Literal["batch", "batch_output"]
    ) -> FileObject:
        return FileObject(
            id=f"file-{secrets.token_hex(12)}",
            bytes=num_bytes,
            created_at=int(time.time()),
            filename=name[:_MAX_NAME_CHARS],
            purpose=purpose,
        )

    def _describe(self, owner: str, file: FileObject) -> None:
        write_json(self._described(file.id), {"owner": owner, "file": file.model_dump()})

    def _described(self, id: str) -> Path:
        return self._directory / f"{id}.json"


async def _bounded(request: Request) -> AsyncGenerator[bytes]:
    """The body, as long as it is no larger than a file may be. Raises ApiError, 413."""
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > MAX_FILE_BYTES:
            raise ApiError(
                413, f"the body is longer than {MAX_FILE_BYTES} bytes", code="body_too_large"
            )
        yield chunk


def _copy(source: BinaryIO, path: Path) -> None:
    source.seek(0)
    with path.open("wb") as target:
        shutil.copyfileobj(source, target)


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is there whole or not at all."""
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(value), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def remove_parts(directory: Path) -> None:
    """Removes what a kill has left of `write_json`."""
    for path in directory.glob("*.part"):
        path.unlink()


class FileAnswer:
    """An ASGI application that sends a file in pieces."""

    _PIECE = 1 << 16

    def __init__(self, path: Path):
        self._path = path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._path.open("rb") as file:
            await self._send(file, send)

    async def _send(self, file: BinaryIO, send: Any) -> None:
        length = os.fstat(file.fileno()).st_size
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"cache-control", b"no-store"),
            (b"content-length", b"%d" % length),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while piece := await asyncio.to_thread(file.read, self._PIECE):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
