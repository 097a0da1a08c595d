"""Rewards from a server of the user: one HTTP request for all answers of a step of a process.

The request is a POST of JSON, the answer a JSON list with a number for each completion:

    {"prompts": ["3 + 4?", ...], "completions": ["7", ...], "columns": {"answer": ["7", ...], ...}}
    [1.0, ...]

`columns` has the field `answer` of the records, and those that align.columns names. A server that cannot be reached, is
too slow, or says that it is busy (429) or failed (5xx), is asked again a few times, each time after a longer pause.
Then the run saves a checkpoint and ends, so that it can be resumed when the server is back. An answer of another form,
a refusal (4xx) or a redirect (3xx) ends it at once.
"""

import contextlib
import http.client
import json
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from deskside.utils.errors import OutsideError, UsageError, describe_error
from deskside.utils.parsing import Unreadable, json_value

DEFAULT_TIMEOUT = 60.0  # seconds
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further attempt
CONNECT_SECONDS = 10.0
NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})


class RewardCase(NamedTuple):
    """An answer of the model to a question. columns: further fields of the question's record."""

    prompt: str
    completion: str
    answer: str
    columns: Mapping[str, Any] = NO_COLUMNS


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error. urllib would ask the other address without the answers, by GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RewardServer:
    """A server that computes rewards. timeout: seconds that a request may take."""

    file: Path | None = None  # it has no function of the user

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url, timeout

    def check(self) -> None:
        """Raise UsageError if nothing listens at the server's address, or the URL cannot be sent."""
        if not self.url.isascii():
            raise UsageError(f"align.reward {self.url}: percent-encode the characters that are not ASCII")
        parts = urlsplit(self.url)
        try:
            if not parts.hostname:
                raise ValueError("the URL has no host")
            address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
            socket.create_connection(address, timeout=CONNECT_SECONDS).close()
        except (OSError, ValueError, UnicodeError) as error:
            raise UsageError(
                f"align.reward {self.url}: no server can be reached there ({error}); start it first"
            ) from None

    def check_answers(self, answers: Sequence[str], split: str) -> None:
        """Do nothing: only the server knows what it needs."""

    def compute_all(self, cases: Sequence[RewardCase]) -> list[float]:
        """Return the rewards in order. Raises OutsideError if the server gives none."""
        if not cases:
            return []
        names = ["answer", *cases[0].columns]
        columns = {name: [{"answer": case.answer, **case.columns}[name] for case in cases] for name in names}
        body = {
            "prompts": [case.prompt for case in cases],
            "completions": [case.completion for case in cases],
            "columns": columns,
        }
        return self._checked(self._ask(json.dumps(body).encode()), len(cases))

    def _ask(self, body: bytes) -> bytes:
        request = urllib.request.Request(
            self.url, body, {"Content-Type": "application/json", "Accept": "application/json"}
        )
        opener = urllib.request.build_opener(_NoRedirects)
        why = ""
        for pause in (*PAUSES, None):
            deadline = time.monotonic() + self.timeout
            try:
                with opener.open(request, timeout=self.timeout) as response:
                    return _read(response, deadline)
            except urllib.error.HTTPError as error:
                if error.code < 400 and (other := error.headers.get("Location")):
                    other = "".join(urljoin(self.url, other).split())[:200]
                    raise OutsideError(
                        f"reward server {self.url}: redirects to another address (status {error.code}); use "
                        f"--align.reward {other} if it is right"
                    ) from None
                said = ""
                with contextlib.suppress(OSError, http.client.HTTPException):  # the status says enough
                    said = error.read(200).decode("utf-8", "replace").strip()
                why = " ".join(f"status {error.code}: {said}".split())
                if error.code < 500 and error.code not in (408, 429):
                    raise OutsideError(f"reward server {self.url}: refuses the request ({why})") from None
            # A server may also close the connection in the middle of its answer.
            except (OSError, http.client.HTTPException) as error:
                why = describe_error(getattr(error, "reason", None) or error)
            if pause is not None:
                time.sleep(pause)
        raise OutsideError(
            f"reward server {self.url}: no answer in {len(PAUSES) + 1} attempts of up to {self.timeout:g} s ({why}); "
            "start it again, or give it more time with --align.reward_timeout, and resume the run"
        )

    def _checked(self, answer: bytes, count: int) -> list[float]:
        """Return the rewards of an answer. Raises OutsideError unless it is a list of `count` finite numbers."""
        try:
            rewards: Any = json_value(answer)
        except Unreadable as error:
            raise OutsideError(f"reward server {self.url}: its answer is not JSON ({error})") from None
        if not isinstance(rewards, list) or len(rewards) != count:
            found = f"{len(rewards)} values" if isinstance(rewards, list) else type(rewards).__name__
            raise OutsideError(
                f"reward server {self.url}: its answer must be a list of {count} numbers, one for each completion, "
                f"but is {found}"
            )
        for reward in rewards:
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise OutsideError(
                    f"reward server {self.url}: a reward must be a finite number, but is {str(reward)[:60]!r}"
                )
        return [float(reward) for reward in rewards]


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the body. The timeout of the connection is for each part of it, so TimeoutError is raised here."""
    body, length = b"", response.length  # None if the server does not say it
    while len(body) != length and (part := response.read1()):
        body += part
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    if length is not None and len(body) < length:
        raise http.client.IncompleteRead(body, length - len(body))
    return body
