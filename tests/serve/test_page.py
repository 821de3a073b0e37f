"""The web page in a real browser: it streams, shows the engine's work, and trusts no text."""

import base64
import contextlib
import io
import json
import re
import shlex

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

from helpers.serve.fake_engine import FakeEngine, fake_model  # noqa: E402
from helpers.serve.live_server import HANG_SECONDS, eventually, serving  # noqa: E402
from jax_attn.serve._openai import answers  # noqa: E402

expect = playwright_api.expect
expect.set_options(timeout=1000 * HANG_SECONDS)
KEY = "a-key-of-one-tenant"
# One pixel.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def server():
    with serving(FakeEngine(fake_model().tokenizer, delay=0.01)) as server:
        yield server


def new_page(browser, **options):
    page = browser.new_page(**options)
    page.set_default_timeout(1000 * HANG_SECONDS)
    return page


@pytest.fixture
def page(browser, server):
    """Loads the page; fails at a script error, a blocked resource, or a request to elsewhere."""
    page = new_page(browser)
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda message: (
            wrong.append(message.text)
            if message.type == "error" and "the server responded" not in message.text.lower()
            else None
        ),
    )
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((server.url, "data:"))
            else wrong.append(f"request to {request.url}")
        ),
    )
    page.goto(server.url)
    yield page
    page.close()
    assert not wrong


def test_completion_streams(page, server, monkeypatch):
    monkeypatch.setattr(server.engine, "holds_at", 30)
    page.fill("#prompt", "import os")
    page.fill("#max_tokens", "60")
    page.click("#send")
    output = page.locator(".turn pre")
    expect(page.locator(".turn.streaming")).to_have_count(1)
    # It grows while it streams.
    expect(output).to_have_text(re.compile(".{30}", re.DOTALL))
    partly = len(output.text_content())
    monkeypatch.undo()
    expect(page.locator(".turn .stats")).to_contain_text("60 generated")
    assert len(output.text_content()) > partly
    assert output.text_content().startswith("import os")
    expect(page.locator(".turn .stats")).to_contain_text("finish: length")
    expect(page.locator(".turn.streaming")).to_have_count(0)


def test_choices(page):
    page.fill("#n", "3")
    page.fill("#max_tokens", "5")
    page.click("#send")
    expect(page.locator(".turn")).to_have_count(3)
    expect(page.locator(".turn .who").nth(2)).to_have_text("choice 3")


def test_chat_with_the_keyboard_alone(page, server):
    page.focus("#tab-completion")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-chat")).to_be_focused()
    expect(page.locator("#tab-chat")).to_have_attribute("aria-selected", "true")
    while page.evaluate("document.activeElement.id") != "prompt":
        page.keyboard.press("Tab")
    page.keyboard.type("hello")
    page.fill("#max_tokens", "5")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".turn .stats").nth(1)).to_contain_text("5 generated")
    page.keyboard.type("more")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".turn .stats").nth(3)).to_contain_text("5 generated")
    seq = server.engine.submitted[-1]
    prompt = server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt])
    assert "# hello\n" in prompt and prompt.endswith("# more\n")  # the answer is between them


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "default": None}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "<b>Oslo"}}\n</tool_call>'


