"""Conversion of a tokenizer.json to llama.cpp's form: byte-level BPE with a named split pattern.

The split patterns are compiled into llama.cpp, which selects one by name (`tokenizer.ggml.pre`). A tokenizer with any
other pattern cannot be exported, because llama.cpp would split text differently than in training. The names and
patterns are those of `llm_tokenizer_bpe` in llama.cpp's src/llama-vocab.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.data.chat.renderer import read_chat_template
from deskside.data.tokenizer import GGUF_PRE_TOKENIZER, SPLIT_PATTERN, end_of_text, special_token_id
from deskside.data.tokenizer import load as load_tokenizer
from deskside.utils.errors import UsageError
from deskside.utils.parsing import read_json_object
from deskside.weights.hf import read_eos_ids

# Token types of the format: ggml-org/ggml, docs/gguf.md.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# (split pattern, True if a word in the vocabulary is used without merging) -> llama.cpp's name
_BY_PATTERN = {
    (SPLIT_PATTERN, False): GGUF_PRE_TOKENIZER,
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST, False): "qwen2",
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST, True): "llama-bpe",
}


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer in llama.cpp's form.

    pre: llama.cpp's name of the split pattern. tokens, types: by id, padded to the model's vocabulary. merges: by rank.
    start: the token that begins a text. ends: the tokens that end a text, those of generation_config.json first.
    end: the token that a chat template renders as `eos_token`, by default ends[0]. add_start: True if every text begins
    with `start`. nfc: True if the tokenizer normalizes text to Unicode's NFC, which llama.cpp does not do.
    """

    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    start: int
    end: int
    ends: tuple[int, ...]
    padding: int
    add_start: bool
    chat_template: str | None
    nfc: bool


def gguf_tokenizer(folder: Path, vocab_size: int, start: int) -> GgufTokenizer:
    """Convert the tokenizer of a run or of a Hugging Face directory. start: the token that begins a text.

    Raises UsageError for a tokenizer that llama.cpp cannot run, and RunError for damaged files.
    """
    file = folder / "tokenizer.json"
    spec = read_json_object(file)
    coder = load_tokenizer(file)
    model = spec.get("model") or {}
    pre = _pre_tokenizer(spec, file)
    vocabulary = coder.get_vocab(with_added_tokens=True)
    if max(vocabulary.values(), default=0) >= vocab_size:
        raise UsageError(
            f"{file}: has token {max(vocabulary.values())}, above the model's vocab_size {vocab_size}"
        )
    # The model's vocabulary is padded for fast matrix products. llama.cpp needs a token for each of its rows.
    tokens = [_filler(number, vocabulary) for number in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, number in vocabulary.items():
        tokens[number], types[number] = token, NORMAL
    for added in spec.get("added_tokens", []):
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
        if wrong := [key for key in ("lstrip", "rstrip", "single_word") if added.get(key)]:
            raise UsageError(
                f"{file}: token '{added['content']}' has {', '.join(wrong)}, which llama.cpp does not support; "
                "use --to hf"
            )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    if not merges:
        raise UsageError(
            f"{file}: has no merges, and llama.cpp needs some; train a tokenizer with a larger vocabulary"
        )
    end_of_text_id = end_of_text(coder, folder)[1]
    template = read_chat_template(folder)
    ends = tuple(dict.fromkeys([*read_eos_ids(folder, vocab_size), end_of_text_id]))
    template_end = None
    if template is not None and "eos_token" in template:
        template_end = special_token_id(coder, folder, "eos_token")
    return GgufTokenizer(
        pre=pre,
        tokens=tuple(tokens),
        types=tuple(types),
        merges=tuple(merges),
        start=start,
        end=ends[0] if template_end is None else template_end,
        ends=ends,
        padding=end_of_text_id,
        # As in training: a chat template renders the first token of a conversation; any other text begins with `start`.
        add_start=template is None or _starts_every_text(spec.get("post_processor"), tokens[start]),
        chat_template=template,
        nfc=(spec.get("normalizer") or {}).get("type") == "NFC",
    )


def _filler(number: int, vocabulary: Mapping[str, int]) -> str:
    """Return a name for a row without a token. It is unique, because llama.cpp aborts if two tokens are equal."""
    name = f"[PAD{number}]"
    while name in vocabulary:
        name += "]"
    return name


def _pre_tokenizer(spec: dict[str, Any], file: Path) -> str:
    """Return llama.cpp's name of the split pattern. Raises UsageError if it has none."""
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UsageError(f"{file}: is not byte-level BPE, and --to gguf supports nothing else; use --to hf")
    wrong = [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(key)]
    normalizer = (spec.get("normalizer") or {}).get("type")
    # llama.cpp ignores NFC, for Qwen's models too, so it is accepted here.
    if normalizer not in (None, "NFC"):
        wrong.append(f"normalizer {normalizer}")
    if wrong:
        raise UsageError(f"{file}: has {', '.join(wrong)}, which llama.cpp does not support; use --to hf")
    pre_tokenizer = spec.get("pre_tokenizer") or {}
    is_sequence = pre_tokenizer.get("type") == "Sequence"
    steps = pre_tokenizer.get("pretokenizers", []) if is_sequence else [pre_tokenizer]
    kinds = [step.get("type") for step in steps]
    last = steps[-1] if steps else {}
    # llama.cpp has no pattern that adds a space before the first word.
    byte_level = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    whole_words = bool(model.get("ignore_merges"))
    gpt2_pattern = last.get("use_regex", True)  # "ByteLevel" then splits text with GPT-2's pattern
    name = None
    if byte_level and kinds == ["Split", "ByteLevel"] and not gpt2_pattern:
        pattern = str((steps[0].get("pattern") or {}).get("Regex"))
        if steps[0].get("behavior") == "Isolated" and not steps[0].get("invert"):
            name = _BY_PATTERN.get((pattern, whole_words))
    elif byte_level and gpt2_pattern and not whole_words:
        if kinds == ["ByteLevel"]:
            name = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
            name = "smollm"
    if name is None:
        raise UsageError(
            f"{file}: splits text with a pattern that llama.cpp does not have; use --to hf (supported are the patterns "
            "of deskside, Qwen3, Llama 3, SmolLM and GPT-2)"
        )
    return name


def _starts_every_text(processor: object, token: str) -> bool:
    """Return True if a post-processor of tokenizer.json puts this token before every text."""
    if not isinstance(processor, dict):
        return False
    if processor.get("type") == "Sequence":
        return any(_starts_every_text(part, token) for part in processor.get("processors", []))
    single = processor.get("single") if processor.get("type") == "TemplateProcessing" else None
    first = single[0] if single else {}
    return bool(first.get("SpecialToken", {}).get("id") == token)
