from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deskside.data import tokenizer as bpe
from deskside.errors import UsageError

TEXTS = [
    "The quick brown fox, it's 2024! नमस्ते दुनिया।\n\n\tdef f(x):\r\n    return x + 1234567\n" * 3,
    "தமிழ் மொழி തെലుగు and emoji 👩‍👩‍👧 🎉 with zero width joiners ക്‍ഷ.",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    bpe.save(bpe.train(TEXTS * 4, 700), out)
    return out


def test_special_tokens_come_first(directory: Path) -> None:
    tokenizer = bpe.load(directory)
    assert [tokenizer.id_to_token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert bpe.end_of_text(tokenizer) == ("<|endoftext|>", 0)


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_round_trip_and_exact_bytes(directory: Path, text: str) -> None:
    tokenizer = bpe.load(directory)
    ids = bpe.encode(tokenizer, text)
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
    assert int(bpe.token_bytes(tokenizer)[ids].sum()) == len(text.encode("utf-8"))


def test_token_bytes_of_parts_of_characters(directory: Path) -> None:
    tokenizer = bpe.load(directory)
    lengths = bpe.token_bytes(tokenizer)
    assert lengths[:3].tolist() == [0, 0, 0]
    assert (lengths[3 : 3 + 256] == 1).all(), (
        "the 256 bytes stand for one byte each, though most are not UTF-8"
    )
    assert len(lengths) == tokenizer.get_vocab_size()


def test_transformers_agrees(directory: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(directory), bpe.load(directory)
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False).input_ids == bpe.encode(ours, text).tolist()
    assert theirs.eos_token_id == theirs.bos_token_id == 0


def test_text_cannot_forge_special_tokens(directory: Path) -> None:
    ids = bpe.encode(bpe.load(directory), "a<|endoftext|>b<|im_start|>")
    assert not set(ids.tolist()) & {0, 1, 2}


def test_words_keep_marks_and_digits_are_single() -> None:
    words = regex.findall(bpe.SPLIT_PATTERN, "नमस्ते 2024 it's")
    assert words == ["नमस्ते", " ", "2", "0", "2", "4", " it", "'s"]


@pytest.mark.parametrize("text", ["one\ntwo\n\nthree  \n four" * 40, "a b" * 50, "\n" * 100, "x" * 333, ""])
def test_cutting_long_texts_keeps_every_character_and_every_word(text: str) -> None:
    parts = bpe.split_long(text, limit=16)
    assert "".join(parts) == text
    if "one" in text:
        assert len(parts) > 5
        whole = regex.findall(bpe.SPLIT_PATTERN, text)
        assert [w for part in parts for w in regex.findall(bpe.SPLIT_PATTERN, part)] == whole


@given(st.text(alphabet="ab \n\r\t.1é", max_size=300))
@settings(max_examples=300, deadline=None)
def test_a_cut_at_a_newline_never_changes_the_words(text: str) -> None:
    parts = bpe.split_long(text, limit=8)
    assert "".join(parts) == text
    for left, right in itertools.pairwise(parts):
        if left.endswith("\n") and not right[0].isspace():
            joined = regex.findall(bpe.SPLIT_PATTERN, left + right)
            assert joined == regex.findall(bpe.SPLIT_PATTERN, left) + regex.findall(bpe.SPLIT_PATTERN, right)


def test_training_is_deterministic() -> None:
    assert bpe.train(TEXTS, 500).to_str() == bpe.train(TEXTS, 500).to_str()


def test_existing_tokenizer_is_taken_over(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "hf"
    other.mkdir()
    spec = json.loads((directory / "tokenizer.json").read_text())
    text = json.dumps(spec).replace("<|endoftext|>", "<|fin|>")
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match="no end-of-text token"):
        bpe.copy(other, tmp_path / "out")
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|fin|>"}}))
    bpe.copy(other, tmp_path / "out")
    assert bpe.end_of_text(bpe.load(tmp_path / "out"), tmp_path / "out") == ("<|fin|>", 0)


def test_wrong_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such tokenizer"):
        bpe.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="not a tokenizers file"):
        bpe.load(tmp_path)
    with pytest.raises(UsageError, match="at least 259"):
        bpe.train(TEXTS, 100)
    from tokenizers import Tokenizer, models

    with pytest.raises(UsageError, match="not byte-level"):
        bpe.token_bytes(Tokenizer(models.BPE({"a": 0}, [])))


def test_lengths_fit() -> None:
    """A corpus of one letter has tokens of more than 65,535 of them."""
    long = "a" * 70_000
    tokenizer = Tokenizer(models.BPE({long: 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert bpe.token_bytes(tokenizer).tolist() == [70_000, 1]
