"""Byte-level byte-pair encoding (BPE): training, loading, and the bytes that each token represents.

Text is first split into words, and merges never cross word boundaries. The split pattern is that of Qwen3.5's published
tokenizer, for three reasons. Combining marks (`\\p{M}`) stay with their letters; otherwise every Indic word would be
split at each vowel sign. Every digit is separate, which helps small models to learn arithmetic. And llama.cpp knows the
pattern by name (`qwen35`), so an exported GGUF file splits text exactly as training did.

Tokenizers trained here have no normalizer, so tokens decode to exactly the bytes of the text, and bits per byte are
exact.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deskside.facts.checkpoint_names import hub_name_hint
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import json_value, read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
SPECIAL_TOKENS = (END_OF_TEXT, *CHAT_TOKENS)
GGUF_PRE_TOKENIZER = "qwen35"  # llama.cpp's name for SPLIT_PATTERN
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
MAX_VOCAB = 1 << 20  # four times Gemma's vocabulary

# Names of the token between documents in published tokenizers, the most specific first.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer on `texts`. A small corpus may give fewer tokens than `vocab_size`.

    Raises UsageError if `vocab_size` is too small for the 256 bytes and the special tokens, or too large.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    check_size(vocab_size)
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_size(vocab_size: int) -> None:
    """Raise UsageError for an invalid size. A size far above MAX_VOCAB would make `tokenizers` abort the process."""
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise UsageError(
            f"--vocab-size {vocab_size}: give at least {MIN_VOCAB} (256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens) and at most {MAX_VOCAB}."
        )


def load(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, or the one in a directory (of prepared data or a Hugging Face model).

    The tokenizer encodes text that spells a special token as ordinary text, so that data cannot forge the end of a
    document. It neither truncates nor pads, whatever the file says. Raises UsageError if there is no such file, and
    RunError if it is not a valid tokenizer.
    """
    from tokenizers import Tokenizer

    file = Path(os.path.expanduser(path))
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        hint = (
            hub_name_hint(file)
            or "Give a tokenizer.json, a directory that holds one, or owner/name of the hub"
        )
        raise UsageError(f"{file}: no such tokenizer. {hint[0].upper()}{hint[1:]}.")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise RunError(f"{file}: not a tokenizers file (not UTF-8).") from None
    except Exception as error:  # tokenizers raises Exception itself, not a subclass
        if type(error) is not Exception:
            raise
        raise RunError(f"{file}: not a tokenizers file ({str(error)[:100]}).") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(tokenizer: Tokenizer, directory: str | Path | None = None) -> tuple[str, int]:
    """Return the end-of-text token, which separates documents, and its id.

    directory: a folder whose tokenizer_config.json may name the token. Raises UsageError if the vocabulary has no such
    token, and RunError if tokenizer_config.json is damaged.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    special = {str(token.content) for token in added if token.special}
    # A vocabulary may hold </s> as a tag of HTML.
    names = sorted(_END_NAMES, key=lambda name: name not in special)
    if directory is not None:
        eos_token = named_token(read_config(Path(directory)), "eos_token")
        if eos_token is not None:
            names.append(eos_token)
    for name in names:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return name, token_id
    raise UsageError(
        f"the tokenizer has no end-of-text token. Looked for {', '.join(names)}; add one, or train a new tokenizer."
    )


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as AutoTokenizer.from_pretrained reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    # Not tokenizer.save: it reports a full disk as a bare Exception.
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    write_config(directory, default_config(end_of_text(tokenizer)[0]))


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, or {} without one. Raises RunError if it is not a JSON object."""
    file = directory / "tokenizer_config.json"
    return read_json_object(file, big_integers=True) if file.is_file() else {}


def named_token(config: Mapping[str, Any], key: str) -> str | None:
    """Return the text of a token that tokenizer_config.json names, such as "bos_token", or None if it has none."""
    token = config.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def special_token_id(tokenizer: Tokenizer, directory: Path, key: str) -> int | None:
    """Return the id of a token that tokenizer_config.json names, or None if it has none, or the vocabulary lacks it."""
    name = named_token(read_config(directory), key)
    return None if name is None else tokenizer.token_to_id(name)


