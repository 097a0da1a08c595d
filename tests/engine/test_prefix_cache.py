"""The prefix cache: the pages that it returns, in a stateful model, and answers that are equal with and without it."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from deskside.engine.engine import Draft, Engine
from deskside.engine.pages import Key, PageKeys, Pages
from deskside.engine.requests import Request
from deskside.engine.sampling import GREEDY, Sampling
from tests.engine.test_generate import VARIANTS, make, plain

PAGES, SIZE = 6, 2
# only two tokens, so that many texts share a prefix
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class PrefixCache(RuleBasedStateMachine):
    """Rows allocate pages for a text, write those that they did not find, and leave in any order.

    `content` is what rows have written to each page. A page returned as cached must contain exactly that text. The
    order of eviction is compared with a list of the unused pages, least recently used first.
    """

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(PAGES)
        self.content: dict[int, Key] = {}
        self.holders = [0] * (PAGES + 1)
        self.known: dict[Key, int] = {}
        self.unused: list[Key] = []

    @rule(target=held, text=TEXTS, more=st.integers(0, 2))
    def start(self, text: list[int], more: int) -> list[int]:
        keys = [*PageKeys(array("q", text), SIZE)]
        cached = self.pages.num_cached(keys)
        assert cached == next((n for n, key in enumerate(keys) if key not in self.known), len(keys))
        new = len(keys) - cached + more
        pages = self.pages.allocate(keys[:cached], new)
        free = PAGES - sum(map(bool, self.holders)) - sum(key in self.unused for key in keys[:cached])
        assert (pages is None) == (free < new)
        if pages is None:
            return []
        assert [self.content[page] for page in pages[:cached]] == keys[:cached]
        self.unused = [key for key in self.unused if key not in keys[:cached]]
        for page in pages[cached:]:
            if (gone := self.content.pop(page, None)) is not None and self.known.get(gone) == page:
                assert gone == self.unused.pop(0), "evicted another page than the least recently used one"
                del self.known[gone]
        for page in pages:
            self.holders[page] += 1
        for page, key in zip(pages, keys, strict=False):
            self.content[page] = key
            self.pages.register(page, key)
            self.known.setdefault(key, page)
        return pages

    @rule(pages=consumes(held))
    def end(self, pages: list[int]) -> None:
        self.pages.release(pages)
        for page in reversed(pages):
            self.holders[page] -= 1
            key = self.content.get(page)
            if not self.holders[page] and key is not None and self.known.get(key) == page:
                self.unused.append(key)

    @rule()
    def forget(self) -> None:
        """Forget all contents, as after a change of the weights."""
        self.pages.forget_contents()
        self.known.clear()
        self.unused.clear()

    @invariant()
    def what_nobody_holds_is_available(self) -> None:
        assert self.pages.available == PAGES - sum(map(bool, self.holders))


PrefixCache.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_prefix_cache = PrefixCache.TestCase


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("name", ["gqa", "window", "learned"])
def test_turns_of_a_conversation_and_a_shared_beginning(name: str, drafts: int) -> None:
    """The memory holds at most two conversations, so pages of the others are evicted between their turns."""
    model = make(**VARIANTS[name] | {"num_hidden_layers": 2})
    draft = Draft(make(**VARIANTS[name] | {"num_hidden_layers": 1}), drafts) if drafts else None
    engine = Engine(model, max_batch=2, max_tokens=72, page_size=4, prefill_tokens=16, draft=draft)
    system = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    texts = [[*system, user] for user in (10, 20, 30, 10)]
    for turn in range(3):
        answers = engine.run([Request(tuple(text), 6) for text in texts])
        for text, (answer,) in zip(texts, answers, strict=True):
            assert answer.tokens == plain(model, text, 6)
            text += [*answer.tokens, 40 + turn]
    assert engine.counts.prompt_tokens == 4 * (10 + 17 + 24)
    # In the first turn, all conversations but the first reuse at least the two full pages of the common beginning.
    assert 3 * 8 <= engine.counts.cached_tokens < engine.counts.prompt_tokens
    assert engine.evicted_pages > 0


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, repetition_penalty=1.2)])
def test_a_group_of_answers_computes_its_prompt_once(sampling: Sampling) -> None:
    """GRPO submits one request for each answer, each with its own random stream."""
    model, prompt, group = make(num_hidden_layers=2), list(range(30, 51)), 5
    engine = Engine(model, max_batch=group, max_tokens=400, page_size=4)
    requests = [Request(tuple(prompt), 6, sampling, 3, first_sample=n) for n in range(group)]
    for n, (answer,) in enumerate(engine.run(requests)):
        assert answer.tokens == plain(model, prompt, 6, sampling, n, seed=3)
    assert engine.counts.cached_tokens == (group - 1) * 20
    engine.weights_changed()
    engine.run(requests[:1])
    assert engine.counts.cached_tokens == (group - 1) * 20
