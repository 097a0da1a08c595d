"""The chat page and its files, from memory: deskside/serve/web, with third-party libraries in its vendor folder."""

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

WEB_PREFIX = "/web/"  # of the paths of all files but the page, which is /

# The page runs its own scripts only and talks to its own server only, whatever a model writes. DOMPurify alone may turn
# text into elements (Trusted Types, https://www.w3.org/TR/trusted-types/). Style attributes are allowed because KaTeX
# sets some (of \boxed and others); DOMPurify removes those of models.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "font-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
# Not mimetypes: the machine's own table extends it, and may say anything of .js. Any other file is text/plain.
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


class WebFiles:
    """Answers requests for the page's files. Nothing else on the disk can be reached: no file is opened later."""

    def __init__(self) -> None:
        self._files = dict(_read(files("deskside.serve").joinpath("web"), ""))

    async def page(self, request: Request) -> Response:
        """Return the page."""
        return self._respond("index.html", request)

    async def file(self, request: Request) -> Response:
        """Return a file of the page. Raises HTTPException for any other."""
        name = request.path_params["path"]
        if name not in self._files:
            raise HTTPException(404)
        return self._respond(name, request)

    def _respond(self, name: str, request: Request) -> Response:
        content = self._files[name]
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {
            "cache-control": "no-cache",  # a browser asks each time whether the file has changed
            "etag": tag,
            "content-security-policy": POLICY,
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        kind = TYPES.get(PurePosixPath(name).suffix, "text/plain")
        return Response(content, headers=headers, media_type=kind)


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    """Return the names and contents of all files within a folder."""
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        name = prefix + entry.name
        found += _read(entry, name + "/") if entry.is_dir() else [(name, entry.read_bytes())]
    return found
