"""The sample of a tokenizer's training text by language, compared with shares computed in plain Python."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from deskside.data import tokenizer as bpe
from deskside.data.corpus.analyze import CorpusOptions, analyze
from deskside.data.corpus.encoder_sample import EncoderSample
from deskside.data.corpus.prepare import prepare
from deskside.data.corpus.sources import Source
from deskside.data.corpus.tokenizer_sample import plan_sample
from deskside.utils.errors import UsageError
from tests.data.data_corpus import WORDS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five hundred documents of one letter and its language: 80 % a, 18 % b, 2 % without a language."""
    path = tmp_path_factory.mktemp("sample") / "corpus.jsonl"
    lines = []
    for number in range(500):
        letter, lang = ("c", "") if number % 50 == 7 else ("b", "bb") if number % 5 == 1 else ("a", "aa")
        lines.append({"text": f"{number} {letter * 400}", "lang": lang})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sampled(corpus: Path, options: CorpusOptions) -> Counter[str]:
    """Return how often each letter occurs in the sample."""
    sources = [Source.parse(str(corpus))]
    sample = plan_sample(sources, options)
    analysis = analyze(sources, [], options, sample.sampler_of, EncoderSample())
    return Counter(c for text in sample.texts(analysis.holdout) for c in text if c in "abc")


@pytest.mark.parametrize("sample_bytes", [40_000, 1 << 30])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 1000.0])
def test_shares(corpus: Path, temperature: float, sample_bytes: int) -> None:
    """A language with less text than its share is repeated. The size of the whole sample stays the same."""
    options = CorpusOptions(
        tokenizer_temperature=temperature, sample_bytes=sample_bytes, val_fraction=0, quiet=True
    )
    letters = {"a": 0, "b": 0, "c": 0}
    for line in corpus.read_text().splitlines():
        text = json.loads(line)["text"]
        letters[text[-1]] += len(text)
    powers = {letter: size ** (1 / temperature) for letter, size in letters.items()}
    total = min(sample_bytes, sum(letters.values()))
    found = sampled(corpus, options)
    for letter in letters:
        wanted = total * powers[letter] / sum(powers.values())
        # Whole documents of 404 bytes are sampled. A repeated language is sampled in copies of its whole text.
        assert abs(found[letter] - wanted * 400 / 404) <= 2 * 404
    if temperature == 1.0 and sample_bytes == 1 << 30:
        assert found == {"a": 400 * 390, "b": 400 * 100, "c": 400 * 10}


def test_a_small_language_gets_shorter_words(tmp_path: Path) -> None:
    """With a temperature, the rare language needs fewer tokens and the frequent one more."""
    lines = []
    for number in range(400):
        lang = "hi" if number % 40 == 0 else "en"
        words = [WORDS[lang][(number * 7 + k * k) % len(WORDS[lang])] for k in range(60)]
        unique = f" {number:x}{'क' if lang == 'hi' else 'k'}"
        lines.append({"text": " ".join(words) + unique * 9, "lang": lang})
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens: dict[float | None, dict[str, int]] = {}
    for temperature in (None, 1000.0):
        options = CorpusOptions(vocab_size=330, tokenizer_temperature=temperature, workers=1, quiet=True)
        report = prepare([str(tmp_path / "text.jsonl")], tmp_path / f"{temperature}", options)
        tokenizer = bpe.load(report.out)
        tokens[temperature] = {
            lang: len(tokenizer.encode(" ".join(words)).ids) for lang, words in WORDS.items()
        }
    assert tokens[1000.0]["hi"] < tokens[None]["hi"] and tokens[1000.0]["en"] >= tokens[None]["en"]


@pytest.mark.parametrize(
    "options", [{"tokenizer_temperature": 0.5}, {"tokenizer_temperature": 2.0, "tokenizer": "other"}]
)
def test_refused(corpus: Path, tmp_path: Path, options: dict[str, object]) -> None:
    if "tokenizer" in options:
        prepare([str(corpus)], tmp_path / "other", CorpusOptions(vocab_size=300, workers=1, quiet=True))
        options = {**options, "tokenizer": tmp_path / "other"}
    with pytest.raises(UsageError, match="--tokenizer-temperature"):
        prepare([str(corpus)], tmp_path / "out", CorpusOptions(quiet=True, **options))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_one_language_is_refused(tmp_path: Path) -> None:
    """A temperature would change nothing."""
    (tmp_path / "text.txt").write_text("some words\n" * 400)
    options = CorpusOptions(tokenizer_temperature=2.0, vocab_size=300, workers=1, quiet=True)
    with pytest.raises(UsageError, match="--tokenizer-temperature: all documents have the language unknown"):
        prepare([str(tmp_path / "text.txt")], tmp_path / "out", options)
