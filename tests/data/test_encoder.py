import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from deskside.data import encoder as encoders
from deskside.data import tokenizer as bpe
from deskside.data.encoder import (
    Encoder,
    EncoderInfo,
    ReferenceEncoder,
    choose_encoder,
    make_encoder,
    still_valid,
)
from tests.data.test_tokenizer import PATTERNS

pytest.importorskip("fastokens")  # it has wheels for Linux only

TEXTS = ["The river ran under a stone bridge; it's 1234 o'clock.\n\n", "नमस्ते दुनिया क्षत्रिय தமிழ் తెలుగు\n"] * 40


def spec_of(name: str) -> dict[str, Any]:
    """Return the tokenizer.json of a small vocabulary with the other components of a published tokenizer."""
    spec = json.loads(bpe.train(TEXTS, 600).to_str())
    split, byte_level = spec["pre_tokenizer"]["pretokenizers"]
    if name in PATTERNS:
        split["pattern"] = {"Regex": PATTERNS[name]}
    if name == "qwen3":
        split["pattern"] = {"Regex": PATTERNS["llama3"].replace(r"\p{N}{1,3}", r"\p{N}")}
        spec["normalizer"] = {"type": "NFC"}
    elif name == "llama3":
        spec["model"]["ignore_merges"] = True
    elif name == "gpt2":
        spec["pre_tokenizer"] = {**byte_level, "use_regex": True}
    elif name == "deepseek":
        digits = {**split, "pattern": {"Regex": r"\p{N}{1,3}"}}
        cjk = {**split, "pattern": {"Regex": "[一-龥\u0800-一가-\ud7ff]+"}}
        spec["pre_tokenizer"]["pretokenizers"] = [digits, cjk, split, byte_level]
    return spec


FAST = EncoderInfo(library="fastokens", version="0")
NAMES = ("deskside", "qwen3", "llama3", "gpt2", "deepseek")


