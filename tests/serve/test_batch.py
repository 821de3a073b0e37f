"""Files of requests: each is answered once, whatever ends the process."""

import json
import signal
import subprocess
import sys
import time

import pytest

from jax_attn.serve import __main__ as main
from jax_attn.serve import _batch

SMALL = ["--dtype=float32", "--max-running=4", "--max-step-tokens=32", "--num-pages=128"]


def line(i, url="/v1/completions", **body):
    body = {"prompt": f"def f{i}(", "max_tokens": 4, "temperature": 0} | body
    if "chat" in url:
        del body["prompt"]
    return {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}


def write(path, lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def read(path):
    answers = [json.loads(each) for each in path.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer["response"] for answer in answers}
    assert len(by_id) == len(answers)
    return by_id


def run(source, output, *options):
    return main.main(["batch", str(source), str(output), *SMALL, *options])


def test_each_request_has_one_answer_after_kills(tmp_path, monkeypatch):
    messages = [{"role": "user", "content": "x"}]
    lines = [
        line(0, max_tokens=2, logprobs=1),
        line(1, "/v1/chat/completions", messages=messages),
        line(2, n=0),
        line(3, "/v1/embeddings"),
        *(line(i, max_tokens=100, ignore_eos=True) for i in range(4, 30)),
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "jax_attn.serve", "batch", str(source), str(output), *SMALL]
    log = tmp_path / "log.txt"  # not a pipe: XLA may write more than a pipe holds
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        while not (output.exists() and output.read_bytes().count(b"\n") >= 4):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        process.kill()
    found = output.read_bytes()
    num_killed = found.count(b"\n")
    # It may also come in the middle of a line.
    output.write_bytes(found[: found.rindex(b"\n") + 1] + b'{"id": "batch_req_1", "cust')

    write_answer = _batch._Batch._write

    def terminated(self, status, line):
        write_answer(self, status, line)
        if self.num_written == 4:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(_batch._Batch, "_write", terminated)
    assert run(source, output) == 1
    assert num_killed < len(read(output)) < len(lines)
    monkeypatch.undo()
    assert run(source, output) == 0
    answers = read(output)
    assert set(answers) == {each["custom_id"] for each in lines}
    status = [answers[f"r{i}"]["status_code"] for i in range(30)]
    assert status == [200, 200, 400, 404] + [200] * 26
    assert answers["r0"]["body"]["choices"][0]["logprobs"] is not None
    assert answers["r1"]["body"]["object"] == "chat.completion"
    assert answers["r2"]["body"]["error"]["param"] == "n"
    assert all(answers[f"r{i}"]["body"]["usage"]["completion_tokens"] == 100 for i in range(4, 30))
    before = output.read_bytes()
    assert run(source, output) == 0 and output.read_bytes() == before


def test_another_process_that_writes_is_refused(tmp_path, capsys):
    source, output = write(tmp_path / "in.jsonl", [line(0)]), tmp_path / "out.jsonl"
    hold = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print(); input()"
    command = [sys.executable, "-c", hold, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert run(source, output) == 1
        other.communicate(b"\n")
    assert "out.jsonl: expected no other process to write it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "in.jsonl:2: expected a JSON object"),
        ("[]", "in.jsonl:2: expected an object with body, custom_id, method, url"),
        (json.dumps(line(0)), "in.jsonl:2: custom_id: expected another for each request, got 'r0'"),
        (json.dumps(line(1) | {"custom_id": 5}), "in.jsonl:2: custom_id: expected a text, got 5"),
        (json.dumps(line(1) | {"method": "GET"}), "in.jsonl:2: method: expected 'POST', got 'GET'"),
        (json.dumps(line(1, "/metrics")), "in.jsonl:2: url: expected one of /v1/chat/completions,"),
        (json.dumps(line(1) | {"body": 1}), "in.jsonl:2: body: expected an object, got 1"),
        (json.dumps(line(1) | {"method": "G" * 999}), "got 'GGGGG"),
        (
            json.dumps(line(1, logit_bias=[[]] * 70000)),
            "in.jsonl:2: expected a JSON object: expected at most 65536",
        ),
        (json.dumps(line(1, prompt="a" * 5000)), "in.jsonl:2: expected at most 4096 bytes of a"),
        (json.dumps(line(1, stream=True)), "in.jsonl:2: body: stream: expected false"),
        (json.dumps(line(1, background=True)), "in.jsonl:2: body: background: expected false"),
    ],
)
def test_what_is_no_request_is_refused_before_anything_runs(
    tmp_path, capsys, monkeypatch, text, sentence
):
    if "4096 bytes" in sentence:
        monkeypatch.setattr(_batch, "_MAX_BODY_BYTES", 4096)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line(0)) + "\n" + text + "\n")
    assert run(source, output) == 1
    error = capsys.readouterr().err
    assert sentence in error and len(error) < 400 and not output.read_bytes()


def test_a_file_of_other_answers_is_left_alone(tmp_path, capsys):
    source, output = write(tmp_path / "in.jsonl", [line(0)]), tmp_path / "out.jsonl"
    for other, sentence in (
        ('{"custom_id": "z"}\n', "expected answers to requests of"),
        ("5\n", "out.jsonl:1: expected an answer with a custom_id"),
    ):
        output.write_text(other)
        assert run(source, output) == 1
        assert sentence in capsys.readouterr().err and output.read_text() == other
    assert run(tmp_path / "none.jsonl", tmp_path / "new.jsonl") == 1


def test_options_of_the_server_alone_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path / "a", tmp_path / "b", "--port=80")
    assert "--port: expected an option of the engine" in capsys.readouterr().err
