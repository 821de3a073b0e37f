"""Far more clients than the server can take, many of them rude, for half a minute."""

import asyncio
import collections
import random
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("openai", reason="needs the extra `test`")

from live_server import post_bytes
from test_server_end_to_end import MODEL, Server, model_directory

NUM_REQUESTS = 6000
NUM_CLIENTS = 160  # 4 sequences run, 8 wait
TEXTS = [("import os\nimport sys\n\nclass Server(object):\n    def run(" * k) for k in (1, 2, 3)]


def make_request(rng: random.Random) -> tuple[bytes, str]:
    """Its bytes, and what to do with it: answer, leave or refuse."""
    kind = rng.choices(["answer", "leave", "refuse"], [75, 20, 5])[0]
    body = {"model": MODEL, "max_tokens": rng.choice([1, 2, 8, 120]), "stream": rng.random() < 0.5}
    body |= rng.choice([{}, {"temperature": 0}, {"n": 2}, {"regex": "[a-z]{3,9}"}, {"stop": ":"}])
    text = rng.choice(TEXTS) + str(rng.randint(0, 99))
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    if path == "/v1/completions":
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    if kind == "refuse":
        body |= rng.choice([{"n": -1}, {"regex": "("}, {"top_p": 7}, {"bogus": 1}])
    # The connection closes after the answer, so that a reader sees the end of it.
    return post_bytes(path, body).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1), kind


async def client(port: int, rng: random.Random, counts: collections.Counter) -> None:
    request, kind = make_request(rng)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if kind == "leave":
            if rng.random() < 0.5:
                await asyncio.sleep(0.02)
            else:  # in the middle of the answer
                await asyncio.wait_for(reader.read(1), 60)
            counts["left"] += 1
            return
        answer = await asyncio.wait_for(reader.read(-1), 120)
    finally:
        writer.close()
    status = int(answer.split(b" ", 2)[1])
    assert status in ((400,) if kind == "refuse" else (200, 429)), answer
    if status == 200:  # accepted: then it is answered, to the end
        chunks = answer.split(b"data: ")
        last = chunks[-1].startswith(b"[DONE]") if len(chunks) > 1 else b'"usage":{' in answer
        assert last and b'{"error"' not in answer, answer
    counts[status] += 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_overload(tmp_path):
    server = Server(tmp_path, "--model", str(model_directory()), "--num-pages", "16")
    try:
        server.wait_until_ready()
        counts: collections.Counter = collections.Counter()
        memory = []

        async def main():
            rng = random.Random(0)
            left = iter(range(NUM_REQUESTS))
            port = int(server.url.rsplit(":", 1)[1])

            async def clients():
                for i in left:
                    await client(port, rng, counts)
                    if i % (NUM_REQUESTS // 8) == 0:
                        memory.append(resident_megabytes(server.process.pid))

            await asyncio.gather(*(clients() for _ in range(NUM_CLIENTS)))

        asyncio.run(main())
        preemptions = server.metric("jax_attn_preemptions_total")
        print(dict(counts), memory, preemptions)
        assert sum(counts.values()) == NUM_REQUESTS
        assert min(counts[200], counts[429], counts["left"], counts[400]) > 100
        assert server.metric('jax_attn_requests_total{outcome="failed"}') == 0
        assert server.metric("jax_attn_sequences_running") == 0
        assert server.metric("jax_attn_sequences_waiting") == 0
        assert server.metric('jax_attn_pages{state="used"}') == 0
        pages = [server.metric(f'jax_attn_pages{{state="{s}"}}') for s in ("free", "cached")]
        assert sum(pages) == 16 and preemptions > 0
        assert memory[-1] < memory[2] * 1.1, memory
        assert "Traceback" not in server.log()
    finally:
        server.close()


def resident_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
