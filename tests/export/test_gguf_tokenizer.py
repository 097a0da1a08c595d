"""The tokenizer in GGUF files: llama.cpp's names of split patterns, token types, and special tokens."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from deskside.data import tokenizer as bpe
from deskside.export.gguf_tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, gguf_tokenizer
from deskside.utils.errors import UsageError
from tests.data.chat_tokenizer import make as make_chat

TEXT = ["the ship went to the sea and the sea was wide. " * 4]


def save(folder: Path, pre: Any, **model: Any) -> Path:
    """Save a small tokenizer with this pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def split(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def change(folder: Path, **values: Any) -> Path:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **values}), "utf-8")
    return folder


def test_published_patterns_have_llama_cpps_names(tmp_path: Path) -> None:
    """The patterns are taken from transformers, so a misspelled one of ours would be noticed."""
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    llama = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    assert gguf_tokenizer(save(tmp_path / "a", split(PRETOKENIZE_REGEX)), 300, 0).pre == "qwen2"
    assert gguf_tokenizer(save(tmp_path / "b", split(llama), ignore_merges=True), 300, 0).pre == "llama-bpe"
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert gguf_tokenizer(save(tmp_path / "c", plain), 300, 0).pre == "gpt-2"
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    assert gguf_tokenizer(save(tmp_path / "d", digits), 300, 0).pre == "smollm"
    # Llama 3 takes a whole word if the vocabulary has it. Without that, it is a different tokenizer.
    with pytest.raises(UsageError, match=r"that llama.* does not have"):
        gguf_tokenizer(save(tmp_path / "e", split(llama)), 300, 0)


def test_our_own_tokenizer(tmp_path: Path) -> None:
    trained = bpe.train(["one two three, naïve 東京 " * 20], 300)
    bpe.save(trained, tmp_path)
    found = gguf_tokenizer(tmp_path, 310, 0)
    size = trained.get_vocab_size()
    assert found.pre == "qwen35"
    assert list(found.tokens[:size]) == [trained.id_to_token(n) for n in range(size)]
    assert found.types == (CONTROL,) * 3 + (NORMAL,) * (size - 3) + (UNUSED,) * (310 - size)
    assert found.tokens[size:] == tuple(f"[PAD{n}]" for n in range(size, 310))
    merges = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))["model"]["merges"]
    assert [merge.split(" ") for merge in found.merges] == merges
    # Pretraining puts the end-of-text token before every text, so a prompt gets it too.
    assert (found.start, found.end, found.ends, found.padding, found.add_start) == (0, 0, (0,), 0, True)
    assert found.chat_template is None and not found.nfc


def test_of_a_chat_model(tmp_path: Path) -> None:
    folder = make_chat(tmp_path)
    coder = bpe.load(folder)
    found = gguf_tokenizer(folder, 512, 0)
    end, turn = coder.token_to_id("<|endoftext|>"), coder.token_to_id("<|im_end|>")
    assert found.end == turn and found.ends == (turn, end) and found.padding == end
    assert found.chat_template == (folder / "chat_template.jinja").read_text("utf-8")
    assert not found.add_start  # a conversation begins with its own first token


def test_a_template_gets_the_end_that_it_was_rendered_with(tmp_path: Path) -> None:
    """llama.cpp renders `eos_token` as the file's end token. We render the one that tokenizer_config.json names."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{{ eos_token }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = save(tmp_path / "plain", split(bpe.SPLIT_PATTERN))
    coder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    coder.add_special_tokens(list(bpe.CHAT_TOKENS))
    coder.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}), "utf-8")
    turn = coder.token_to_id("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn, 0]}), "utf-8")
    found = gguf_tokenizer(folder, 300, 0)
    assert (found.end, found.ends) == (0, (turn, 0))


def test_a_start_token_that_the_tokenizer_adds_itself(tmp_path: Path) -> None:
    folder = make_chat(tmp_path)
    single = [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    change(folder, post_processor={"type": "Sequence", "processors": [template]})
    assert gguf_tokenizer(folder, 512, 0).add_start


def test_added_tokens_that_are_plain_text(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    found = gguf_tokenizer(folder, 300, 0)
    assert found.types[tokenizer.token_to_id("<tool>")] == USER_DEFINED
    assert found.types[0] == CONTROL


def test_no_filler_is_spelt_like_a_token(tmp_path: Path) -> None:
    """llama.cpp aborts if two tokens have the same text."""
    folder = save(tmp_path / "a", pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["[PAD299]", "[PAD299]]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    found = gguf_tokenizer(folder, 300, 0)
    assert found.types[299] == UNUSED and len(set(found.tokens)) == 300


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word"])
def test_an_added_token_that_takes_its_surroundings_is_named(option: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "a", pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<tool>", **{option: True})])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(UsageError, match=f"'<tool>' has {option}"):
        gguf_tokenizer(folder, 300, 0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("prefix space", "llama.cpp does not have"),
        ("pattern", "llama.cpp does not have"),
        ("lowercase", "normalizer Lowercase"),
        ("word end", "end_of_word_suffix"),
        ("unigram", "not byte-level BPE"),
        ("no merges", "has no merges"),
        ("vocabulary", "above the model's vocab_size 100"),
    ],
)
def test_what_llama_cpp_cannot_run_is_named(what: str, message: str, tmp_path: Path) -> None:
    space = what == "prefix space"
    pre = split("[a-z]+") if what == "pattern" else pre_tokenizers.ByteLevel(add_prefix_space=space)
    folder = save(tmp_path / "a", pre)
    model = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    if what == "lowercase":
        change(folder, normalizer={"type": "Lowercase"})
    elif what == "word end":
        change(folder, model={**model, "end_of_word_suffix": "</w>"})
    elif what == "unigram":
        change(folder, model={"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", 0.0]]})
    elif what == "no merges":
        change(folder, model={**model, "merges": []})
    with pytest.raises(UsageError, match=message):
        gguf_tokenizer(folder, 100 if what == "vocabulary" else 300, 0)


def test_nfc_is_taken_as_for_qwens_own_models(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", pre_tokenizers.ByteLevel(add_prefix_space=False))
    found = gguf_tokenizer(change(folder, normalizer={"type": "NFC"}), 300, 0)
    assert found.pre == "gpt-2" and found.nfc
