"""The functions of the chat page with prepared answers: branches, saved conversations, export, and a lost server."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect

from tests.serve.chat_page import PHONE, TOOLS, ChatPage, PreparedServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

GROWING_ADDRESS = """async () => {
  const { MarkdownView } = await import("/web/js/markdown.js");
  const element = document.createElement("div");
  const view = new MarkdownView(element);
  for (const end of ["", "/path"]) view.show(`[x]\n\n[x]: https://example.invalid${end}`);
  return element.querySelector("a").href;
}"""
ANOTHER_MODEL_AND_BACK = """async () => {
  const { addMessage, newConversation } = await import("/web/js/conversation.js");
  const { Turn } = await import("/web/js/turn.js");
  const conversation = newConversation();
  const message = addMessage(conversation, null, { role: "assistant", content: "**x**", finish: "stop" });
  const session = { conversation, errors: new Map(), model: { chat_template: true } };
  const turn = new Turn(session, message);
  return [true, false, true].map((chats) => {
    session.model.chat_template = chats;
    turn.update();
    return turn.element.querySelectorAll("strong").length;
  });
}"""
# A transaction that blocks saving and deleting until `held` is false.
HOLD_STORE = """() => new Promise((resolve) => {
  indexedDB.open("deskside-chat").onsuccess = ({ target }) => {
    const store = target.result.transaction("conversations", "readwrite").objectStore("conversations");
    window.held = true;
    const again = () => { if (window.held) store.count().onsuccess = again; };
    again();
    resolve();
  };
})"""
WITHOUT_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', { value: undefined })"  # as with http


def test_markdown_grows_without_replacing_what_is_complete(chat: ChatPage) -> None:
    page = chat.page
    chat.send("rich")
    expect(chat.last.locator(".markdown")).to_contain_text("crosses out")
    chat.last.locator(".markdown h2").evaluate("e => { window.heading = e; }")
    chat.answer()
    assert page.evaluate("window.heading.isConnected")
    answer = chat.last.locator(".markdown")
    assert answer.locator("table tbody tr").count() == 3
    assert answer.locator("td.align-right").count() == 6
    assert answer.locator(".hljs-keyword").first.inner_text() == "def"
    assert answer.locator(".math .katex-html").count() == 9 and answer.locator(".math.display").count() == 1
    link = answer.get_by_role("link")
    assert (
        link.get_attribute("rel") == "noopener noreferrer nofollow"
        and link.get_attribute("target") == "_blank"
    )
    answer.get_by_role("button", name="Copy code").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert (
        copied.startswith("def primes(n")
        and copied.endswith("if is_prime]")
        and "\n    for p in range" in copied
    )
    chat.button("Copy").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("## How a prime sieve")
    page.evaluate(WITHOUT_CLIPBOARD)
    expect(chat.button("Copy").locator("use")).to_have_attribute("href", "#icon-copy")
    chat.button("Copy").click()
    expect(chat.button("Copy").locator("use")).to_have_attribute("href", "#icon-check")
    expect(chat.button("Copy")).to_be_focused()
    assert page.evaluate(GROWING_ADDRESS) == "https://example.invalid/path"
    assert page.evaluate(ANOTHER_MODEL_AND_BACK) == [1, 0, 1]
    usage = chat.last.locator(".usage").inner_text()
    tokens, speed = re.search(r"(\d+) tokens · (\d+) tokens/s", usage).groups()
    # A pause of 4 ms before each token: at most 250 tokens a second.
    assert int(tokens) == 160 and 5 < int(speed) <= 250


def test_branches(chat: ChatPage) -> None:
    first = chat.ask("versions")
    chat.button("Regenerate").click()
    second = chat.answer()
    assert first != second
    assert chat.ask("and more") == "and more"
    question = chat.page.locator(".turn.user").first
    question.get_by_role("button", name="Edit").click()
    question.get_by_label("Edit the question").fill("another question")
    chat.page.keyboard.press("Control+Enter")
    assert chat.answer() == "another question"
    assert chat.texts() == ["another question", "another question"]
    question = chat.page.locator(".turn.user").first
    question.get_by_role("button", name="Previous version").click()
    # the newest of the following messages
    assert chat.texts() == ["versions", second, "and more", "and more"]
    chat.page.locator(".turn").nth(1).get_by_role("button", name="Previous version").click()
    assert chat.texts() == ["versions", first]
    chat.button("Edit").click()
    chat.last.get_by_label("Edit the answer").fill("my own words")
    chat.last.get_by_role("button", name="Save").click()
    assert chat.texts() == ["versions", "my own words"]
    assert chat.last.locator(".versions").inner_text() == "3 / 3"
    assert chat.ask("next") == "next"
    assert [m["content"] for m in chat.posted()["messages"]] == ["versions", "my own words", "next"]


def test_conversations_are_kept_found_renamed_and_deleted(chat: ChatPage) -> None:
    page = chat.page
    chat.ask("about lighthouses")
    chat.page.get_by_role("button", name="New chat").click()
    assert chat.texts() == []
    chat.ask("about pirates")
    chat.page.get_by_label("Message", exact=True).fill("not sent yet")
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    assert chat.texts() == ["about pirates", "about pirates"]
    expect(page.get_by_label("Message", exact=True)).to_have_value("not sent yet")
    saved = page.locator("#conversations .title")
    assert saved.all_inner_texts() == ["about pirates", "about lighthouses"]
    page.keyboard.press("Control+k")
    page.keyboard.type("lightHOUSE")
    expect(saved).to_have_text(["about lighthouses"])
    saved.click()
    expect(page.locator(".turn > .text")).to_have_text(["about lighthouses", "about lighthouses"])
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name="Rename about lighthouses").click()
    page.get_by_label("Title").fill("Lights <b>")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Lights <b>")
    page.get_by_role("button", name="Delete Lights <b>").click()
    page.get_by_role("button", name="Cancel").click()
    expect(saved).to_have_count(2)
    page.get_by_role("button", name="Delete Lights <b>").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(saved).to_have_text(["about pirates"])
    assert chat.texts() == []
    page.go_back()  # the parent was deleted, so there is a new chat
    page.go_back()
    expect(page.locator(".turn > .text")).to_have_text(["about pirates", "about pirates"])


def test_export_and_import(chat: ChatPage, tmp_path: Path) -> None:
    page = chat.page
    chat.settings(system="be kind")
    chat.ask("versions")
    chat.button("Regenerate").click()
    chat.answer()
    chat.ask("think")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text())
    texts = chat.texts()
    assert [m["role"] for m in exported[0]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert [m["content"].strip() for m in exported[0]["messages"]][:3] == ["be kind", "versions", texts[1]]
    assert exported[0]["messages"][-1]["reasoning_content"].strip() == "Why, indeed?"
    page.get_by_role("button", name="Delete all conversations").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#conversations .title")).to_have_count(0)
    page.locator("#file").set_input_files(file)
    expect(page.locator(".turn")).to_have_count(4)
    assert chat.texts() == texts
    page.locator(".turn").nth(1).get_by_role("button", name="Previous version").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    download.value.save_as(file)
    again = json.loads(file.read_text())
    assert [without_ids(entry) for entry in again] == [without_ids(entry) for entry in exported]
    # A bare list of messages, as from another program.
    file.write_text(json.dumps([{"role": "user", "content": [{"type": "text", "text": "from elsewhere"}]}]))
    page.locator("#file").set_input_files(file)
    expect(page.locator(".turn > .text")).to_have_text(["from elsewhere"])
    expect(page.locator("#conversations .title")).to_have_count(2)
    for bad in (
        "{",
        '{"messages": 7}',
        '[{"role": "wizard", "content": "x"}]',
        '[{"role": "user", "content": 7}]',
        '{"messages": [null]}',
        '[{"role": "assistant", "tool_calls": {}}]',
        "[]",
    ):
        file.write_text(bad)
        page.locator("#file").set_input_files(file)
        dialog = page.get_by_role("dialog")
        assert "of null" not in dialog.inner_text() and "is not a function" not in dialog.inner_text()
        dialog.get_by_role("button", name="Close").click()
    expect(page.locator("#conversations .title")).to_have_count(2)
    deep = "[" * 20_000 + "]" * 20_000
    call = {"id": "1", "function": {"name": "dig", "arguments": deep}}
    file.write_text(json.dumps([{"role": "assistant", "content": "a deep call", "tool_calls": [call]}]))
    page.locator("#file").set_input_files(file)
    expect(page.locator("details.call pre")).to_have_text(deep)


def without_ids(entry: dict[str, Any]) -> Any:
    """Return the parts of an exported conversation that an import keeps: its tree, in order of time."""
    tree = entry["deskside"]
    ordered = sorted(tree["messages"], key=lambda m: m["created"])
    places = {message["id"]: place for place, message in enumerate(ordered)}
    messages = [{**m, "id": None, "parent": places.get(m["parent"])} for m in ordered]
    return entry["title"], entry["created"], tree["system"], messages


def test_a_question_sent_while_conversations_are_being_deleted_is_answered(chat: ChatPage) -> None:
    page = chat.page
    chat.ask("first")
    page.evaluate(HOLD_STORE)
    page.get_by_role("button", name="Delete all conversations").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".turn")).to_have_count(0)
    chat.send("second")
    expect(page.locator(".turn > .text").first).to_have_text("second")
    page.evaluate("window.held = false")
    assert chat.answer() == "second" and chat.texts() == ["second", "second"]
    expect(page.locator("#conversations .title")).to_have_text(["second"])


def test_an_answered_dialog_acts_before_the_next_input(chat: ChatPage) -> None:
    """A dialog's "close" event may come after the user's next action, and nothing waits for it."""
    page = chat.page
    chat.ask("first")
    page.evaluate("addEventListener('close', (event) => event.stopImmediatePropagation(), true)")
    page.get_by_role("button", name="Rename first").click()
    page.get_by_label("Title").fill("renamed")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("renamed")
    expect(page.get_by_role("button", name="Rename renamed")).to_be_focused()
    page.get_by_role("button", name="Delete renamed").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("dialog.ask-dialog")).to_have_count(0)


@pytest.mark.full
def test_what_is_deleted_while_it_is_answered_stays_deleted(chat: ChatPage) -> None:
    chat.send("count slowly")
    expect(chat.page.locator(".turn.assistant > .text")).to_contain_text("1 2")
    chat.page.get_by_role("button", name="Delete all conversations").click()
    chat.page.get_by_role("button", name="Delete", exact=True).click()
    assert chat.ask("another") == "another"
    chat.page.reload()
    expect(chat.page.locator("#conversations .title")).to_have_text(["another"])


def test_sampling_and_models(chat: ChatPage) -> None:
    page = chat.page
    chat.ask("hello")
    assert set(chat.posted()) == {
        "model",
        "temperature",
        "max_tokens",
        "messages",
        "stream",
        "stream_options",
    }
    wanted = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 12, "seed": 7,
        "repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": -0.5,
    }  # fmt: skip
    chat.settings(
        **{name: str(value) for name, value in wanted.items()}, thinking="off", tools=json.dumps(TOOLS)
    )
    page.get_by_label("Model", exact=True).select_option("poet")
    page.reload()  # this browser's settings are kept
    expect(page.get_by_label("Model", exact=True)).to_have_value("poet")
    chat.ask("hello again")
    posted = chat.posted()
    assert wanted.items() <= posted.items() and posted["model"] == "poet" and posted["tools"] == TOOLS
    assert posted["chat_template_kwargs"] == {"enable_thinking": False}
    assert chat.last.locator(".who").inner_text() == "poet"
    page.keyboard.press("Control+,")
    page.locator("#setting-temperature").fill("3")
    page.locator("#setting-temperature").blur()
    assert page.locator("#setting-temperature").get_attribute("aria-invalid") == "true"
    page.locator("#tools").fill("{")
    page.locator("#tools").blur()
    assert page.locator("#tools").get_attribute("aria-invalid") == "true"
    page.get_by_role("button", name="Reset").click()
    assert page.locator("#settings [aria-invalid=true], #settings .bad:not(:empty)").count() == 0
    page.keyboard.press("Escape")
    chat.ask("hello")
    assert chat.posted()["temperature"] == 0.8
    assert not {*wanted, "chat_template_kwargs", "tools"} & {*chat.posted()} - {"temperature", "max_tokens"}


@pytest.mark.full
def test_continuing_after_the_limit(chat: ChatPage) -> None:
    chat.settings(max_tokens="10")
    assert chat.ask("count").split() == [str(i) for i in range(1, 11)]
    expect(chat.last.get_by_text("Ended at the maximum")).to_be_visible()
    chat.settings(tools='[{"type": "wizard"}]')
    chat.button("Continue").click()
    expect(chat.last.get_by_role("alert")).to_contain_text("tools")
    chat.settings(max_tokens="500", tools="")
    chat.button("Continue").click()
    assert chat.answer().split() == [str(i) for i in range(1, 301)]
    assert chat.last.locator(".usage").inner_text().startswith("300 tokens")
    assert chat.page.locator(".turn").count() == 2 and chat.button("Continue").count() == 0
    assert len(chat.complaints) == 1 and "400" in chat.complaints.pop()  # the refused attempt


@pytest.mark.full
def test_what_is_typed_survives_the_end_of_an_answer(chat: ChatPage) -> None:
    page = chat.page
    chat.ask("first")
    page.locator(".turn.user").get_by_role("button", name="Edit").click()
    area = page.get_by_label("Edit the question")
    area.fill("changed")
    chat.send("count")
    send = page.locator(".edit [type=submit]")
    expect(send).to_be_disabled()  # one answer at a time
    area.press("Control+Enter")
    page.get_by_role("button", name="Settings").click()
    page.locator("#system").fill("be ki")
    expect(page.locator("#stop")).to_be_hidden()
    assert page.locator("#system").input_value() == "be ki"
    page.keyboard.press("Escape")
    expect(send).to_be_enabled()
    assert chat.texts()[-1].endswith("300")
    area.press("Control+Enter")
    assert chat.answer() == "changed" and chat.posted()["messages"][0]["content"] == "be ki"
    page.evaluate("setTimeout(() => { throw new Error('as if by a fault') })")
    expect(page.get_by_text("The page has failed.")).to_be_visible()
    assert chat.complaints.pop() == "as if by a fault"


@pytest.mark.full
def test_the_drawer_of_a_phone_by_keyboard(
    browser: "Browser", prepared: PreparedServer, tmp_path: Path
) -> None:
    chat = ChatPage(browser, prepared.address, PHONE)
    page = chat.page
    menu = page.get_by_role("button", name="Conversations")
    chat.send("count slowly")
    expect(page.locator(".turn.assistant > .text")).to_contain_text("1 2")
    menu.press("Enter")
    expect(page.locator("#new")).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    expect(page.locator("#stop")).to_be_visible()  # the answer continues
    menu.press("Enter")
    page.get_by_role("button", name="Delete all conversations").press("Enter")
    page.get_by_role("button", name="Delete", exact=True).press("Enter")
    expect(page.locator("#new")).to_be_focused()
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "from elsewhere"}]))
    page.locator("#file").set_input_files(file)
    expect(page.locator("#sidebar")).to_be_hidden()
    assert chat.texts() == ["from elsewhere"] and chat.complaints == []
    chat.close()


def test_reasoning_and_tool_calls_are_folded(chat: ChatPage) -> None:
    page = chat.page
    assert chat.ask("think") == "Because of it."
    reasoning = chat.last.locator("details.reasoning .markdown")
    expect(reasoning).to_be_hidden()
    chat.last.get_by_text("Reasoning").click()
    expect(reasoning).to_have_text("Why, indeed?")
    chat.settings(tools=json.dumps(TOOLS))
    chat.send("weather")
    page.get_by_text("Tool call:").click()
    expect(chat.last.locator("details.call pre")).to_contain_text('"city": "Oslo"')
    page.get_by_label("Result of weather").last.fill("sunny")
    page.get_by_role("button", name="Send results").click()
    expect(chat.last.locator("> .text")).to_have_text("It is sunny.")
    assert [m["role"] for m in chat.posted()["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert chat.posted()["messages"][-1]["content"] == "sunny"


@pytest.mark.full
def test_a_refusal_is_shown_at_its_question(browser: "Browser", prepared: PreparedServer) -> None:
    chat = ChatPage(browser, prepared.address)
    chat.settings(tools='[{"type": "wizard"}]')
    chat.send("a question")
    expect(chat.last.get_by_role("alert")).to_contain_text("tools")
    assert chat.texts() == ["a question"]
    chat.settings(tools="")
    chat.button("Try again").click()
    assert chat.answer() == "a question" and chat.texts() == ["a question", "a question"]
    assert len(chat.complaints) == 1 and "400" in chat.complaints[0]
    chat.close()


def test_the_server_is_killed_and_returns(browser: "Browser", prepared: PreparedServer) -> None:
    chat = ChatPage(browser, prepared.address)
    page = chat.page
    banner = page.get_by_text("The server cannot be reached.")
    chat.send("count slowly")
    expect(chat.last.locator("> .text")).to_contain_text("1 2 3")
    prepared.kill()
    expect(banner).to_be_visible()
    expect(chat.last.get_by_role("alert")).to_have_text("The connection was lost.")
    begun = chat.last.locator("> .text").inner_text()
    assert begun.startswith("1 2 3")
    page.get_by_role("button", name="New chat").click()
    chat.send("asked while it was away")
    expect(chat.last.get_by_text("Will be sent")).to_be_visible()
    page.get_by_role("button", name="Try now").click()
    expect(banner).to_be_visible()
    prepared.start()
    expect(chat.page.locator(".turn.assistant > .text")).to_have_text("asked while it was away")
    expect(banner).to_be_hidden()
    page.locator("#conversations .title").nth(1).click()
    expect(chat.last.locator("> .text")).to_have_text(begun)
    chat.button("Continue").click()
    expect(chat.last.locator("> .text")).to_contain_text(begun + " " + str(len(begun.split()) + 1))
    page.keyboard.press("Escape")
    chat.answer()
    assert all("Failed to load resource" in text or "ERR_" in text for text in chat.complaints), (
        chat.complaints
    )
    chat.close()


@pytest.mark.full
def test_two_tabs_lose_nothing_of_one_conversation(chat: ChatPage) -> None:
    chat.ask("begin")
    other = chat.context.new_page()
    other.goto(chat.page.url)
    expect(other.locator(".turn")).to_have_count(2)
    chat.ask("from the first tab")
    other.locator("#say").fill("from the second tab")
    other.keyboard.press("Enter")
    expect(other.locator(".turn > .text").last).to_have_text("from the second tab")
    expect(other.locator("#stop")).to_be_hidden()
    chat.page.reload()
    expect(chat.page.locator(".turn > .text").last).to_have_text("from the second tab")
    chat.page.locator(".turn").nth(2).get_by_role("button", name="Previous version").click()
    assert chat.texts() == ["begin", "begin", "from the first tab", "from the first tab"]


def with_own_clock(page: "Page") -> None:
    """Reopen the page with a clock that `page.clock.run_for` advances, so that its timeouts end at once."""
    page.clock.install()
    page.reload()
    expect(page.locator("#say:focus")).to_be_attached()


def test_a_server_that_hangs(chat: ChatPage, prepared: PreparedServer) -> None:
    page = chat.page
    with_own_clock(page)
    text = chat.last.locator("> .text")
    chat.send("count slowly")
    page.clock.run_for(1000)
    expect(text).to_contain_text("1 2 3")
    prepared.freeze()
    try:
        page.clock.run_for(11_000)
        expect(page.get_by_text("The server does not answer.")).to_be_visible()
        expect(page.get_by_role("button", name="Try now")).to_be_visible()
    finally:
        prepared.thaw()
    # A check that waited for the frozen server may have hidden the button by now.
    page.locator("#retry").evaluate("e => e.click()")
    expect(page.locator("#gone")).to_be_hidden()
    begun = text.inner_text()
    expect(text).not_to_have_text(begun)  # the frozen answer continues: nothing was aborted
    page.keyboard.press("Escape")
    chat.answer()


def test_an_answer_that_does_not_go_on_is_asked_again(chat: ChatPage) -> None:
    page = chat.page
    with_own_clock(page)
    held = []
    # The first request is accepted but never answered, while the server reports that it is healthy.
    hold = lambda route: route.continue_() if held else held.append(route)  # noqa: E731
    page.route("**/v1/chat/completions", hold)
    chat.send("hello")
    page.clock.run_for(20_000)
    expect(page.locator("#gone")).to_be_hidden()
    page.clock.run_for(20_000)
    expect(page.get_by_text("Nothing of the answer has come")).to_be_visible()
    page.locator("#retry").evaluate("e => e.click()")
    expect(chat.page.locator(".turn.assistant > .text")).to_have_text("hello")
    expect(page.locator("#gone")).to_be_hidden()
    assert len(held) == 1 and chat.texts() == ["hello", "hello"]


def test_enter_by_touch_is_a_new_line(browser: "Browser", prepared: PreparedServer) -> None:
    chat = ChatPage(browser, prepared.address, PHONE, is_mobile=True, has_touch=True)
    box = chat.page.get_by_label("Message", exact=True)
    box.fill("one")
    box.press("Enter")
    chat.page.keyboard.type("two")
    expect(box).to_have_value("one\ntwo")
    chat.page.get_by_role("button", name="Send").tap()
    chat.answer()
    assert chat.posted()["messages"][-1]["content"] == "one\ntwo" and chat.complaints == []
    chat.close()


def test_the_list_of_shortcuts_opens_on_any_keyboard(chat: ChatPage) -> None:
    pressed = "new KeyboardEvent('keydown', {key: '/', ctrlKey: true, shiftKey, bubbles: true})"
    for shift in (False, True):  # a German keyboard has / on Shift+7
        chat.page.evaluate(f"shiftKey => document.body.dispatchEvent({pressed})", shift)
        expect(chat.page.locator("#shortcuts")).to_be_visible()
        chat.page.keyboard.press("Escape")
