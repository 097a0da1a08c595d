"""Pictures of the chat page, on a desktop and a phone, light and dark; docs/images/serve.png is one of them.

    python -m tests.serve.chat_pictures FOLDER

The answers are those of prepared.py, so that every kind of content is seen.
"""

import json
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from benchmarks.contact_sheet import FORMS, SIZES
from tests.chromium import launched_chromium
from tests.dashboard.browsing import serious_faults
from tests.data.chat.templates import template
from tests.serve.chat_page import TOOLS, ChatPage, PreparedServer
from tests.serve.chatty import make_chatty

QUESTION = "Write a Python function that finds prime numbers."


def take(chat: ChatPage, folder: Path, form: str) -> None:
    """Take the pictures of one form while the server runs."""
    page = chat.page

    def picture(name: str) -> None:
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)
        page.screenshot(path=folder / f"chat-{name}-{form}.png")

    def new_chat() -> None:
        page.keyboard.press("Control+Shift+O")

    picture("empty")
    chat.settings(tools=json.dumps(TOOLS))
    chat.ask("think")
    chat.last.get_by_text("Reasoning").click()
    chat.send("weather")
    page.get_by_text("Tool call:").click()
    picture("folded")
    chat.settings(tools="", max_tokens="12")
    new_chat()
    chat.ask("versions")
    chat.button("Regenerate").click()
    chat.answer()
    chat.ask("count")
    picture("branches")
    page.get_by_role("button", name="Settings").click()
    picture("settings")
    page.get_by_role("button", name="Reset").click()
    page.keyboard.press("Escape")
    new_chat()
    chat.ask(QUESTION)
    picture("rich-end")
    if form.startswith("phone"):
        page.get_by_role("button", name="Conversations").click()
        picture("drawer")
        page.keyboard.press("Escape")
    page.locator("#thread").evaluate("e => { e.scrollTop = 0; }")
    picture("rich")


def take_all(browser: Browser, folder: Path) -> list[str]:
    """Take the pictures of all forms, the last picture of each without the server. Return the faults of the pages."""
    opened: dict[str, ChatPage] = {}
    faults = []
    with tempfile.TemporaryDirectory() as temporary:
        _, run = make_chatty(Path(temporary))
        (run / "chat_template.jinja").write_text(template("qwen3"), "utf-8")
        server = PreparedServer(run)
        try:
            for form, scheme in FORMS:
                name = f"{form}-{scheme}"
                chat = opened[name] = ChatPage(browser, server.address, SIZES[form], scheme == "dark")
                take(chat, folder, name)
                found = [*chat.complaints, *serious_faults(chat.page)]
                faults += [f"chat-{name}: {fault}" for fault in found]
        finally:
            server.kill()
    for name, chat in opened.items():
        chat.send("Are you still there?")
        chat.page.get_by_text("Will be sent").wait_for()
        chat.page.screenshot(path=folder / f"chat-gone-{name}.png")
        faults += [f"chat-gone-{name}: {fault}" for fault in serious_faults(chat.page)]
    return faults


def main(folder: Path) -> None:
    """Take all pictures."""
    with launched_chromium() as browser:
        faults = take_all(browser, folder)
    sys.exit("\n".join(faults))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
