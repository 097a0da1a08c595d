"""Pictures of the chat page, on a desktop and a phone, light and dark; docs/images/serve.png is one of them.

    python -m tests.serve.chat_pictures FOLDER

The answers are those of prepared.py, so that every kind of content is seen.
"""

import json
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.data.chat.templates import template
from tests.serve.chat_page import DESKTOP, PHONE, TOOLS, ChatPage, PreparedServer
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


def take_all(browser: Browser, server: PreparedServer, folder: Path) -> None:
    """Take the pictures of all forms, the last of each without the server."""
    opened = {}
    for (place, size), dark in product({"desktop": DESKTOP, "phone": PHONE}.items(), (False, True)):
        form = f"{place}-{'dark' if dark else 'light'}"
        opened[form] = ChatPage(browser, server.address, size, dark)
        take(opened[form], folder, form)
    server.kill()
    for form, chat in opened.items():
        chat.send("Are you still there?")
        chat.page.get_by_text("Will be sent").wait_for()
        chat.page.screenshot(path=folder / f"chat-gone-{form}.png")


def main(folder: Path) -> None:
    """Take all pictures."""
    chromium = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        _, run = make_chatty(Path(temporary))
        (run / "chat_template.jinja").write_text(template("qwen3"), "utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        server = PreparedServer(run)
        try:
            take_all(browser, server, folder)
        finally:
            server.kill()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
