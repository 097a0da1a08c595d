import random

from deskside.data.corpus.encoder_sample import EncoderSample
from deskside.data.corpus.heldout import text_hash
from deskside.data.reading.index import MAX_TAGS


def test_every_source_and_language_is_sampled_from_the_whole_corpus_in_any_order() -> None:
    documents = [
        (("wiki", lang), f"{lang} {number} ".encode() + "é क 🎉".encode() * (number % 900))
        for lang in ("hi", "ta", "")
        for number in range(2000)
    ]
    documents.append((("books", "en"), b"einziges"))
    samples = []
    for seed in range(2):
        random.Random(seed).shuffle(documents)
        sample = EncoderSample()
        for pair, text in documents:
            sample.add(pair, text_hash(text), text)
        samples.append(sorted(sample.texts()))
    assert samples[0] == samples[1]
    names = [name for name, _ in samples[0]]
    assert {name: names.count(name) for name in names} == {
        "a text wiki hi": 64,
        "a text wiki ta": 64,
        "a text wiki": 64,
        "a text books en": 1,
    }
    whole = b"\n".join(text for _, text in documents).decode()
    assert all(text in whole and len(text.encode()) <= 4096 for _, text in samples[0])
    assert sum(len(text) for _, text in samples[0]) > 150_000


def test_a_source_for_every_document_does_not_keep_the_corpus() -> None:
    sample = EncoderSample()
    for number in range(5000):
        text = b"%d " % number * 2000
        sample.add((f"https://example.org/{number}", "en"), text_hash(text), text)
    texts = list(sample.texts())
    assert len(texts) == MAX_TAGS + 1
    assert sum(len(text) for _, text in texts) < 5e6