def test_tools(browser, tmp_path):
    """Calls are shown; the next prompts are their results, and then the model goes on."""
    template = (
        '{% if tools %}{{ tools | tojson }} <tool_call>{"name": N, "arguments": {}}</tool_call>'
        "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
        '{# "arguments": #}'
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    engine = FakeEngine(fake_model().tokenizer)
    engine.limits.max_model_len = 1000
    with (
        serving(engine, directory=tmp_path) as server,
        contextlib.closing(new_page(browser)) as page,
    ):
        page.goto(server.url)
        expect(page.locator("#tools-field")).to_be_hidden()
        page.click("#tab-chat")
        expect(page.locator("#tools-field")).to_be_visible()
        expect(page.locator("#pictures-field")).to_be_hidden()
        page.fill("#tools", "{}")
        page.fill("#prompt", "Rain?")
        page.click("#send")
        assert page.evaluate("tools.validationMessage").startswith("Tools: expected a JSON list")
        page.fill("#tools", json.dumps([TOOL]))
        engine.says = f"See.{CALL}\n{CALL}"
        page.click("#send")
        expect(page.locator(".turn pre").nth(1)).to_have_text(
            'See.\nweather {"city": "<b>Oslo"}\nweather {"city": "<b>Oslo"}'
        )
        expect(page.locator("#prompt")).to_have_attribute("aria-label", "Result of weather")
        num_requests = len(engine.submitted)
        page.fill("#prompt", "wet")
        page.click("#send")
        assert len(engine.submitted) == num_requests
        engine.says = "Yes."
        page.fill("#prompt", "dry")
        page.click("#as-python")
        assert '"default": None' in page.locator("#code-text").text_content()
        page.click("#code-close")
        page.click("#send")
        expect(page.locator(".turn pre").nth(4)).to_have_text("Yes.")
        expect(page.locator("#prompt")).to_have_attribute("aria-label", "Prompt")
        seq = engine.submitted[-1]
        prompt = engine.tokenizer.decode(seq.tokens[: seq.num_prompt])
        assert "tool: wet;tool: dry;" in prompt and "weather" in prompt


def test_pictures_go_with_the_message(browser, monkeypatch):
    """They are in the request that the page shows as code, and are shown themselves."""
    with serving() as server, contextlib.closing(new_page(browser)) as page:
        card = server.get("/v1/models").json
        card["data"][0]["features"].append("pictures")
        page.route("**/v1/models", lambda route: route.fulfill(json=card))
        page.goto(server.url)
        page.click("#tab-chat")
        dot = base64.b64decode(PNG)
        page.set_input_files(
            "#pictures-input", {"name": "a.png", "mimeType": "image/png", "buffer": dot}
        )
        page.fill("#prompt", "What is it?")
        page.wait_for_function("pictures.length === 1")
        page.click("#as-curl")
        body = json.loads(shlex.split(page.locator("#code-text").text_content())[-1])
        picture, text = body["messages"][-1]["content"]
        assert picture["image_url"]["url"] == f"data:image/png;base64,{PNG}"
        assert text == {"type": "text", "text": "What is it?"}
        page.click("#code-close")
        page.click("#send")
        expect(page.locator(".turn img")).to_have_count(1)
        # This model reads none: the server says so, and the prompt stays.
        expect(page.locator(".turn.failed")).to_contain_text("messages[0]")
        expect(page.locator("#prompt")).to_have_value("What is it?")


def test_escape_stops_the_engine_too(page, server, monkeypatch):
    monkeypatch.setattr(server.engine, "holds_at", 60)
    page.fill("#max_tokens", "200")
    page.click("#send")
    expect(page.locator(".turn pre")).to_have_text(re.compile(".{60}", re.DOTALL))
    aborted = len(server.engine.aborted)
    page.keyboard.press("Escape")
    expect(page.locator(".turn .stats")).to_have_text("stopped")
    eventually(lambda: len(server.engine.aborted) == aborted + 1)
    expect(page.locator("#send")).to_be_enabled()


def test_errors_are_shown(page):
    """In the server's words: invalid requests, too long ones, and late failures."""
    page.evaluate("document.getElementById('form').noValidate = true")
    alerts = page.get_by_role("alert")
    for i, (max_tokens, prompt, words) in enumerate(
        [
            ("-1", "a", "max_tokens: "),
            ("9999", "a", "9999 in the completion"),
            ("9", FakeEngine.FAIL, "asked to fail"),
        ]
    ):
        page.fill("#max_tokens", max_tokens)
        page.fill("#prompt", prompt)
        page.click("#send")
        expect(alerts.nth(i)).to_contain_text(words)
    expect(alerts).to_have_count(3)


def test_comments_of_a_stream_are_no_events(page, server, monkeypatch):
    """The server's own, which it sends while a request waits."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(server.engine, "holds_at", 0)
    sent = []
    send_comment = answers.GenerationAnswer._send_comment

    async def counted(self, send):
        await send_comment(self, send)
        sent.append(0)

    monkeypatch.setattr(answers.GenerationAnswer, "_send_comment", counted)
    page.fill("#max_tokens", "5")
    page.click("#send")
    eventually(lambda: len(sent) > 2)
    monkeypatch.setattr(server.engine, "holds_at", None)
    expect(page.locator(".turn .stats")).to_contain_text("5 generated")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_prompt_is_kept_after_an_error(page, server, monkeypatch):
    page.click("#tab-chat")
    page.fill("#max_tokens", "9999")
    page.fill("#prompt", "a long question")
    page.click("#send")
    expect(page.get_by_role("alert")).to_contain_text("9999 in the completion")
    expect(page.locator("#prompt")).to_have_value("a long question")


def test_text_that_arrives_does_not_scroll_a_reader(page, server, monkeypatch):
    monkeypatch.setattr(server.engine, "holds_at", 120)
    page.fill("#prompt", "import os\n" * 12)
    page.fill("#max_tokens", "200")
    page.click("#send")
    eventually(lambda: 120 in server.engine.live.values())
    output = page.locator("#output")
    assert output.evaluate("e => e.scrollHeight > e.clientHeight + 50")
    expect(output).to_have_js_property(
        "scrollTop", output.evaluate("e => e.scrollHeight - e.clientHeight")
    )
    output.evaluate("e => { e.scrollTop = 0; }")
    monkeypatch.undo()
    expect(page.locator(".turn .stats")).to_contain_text("200 generated")
    assert output.evaluate("e => e.scrollTop") == 0


def test_a_system_prompt_and_settings_that_stay(page, server):
    page.click("#tab-chat")
    page.fill("#system", "Be brief.")
    page.fill("#max_tokens", "4")
    page.fill("#temperature", "0.3")
    page.check("#probabilities")
    page.reload()
    expect(page.locator("#tab-chat")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#system")).to_have_value("Be brief.")
    expect(page.locator("#temperature")).to_have_value("0.3")
    expect(page.locator("#probabilities")).to_be_checked()
    page.fill("#prompt", "hello")
    page.click("#send")
    expect(page.locator(".turn .stats").nth(1)).to_contain_text("4 generated")
    seq = server.engine.submitted[-1]
    prompt = server.engine.tokenizer.decode(seq.tokens[: seq.num_prompt])
    assert prompt.index("Be brief.") < prompt.index("hello") and seq.params.temperature == 0.3
    page.click("#tab-completion")
    expect(page.locator("#system")).to_be_hidden()


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_probabilities_of_tokens(page, server, mode):
    page.click(f"#tab-{mode}")
    page.fill("#prompt", "import os")
    page.fill("#max_tokens", "8")
    page.check("#probabilities")
    page.click("#send")
    expect(page.locator(".turn .stats").last).to_contain_text("8 generated")
    tokens = page.locator(".turn .token")
    expect(tokens).to_have_count(8)
    output = page.locator(".turn pre").last.text_content()
    assert output.endswith("".join(tokens.all_text_contents()))  # each token is where its text is
    tip = page.locator("#tip")
    expect(tip).to_be_hidden()
    tokens.nth(2).hover()
    expect(tip).to_contain_text("60.7 %")  # exp(-0.5)
    expect(tip).to_contain_text("22.3 %")
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    page.focus("#output")
    page.keyboard.press("ArrowRight")
    expect(tokens.first).to_have_class("token shown")
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_have_class("token shown")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_texts_are_copied(browser, server):
    page = new_page(browser, permissions=["clipboard-read", "clipboard-write"])
    page.goto(server.url)
    page.fill("#max_tokens", "5")
    page.click("#send")
    expect(page.locator(".turn .stats")).to_contain_text("5 generated")
    page.click(".turn .copy")
    expect(page.locator(".turn .copy")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.locator(".turn pre").text_content()
    page.close()


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_request_as_code_runs(page, server, mode):
    """Both give the page's request: curl's words as a shell splits them, Python's as it runs."""
    openai = pytest.importorskip("openai", reason="needs the extra `test`")
    nasty = 'it\'s "quoted" \\ $HOME `x`\nünï'
    page.click(f"#tab-{mode}")
    page.fill("#prompt", nasty)
    page.fill("#seed", "7")
    page.fill("#max_tokens", "3")
    expect(page.locator("#model")).to_have_text("tiny")
    page.click("#as-curl")
    words = shlex.split(page.locator("#code-text").text_content())
    path = "/v1/completions" if mode == "completion" else "/v1/chat/completions"
    assert words[:2] == ["curl", server.url + path]
    body = json.loads(words[-1])
    assert body["seed"] == 7 and body["model"] == "tiny"
    assert nasty == (body["prompt"] if mode == "completion" else body["messages"][-1]["content"])
    first = server.post(path, body).json["choices"][0]
    page.click("#code-close")
    page.click("#as-python")
    code = page.locator("#code-text").text_content()
    assert openai.OpenAI and "from openai import OpenAI" in code
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    names["client"].close()
    text = first["text"] if mode == "completion" else first["message"]["content"]
    assert printed.getvalue() == text + "\n"
    page.keyboard.press("Escape")
    expect(page.locator("#code")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing(page, server, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe")
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    expect(page.locator("#requests tr")).to_have_count(5)
    page.click("#tab-chat")
    page.evaluate("features = ['tools', 'pictures']; showFields()")
    page.fill("#prompt", "hello")
    page.fill("#max_tokens", "5")
    page.check("#probabilities")
    page.click("#send")
    expect(page.locator(".turn .stats").nth(1)).to_contain_text("5 generated")
    page.fill("#max_tokens", "2000")
    page.fill("#prompt", "hello")
    page.evaluate("document.getElementById('form').noValidate = true")
    page.click("#send")
    expect(page.get_by_role("alert")).to_have_count(1)
    checker = axe.Axe()
    results = checker.run(page)
    assert results.violations_count == 0, results.generate_report()
    page.click("#as-curl")
    results = checker.run(page)
    assert results.violations_count == 0, results.generate_report()


def test_on_a_phone(page):
    """Targets of 44 px, and a row of the table that fits, with its labels."""
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.locator("#requests tr")).to_have_count(5)
    page.click("#tab-chat")
    small = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, a')]
          .map((node) => [node, (node.closest('label.check') ?? node).getBoundingClientRect()])
          .filter(([, box]) => box.width && (box.width < 43.5 || box.height < 43.5))
          .map(([node, box]) => `${node.outerHTML} ${box.width} x ${box.height}`)"""
    )
    assert not small
    row = page.locator("#requests tr").first
    box = row.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert row.evaluate("e => e.scrollWidth <= e.clientWidth")
    labels = row.locator("td").evaluate_all(
        "cells => cells.map((cell) => getComputedStyle(cell, '::before').content)"
    )
    assert [label for label in labels if "none" not in label and label != "normal"] == [
        f'"{name} "' for name in ("prompt", "cached", "output", "pages", "age")
    ]


def test_live_view(page, server):
    expect(page.locator("#status")).to_have_text("ok")
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#requests tr")).to_have_count(5)
    expect(page.locator("#requests-note")).to_have_text("3 running, 2 waiting")
    expect(page.locator("#tree li")).to_have_count(4)
    expect(page.locator("#tree li li")).to_have_count(2)
    expect(page.locator("#tree .hidden")).to_have_count(1)
    expect(page.locator("#step i")).to_have_count(3)
    expect(page.locator("#step i.prefill")).to_have_count(1)
    expect(page.locator("#pages-legend")).to_contain_text("in use 10")
    expect(page.locator("#tiles")).to_contain_text("40 %")
    painted = page.evaluate(
        """() => {
          const canvas = document.getElementById('pages');
          const context = canvas.getContext('2d');
          const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
          const colors = new Set();
          for (let i = 0; i < data.length; i += 4) {
            if (data[i + 3] === 255) colors.add(data.slice(i, i + 3).join());
          }
          return colors.size;
        }"""
    )
    assert painted == 4


def test_texts_are_never_markup(page, server, monkeypatch):
    evil = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    snapshot = server.engine.picture()
    node = snapshot["tree"][0] | {"tokens": server.engine.tokenizer.encode(evil).ids}
    request = snapshot["requests"][0] | {"id": evil[-20:]}
    changed = snapshot | {"tree": [node], "requests": [request]}
    monkeypatch.setattr(server.engine, "picture", lambda: changed)
    expect(page.locator("#tree li")).to_have_count(1)
    expect(page.locator("#tree .text")).to_contain_text("<img src=x")
    page.fill("#prompt", evil)
    page.fill("#max_tokens", "3")
    page.click("#send")
    expect(page.locator(".turn .stats")).to_contain_text("3 generated")
    assert page.locator("b", has_text="bold").count() == 0
    assert page.title() == "jax_attn.serve"


def test_many_pages_fit(page, server, monkeypatch):
    states = "u" * 60_000 + "f" * 60_000
    changed = server.engine.picture() | {
        "pages": {"page_size": 16, "total": len(states), "states": states}
    }
    monkeypatch.setattr(server.engine, "picture", lambda: changed)
    expect(page.locator("#pages-legend")).to_contain_text("in use 60,000")
    assert page.evaluate("document.getElementById('pages').clientHeight") < 300


def test_states_of_a_hybrid(page, server, monkeypatch):
    expect(page.locator("#pages-note")).to_contain_text("tokens")
    assert "recurrent" not in page.locator("#pages-note").text_content()
    stats = server.engine.stats() | {"states": {"used": 3, "cached": 1200, "free": 7}}
    monkeypatch.setattr(server.engine, "stats", lambda: stats)
    expected = "recurrent states: 3 used, 1,200 cached, 7 free"
    expect(page.locator("#pages-note")).to_contain_text(expected)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_no_sideways_scrolling_and_enough_contrast(page, scheme, width):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    expect(page.locator("#requests tr")).to_have_count(5)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ratio = page.evaluate(
        """() => {
          const luminance = (color) => {
            const [r, g, b] = color.match(/[\\d.]+/g).map((x) => x / 255)
              .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const style = (name) => getComputedStyle(document.querySelector(name));
          const card = luminance(style('section').backgroundColor);
          const dim = luminance(style('.legend').color);
          return (Math.max(card, dim) + 0.05) / (Math.min(card, dim) + 0.05);
        }"""
    )
    assert ratio >= 4.5  # WCAG AA


def test_the_server_goes_away(browser):
    with serving() as server:
        page = new_page(browser)
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("ok")
    expect(page.locator("#status")).to_have_text("not reachable")
    page.close()


def test_key(browser):
    """The browser asks for the key, and sends it with the page's requests."""
    with serving(api_keys=(KEY,)) as server:
        page = new_page(browser, http_credentials={"username": "me", "password": KEY})
        assert page.goto(server.url).status == 200
        page.fill("#max_tokens", "5")
        page.click("#send")
        expect(page.locator(".turn .stats")).to_contain_text("5 generated")
        expect(page.locator("#status")).to_have_text("ok")
        page.close()
        assert server.get("/").status == 401
