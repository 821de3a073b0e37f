"""Checks a live server with client libraries: check_clients.py PYTHON [--npm FOLDER] [--write].

PYTHON is that of an environment with some of the libraries; those that it lacks are skipped.
FOLDER has node_modules with some of npm's, which check_clients.mjs calls with `node`.

The server has the bundled model and a template with tools. --write: the table of versions and
results goes into docs/server.md. With --against URL this is the part that runs in that environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "server.md"
BEGIN, END = "<!-- clients: made by build_tools/check_clients.py -->\n", "<!-- end of clients -->"
MODEL = "tools"
ASK = "Will it rain in Oslo?"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The forecast.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]

# ---- in the clients' environment ---------------------------------------------------------------


def weather_of(arguments: dict) -> None:
    assert arguments["city"] in ("Bern", "Oslo") and 1 <= arguments["days"] <= 3, arguments


def openai(url: str) -> dict[str, Callable[[], None]]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "max_tokens": 60}

    def streams() -> None:
        stream = client.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    def tools() -> None:
        answer = client.chat.completions.create(**chat, tools=TOOLS, tool_choice="required")
        weather_of(json.loads(answer.choices[0].message.tool_calls[0].function.arguments))

    def schemas() -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
        answer = client.chat.completions.create(**chat, response_format=schema)
        weather_of(json.loads(answer.choices[0].message.content))

    def responses() -> None:
        first = client.responses.create(model=MODEL, input=ASK, max_output_tokens=8)
        ask = {"model": MODEL, "max_output_tokens": 8, "previous_response_id": first.id}
        with client.responses.stream(**ask, input="And now?") as stream:
            assert [event.type for event in stream][-1] == "response.incomplete"
        begun = client.responses.create(**ask, input="Slowly.", background=True)
        while client.responses.retrieve(begun.id).status in ("queued", "in_progress"):
            time.sleep(0.05)
        assert client.responses.input_items.list(begun.id).data

    return {"stream": streams, "tools": tools, "schema": schemas, "responses": responses}


def anthropic(url: str) -> dict[str, Callable[[], None]]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    ask = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "max_tokens": 60}

    def streams() -> None:
        with client.messages.stream(**ask) as stream:
            assert "".join(stream.text_stream)
            assert stream.get_final_message().usage.output_tokens

    def tools() -> None:
        given = [{"name": "weather", "description": "The forecast.", "input_schema": SCHEMA}]
        answer = client.messages.create(**ask, tools=given, tool_choice={"type": "any"})
        weather_of(next(block for block in answer.content if block.type == "tool_use").input)
        assert client.messages.count_tokens(model=MODEL, messages=ask["messages"]).input_tokens

    return {"stream": streams, "tools": tools}


def ollama(url: str) -> dict[str, Callable[[], None]]:
    from ollama import Client

    client, messages = Client(host=url), [{"role": "user", "content": ASK}]
    options = {"num_predict": 60}

    def streams() -> None:
        parts = list(client.chat(MODEL, messages, stream=True, options=options))
        assert parts[-1].done and "".join(part.message.content for part in parts)
        assert client.generate(MODEL, ASK, options=options).response

    def tools() -> None:  # it has no tool_choice: the model may call or not
        assert client.chat(MODEL, messages, tools=TOOLS, options=options).done

    def schemas() -> None:
        answer = client.chat(MODEL, messages, format=SCHEMA, options=options)
        weather_of(json.loads(answer.message.content))

    def lists() -> None:
        assert client.list().models and "tools" in client.show(MODEL).capabilities

    return {"stream": streams, "tools": tools, "schema": schemas, "models": lists}


def langchain_openai(url: str) -> dict[str, Callable[[], None]]:
    from langchain_openai import ChatOpenAI

    def model(**more: object) -> ChatOpenAI:
        ends = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "max_tokens": 60}
        return ChatOpenAI(model=MODEL, **ends, **more)

    def responses() -> None:
        assert model(use_responses_api=True).invoke(ASK).content

    return _langchain(model(), "required") | {"responses": responses}


def langchain_anthropic(url: str) -> dict[str, Callable[[], None]]:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=url, api_key="none", max_retries=0, max_tokens=60)
    return _langchain(model, "any")


def langchain_ollama(url: str) -> dict[str, Callable[[], None]]:
    from langchain_ollama import ChatOllama

    model = ChatOllama(model=MODEL, base_url=url, num_predict=60)
    checks = _langchain(model, None)

    def schemas() -> None:
        weather_of(model.with_structured_output(SCHEMA | {"title": "weather"}).invoke(ASK))

    return {"stream": checks["stream"], "schema": schemas}


def _langchain(model: object, choice: str | None) -> dict[str, Callable[[], None]]:
    def streams() -> None:
        assert "".join(str(chunk.content) for chunk in model.stream(ASK))

    def tools() -> None:
        answer = model.bind_tools([FUNCTION], tool_choice=choice).invoke(ASK)
        weather_of(answer.tool_calls[0]["args"])

    return {"stream": streams, "tools": tools}


def litellm(url: str) -> dict[str, Callable[[], None]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    from litellm import completion

    ask = {"messages": [{"role": "user", "content": ASK}], "max_tokens": 60, "api_key": "none"}
    theirs = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1"}

    def streams() -> None:
        stream = completion(**ask, **theirs, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    def tools() -> None:
        answer = completion(**ask, **theirs, tools=TOOLS, tool_choice="required")
        weather_of(json.loads(answer.choices[0].message.tool_calls[0].function.arguments))

    def others() -> None:
        for name, base in (("anthropic", url), ("ollama_chat", url)):
            answer = completion(**ask, model=f"{name}/{MODEL}", api_base=base)
            assert answer.choices[0].message.content

    return {"stream": streams, "tools": tools, "anthropic, ollama": others}


def pydantic_ai(url: str) -> dict[str, Callable[[], None]]:
    from typing import Literal

    from pydantic import BaseModel, Field
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Weather(BaseModel):
        city: Literal["Bern", "Oslo"]
        days: int = Field(ge=1, le=3)

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings = {"max_tokens": 200}

    def tools() -> None:
        agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=Weather)
        weather_of(agent.run_sync(ASK, model_settings=settings).output.model_dump())

    def responses() -> None:
        agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), output_type=Weather)
        weather_of(agent.run_sync(ASK, model_settings=settings).output.model_dump())

    return {"tools": tools, "responses": responses}


def instructor(url: str) -> dict[str, Callable[[], None]]:
    from typing import Literal

    import instructor as library
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Weather(BaseModel):
        city: Literal["Bern", "Oslo"]
        days: int = Field(ge=1, le=3)

    def mode(name: str) -> Callable[[], None]:
        def check() -> None:
            plain = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            client = library.from_openai(plain, mode=getattr(library.Mode, name))
            ask = {"model": MODEL, "messages": [{"role": "user", "content": ASK}]}
            found = client.chat.completions.create(**ask, response_model=Weather, max_tokens=200)
            weather_of(found.model_dump())

        return check

    return {"TOOLS": mode("TOOLS"), "JSON_SCHEMA": mode("JSON_SCHEMA")}


def openai_agents(url: str) -> dict[str, Callable[[], None]]:
    from agents import (
        Agent,
        FunctionTool,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        RunConfig,
        Runner,
    )
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    calls = []

    async def call(context: object, arguments: str) -> str:
        weather_of(json.loads(arguments))
        calls.append(arguments)
        return "sun"

    tool = FunctionTool("weather", FUNCTION["description"], SCHEMA, call)

    def loop(kind: type) -> Callable[[], None]:
        def check() -> None:
            calls.clear()
            agent = Agent(
                name="a",
                tools=[tool],
                model=kind(model=MODEL, openai_client=client),
                model_settings=ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, max_tokens=200
                ),
                tool_use_behavior="stop_on_first_tool",  # the model's own answer may not end
            )
            Runner.run_sync(agent, ASK, run_config=RunConfig(tracing_disabled=True))
            assert calls

        return check

    return {"tools": loop(OpenAIChatCompletionsModel), "responses": loop(OpenAIResponsesModel)}


def huggingface_hub(url: str) -> dict[str, Callable[[], None]]:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=url, api_key="none")
    messages = [{"role": "user", "content": ASK}]

    def streams() -> None:
        stream = client.chat_completion(messages, model=MODEL, max_tokens=60, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    def tools() -> None:
        ask = {"model": MODEL, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required"}
        answer = client.chat_completion(messages, **ask)
        arguments = answer.choices[0].message.tool_calls[0].function.arguments
        weather_of(json.loads(arguments) if isinstance(arguments, str) else arguments)

    return {"stream": streams, "tools": tools}


def dspy(url: str) -> dict[str, Callable[[], None]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import dspy as library

    ends = {"api_base": f"{url}/v1", "api_key": "none", "cache": False, "num_retries": 0}
    model = library.LM(f"openai/{MODEL}", max_tokens=60, **ends)

    def completes() -> None:
        assert model(ASK)[0]

    def schemas() -> None:  # adapters ask for one only from models that LiteLLM lists
        schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
        weather_of(json.loads(model(ASK, response_format=schema)[0]))

    return {"completion": completes, "schema": schemas}


# The distribution of each library.
CLIENTS = {
    "openai": openai,
    "anthropic": anthropic,
    "ollama": ollama,
    "langchain-openai": langchain_openai,
    "langchain-anthropic": langchain_anthropic,
    "langchain-ollama": langchain_ollama,
    "litellm": litellm,
    "pydantic-ai-slim": pydantic_ai,
    "instructor": instructor,
    "openai-agents": openai_agents,
    "huggingface_hub": huggingface_hub,
    "dspy": dspy,
}


def run_checks(url: str) -> None:
    """Prints a line of JSON for each check: client, version, name, error or null."""
    for client, make in CLIENTS.items():
        try:
            version = importlib.metadata.version(client)
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            checks = make(url)
        except Exception as error:
            print(json.dumps([client, version, "import", repr(error)[:500]]), flush=True)
            continue
        for name, check in checks.items():
            error = None
            try:
                check()
            except Exception as raised:
                error = repr(raised)[:500]
            print(json.dumps([client, version, name, error]), flush=True)


# ---- here --------------------------------------------------------------------------------------


def main(python: str, npm: str | None, write: bool) -> int:
    from jax_attn import models

    directory = Path(tempfile.mkdtemp()) / MODEL
    try:
        shutil.copytree(models.BUNDLED, directory)
        example = (ROOT / "examples" / "serve_tools.py").read_text(encoding="utf-8")
        template = re.search(r'TEMPLATE = """\\\n(.*?)"""', example, re.DOTALL)[1]
        (directory / "chat_template.jinja").write_text(template)
        options = ["--model", str(directory), "--port", "0", "--max-running", "4"]
        command = [sys.executable, "-m", "jax_attn.serve", *options, "--max-step-tokens", "64"]
        log = directory.parent / "log"  # not a pipe, which its log would fill
        with log.open("w") as file, subprocess.Popen(command, stderr=file) as server:
            try:
                while not (found := re.search(r"running on (http://\S+)", log.read_text())):
                    if server.poll() is not None:
                        raise SystemExit(log.read_text())
                    time.sleep(0.2)
                wait_until_ready(found[1])
                environment = {
                    name: value for name, value in os.environ.items() if name != "PYTHONPATH"
                }
                commands = [[python, __file__, "--against", found[1]]]
                if npm is not None:
                    question = json.dumps({"model": MODEL, "text": ASK, "fn": FUNCTION})
                    script = str(Path(__file__).with_suffix(".mjs"))
                    commands.append(["node", script, found[1], npm, question])
                runs = [
                    subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
                    for command in commands
                ]
            finally:
                server.kill()
    finally:
        shutil.rmtree(directory.parent)
    lines = [line for run in runs for line in run.stdout.splitlines()]
    results = [json.loads(line) for line in lines if line.startswith("[")]
    print(table(results))
    failed = [result for result in results if result[3] is not None]
    for client, version, name, error in failed:
        print(f"{client} {version}: {name}: {error}", file=sys.stderr)
    if write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, behind = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}{table(results)}{END}{behind}", encoding="utf-8")
    return 1 if failed or any(run.returncode for run in runs) or not results else 0


def wait_until_ready(url: str) -> None:
    while True:
        try:
            urllib.request.urlopen(f"{url}/health")
            return
        except urllib.error.HTTPError:
            time.sleep(0.2)


def table(results: list[list]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for client, version, name, error in results:
        mark = name if error is None else f"**{name} fails**"
        rows.setdefault((client, version), []).append(mark)
    lines = [
        f"| {client} | {version} | {', '.join(names)} |"
        for (client, version), names in rows.items()
    ]
    return "\n".join(["| client | version | what works |", "| --- | --- | --- |", *lines]) + "\n"


if __name__ == "__main__":
    if sys.argv[1] == "--against":
        run_checks(sys.argv[2])
        os._exit(0)  # some libraries leave threads that wait
    else:
        more = sys.argv[2:]
        npm = more[more.index("--npm") + 1] if "--npm" in more else None
        sys.exit(main(sys.argv[1], npm, "--write" in more))