@functools.cache
def fast_encoder(tokenizer_json: str) -> Encoder:
    return make_encoder(tokenizer_json, FAST)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    """Tokenizers like published ones, with special tokens and with an added token that is ordinary text."""
    found = {}
    for name in NAMES:
        found[name] = Tokenizer.from_str(json.dumps(spec_of(name)))
        found[name].add_tokens(
            [AddedToken("<tool>", normalized=False), AddedToken("straße", normalized=True)]
        )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_published_kinds_of_tokenizers_are_encoded_fast(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    info = choose_encoder(tokenizers[name], [("a text", text) for text in TEXTS])
    assert (info.library, info.reason) == ("fastokens", "") and info.compared_bytes > 150_000
    assert still_valid(info) == info


@pytest.mark.parametrize("name", NAMES)
@given(
    text=st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=60),
        st.text("aB1 .'\n\r\t\u0301\u0915\u094d\u200d\u00a0\u2028\x00\x1c\u017f\u212a🎉é", max_size=60),
        st.lists(
            st.sampled_from(["<|im_end|>", "<|endoftext|>", "<tool>", "straße", "<|", " ", "x"]), max_size=9
        ).map("".join),
    ),
    plain=st.booleans(),
)
@example("'\u017f\u0904", False)
@example("x'\u017f\u0915\u094d 1", True)
@settings(max_examples=150, deadline=None)
def test_any_text_has_the_tokens_of_tokenizers(
    tokenizers: dict[str, Tokenizer], name: str, text: str, plain: bool
) -> None:
    tokenizer = tokenizers[name]
    fast = fast_encoder(tokenizer.to_str())
    assert fast.ids(text, plain).tolist() == ReferenceEncoder(tokenizer).ids(text, plain).tolist()
    tokenizer.encode_special_tokens = plain
    assert fast.ids(text, plain).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_every_code_point_has_the_tokens_of_tokenizers(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    fast = make_encoder(tokenizer.to_str(), FAST)
    tokenizer.encode_special_tokens = True
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for start in range(0, len(characters), 1024):
        texts = [
            f"a{c}b {c}1 {c}{c}. '{c} '{c}\u0915 '\u017f{c} \n{c}\u0301{c} x{c}"
            for c in characters[start : start + 1024]
        ]
        for text, expected in zip(
            texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            assert fast.ids(text).tolist() == expected.ids, text


def test_half_of_a_surrogate_pair_is_refused_by_both(tokenizers: dict[str, Tokenizer]) -> None:
    for library in ("fastokens", "tokenizers"):
        encoder = make_encoder(tokenizers["deskside"].to_str(), EncoderInfo(library=library, version="0"))
        with pytest.raises((UnicodeEncodeError, TypeError)):
            encoder.ids("a\ud800b")


def test_another_library_is_used_only_if_its_tokens_are_equal(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers["deskside"]
    real = encoders._Fastokens.fast_ids

    def wrong(self: Any, text: str, plain: bool) -> Any:
        ids = real(self, text, plain)
        return ids[::-1] if "sesquipedalian" in text else ids

    monkeypatch.setattr(encoders._Fastokens, "fast_ids", wrong)
    assert choose_encoder(tokenizer, [("a text wiki", "usual")]).library == "fastokens"
    info = choose_encoder(tokenizer, [("a text wiki", "usual"), ("a text books en", "sesquipedalian words")])
    assert info.library == "tokenizers" and "a text books en" in info.reason
    assert isinstance(make_encoder(tokenizer.to_str(), info), ReferenceEncoder)


def test_every_added_token_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(spec_of("deskside")))
    tokenizer.add_tokens([f"<unused{number}>" for number in range(300)])
    assert choose_encoder(tokenizer).library == "fastokens"
    real = encoders._Fastokens.fast_ids

    def wrong(self: Any, text: str, plain: bool) -> Any:
        ids = real(self, text, plain)
        return ids[::-1] if "<unused299>" in text else ids

    monkeypatch.setattr(encoders._Fastokens, "fast_ids", wrong)
    assert choose_encoder(tokenizer).library == "tokenizers"


def test_a_tokenizer_that_fastokens_cannot_read_is_encoded_by_tokenizers() -> None:
    spec = spec_of("deskside")
    spec["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    info = choose_encoder(Tokenizer.from_str(json.dumps(spec)))
    assert info.library == "tokenizers" and info.reason


def test_a_resumed_preparation_needs_the_version_that_was_compared() -> None:
    other = still_valid(EncoderInfo(library="fastokens", version="0.0.1", compared_bytes=7))
    assert other.library == "tokenizers" and "0.0.1" in other.reason
    assert still_valid(None).library == "tokenizers"
    older = EncoderInfo(library="tokenizers", version="0.0.1", reason="why")
    assert still_valid(older) == encoders.tokenizers_info("why")


def test_words_that_are_too_long_for_fastokens_are_encoded_by_tokenizers() -> None:
    spec = spec_of("deskside")
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"(?:\p{L}\p{M}*)+|[\s\S]"}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    info = choose_encoder(tokenizer, [("a text", text) for text in TEXTS])
    fast = make_encoder(tokenizer.to_str(), info)
    assert isinstance(fast, encoders._Fastokens)
    text = "a river " + "a" * 20_000
    with pytest.raises(ValueError):
        fast.fast_ids(text, True)
    assert fast.ids(text).tolist() == ReferenceEncoder(tokenizer).ids(text).tolist()


def test_dropped_merges_differ() -> None:
    spec = spec_of("deskside")
    spec["model"]["dropout"] = 0.5
    assert choose_encoder(Tokenizer.from_str(json.dumps(spec))).library == "tokenizers"


def test_long_texts_in_pieces(tokenizers: dict[str, Tokenizer]) -> None:
    text = "".join(TEXTS) * 60
    tokenizer = tokenizers["qwen3"]
    fast = make_encoder(tokenizer.to_str(), FAST)
    ids = encoders.encode(fast, text.encode(), np.uint16)
    assert ids.dtype == np.uint16 and len(text.encode()) > 2 << 16
    assert ids.tolist() == encoders.encode(ReferenceEncoder(tokenizer), text).tolist()