def default_config(eos: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json for a tokenizer with this end-of-text token."""
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), eos)
    return {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}


def write_config(directory: Path, config: dict[str, Any]) -> None:
    """Write tokenizer_config.json."""
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_for_data(source: str | Path) -> tuple[Tokenizer, str]:
    """Load a tokenizer that data can be prepared with, and return it with its end-of-text token.

    Raises the same errors as `load`, `end_of_text` and `token_bytes`.
    """
    file = Path(os.path.expanduser(source))
    tokenizer = load(file)
    eos, _ = end_of_text(tokenizer, file if file.is_dir() else file.parent)
    token_bytes(tokenizer)  # raises if it is not byte-level BPE
    return tokenizer, eos


def copy(source: str | Path, directory: Path) -> None:
    """Copy a tokenizer and its tokenizer_config.json, or write a default one. Raises the errors of `load_for_data`."""
    file = Path(os.path.expanduser(source))
    folder = file if file.is_dir() else file.parent
    _, eos = load_for_data(file)
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "tokenizer.json" if file.is_dir() else file, directory / "tokenizer.json")
    config = folder / "tokenizer_config.json"
    if config.is_file():
        shutil.copyfile(config, directory / "tokenizer_config.json")
    else:
        write_config(directory, default_config(eos))


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """Return the number of bytes that each token represents, shape [vocab]; 0 for special tokens.

    In byte-level BPE, each character of a token's string in the vocabulary stands for one byte, even if the token is
    only part of a UTF-8 character. So sums over the tokens of a text are exact. Raises UsageError for other tokenizers.
    """
    spec = json_value(tokenizer.to_str())
    if not _is_byte_level(spec.get("pre_tokenizer")) or (spec.get("model") or {}).get("type") != "BPE":
        raise UsageError(
            "the tokenizer is not byte-level BPE, so its bytes per token are not known. Train a new tokenizer, or "
            "give one of byte-level BPE."
        )
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocab.values()) + 1, dtype=np.uint32)
    for token, index in vocab.items():
        lengths[index] = len(token)
    for added in spec.get("added_tokens", []):
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode("utf-8"))
    return lengths


def token_texts(tokenizer: Tokenizer) -> list[bytes]:
    """Return the text of each token of a byte-level BPE tokenizer as bytes, b"" for special tokens."""
    spec = json_value(tokenizer.to_str())
    added = {
        token["id"]: b"" if token["special"] else token["content"].encode("utf-8")
        for token in spec.get("added_tokens", [])
    }
    # Byte-level BPE maps the printable bytes of Latin-1 to themselves, and the others to code points from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    texts = [b""] * (max(vocab.values()) + 1)
    for token, index in vocab.items():
        texts[index] = added[index] if index in added else bytes(byte_of[c] for c in token)
    return texts


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """Return an upper bound of the bytes that one token represents, or None if no bound is known.

    A text of n bytes has at least n / max_bytes_per_token tokens. A bound is known for BPE without unknown tokens whose
    pre-tokenizer and normalizer remove nothing. The normalizer NFC shortens a text to no less than a third of its bytes
    (Hangul syllables of three Jamo, U+1FEF).
    """
    from tokenizers import pre_tokenizers

    spec = json_value(tokenizer.to_str())
    model = spec.get("model") or {}
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, dict):
        return None
    byte_level = _is_byte_level(spec.get("pre_tokenizer"))
    needed = pre_tokenizers.ByteLevel.alphabet() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    complete = (byte_level or model.get("byte_fallback")) and all(piece in vocab for piece in needed)
    shrinkage = _max_shrinkage(spec.get("normalizer"))
    added = spec.get("added_tokens", [])
    # Such tokens remove the adjacent white space.
    strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if not complete or shrinkage is None or strips or not _keeps_all(spec.get("pre_tokenizer")):
        return None
    # In byte-level BPE, each character of a token's string stands for one byte.
    lengths = [len(token) if byte_level else len(token.encode()) for token in vocab]
    return shrinkage * max([*lengths, *(len(token["content"].encode()) for token in added)])


def _max_shrinkage(normalizer: Any) -> int | None:
    """Return the factor by which a normalizer can shorten a text in bytes, or None if no bound is known."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        factors = [_max_shrinkage(part) for part in normalizer.get("normalizers", [])]
        return None if None in factors else math.prod(factor or 1 for factor in factors)
    if kind == "Replace":
        pattern, content = normalizer.get("pattern", {}).get("String"), normalizer.get("content", "")
        keeps_length = isinstance(pattern, str) and len(content.encode()) >= len(pattern.encode())
        return 1 if keeps_length else None
    return {"NFC": 3, "Prepend": 1}.get(kind)


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Return True if a pre-tokenizer keeps the whole text."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_keeps_all(part) for part in pre_tokenizer.get("pretokenizers", []))
    if kind == "Split":
        return bool(pre_tokenizer.get("behavior") != "Removed")
    return kind in ("ByteLevel", "Digits", "Metaspace")


def _is_byte_level(pre_tokenizer: Any) -> bool:
    """Return True if a pre-tokenizer is ByteLevel or a sequence that contains it."""
    if not isinstance(pre_tokenizer, dict):
        return False
    if pre_tokenizer.get("type") == "ByteLevel":
        return True
    return any(_is_byte_level(part) for part in pre_tokenizer.get("pretokenizers", []))


def spans(data: bytes, limit: int = 1 << 16) -> Iterator[tuple[int, int]]:
    """Cut the UTF-8 of a text into spans that, if possible, have the same tokens as the whole text.

    After `limit` bytes of a span, the next cut is before a single space, or after a single newline, with a letter after
    it and no white space before it. The patterns of published byte-level tokenizers and SPLIT_PATTERN all begin a word
    there, and none of them looks behind, so the tokens do not change. If there is no such place within 16 times `limit`
    bytes, the cut is between two characters, and the tokens at the cut may differ.
    """
    start = 0
    while len(data) - start > 2 * limit:
        end = min(len(data), start + 16 * limit)
        cut = next(_word_starts(data, start + limit, end), None)
        if cut is None:
            cut = end
            while cut < len(data) and data[cut] & 0xC0 == 0x80:
                cut += 1
        yield start, cut
        start = cut
    if start < len(data) or not data:
        yield start, len(data)


_SPACE = re.compile(rb"[ \n]")


def _word_starts(data: bytes, start: int, end: int) -> Iterator[int]:
    """Yield the places from `start` to `end` where a word begins in every split pattern."""
    for match in _SPACE.finditer(data, start, end - 4):  # a UTF-8 character has at most 4 bytes
        at = match.start()
        before = data[max(0, at - 4) : at].decode("utf-8", "ignore")[-1:]
        after = data[at + 1 : at + 5].decode("utf-8", "ignore")[:1]
        if before and not before.isspace() and after.isalpha():
            yield at if match.group() == b" " else at + 1
