"""The files of the chat page: which ones are served, and that third-party files are those listed in vendor.toml."""

import asyncio
import hashlib
import re
import tomllib
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

import deskside.serve
from deskside.serve.web_files import WEB_PREFIX, WebFiles
from tests.sources import ROOT

WEB = Path(deskside.serve.__file__).parent / "web"
VENDOR = WEB / "vendor"


def get(path: str, **headers: str) -> httpx.Response:
    """Return the response to a request for the page or a file."""

    async def run() -> httpx.Response:
        web = WebFiles()
        app = Starlette(routes=[Route("/", web.page), Route(WEB_PREFIX + "{path:path}", web.file)])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize("folder", [VENDOR, ROOT / "docs/vendor"], ids=["page", "documentation"])
def test_third_party_files_are_those_of_the_list(folder: Path) -> None:
    listed = tomllib.loads((folder / "vendor.toml").read_text())
    assert all({"package", "version", "licence", "sha256"} == set(entry) for entry in listed.values())
    hashes = {
        f"{name}/{file}": digest for name, entry in listed.items() for file, digest in entry["sha256"].items()
    }
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "vendor.toml"
    }
    assert found == hashes
    assert all(f"{name}/LICENSE" in found for name in listed)


def test_the_page_asks_only_for_files_that_are_there() -> None:
    page = get("/").text
    for address in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert (WEB / address.removeprefix("web/")).is_file(), address
    for script in (WEB / "js").glob("*.js"):
        for name in re.findall(r'from "\./([\w.]+)"', script.read_text()):
            assert (WEB / "js" / name).is_file(), f"{script.name}: {name}"
    css = (VENDOR / "katex" / "katex.min.css").read_text()
    assert all(
        (VENDOR / "katex" / font).is_file() for font in re.findall(r"url\((fonts/[\w-]+\.woff2)\)", css)
    )


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/", "text/html; charset=utf-8"),
        ("/web/js/main.js", "text/javascript; charset=utf-8"),
        ("/web/css/theme.css", "text/css; charset=utf-8"),
        ("/web/vendor/katex/fonts/KaTeX_Main-Regular.woff2", "font/woff2"),
        ("/web/icon.svg", "image/svg+xml"),
    ],
)
def test_types_and_repeated_requests(path: str, kind: str) -> None:
    first = get(path)
    assert (first.status_code, first.headers["content-type"]) == (200, kind)
    assert "script-src 'self';" in first.headers["content-security-policy"]
    again = get(path, **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_nothing_else_is_served() -> None:
    for path in ("/web/", "/web/nothing.js", "/web/%2e%2e/app.py", "/web//etc/passwd", "/web/vendor"):
        assert get(path).status_code == 404
