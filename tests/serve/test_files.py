"""/v1/files and /v1/batches with OpenAI's client: bounded, on the disk, on after a restart."""

import contextlib
import io
import json
import socket

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
openai = pytest.importorskip("openai", reason="needs the extra `test`")

from helpers.serve.live_server import KEYS, eventually, serving  # noqa: E402
from jax_attn.serve._http import batches, files  # noqa: E402

PATH = "/v1/completions"


def lines(*bodies, url=PATH) -> bytes:
    made = [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": {"prompt": "a"} | body}
        for i, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in made).encode()


def read(client, id) -> dict:
    found = map(json.loads, client.files.content(id).read().splitlines())
    return {line["custom_id"]: line["response"] for line in found}


def upload(client, content, name="in.jsonl"):
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch")


def begin(client, content):
    file = upload(client, content)
    return client.batches.create(
        input_file_id=file.id, endpoint=PATH, completion_window="24h", metadata={"a": "b"}
    )


def ends(client, id):
    eventually(lambda: client.batches.retrieve(id).status in ("completed", "cancelled", "failed"))
    return client.batches.retrieve(id)


def test_a_batch(tmp_path):
    with serving(files_directory=tmp_path) as server, server.client() as client:
        bodies = [{"max_tokens": 3}, {"max_tokens": -1}, *[{"max_tokens": 2}] * 60]
        batch = begin(client, lines(*bodies))
        assert batch.request_counts.total == 62 and batch.metadata == {"a": "b"}
        batch = ends(client, batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (61, 1)
        answers, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
        assert len(answers) == 61 and set(errors) == {"r1"}
        assert answers["r0"]["body"]["usage"]["completion_tokens"] == 3
        assert errors["r1"]["status_code"] == 400
        assert {seq.priority for seq in server.engine.submitted} == {1000}
        assert [each.id for each in client.batches.list()] == [batch.id]
        ids = [file.id for file in client.files.list(order="asc")]
        assert ids == [batch.input_file_id, batch.output_file_id, batch.error_file_id]
        assert client.files.retrieve(ids[0]).filename == "in.jsonl"
        client.files.delete(ids[1])
        with pytest.raises(openai.NotFoundError, match="it is not yours, or was deleted"):
            client.files.content(ids[1])
        with pytest.raises(openai.BadRequestError, match="the batch has ended: completed"):
            client.batches.cancel(batch.id)
        assert not server.app.state.server.limiter.held("")


def test_a_restart_goes_on_and_a_cancelled_batch_keeps_its_answers(tmp_path):
    content = lines(*[{"max_tokens": 2}] * 9, {"max_tokens": 50})
    with serving(files_directory=tmp_path) as server, server.client() as client:
        server.engine.holds_at = 3
        batch = begin(client, content)
        counts = lambda: client.batches.retrieve(batch.id).request_counts.completed  # noqa: E731
        eventually(lambda: counts() == 9)
        with pytest.raises(openai.BadRequestError, match="reads it; cancel that first"):
            client.files.delete(batch.input_file_id)
    with serving(files_directory=tmp_path) as server, server.client() as client:
        batch = ends(client, batch.id)
        assert len(server.engine.submitted) == 1  # the others had been answered
        assert len(read(client, batch.output_file_id)) == 10
        server.engine.holds_at = 3
        second, third = begin(client, content), begin(client, content)
        eventually(lambda: client.batches.retrieve(second.id).request_counts.completed == 9)
        assert client.batches.retrieve(third.id).status == "validating"  # its turn comes later
        assert client.batches.cancel(third.id).status == "cancelled"
        second = client.batches.cancel(second.id)
        assert second.status == "cancelled" and len(read(client, second.output_file_id)) == 9
        eventually(lambda: not server.engine.live)
        assert client.batches.cancel(second.id).status == "cancelled"
        page = client.batches.list(limit=2)
        assert [each.id for each in page.data] == [third.id, second.id] and page.has_more


def test_what_is_refused(tmp_path, monkeypatch):
    options = {"files_directory": tmp_path, "max_body_bytes": 4096}
    with serving(**options) as server, server.client() as client:
        for content, words in [
            (b"", "expected requests, got none"),
            (b"x\n", "in.jsonl:1: expected a JSON object"),
            (lines({}, url="/v1/embeddings"), "expected that of endpoint"),
            (lines({"stream": True}), "a batch has no streams"),
            (lines({"stop": "a" * 4096}), "in.jsonl:1: expected at most 4096 bytes of a line"),
            (b"\n" * 50_001, "at most 50000 lines"),
        ]:
            with pytest.raises(openai.BadRequestError, match=words):
                begin(client, content)
        monkeypatch.setattr(batches, "MAX_REQUESTS", 1)
        with pytest.raises(openai.BadRequestError, match="at most 1 lines"):
            begin(client, lines({}, {}))
        with pytest.raises(openai.BadRequestError, match="expected 'batch', got 'vision'"):
            client.files.create(file=("a", b"a"), purpose="vision")
        monkeypatch.setattr(files, "MAX_OWNER_BYTES", 300)
        with pytest.raises(openai.BadRequestError, match="delete some"):
            upload(client, bytes(301))
        monkeypatch.setattr(files, "MAX_FILES", 1)
        with pytest.raises(openai.BadRequestError, match="at most 1 files"):
            upload(client, b"")
        monkeypatch.setattr(files, "MAX_FILE_BYTES", 100)
        monkeypatch.setattr(files, "MAX_FILES", 99)
        monkeypatch.setattr(files, "MAX_OWNER_BYTES", 1 << 20)
        with pytest.raises(openai.APIStatusError, match="longer than 100 bytes") as caught:
            upload(client, bytes(101))
        assert caught.value.status_code == 413
        form = {"Content_Type": "multipart/form-data; boundary=x", "Origin": "http://evil.example"}
        assert server.post("/v1/files", b"", **form).error["code"] == "wrong_origin"
        assert server.post("/v1/files", {}).status == 415
        empty = server.post("/v1/files", b"--x--\r\n", Content_Type=form["Content_Type"])
        assert empty.status == 400 and empty.error["param"] == "file"
        for path in ("/v1/files/file-x/content", "/v1/files/..%2Fbatches", "/v1/batches/x"):
            assert server.get(path).status == 404


def test_a_full_disk_and_a_kill_leave_nothing(tmp_path, monkeypatch):
    def full(source, target):
        target.write(b"a")
        raise OSError(28, "No space left on device")

    with serving(files_directory=tmp_path) as server:
        with monkeypatch.context() as patch, server.client() as client:
            patch.setattr(files.shutil, "copyfileobj", full)
            with pytest.raises(openai.InternalServerError):
                upload(client, b"a")
        assert not list((tmp_path / "files").iterdir())
        with server.client() as client:
            kept = upload(client, b"a")
    for name in (f"files/file-{'0' * 24}", "files/a.part", "batches/a.part"):
        (tmp_path / name).touch()
    with serving(files_directory=tmp_path):
        found = {path.name for path in tmp_path.glob("*/*")}
    assert found == {kept.id, f"{kept.id}.json"}


def test_batches_that_have_not_ended_are_bounded_and_saved(tmp_path, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batches, "MAX_UNENDED", 2)
    with serving(files_directory=tmp_path) as server, server.client() as client:
        server.engine.holds_at = 1
        first, _ = (begin(client, lines({"max_tokens": 2})) for _ in range(2))
        with pytest.raises(openai.RateLimitError, match="at most 2 batches of one key") as caught:
            begin(client, lines({"max_tokens": 2}))
        assert caught.value.body["reason"] == "too_many_batches"
        client.batches.cancel(first.id)
        third = begin(client, lines({"max_tokens": 2}))
        client.batches.cancel(third.id)
        monkeypatch.setattr(batches, "write_json", full)
        with server.client() as other, pytest.raises(openai.InternalServerError):
            begin(other, lines({"max_tokens": 2}))
        assert len(client.batches.list().data) == 3
        monkeypatch.undo()


def test_a_batch_keeps_its_answers_on_a_full_disk(tmp_path, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    with serving(files_directory=tmp_path) as server, server.client() as client:
        server.engine.holds_at = 1
        batch = begin(client, lines({"max_tokens": 2}))
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_json", full)
            server.engine.holds_at = None
            eventually(lambda: not server.app.state.server._batches._tasks)
    with serving(files_directory=tmp_path) as server, server.client() as client:
        assert set(read(client, ends(client, batch.id).output_file_id)) == {"r0"}
        assert not server.engine.submitted


def test_a_directory_is_one_servers(tmp_path):
    with serving(files_directory=tmp_path):
        with pytest.raises(ValueError, match="--files-directory: .* no other server uses, got /"):
            with serving(files_directory=tmp_path):
                pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--files-directory: .*/file: Not a directory"):
        with serving(files_directory=tmp_path / "file"):
            pass
    with serving(files_directory=tmp_path) as server:
        assert server.get("/v1/files").ok


def test_a_bug_fails_a_batch_without_details(tmp_path, monkeypatch):
    async def run(self):
        raise RuntimeError("a secret")

    monkeypatch.setattr(batches.BatchRun, "run", run)
    with serving(files_directory=tmp_path) as server, server.client() as client:
        batch = ends(client, begin(client, lines({})).id)
        assert batch.status == "failed" and batch.errors.data[0].message == "internal error"


def test_slow_uploads_wait_for_their_own_key_alone(tmp_path):
    head = "POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    head += f"Authorization: Bearer {KEYS[0]}\r\nContent-Length: 9\r\n\r\n-"
    with (
        serving(files_directory=tmp_path, api_keys=KEYS) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(4):
            slow = socket.create_connection(("127.0.0.1", server.port))
            stack.enter_context(slow).sendall(head.encode())
        eventually(lambda: server.app.state.server.limiter.held("key0")["requests"] == 4)
        with server.client(KEYS[1]) as client:
            assert upload(client, b"a").bytes == 1


def test_without_a_directory():
    with serving() as server:
        answer = server.get("/v1/files")
        assert answer.status == 404 and "--files-directory" in answer.error["message"]


def test_keys_own_their_files_in_any_order(tmp_path):
    with serving(files_directory=tmp_path, api_keys=KEYS) as server:
        with server.client(KEYS[1]) as mine, server.client(KEYS[0]) as other:
            file = upload(mine, lines({"max_tokens": 2}))
            batch = begin(mine, lines({"max_tokens": 2}))
            assert ends(mine, batch.id).request_counts.completed == 1
            assert server.engine.submitted[-1].tenant == "key1"
            for ask in (
                lambda: other.files.retrieve(file.id),
                lambda: other.files.delete(file.id),
                lambda: other.batches.retrieve(batch.id),
                lambda: other.batches.cancel(batch.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    ask()
            assert not list(other.files.list()) and not list(other.batches.list())
            server.engine.holds_at = 1
            batch = begin(mine, lines({"max_tokens": 2}))
            eventually(lambda: server.engine.live)
            with pytest.raises(openai.NotFoundError):
                other.files.delete(batch.input_file_id)
    with serving(files_directory=tmp_path, api_keys=KEYS[::-1]) as server:
        with server.client(KEYS[1]) as mine, server.client(KEYS[0]) as other:
            assert mine.files.retrieve(file.id).bytes == file.bytes
            assert not list(other.files.list())
            assert ends(mine, batch.id).request_counts.completed == 1
            assert server.engine.submitted[-1].tenant == "key0"


def test_a_batch_fails_if_its_key_is_no_more(tmp_path):
    with serving(files_directory=tmp_path, api_keys=KEYS) as server:
        with server.client(KEYS[0]) as client:
            server.engine.holds_at = 1
            batch = begin(client, lines({"max_tokens": 2}))
            eventually(lambda: server.engine.live)
    with serving(files_directory=tmp_path, api_keys=KEYS[1:]) as server:
        (entry,) = server.app.state.server._batches._entries.values()
        eventually(lambda: entry.batch.status == "failed")
        assert not server.engine.submitted
    with serving(files_directory=tmp_path, api_keys=KEYS) as server:
        with server.client(KEYS[0]) as client:
            (error,) = client.batches.retrieve(batch.id).errors.data
            assert "the key that made the batch is none of the server's" in error.message
