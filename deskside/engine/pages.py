"""Who holds which page of the key-value pool, and which pages hold a text that may be asked for again.

A page that is full never changes, so rows with the same beginning read the same pages: the samples of one prompt, the
turns of a conversation, requests with one system prompt. A full page is known by its key, a digest of all tokens up to
its end. When nobody holds it any more, its content stays until the memory is wanted, the oldest going first.

Nothing here touches the device. Work is queued there in order, so a page may be handed on while the last step of the
row that held it is still running.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes


def keys_of(tokens: Sequence[int], size: int) -> list[Key]:
    """Keys of the pages that these tokens fill, in order."""
    keys: list[Key] = []
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens) - size + 1, size):
        digest.update(array("q", tokens[start : start + size]).tobytes())
        keys.append(digest.digest())
    return keys


class Pages:
    """Pages 1..count; page 0 is the cache's spare one and is never handed out."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count, 0, -1))
        self._holders = [0] * (count + 1)
        self._known: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages that nobody holds, oldest first

    @property
    def available(self) -> int:
        """Pages that `take` can hand out."""
        return len(self._free) + len(self._idle)

    def known(self, keys: Sequence[Key]) -> int:
        """Return how many of these pages, counted from the first, are cached."""
        return next((n for n, key in enumerate(keys) if key not in self._known), len(keys))

    def take(self, keys: Sequence[Key], more: int) -> list[int] | None:
        """Hold the known pages of `keys`, and `more` new ones; None, and nothing taken, where there are too few."""
        shared = [self._known[key] for key in keys]
        if self.available - sum(page in self._idle for page in shared) < more:
            return None
        for page in shared:
            self._idle.pop(page, None)
        pages = shared + [self._new() for _ in range(more)]
        for page in pages:
            self._holders[page] += 1
        return pages

    def learn(self, page: int, key: Key) -> None:
        """A held page now has the content of this key. Another page may have it already; that one stays known."""
        if key not in self._known and page not in self._key_of:
            self._known[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. The end of a text is forgotten before its beginning, which more texts may share."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """No content is known any more: the model has changed. Pages that are held stay with their holders."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._known.clear()
        self._key_of.clear()

    def _new(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._idle.popitem(last=False)
        del self._known[self._key_of.pop(page)]
        return page
