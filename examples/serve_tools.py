"""A client with tools: the model asks for a call, the client makes it, the model gets the result.

The chat template must show tools to the model. The bundled model's template does not, so this
script serves a copy with a template like those of Qwen and Hermes. The bundled model was not
trained on tools, but `tool_choice="required"` makes its calls follow the tool's schema.
"""

import atexit
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from openai import InternalServerError, OpenAI

from jax_attn import models

TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>
{"name": ..., "arguments": ...}
</tool_call> to call one.
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

directory = Path(tempfile.mkdtemp()) / "with-tools"
atexit.register(shutil.rmtree, directory.parent)
shutil.copytree(models.BUNDLED, directory)
(directory / "chat_template.jinja").write_text(TEMPLATE)
options = ["--model", str(directory), "--port", "0", "--max-running", "2"]
server = subprocess.Popen(
    [sys.executable, "-m", "jax_attn.serve", *options, "--max-step-tokens", "64"],
    stderr=subprocess.PIPE,
    text=True,
)
atexit.register(server.kill)
for line in server.stderr:
    if found := re.search(r"running on (http://\S+)", line):
        break
client = OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0)


def ask(messages, **more):
    while True:  # the port is open while the server compiles
        try:
            return client.chat.completions.create(
                model="with-tools", messages=messages, tools=tools, temperature=0, **more
            )
        except InternalServerError as error:
            assert error.status_code == 503, error
            time.sleep(0.2)


def weather(city, days):
    return {"city": city, "forecast": ["sun"] * days}


tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The forecast for a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Bern", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 3},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
messages = [{"role": "user", "content": "Will it rain in Oslo?"}]
one_call = {"tool_choice": "required", "parallel_tool_calls": False}
choice = ask(messages, max_tokens=100, **one_call).choices[0]
assert choice.finish_reason == "tool_calls", choice
messages.append(choice.message)
for call in choice.message.tool_calls:
    arguments = json.loads(call.function.arguments)
    print(f"the model calls {call.function.name}({arguments})")
    result = json.dumps(weather(**arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

answer = ask(messages, tool_choice="none", max_tokens=16)
print("and then writes", repr(answer.choices[0].message.content))

server.terminate()
assert server.wait(30) == 0
