"""The sample for the tokenizer contains only training text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.corpus.analyze import Splitter, TextSampler
from deskside.data.corpus.heldout import HoldoutPlanner, start_if_chosen, start_if_tails, text_hash

DOCUMENT = st.text("ab \nहि", min_size=30, max_size=300).map(lambda text: ("word " + text) * 60)


@settings(max_examples=20)
@given(st.lists(DOCUMENT, min_size=1, max_size=14, unique=True))
def test_unlimited_sample_equals_the_training_text(documents: list[str]) -> None:
    planner, sampler = HoldoutPlanner(seed=0, fraction=None), TextSampler(1 << 30, seed=0)
    for text in (document.encode() for document in documents):
        key = text_hash(text)
        planner.add(text, key, [])
        sampler.add(
            text, key, start_if_tails(text, None) if planner.few else len(text), start_if_chosen(text)
        )
    splitter = Splitter(holdout := planner.plan())
    trained = b"".join(splitter.divide(document.encode())[0] for document in documents)
    sample = "".join(sampler.texts(holdout)).encode()
    assert sorted(sample) == sorted(trained)
