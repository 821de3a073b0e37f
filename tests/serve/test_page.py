"""The web page in a real browser: it streams, shows what the engine does, and trusts no text."""

import re

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

from helpers.serve.fake_engine import FakeEngine, fake_model  # noqa: E402
from helpers.serve.live_server import HANG_SECONDS, eventually, serving  # noqa: E402

expect = playwright_api.expect
expect.set_options(timeout=1000 * HANG_SECONDS)
KEY = "a-key-of-one-tenant"


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
    """Loaded; fails the test at any script error, blocked resource, or request to elsewhere."""
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
    """In the server's words: what is wrong, what is too long, and what fails later."""
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
    """The browser asks for the key, and sends it with what the page fetches."""
    with serving(api_keys=(KEY,)) as server:
        page = new_page(browser, http_credentials={"username": "me", "password": KEY})
        assert page.goto(server.url).status == 200
        page.fill("#max_tokens", "5")
        page.click("#send")
        expect(page.locator(".turn .stats")).to_contain_text("5 generated")
        expect(page.locator("#status")).to_have_text("ok")
        page.close()
        assert server.get("/").status == 401
