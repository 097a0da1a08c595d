"""The chat page with the real engine: answers are what the model generates, and
stopping an answer stops the computation.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect

from deskside.data.chat.messages import Conversation
from deskside.engine.generate import generate
from deskside.serve.templating import PromptEncoder
from deskside.weights.load import load_model
from tests.serve.chat_page import ChatPage, real_server
from tests.serve.chatty import make_endless

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.full  # each test starts a server; the other tests of the page share one
KEY = "open-sesame"
GREEDY = {"temperature": "0", "max_tokens": "30"}


def test_answers_and_their_continuation_are_the_models(browser: "Browser", runs: tuple[Path, Path]) -> None:
    loaded = load_model(runs[1])
    prompts = PromptEncoder(loaded)
    messages = [{"role": "system", "content": "be brief"}]
    with real_server(runs[1]) as address:
        chat = ChatPage(browser, address)
        chat.settings(**GREEDY, system="be brief")
        for text in ("hello <b>you</b>", "and <script>alert(1)</script>"):
            chat.ask(text)
            messages.append({"role": "user", "content": text})
            prompt = prompts.conversation(Conversation(messages))
            found = generate(loaded.model, [prompt], max_new_tokens=60, eos_tokens=loaded.eos_tokens)[
                0
            ].tokens
            kept = chat.page.evaluate(SHOWN_MESSAGE)
            assert kept["content"] == loaded.tokenizer.decode(found[:30]) and kept["finish"] == "length"
            assert kept["usage"]["prompt"] == len(prompt) and kept["usage"]["completion"] == 30
            messages.append({"role": "assistant", "content": kept["content"]})
        chat.button("Continue").click()
        chat.answer()
        kept = chat.page.evaluate(SHOWN_MESSAGE)
        assert kept["usage"]["completion"] == 60
        # A prefix may have other tokens when it is tokenized again. The model then continues after the same text.
        assert kept["content"].startswith(messages[-1]["content"]) and len(kept["content"]) > len(
            messages[-1]["content"]
        )
        assert chat.page.locator(".turn b, .turn script").count() == 0
        assert chat.complaints == []
        chat.close()


def test_stop_ends_the_work_of_the_server(browser: "Browser", tmp_path: Path) -> None:
    with real_server(make_endless(tmp_path), "--concurrency", "2", "--max-tokens", "4000") as address:
        chat = ChatPage(browser, address)
        for number in range(3):  # the server answers two at a time, so a stopped answer must free its slot
            chat.send("the sea")
            expect(chat.last.locator("> .text")).to_have_text(re.compile("a{10}"))
            chat.page.keyboard.press("Escape") if number else chat.page.get_by_role(
                "button", name="Stop"
            ).click()
            assert set(chat.answer()) == {"a"}
            assert chat.last.get_by_text("Stopped.").is_visible()
            expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()
        assert chat.complaints == []
        chat.close()


def test_a_key_is_asked_for_and_a_plain_model_continues(browser: "Browser", runs: tuple[Path, Path]) -> None:
    with real_server(runs[0], DESKSIDE_API_KEY=KEY) as address:
        chat = ChatPage(browser, address)
        page = chat.page
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("API key").fill("ключ")  # which is not allowed in an HTTP header
        page.keyboard.press("Enter")
        dialog.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_label("API key")).to_have_value("")
        page.keyboard.press("Escape")
        chat.send("asked without a key")
        dialog.get_by_label("API key").fill(KEY + " ")
        page.keyboard.press("Enter")
        expect(page.locator("#hint")).to_contain_text("continues your text")
        expect(chat.button("Try again")).to_be_visible()
        page.get_by_role("button", name="New chat").click()
        assert KEY in page.evaluate("JSON.stringify(sessionStorage)")
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        chat.settings(**GREEDY)
        first = chat.ask("the sea")
        assert chat.posted("/v1/completions")["prompt"] == "the sea"
        chat.button("Continue").click()
        assert len(chat.answer()) > len(first)
        assert chat.posted("/v1/completions")["prompt"] == "the sea" + first
        assert all("401" in text for text in chat.complaints)
        chat.close()


SHOWN_MESSAGE = """() => new Promise((resolve) => {
  const opening = indexedDB.open("deskside-chat");
  opening.onsuccess = () => {
    const all = opening.result.transaction("conversations").objectStore("conversations").get(location.hash.slice(1));
    all.onsuccess = () => { opening.result.close(); resolve(all.result.messages[all.result.leaf]); };
  };
})"""
