"""Models of the Hugging Face Hub, with a local server in its place."""

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from jax_attn import models

pytest.importorskip("huggingface_hub", reason="needs the extra `models`")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    name: (models.BUNDLED / name).read_bytes()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja")
} | {"consolidated.safetensors": b"twice", "README.md": b"no need", "pytorch_model.bin": b"pickle"}


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has org/model at main, and org/gated, to which nobody has access."""

    asked: list[tuple[str, str, str | None]] = []

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append((self.command, path, self.headers.get("authorization")))
        name, _, rest = path.removeprefix("/api/models").strip("/").partition("/")
        model, _, rest = rest.partition("/")
        if (name, model) == ("org", "gated"):
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if (name, model) != ("org", "model"):
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/"):
            if rest.split("/")[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": file, "size": len(raw), "oid": digest(raw)}
                    for file, raw in FILES.items()
                ]
                return self.answer(200, json.dumps(entries).encode())
            if rest not in ("revision/main", f"revision/{COMMIT}"):
                return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": file} for file in FILES]
            info = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": siblings}
            return self.answer(200, json.dumps(info).encode())
        raw = FILES[rest.split("/")[-1]]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest(raw)}"'}
        self.answer(200, raw, headers)

    do_HEAD = do_GET

    def answer(self, status, raw, headers=()):
        self.send_response(status)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(raw)

    def log_message(self, *args):
        pass


def digest(raw: bytes) -> str:
    return hashlib.sha1(raw).hexdigest()


@contextlib.contextmanager
def hub():
    Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def fetch(home, endpoint: str, *args: str, **env: str) -> str:
    """The path of the model, or the sentence that says why there is none."""
    return fetch_each(home, endpoint, [args], **env)[0]


def fetch_each(home, endpoint: str, calls: Sequence[tuple[str, ...]], **env: str) -> list[str]:
    """Results of `fetch` for each call, from one new process.

    The library reads its environment when it is imported.
    """
    code = """
import json, sys
from jax_attn import models
for args in json.loads(sys.argv[1]):
    try:
        print(models.fetch(*args))
    except models.ModelDirectoryError as error:
        print(f"refused: {error}")
"""
    named = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(calls)],
        env=os.environ | named | env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == len(calls), done.stdout  # one line each
    return told


def test_a_model_is_loaded_once_and_then_served_without_network(tmp_path):
    with hub() as endpoint:
        path = fetch(tmp_path, endpoint, "org/model", HF_TOKEN="hf_secret")
        assert not path.startswith("refused"), path
        tokens = {token for _, name, token in Hub.asked if "/org/model/" in name}
        assert tokens == {"Bearer hf_secret"}
        names = {name for method, name, _ in Hub.asked if method == "GET" and "/resolve/" in name}
        assert {name.split("/")[-1] for name in names} == FILES.keys() - {
            "README.md",
            "pytorch_model.bin",
            "consolidated.safetensors",
        }
        again = fetch(tmp_path, endpoint, "org/model", COMMIT)
        assert again == path
    # The server has stopped listening.
    assert fetch(tmp_path, endpoint, "org/model") == path
    assert fetch(tmp_path, endpoint, "org/model", HF_HUB_OFFLINE="1") == path
    assert models.load(path, "float32").config.vocab_size == 4096


def test_what_cannot_be_had_is_one_sentence(tmp_path):
    with hub() as endpoint:
        calls = [("org/another",), ("org/gated",), ("org/model", "v9")]
        whys = ("no such model", "HF_TOKEN", "no such revision")
        for told, why in zip(fetch_each(tmp_path, endpoint, calls), whys, strict=True):
            assert why in told
    for env, why in (({}, "no network"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        told = fetch(tmp_path, endpoint, "org/model", **env)
        assert "refused: org/model: no such directory" in told and why in told
    names = ("nothing", "/no/such/directory", "a/b/c", "../no such directory")
    for told in fetch_each(tmp_path, endpoint, [(name,) for name in names]):
        assert "expected a directory, or ORG/NAME" in told


def test_a_directory_is_itself(tmp_path):
    assert models.fetch(tmp_path) == tmp_path and models.fetch(str(models.BUNDLED)).is_dir()
    with pytest.raises(models.ModelDirectoryError, match="a directory has no revision, got 'x'"):
        models.fetch(tmp_path, "x")
