"""Page allocator of the KV cache, with prefix sharing.

A full page never changes, so rows with the same prefix share its pages: the samples of one prompt, the turns of a
conversation, requests with one system prompt. A full page is registered under a key, a digest of its tokens and of the
key of the page before it, so equal keys mean equal tokens up to the page's end. A registered page that no row holds any
more keeps its content until the page is needed; the least recently used page is evicted first.

This is host-side bookkeeping. The device executes steps in the order in which they were queued, so a page may be
reused while the last step of the row that held it is still running.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

Key = bytes


class PageKeys:
    """The keys of the pages that some tokens fill, in order. Each is computed when it is first read.

    Most prompts share nothing with others, which their first key shows. The other keys are then computed after the
    device has started on the prompt.

    Args:
        tokens: In 64-bit integers.
        size: Tokens per page.
        adapter: Number of the adapter in use; with another one, the same tokens have other keys and values.
        known: Keys of the first pages, which are not computed again.
    """

    def __init__(self, tokens: "array[int]", size: int, adapter: int = 0, known: Sequence[Key] = ()):
        self._contents, self._page_bytes = memoryview(tokens).cast("B"), tokens.itemsize * size
        self._length = len(tokens) // size
        self._before_first = adapter.to_bytes(8, "little")  # in place of the key of an earlier page
        self._keys = [*known]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Key:
        """Return the key of a page. Raises IndexError if there is no such page."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        while len(self._keys) <= index:
            start = len(self._keys) * self._page_bytes
            page = self._contents[start : start + self._page_bytes]
            previous = self._keys[-1] if self._keys else self._before_first
            self._keys.append(hashlib.blake2b(page, digest_size=16, key=previous).digest())
        return self._keys[index]

    def __iter__(self) -> Iterator[Key]:
        return (self[index] for index in range(self._length))


class Pages:
    """Allocates pages 1 to `count`. Page 0 is never allocated: padding is written there.

    evicted: number of registered pages that gave way to new ones so far.
    """

    def __init__(self, count: int, evicted: int = 0):
        self.count, self.evicted = count, evicted
        self._free = list(range(count, 0, -1))
        self._ref_counts = [0] * (count + 1)
        self._page_of: dict[Key, int] = {}  # registered pages
        self._key_of: dict[int, Key] = {}
        # Registered pages that no row holds, oldest first.
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can return."""
        return len(self._free) + len(self._unused)

    def num_cached(self, keys: Iterable[Key]) -> int:
        """Return the number of leading keys whose pages are registered."""
        return sum(1 for _ in takewhile(self._page_of.__contains__, keys))

    def allocate(self, keys: Sequence[Key], num_new: int) -> list[int] | None:
        """Return the registered pages of `keys` and `num_new` new ones, all held. None if too few are available."""
        shared = [self._page_of[key] for key in keys]
        if self.available - sum(page in self._unused for page in shared) < num_new:
            return None
        for page in shared:
            self._unused.pop(page, None)
        pages = shared + self._take(num_new)
        for page in pages:
            self._ref_counts[page] += 1
        return pages

    def register(self, page: int, key: Key) -> None:
        """Make the content of a held, full page available to others. Does nothing if the page or key is registered."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Release a row's pages."""
        # In reverse, so that the end of a text is evicted before its prefix, which more texts may share.
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            assert self._ref_counts[page] >= 0
            if self._ref_counts[page] == 0:
                if page in self._key_of:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def forget_contents(self) -> None:
        """Unregister all pages, because their contents are no longer valid. Rows keep the pages that they hold."""
        self._free.extend(self._unused)
        self._unused.clear()
        self._page_of.clear()
        self._key_of.clear()

    def _take(self, count: int) -> list[int]:
        """Return pages that are free, and evict others if there are too few."""
        start = max(0, len(self._free) - count)
        pages = self._free[start:][::-1]
        del self._free[start:]
        evicted = [self._unused.popitem(last=False)[0] for _ in range(count - len(pages))]
        for page in evicted:
            del self._page_of[self._key_of.pop(page)]
        self.evicted += len(evicted)
        return pages + evicted
