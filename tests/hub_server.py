"""A local server with the part of the Hugging Face hub's HTTP interface that huggingface_hub uses for models."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

TOKEN = "hf_test"


@dataclass
class Repository:
    """A model: its files by revision, and the revisions of its branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(repr((sorted(files), len(self.commits), branch)).encode()).hexdigest()
        self.commits[sha] = files
        self.refs[branch] = sha
        return sha


class FakeHub:
    """Repositories by owner/name. requested: every (method, path).

    broken: the status of every answer, if not None. page: the content of every answer, with status 200, if not None.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requested: list[tuple[str, str]] = []
        self.uploads: dict[str, bytes] = {}
        self.broken: int | None = None
        self.page: bytes | None = None
        self.url = ""

    def publish(self, name: str, folder: Path, branch: str = "main") -> str:
        """Add a folder as a commit and return its hash."""
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        return self.repositories.setdefault(name, Repository()).commit(files, branch)

    def downloaded(self) -> set[str]:
        """Return the names of the files that were sent."""
        return {
            path.split("/resolve/")[1].split("/", 1)[1]
            for method, path in self.requested
            if method == "GET" and "/resolve/" in path
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self._send(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def _repository(self, name: str) -> Repository | None:
        """Return the repository if it exists and this client may see it. Otherwise answer as the hub does."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._has_token()):
            self._fail(404 if self._has_token() else 401, "RepoNotFound")
            return None
        return found

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _begin(self) -> list[str] | None:
        path = urlsplit(self.path).path
        self.hub.requested.append((self.command, path))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.broken is not None:
            self._fail(self.hub.broken, "broken")
            return None
        if self.hub.page is not None:
            self._send(200, self.hub.page)
            return None
        return path.strip("/").split("/")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self._begin()
        if parts is None:
            return
        if parts == ["api", "whoami-v2"]:
            self._send(200, {"name": "me", "type": "user"}) if self._has_token() else self._fail(
                401, "Unauthorized"
            )
            return
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        repository = self._repository(name)
        if repository is None:
            return
        revision = parts[5] if is_api and len(parts) > 5 else "main" if is_api else parts[3]
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            self._fail(404, "RevisionNotFound")
            return
        files = repository.commits[sha]
        if not is_api:
            self._file(repository, files, "/".join(parts[4:]), sha)
        elif len(parts) > 4 and parts[4] == "tree":
            listing = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            self._send(200, listing)
        else:
            siblings = [{"rfilename": path} for path in files]
            self._send(200, {"id": name, "sha": sha, "siblings": siblings, "private": repository.private})

    def _file(self, repository: Repository, files: dict[str, bytes], path: str, sha: str) -> None:
        if repository.gated and not self._has_token():
            self._fail(401, "GatedRepo")
        elif path not in files:
            self._fail(404, "EntryNotFound")
        else:
            etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
            self._send(200, files[path], ETag=etag, X_Repo_Commit=sha)

    def do_POST(self) -> None:
        parts = self._begin()
        if parts is None:
            return
        if not self._has_token():
            self._fail(401, "Unauthorized")
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(self.body))
        elif parts == ["api", "validate-yaml"]:
            self._send(200, {"errors": [], "warnings": []})
        elif parts[4:5] == ["preupload"]:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(self.body)["files"]
            ]
            self._send(200, {"files": modes})
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/store/{each['oid']}", "header": {}}}}
                for each in json.loads(self.body)["objects"]
            ]
            self._send(200, {"transfer": "basic", "objects": objects})
        elif parts[4:5] == ["commit"]:
            self._commit("/".join(parts[2:4]))
        else:
            self._fail(404, "unknown")

    def _create(self, wanted: dict[str, Any]) -> None:
        name = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
        if name in self.hub.repositories:
            self._send(409, {"error": "exists", "url": f"{self.hub.url}/{name}"})
            return
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.repositories[name] = Repository(private=bool(private))
        self._send(200, {"url": f"{self.hub.url}/{name}", "id": name})

    def _commit(self, name: str) -> None:
        files: dict[str, bytes] = {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "lfsFile":
                files[entry["value"]["path"]] = self.hub.uploads[entry["value"]["oid"]]
        sha = self.hub.repositories[name].commit(files)
        self._send(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha})

    def do_PUT(self) -> None:
        parts = self._begin()
        if parts is not None:
            assert hashlib.sha256(self.body).hexdigest() == parts[-1]
            self.hub.uploads[parts[-1]] = self.body
            self._send(200)


@contextmanager
def running() -> Iterator[FakeHub]:
    """Run a server without repositories."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, token: str | None = None) -> None:
    """Point huggingface_hub, which reads its variables when it is imported, to a server and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
