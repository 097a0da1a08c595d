"""The chat page in a headless Chromium, operated like a user does."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from playwright.sync_api import expect

from benchmarks.serve_load import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


class ChatPage:
    """An open page, the requests that it made, and its console messages."""

    def __init__(
        self,
        browser: "Browser",
        address: str,
        size: dict[str, int] = DESKTOP,
        dark: bool = False,
        **options: bool,
    ):
        self.context = browser.new_context(
            viewport=size,
            color_scheme="dark" if dark else "light",
            permissions=["clipboard-read", "clipboard-write"],
            **options,  # options of a browser context, such as is_mobile
        )
        self.page = self.context.new_page()
        self.requests: list[Any] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)
        # The last request that the page makes when it opens, unless it asks for a key.
        expect(self.page.locator("#say:focus, dialog[open]")).to_be_attached()

    def send(self, text: str) -> None:
        """Send a question without waiting for the answer."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> str:
        """Send a question and return the text of the complete answer."""
        self.send(text)
        return self.answer()

    def answer(self) -> str:
        """Wait for the end of the answer, and return its text."""
        expect(self.page.locator("#stop")).to_be_hidden()
        return self.last.locator("> .text").inner_text()

    @property
    def last(self) -> "Locator":
        return self.page.locator(".turn").last

    def texts(self) -> list[str]:
        """Return the texts of all messages."""
        return self.page.locator(".turn > .text").all_inner_texts()

    def button(self, name: str) -> "Locator":
        """Return a button of the last message."""
        return self.last.get_by_role("button", name=name, exact=True)

    def settings(self, **values: str) -> None:
        """Fill fields of the settings dialog, given by the ends of their ids."""
        self.page.get_by_role("button", name="Settings").click()
        for name, value in values.items():
            field = self.page.locator(f"#{name}, #setting-{name}")
            if field.evaluate("e => e.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
                field.blur()
        self.page.keyboard.press("Escape")

    def posted(self, path: str = "/v1/chat/completions") -> dict[str, Any]:
        """Return the body of the last request to a path."""
        return [request for request in self.requests if request.url.endswith(path)][-1].post_data_json

    def close(self) -> None:
        self.context.close()


class PreparedServer:
    """The process of tests/serve/prepared.py, which can be killed and restarted on its port."""

    def __init__(self, run: Path, port: int = 0):
        self._run, self._port = run, port
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        command = [sys.executable, "-m", "tests.serve.prepared", str(self._run), "--port", str(self._port)]
        options = ["--device", "cpu", "--name", "prepared", "--max-tokens", "1000"]
        self._process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT}
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "http://" in line, line
        self.address = line.split("  ")[0].rpartition(" ")[2]
        self._port = int(self.address.rpartition(":")[2])
        assert httpx.get(f"{self.address}/health").status_code == 200

    def freeze(self) -> None:
        """Stop the process with SIGSTOP: its connections remain, and it answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process without a warning."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def real_server(run: Path, *options: str, **environment: str) -> Iterator[str]:
    """Serve a run, and yield the address."""
    with served([str(run), "--device", "cpu", *options], {**ENVIRONMENT, **environment}) as (address, _):
        yield address
