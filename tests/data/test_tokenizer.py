from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import regex
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from deskside.data import tokenizer as bpe
from deskside.data.chat.renderer import read_chat_template
from deskside.data.encoder import ReferenceEncoder, encode
from deskside.utils.errors import RunError, UsageError

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
    ids = encode(ReferenceEncoder(tokenizer), text)
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
        assert (
            theirs(text, add_special_tokens=False).input_ids == encode(ReferenceEncoder(ours), text).tolist()
        )
    assert theirs.eos_token_id == theirs.bos_token_id == 0


def test_text_cannot_forge_special_tokens(directory: Path) -> None:
    ids = encode(ReferenceEncoder(bpe.load(directory)), "a<|endoftext|>b<|im_start|>")
    assert not set(ids.tolist()) & {0, 1, 2}


def test_words_keep_marks_and_digits_are_single() -> None:
    words = regex.findall(bpe.SPLIT_PATTERN, "नमस्ते 2024 it's")
    assert words == ["नमस्ते", " ", "2", "0", "2", "4", " it", "'s"]


def pieces(text: str, limit: int) -> list[str]:
    data = text.encode()
    return [data[a:b].decode() for a, b in bpe.spans(data, limit)]


@pytest.mark.parametrize("text", ["one\ntwo\n\nthree  \n four" * 40, "a b" * 50, "\n" * 100, "x" * 333, ""])
def test_cutting_long_texts_keeps_every_character_and_every_word(text: str) -> None:
    parts = pieces(text, 16)
    assert "".join(parts) == text
    if "one" in text:
        assert len(parts) > 5
        whole = regex.findall(bpe.SPLIT_PATTERN, text)
        assert [w for part in parts for w in regex.findall(bpe.SPLIT_PATTERN, part)] == whole


PATTERNS = {
    "deskside": bpe.SPLIT_PATTERN,
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.fixture(scope="module")
def published() -> dict[str, Tokenizer]:
    """Tokenizers with published split patterns, trained so that a cut at a wrong place changes the tokens."""
    found = {}
    for name, pattern in PATTERNS.items():
        spec = json.loads(bpe.train([*TEXTS, "ab a\n\nab 1é ab.\n ab दीa\r\n ab" * 30], 500).to_str())
        spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
        found[name] = Tokenizer.from_str(json.dumps(spec))
    return found


@pytest.mark.parametrize("name", PATTERNS)
@given(text=st.text(alphabet="ab' \n\r\t.1éदी🎉\u2028", max_size=300))
@settings(max_examples=200, deadline=None)
def test_pieces_of_a_long_text_have_the_tokens_of_the_whole(
    published: dict[str, Tokenizer], name: str, text: str
) -> None:
    data, start = text.encode(), 0
    tokenizer = published[name]
    for start, end in bpe.spans(data, limit=8):
        left, right = data[:end].decode(), data[end:].decode()
        if end - start < 16 * 8:  # longer spans end at a place that may change the tokens
            ids = tokenizer.encode(left).ids + tokenizer.encode(right).ids
            assert ids == tokenizer.encode(text).ids
    assert b"".join(data[a:b] for a, b in bpe.spans(data, limit=8)) == data


def test_long_texts_are_encoded_as_a_whole_would_be(directory: Path) -> None:
    tokenizer = bpe.load(directory)
    text = "".join(TEXTS) * 700
    assert len(text.encode()) > 3 << 16
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert (
        encode(ReferenceEncoder(tokenizer), text).tolist()
        == ids
        == encode(ReferenceEncoder(tokenizer), text.encode(), np.uint16).tolist()
    )


def test_training_is_deterministic() -> None:
    assert bpe.train(TEXTS, 500).to_str() == bpe.train(TEXTS, 500).to_str()


def test_copying_an_existing_tokenizer(directory: Path, tmp_path: Path) -> None:
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


def test_a_tag_of_html_does_not_end_a_text(directory: Path, tmp_path: Path) -> None:
    text = (directory / "tokenizer.json").read_text().replace("<|endoftext|>", "<eos>")
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert bpe.end_of_text(bpe.load(tmp_path)) == ("<eos>", 0)


def test_a_tokenizer_saved_by_transformers_without_a_length(directory: Path, tmp_path: Path) -> None:
    """transformers writes its "no limit", an integer of 31 digits, into tokenizer_config.json."""
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    saved.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] > 2**64
    assert bpe.read_config(tmp_path)["eos_token"] == "<|endoftext|>"
    assert bpe.end_of_text(bpe.load(tmp_path), tmp_path) == ("<|endoftext|>", 0)
    assert bpe.special_token_id(bpe.load(tmp_path), tmp_path, "eos_token") == 0
    assert read_chat_template(tmp_path) is None


def test_wrong_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such tokenizer"):
        bpe.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match="not a tokenizers file"):
        bpe.load(tmp_path)
    with pytest.raises(UsageError, match="at least 259"):
        bpe.train(TEXTS, 100)
    from tokenizers import Tokenizer, models

    with pytest.raises(UsageError, match="not byte-level"):
        bpe.token_bytes(Tokenizer(models.BPE({"a": 0}, [])))


def test_token_bytes_above_uint16() -> None:
    """A token may exceed 65,535 bytes if the corpus repeats one letter."""
    long = "a" * 70_000
    tokenizer = Tokenizer(models.BPE({long: 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert bpe.token_bytes(tokenizer).tolist() == [70_000, 1]


@pytest.mark.parametrize("normalised", [False, True])
@given(text=st.text(max_size=60) | st.text("\u1100\u1161\u11a8\u1fef\u212ae\u0301\u0323 ", max_size=60))
@settings(max_examples=100, deadline=None)
def test_max_bytes_per_token_bounds_the_number_of_tokens(
    directory: Path, normalised: bool, text: str
) -> None:
    tokenizer = bpe.load(directory)
    if normalised:
        tokenizer.normalizer = normalizers.NFC()
    longest = bpe.max_bytes_per_token(tokenizer)
    assert longest is not None
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * longest >= len(text.encode())


def test_no_bound_for_lossy_tokenizers(directory: Path) -> None:
    for change in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"added_tokens": [{"id": 0, "content": "x", "single_word": False, "lstrip": False, "rstrip": True,
                           "normalized": False, "special": False}]},
    ):  # fmt: skip
        spec = json.loads(bpe.load(directory).to_str()) | change
        assert bpe.max_bytes_per_token(Tokenizer.from_str(json.dumps(spec))) is None
    unknown = models.BPE({"[UNK]": 0, "a": 1}, [], unk_token="[UNK]", fuse_unk=True)
    assert bpe.max_bytes_per_token(Tokenizer(unknown)) is None
