"""Cache pages: which ones are allocated, shared, kept and forgotten, compared with a model of plain sets."""

from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.engine.pages import Key, PageKeys, Pages


def keys_of(tokens: Iterable[int], size: int, adapter: int = 0) -> list[Key]:
    return [*PageKeys(array("q", tokens), size, adapter)]


def test_a_key_stands_for_all_tokens_up_to_the_end_of_its_page() -> None:
    assert keys_of([1, 2, 3], 4) == []
    a, b = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9], 4), keys_of([1, 2, 3, 4, 5, 6, 7, 0], 4)
    assert len(a) == len(b) == 2
    assert a[0] == b[0] and a[1] != b[1]
    assert keys_of([5, 6, 7, 8], 4)[0] != a[1]
    assert not set(a) & set(keys_of([1, 2, 3, 4, 5, 6, 7, 8], 4, adapter=1))


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4), st.integers(0, 2), st.integers(0, 20))
def test_known_keys_are_continued(tokens: list[int], size: int, adapter: int, known: int) -> None:
    whole = keys_of(tokens, size, adapter)
    keys = PageKeys(array("q", tokens), size, adapter, whole[:known])
    assert [*keys] == whole and len(keys) == len(whole)
    with pytest.raises(IndexError):
        keys[len(whole)]


def test_known_pages_are_shared_and_kept_until_they_are_wanted() -> None:
    pages, keys = Pages(4), keys_of(range(8), 4)
    first = pages.allocate([], 3)
    assert first is not None and pages.available == 1
    pages.register(first[0], keys[0])
    pages.register(first[1], keys[1])
    second = pages.allocate(keys, 1)
    assert second is not None and second[:2] == first[:2] and pages.available == 0
    assert pages.allocate([], 1) is None
    pages.release(first)
    assert pages.available == 1  # two of the three are still in use
    pages.release(second)
    assert pages.available == 4 and pages.num_cached(keys) == 2
    third = pages.allocate(keys[:1], 2)  # the end of a text is forgotten before its beginning
    assert third is not None and third[0] == first[0] and pages.num_cached(keys) == 2
    assert pages.allocate([], 1) is not None and pages.num_cached(keys) == 1
    pages.forget_contents()
    assert pages.num_cached(keys) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.booleans()), max_size=60))
@settings(max_examples=200, deadline=None)
def test_nothing_leaks_and_nobody_gets_a_page_that_another_writes(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Four texts, two of which share a prefix, allocate pages, register them or not, and release them."""
    texts = [keys_of(text, 2) for text in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [7] * 6, [8] * 6)]
    pages = Pages(8)
    held: list[tuple[list[int], int]] = []  # pages, and the number of shared ones
    for text, more, learn in steps:
        if more == 6:
            if held:
                pages.release(held.pop(0)[0])
            continue
        known = pages.num_cached(texts[text])
        before = pages.available
        got = pages.allocate(texts[text][:known], more)
        if got is None:
            assert pages.available == before < 8
            continue
        assert len(got) == len(set(got)) == known + more and 0 not in got
        written = {page for others, shared in held for page in others}
        assert not written & set(got[known:])
        held.append((got, known))
        if learn:
            for page, key in list(zip(got, texts[text], strict=False))[known:]:
                pages.register(page, key)
        assert pages.available == 8 - len({page for others, _ in held for page in others})
    for others, _ in held:
        pages.release(others)
    assert pages.available == 8
    assert pages.allocate([], 8) is not None
    with pytest.raises(AssertionError):
        pages.release([1, 1])
