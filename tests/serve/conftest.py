"""One browser and one server with prepared answers for all tests of the chat page."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chromium import launched_chromium
from tests.data.chat.templates import template
from tests.serve.chatty import make_chatty

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.serve.chat_page import ChatPage, PreparedServer


@pytest.fixture(scope="module")  # while it is open, the thread has an event loop, and asyncio.run() fails
def browser() -> Iterator["Browser"]:
    with launched_chromium() as launched:
        yield launched


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run without a chat template, and a copy with one."""
    made, chatty = make_chatty(tmp_path_factory.mktemp("page"))
    return made.path, chatty


@pytest.fixture(scope="session")
def prepared(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator["PreparedServer"]:
    from tests.serve.chat_page import PreparedServer

    run = tmp_path_factory.mktemp("prepared") / "run"
    shutil.copytree(runs[1], run)
    (run / "chat_template.jinja").write_text(template("qwen3"), "utf-8")
    server = PreparedServer(run)
    yield server
    server.kill()


@pytest.fixture
def chat(browser: "Browser", prepared: "PreparedServer") -> Iterator["ChatPage"]:
    """A new browser profile with the page open. At the end, its console must be empty."""
    from tests.serve.chat_page import ChatPage

    opened = ChatPage(browser, prepared.address)
    yield opened
    opened.close()
    assert opened.complaints == []
