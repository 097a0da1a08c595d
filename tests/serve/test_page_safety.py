"""The chat page against hostile model output, and on phones, in dark mode and for screen readers."""

from typing import TYPE_CHECKING

import httpx
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.serve.chat_page import DESKTOP, PHONE, ChatPage, PreparedServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_the_policy_allows_only_the_pages_own_scripts(prepared: PreparedServer) -> None:
    page = httpx.get(prepared.address)
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert (
        policy["default-src"] == "'none'"
        and policy["script-src"] == "'self'"
        and policy["connect-src"] == "'self'"
    )
    assert policy["require-trusted-types-for"] == "'script'"
    assert [name for name, value in policy.items() if "unsafe" in value or "http" in value] == [
        "style-src-attr"
    ]
    assert "<style" not in page.text and "onclick" not in page.text


def test_hostile_answers(chat: ChatPage, prepared: PreparedServer) -> None:
    page = chat.page
    chat.ask("hostile")
    answer = chat.last.locator(".markdown")
    assert "<script>window.hit = 1</script>" in answer.inner_text()  # shown literally
    assert "end of it" in answer.inner_text()
    page.reload()  # also after loading it from the store
    expect(page.locator(".turn")).to_have_count(2)
    assert page.evaluate("window.hit") is None
    assert (
        answer.locator(
            "script, img, svg:not(.icon):not(.katex svg), iframe, form, input, style, object"
        ).count()
        == 0
    )
    attributes = answer.evaluate("e => [...e.querySelectorAll('*')].flatMap((x) => x.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on")]
    assert answer.locator("[style]:not(.katex *)").count() == 0
    for link in answer.locator("a").all():
        assert link.get_attribute("href").startswith("https://")
        assert "noopener" in link.get_attribute("rel")
    addresses = {request.url for request in chat.requests}
    assert all(url.startswith((prepared.address, "data:")) for url in addresses)
    page.get_by_role("button", name="New chat").click()
    chat.ask("<img src=x onerror=window.hit=13>")
    assert chat.texts()[0] == "<img src=x onerror=window.hit=13>" and page.evaluate("window.hit") is None


@pytest.mark.full
def test_a_huge_table_scrolls_by_itself(browser: "Browser", prepared: PreparedServer) -> None:
    chat = ChatPage(browser, prepared.address, PHONE)
    chat.ask("huge")
    assert chat.last.locator("tbody tr").count() == 120
    assert chat.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert chat.page.locator("#thread").evaluate("e => e.scrollWidth - e.clientWidth") == 0
    assert chat.last.locator(".table").evaluate("e => e.scrollWidth > e.clientWidth")
    assert chat.complaints == []
    chat.close()


@pytest.mark.parametrize(
    "size, dark",
    [
        (PHONE, True),
        pytest.param(DESKTOP, False, marks=pytest.mark.full),
        pytest.param(DESKTOP, True, marks=pytest.mark.full),
        pytest.param(PHONE, False, marks=pytest.mark.full),
    ],
    ids=["phone-dark", "desktop-light", "desktop-dark", "phone-light"],
)
def test_axe_finds_no_fault(
    browser: "Browser", prepared: PreparedServer, size: dict[str, int], dark: bool
) -> None:
    chat = ChatPage(browser, prepared.address, size, dark)
    page = chat.page
    check_accessibility(chat)
    chat.ask("rich")
    chat.button("Regenerate").click()
    chat.answer()
    chat.ask("think")
    chat.last.get_by_text("Reasoning").click()
    check_accessibility(chat)
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    assert page.evaluate("document.documentElement.scrollHeight") == size["height"]
    if size == PHONE:
        for button in page.get_by_role("button").all():
            box = button.bounding_box()
            assert box is None or box["height"] >= 34
        page.get_by_role("button", name="Conversations").click()
        check_accessibility(chat)
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Conversations")).to_be_focused()
    page.get_by_role("button", name="Settings").click()
    check_accessibility(chat)
    assert chat.complaints == []
    chat.close()


def check_accessibility(chat: ChatPage) -> None:
    found = Axe().run(chat.page)
    faults = [v for v in found.response["violations"] if v["impact"] in ("serious", "critical", "moderate")]
    assert not faults, [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in faults]


@pytest.mark.full
def test_themes(chat: ChatPage) -> None:
    def ground() -> str:
        return chat.page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert ground() == "rgb(255, 255, 255)"
    chat.settings(theme="dark")
    assert ground() == "rgb(22, 25, 29)"
    chat.page.reload()
    assert ground() == "rgb(22, 25, 29)"
    chat.settings(theme="system")
    assert ground() == "rgb(255, 255, 255)"
    chat.page.emulate_media(color_scheme="dark")
    assert ground() == "rgb(22, 25, 29)"


@pytest.mark.full
def test_keyboard_and_screen_readers(chat: ChatPage) -> None:
    page = chat.page
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    chat.answer()
    assert chat.texts() == ["one\ntwo", "one two"]
    expect(page.locator("#status")).to_have_text("The answer is complete. one two")
    expect(page.locator("#say")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Regenerate"
    page.keyboard.press("Enter")
    chat.answer()
    assert page.locator("#main").get_by_role("article").count() == 2
    page.keyboard.press("Shift+Escape")
    expect(page.locator("#say")).to_be_focused()
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#say")).to_be_focused()
    page.keyboard.press("Control+Shift+S")
    expect(page.locator("#sidebar")).to_be_hidden()
    page.keyboard.press("Control+Shift+O")
    assert chat.texts() == []
    chat.send("count slowly")
    expect(page.locator(".turn.assistant > .text")).to_contain_text("1 2")
    assert page.locator(".turn.assistant").get_attribute("aria-busy") == "true"
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped")
