"""The page to chat in, as a person meets it: the real server, a real headless Chromium."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.serve_load import served
from deskside.data.chat.messages import Conversation
from deskside.engine.generate import generate
from deskside.serve.templating import PromptEncoder
from deskside.weights.load import load_model
from tests.data.chat.templates import template
from tests.serve.chatty import make_chatty, make_endless
from tests.serve.scripted import make_scripted

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")

DESKTOP, PHONE = {"width": 1100, "height": 800}, {"width": 360, "height": 740}
TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made, chatty = make_chatty(tmp_path_factory.mktemp("page"))
    return made.path, chatty


@pytest.fixture(scope="module")
def address(runs: tuple[Path, Path]) -> Iterator[str]:
    arguments = [str(runs[1]), "--device", "cpu", "--max-tokens", "4000", "--concurrency", "2"]
    with served(arguments, {"OMP_NUM_THREADS": "1"}) as (base, _):
        yield base


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


class Seen:
    """A page, what it asked for, and what its console said."""

    def __init__(self, browser: "Browser", address: str, size: dict[str, int], dark: bool = False):
        context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
        self.page = context.new_page()
        self.page.set_default_timeout(30_000)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)

    def settings(self, **values: str) -> None:
        if self.page.locator("details").get_attribute("open") is None:
            self.page.get_by_text("Settings").click()
        for name, value in values.items():
            self.page.locator(f"#{name}").fill(value)

    def say(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def done(self) -> None:
        sync_api.expect(self.page.get_by_role("button", name="Send")).to_be_visible()

    def turns(self) -> list[str]:
        return self.page.locator(".turn p:not(.note)").all_text_contents()


def test_a_conversation(browser: "Browser", address: str, runs: tuple[Path, Path]) -> None:
    seen = Seen(browser, address, DESKTOP)
    page = seen.page
    sync_api.expect(page.get_by_role("heading", level=1)).to_have_text("small")
    seen.settings(temperature="0", max_tokens="30", system="be brief")
    expected: list[dict[str, str]] = [{"role": "system", "content": "be brief"}]
    loaded = load_model(runs[1])
    prompts = PromptEncoder(loaded)
    said = ["hello <b>you</b>", "and <script>alert(1)</script>"]
    for text in said:
        seen.say(text)
        page.get_by_role("button", name="Stop").wait_for(state="hidden")
        seen.done()
        expected.append({"role": "user", "content": text})
        prompt = prompts.conversation(Conversation(expected))
        found = generate(loaded.model, [prompt], max_new_tokens=30, eos_tokens=loaded.eos_tokens)[0]
        expected.append({"role": "assistant", "content": loaded.tokenizer.decode(found.tokens)})
    assert [" ".join(t.split()) for t in seen.turns()] == [
        " ".join(m["content"].split()) for m in expected[1:]
    ]
    assert page.get_by_text("Ended at the maximum").count() == 2
    assert page.locator(".turn b, .turn script").count() == 0
    page.get_by_role("button", name="New chat").click()
    assert seen.turns() == []
    assert all(url.startswith((address, "data:")) for url in seen.asked)
    assert seen.complaints == []


def test_stop_ends_the_answer_and_the_work(browser: "Browser", tmp_path: Path) -> None:
    arguments = [str(make_endless(tmp_path)), "--device", "cpu", "--max-tokens", "4000", "--concurrency", "2"]
    with served(arguments, {"OMP_NUM_THREADS": "1"}) as (base, _):
        seen = Seen(browser, base, DESKTOP)
        seen.settings(temperature="0", max_tokens="4000")
        for _ in range(3):  # the server answers two at a time, so a stopped answer must free its place
            seen.say("the sea")
            stop = seen.page.get_by_role("button", name="Stop")
            sync_api.expect(seen.page.locator(".turn p").last).to_have_text(re.compile("a{10}"))
            stop.click()
            seen.done()
            assert seen.page.locator(".turn").last.get_by_text("Stopped.").is_visible()
            assert set(seen.turns()[-1]) == {"a"}
        assert seen.page.get_by_role("alert").is_hidden()


def test_refusals_are_shown_and_what_was_said_comes_back(browser: "Browser", address: str) -> None:
    seen = Seen(browser, address, DESKTOP)
    seen.settings(max_tokens="9999")
    seen.say("a question")
    sync_api.expect(seen.page.get_by_role("alert")).to_contain_text("maximum of 4000")
    sync_api.expect(seen.page.get_by_label("Message", exact=True)).to_have_value("a question")
    assert seen.turns() == []
    seen.settings(max_tokens="5", temperature="0")
    seen.page.get_by_role("button", name="Send").click()
    seen.done()
    sync_api.expect(seen.page.locator(".turn")).to_have_count(2)
    assert seen.page.get_by_role("alert").is_hidden()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_width_and_contrast(browser: "Browser", address: str, dark: bool) -> None:
    seen = Seen(browser, address, PHONE, dark)
    seen.settings(temperature="0", max_tokens="40")
    seen.say("word" * 60)
    seen.page.get_by_text("Ended at").wait_for()
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    box = seen.page.get_by_role("button", name="Send").bounding_box()
    assert box is not None and box["height"] >= 44 and box["x"] + box["width"] <= PHONE["width"]
    ratios = seen.page.evaluate(CONTRAST)
    assert min(ratios) >= 4.5, ratios


def test_keyboard_alone(browser: "Browser", address: str) -> None:
    seen = Seen(browser, address, DESKTOP)
    seen.settings(temperature="0", max_tokens="5")
    seen.page.locator("#say").focus()
    seen.page.keyboard.type("one")
    seen.page.keyboard.press("Shift+Enter")
    seen.page.keyboard.type("two")
    seen.page.keyboard.press("Enter")
    seen.page.get_by_text("Ended at").wait_for()
    assert seen.turns()[0] == "one\ntwo"
    assert seen.page.evaluate("document.activeElement.id") == "say"
    seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("document.activeElement.id") == "send"
    for control in seen.page.locator("input, textarea, button").all():
        name = control.evaluate("e => e.labels?.[0]?.textContent || e.textContent")
        assert name.strip()


def test_a_token_is_asked_for_and_a_plain_model_continues(
    browser: "Browser", runs: tuple[Path, Path]
) -> None:
    with served([str(runs[0]), "--device", "cpu"], {"OMP_NUM_THREADS": "1", "DESKSIDE_API_KEY": TOKEN}) as (
        base,
        _,
    ):
        seen = Seen(browser, base, DESKTOP)
        sync_api.expect(seen.page.get_by_role("alert")).to_contain_text("requires an API key")
        seen.page.get_by_label("API key", exact=True).fill(TOKEN)
        seen.page.keyboard.press("Tab")
        sync_api.expect(seen.page.locator("#hint")).to_contain_text("continues your text")
        seen.settings(temperature="0", max_tokens="20")
        seen.say("the sea")
        seen.page.get_by_text("Ended at").wait_for()
        seen.say("")  # goes on
        sync_api.expect(seen.page.locator(".turn")).to_have_count(3)
        sync_api.expect(seen.page.get_by_text("Ended at")).to_have_count(2)
        assert seen.turns()[0] == "the sea" and seen.page.get_by_role("alert").is_hidden()


def test_reasoning_is_beside_the_answer(browser: "Browser", tmp_path: Path) -> None:
    make_scripted(tmp_path, template("qwen3"), ["<think>", "why?", "</think>", "Hi."])
    with served([str(tmp_path / "runs" / "small"), "--device", "cpu"], {"OMP_NUM_THREADS": "1"}) as (base, _):
        seen = Seen(browser, base, DESKTOP)
        seen.say("hello")
        seen.page.get_by_text("Reasoning").click()
        sync_api.expect(seen.page.locator("details p.note")).to_have_text("why?")
        sync_api.expect(seen.page.locator(".turn > p").last).to_have_text("Hi.")
        assert not seen.complaints


CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => [0, 1, 2].map((i) => c[i] / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("h1, h2, p, label, summary, button, input, textarea")]
    .filter((e) => e.checkVisibility() && !e.classList.contains("unseen"))
    .map((e) => [light(rgb(getComputedStyle(e).color)), light(behind(e))])
    .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
}"""
