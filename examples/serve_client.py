"""The server with OpenAI's client: a stream, a JSON object that follows a schema, a shared prefix.

The server is `python -m jax_attn.serve` with the bundled model. Its capacities are small here, so
it compiles in seconds. If `make serve` is running, you need only the lines from `client` on.
"""

import atexit
import json
import re
import subprocess
import sys
import time

from openai import InternalServerError, OpenAI

options = ["--port", "0", "--max-running", "4", "--max-step-tokens", "64"]
server = subprocess.Popen(
    [sys.executable, "-m", "jax_attn.serve", *options], stderr=subprocess.PIPE, text=True
)
atexit.register(server.kill)  # even if something below fails
for line in server.stderr:  # port 0 is any free port; the log names it
    print(line, end="")
    if found := re.search(r"running on (http://\S+)", line):
        break
client = OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id

prompt = "import os\nimport sys\n\n\ndef main("
while True:  # the port is open while the server compiles
    try:
        stream = client.completions.create(
            model=model, prompt=prompt, max_tokens=48, temperature=0, stream=True
        )
        break
    except InternalServerError as error:
        assert error.status_code == 503, error
        time.sleep(0.2)
print(prompt, end="")
for chunk in stream:
    print(chunk.choices[0].text, end="", flush=True)
print("\n")

schema = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Who is it?"}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    max_tokens=40,
)
print("by schema:", person := json.loads(answer.choices[0].message.content))
assert person["name"] in ("ada", "grace") and person["age"] <= 99

beginning = "def add(a, b):\n    return a + b\n\n\n" * 12
for function in ("sub", "mul"):
    usage = client.completions.create(
        model=model, prompt=f"{beginning}def {function}(", max_tokens=8
    ).usage
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"{function}: {cached} of {usage.prompt_tokens} prompt tokens were cached")
assert cached > usage.prompt_tokens // 2

server.terminate()  # it finishes the running requests and exits with 0
assert server.wait(30) == 0
