"""Exported files in llama.cpp itself: the same tokens, the same logits, the same prompts, and the same stops."""

import ctypes
import inspect
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gguf_in_llama_cpp import InLlamaCpp, relative_errors
from deskside.data import tokenizer as bpe
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.messages import Conversation
from deskside.export.gguf import TYPE_NAMES, GgufType, save_gguf
from deskside.export.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError
from tests.data.chat_tokenizer import MARKED, talk
from tests.data.chat_tokenizer import make as make_chat
from tests.export.test_gguf import BLOCKS, CASES, VOCAB
from tests.export.test_hf_parity import random_model

gguf: Any = pytest.importorskip("gguf")
llama_cpp: Any = pytest.importorskip(
    "llama_cpp",
    reason="llama-cpp-python is not installed; `pip install llama-cpp-python` builds llama.cpp with cmake, in minutes",
)
pytestmark = pytest.mark.full

BUNDLED = Path(inspect.getfile(bpe)).parent / "bundled"
ODD = [
    *(
        "",
        " ",
        "   ",
        "\n",
        "\n\n",
        " \n",
        "\n ",
        " \n \n",
        "\t\t x",
        "a  b",
        "a \n b",
        "a\r\nb\r\n\r\n",
        "trail  ",
    ),
    *("don't I'll WE'VE it'S 'd ''s '", "1 12 123 1234567890", "3.14 1,000 v1.2-rc4", "٣٤٥ १२३ Ⅷ ½ ²"),
    *(
        "def f(x):\n    return x ** 2  # y\n",
        "if (a&&b||!c) {\n\tx+=1;\n}\n",
        "https://e.org/a?b=c#d",
        "a_b __init__",
    ),
    *(
        "naïve café",
        "cafe\u0301",
        "ﬁ ß İ Ŀ",
        "東京 日本語",
        "한국어 텍스트",
        "ภาษาไทย",
        "Привет",
        "שלום",
        "مرحبا",
    ),
    *("नमस्ते, क्या हाल है?", "क्ष क्\u200dष क़", "வணக்கம் ஸ்ரீ", "മലയാളം", "বাংলা", "తెలుగు", "\u0301x 1\u0301 !\u0301"),
    *(
        "😀 x😀y",
        "👩‍👩‍👧‍👦",
        "👍🏽",
        "🇮🇳",
        "❤️",
        "1️⃣",
        "\u00a0a\u00a0b\u2003c\u3000\u2028",
        "\u200b\u200d\ufeff",
        "\x00\x85\x1c\x0b",
    ),
    *(
        "<|endoftext|>",
        "a<|im_end|>b",
        " <|im_start|>user\nx<|im_end|>\n",
        "<|im_start|",
        "<|endoftext|><|endoftext|>",
    ),
    *("[PAD303]", "Ġ Ċ âĢĻ", "<s></s><unk>", "\ue000\ufffd\U0010ffff"),
]
POOL = [
    *" \n\t'sSa1½٣.!-éक東한😀_€",
    "  ",
    "\r\n",
    "'ll",
    "bc",
    "\u0301",
    "ि",
    "்",
    "ᄀ",
    "🏽",
    "\u200d",
    "\u00a0",
    "\x85",
    "ª",
]


def strings() -> list[str]:
    """Return some 2,300 strings: those above, Indic text, and random ones."""
    rng = random.Random(0)
    lines = (BUNDLED / "tiny_indic.jsonl").read_text("utf-8").splitlines()
    indic = [json.loads(line)["text"][:400] for line in lines]
    made = ["".join(rng.choice(POOL) for _ in range(rng.randrange(1, 30))) for _ in range(2000)]
    return [*ODD, *indic, *made]


def every_character() -> list[str]:
    """Return texts with each character of Python's Unicode database among letters, digits and signs.

    Of scripts with thousands of letters (Chinese, Korean, private ones), only every 97th is used.
    """
    found = []
    for number in range(0x110000):
        character = chr(number)
        many = number % 97 and unicodedata.name(character, "").startswith(
            ("CJK UNIFIED", "HANGUL S", "TANGUT")
        )
        kind = unicodedata.category(character)
        if not many and kind not in ("Cn", "Cs") and not (kind == "Co" and number % 97):
            found.append(f"a{character}b !{character}{character}! 1{character}2 {character} \n{character}\n")
    return found


def pairs(folder: Path, pre: Any, **options: Any) -> Path:
    """Save a tokenizer with a merge for any two bytes, in random order. Its
    tokens reveal every boundary between words.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters]
    random.Random(0).shuffle(merges)
    tokens = ["<|endoftext|>", *letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges, **options)
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def split(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def splits() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return llama.cpp's name -> pre-tokenizer and options of the model. The patterns
    are transformers' own where it has them.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    llama = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    return {
        "qwen35": (split(bpe.SPLIT_PATTERN), {}),
        "qwen2": (split(PRETOKENIZE_REGEX), {}),
        "llama-bpe": (split(llama), {"ignore_merges": True}),
        "gpt-2": (plain, {}),
        "smollm": (digits, {}),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    bpe.save(bpe.train(["one two three, naïve 東京 नमस्ते don't stop 12 34 " * 20], 300), out)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> GgufTokenizer:
    return gguf_tokenizer(folder, VOCAB, 0)


def prompt() -> list[int]:
    return torch.randint(0, 300, (48,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(case: str, tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    """GPT-2's logits agree less exactly, because ggml's GELU reads a table of float16 numbers."""
    model = random_model(**{**BLOCKS, **CASES[case]}, vocab_size=VOCAB).eval()
    theirs = InLlamaCpp(save_gguf(model, tokenizer, tmp_path / "out").file)
    ids = prompt()
    with torch.no_grad():
        ours = model(torch.tensor([ids]))[0]
        assert relative_errors(ours, theirs.logits(ids)).max() < (2e-3 if "gpt2" in case else 2e-5)
        if "gpt2" not in case:
            for token in theirs.greedy(ids, 12):
                assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
                ids = [*ids, token]


@pytest.mark.parametrize(("dtype", "most"), [("float16", 4e-3), ("bfloat16", 3e-2), ("q8_0", 8e-2)])
@pytest.mark.parametrize("case", ["qwen3", "llama", "gpt2"])
def test_smaller_types_are_near(
    case: str, dtype: GgufType, most: float, tokenizer: GgufTokenizer, tmp_path: Path
) -> None:
    """llama.cpp also rounds activations to the weights' type, so the bounds are twice the measured errors."""
    model = random_model(**{**BLOCKS, **CASES[case]}, vocab_size=VOCAB).eval()
    theirs = InLlamaCpp(save_gguf(model, tokenizer, tmp_path / "out", dtype).file)
    with torch.no_grad():
        error = relative_errors(model(torch.tensor([prompt()]))[0], theirs.logits(prompt())).max()
    assert most / 20 < error < most


def test_rows_that_are_no_whole_blocks_are_read(tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    model = random_model(vocab_size=VOCAB).eval()  # its MLP is 48 wide
    saved = save_gguf(model, tokenizer, tmp_path / "out", "q8_0")
    assert saved.fallback
    with torch.no_grad():
        ours = model(torch.tensor([prompt()]))[0]
    assert relative_errors(ours, InLlamaCpp(saved.file).logits(prompt())).max() < 8e-2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("case", ["qwen3 moe", "llama", "gpt2"])
def test_smaller_types_are_llama_cpps_own_to_the_byte(
    case: str, dtype: GgufType, tokenizer: GgufTokenizer, tmp_path: Path
) -> None:
    """Its quantizer gets our float32 file."""
    model = random_model(**{**BLOCKS, **CASES[case], "moe_intermediate_size": 64}, vocab_size=VOCAB)
    whole = save_gguf(model, tokenizer, tmp_path / "whole").file
    ours = save_gguf(model, tokenizer, tmp_path / "small", dtype).file
    options = llama_cpp.llama_model_quantize_default_params()
    name = TYPE_NAMES[dtype]
    options.ftype, options.nthread = gguf.LlamaFileType[f"MOSTLY_{name}"], 1
    options.output_tensor_type = options.token_embedding_type = gguf.GGMLQuantizationType[name]
    theirs = tmp_path / "theirs.gguf"
    assert (
        llama_cpp.llama_model_quantize(str(whole).encode(), str(theirs).encode(), ctypes.byref(options)) == 0
    )
    found, expected = ({t.name: t for t in gguf.GGUFReader(f).tensors} for f in (ours, theirs))
    assert found.keys() == expected.keys()
    for tensor in found.values():
        assert tensor.tensor_type == expected[tensor.name].tensor_type, tensor.name
        assert np.array_equal(tensor.data, expected[tensor.name].data), tensor.name


# From version 16 on, the two sides have different Unicode tables.
ALL = pytest.param(
    every_character,
    marks=pytest.mark.skipif(
        unicodedata.unidata_version >= "16", reason="this Python knows characters that llama.cpp does not"
    ),
)


@pytest.mark.parametrize("texts", [strings, ALL])
@pytest.mark.parametrize("name", ["qwen35", "qwen2", "llama-bpe", "gpt-2", "smollm"])
def test_every_split_gives_our_tokens(name: str, texts: Callable[[], list[str]], tmp_path: Path) -> None:
    pre, options = splits()[name]
    folder = pairs(tmp_path / "pairs", pre, **options)
    coder = bpe.load(folder)
    size = coder.get_vocab_size()
    model = random_model(vocab_size=size)
    made = gguf_tokenizer(folder, size, 0)
    assert made.pre == name
    theirs = InLlamaCpp(save_gguf(model, made, tmp_path / "out", "float16").file, vocab_only=True)
    wrong = [text for text in texts() if theirs.ids(text) != coder.encode(text, add_special_tokens=False).ids]
    assert wrong == []


@pytest.mark.parametrize("special", [False, True])
def test_special_tokens_where_they_are_meant(special: bool, tmp_path: Path) -> None:
    folder = make_chat(tmp_path)
    theirs = InLlamaCpp(_saved(folder, tmp_path / "out"), vocab_only=True)
    coder = bpe.load(folder)
    coder.encode_special_tokens = not special
    for text in strings():
        assert theirs.ids(text, special) == coder.encode(text, add_special_tokens=False).ids, text


def test_a_text_begins_as_in_training(tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    model = random_model(vocab_size=VOCAB)
    theirs = InLlamaCpp(save_gguf(model, tokenizer, tmp_path / "out").file, vocab_only=True)
    assert theirs.ids("one", start=True) == [0, *theirs.ids("one")]
    chat = InLlamaCpp(_saved(make_chat(tmp_path), tmp_path / "chat-out"), vocab_only=True)
    assert chat.ids("one", start=True) == chat.ids("one")


def test_rows_without_a_token_have_a_name_of_their_own(tmp_path: Path) -> None:
    """Two tokens with the same text would abort the process."""
    bpe.save(bpe.train(["one two three " * 20], 270), tmp_path)
    coder = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    coder.add_tokens([AddedToken("[PAD299]", normalized=False)])
    coder.save(str(tmp_path / "tokenizer.json"))
    model = random_model(vocab_size=300)
    file = save_gguf(model, gguf_tokenizer(tmp_path, 300, 0), tmp_path / "out").file
    text = "one [PAD299] [PAD298] two"
    assert InLlamaCpp(file, vocab_only=True).ids(text) == coder.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("template", [None, MARKED])
def test_a_chat_is_rendered_as_by_us(template: str | None, tmp_path: Path) -> None:
    """Compared with llama-cpp-python's Jinja on the file's template, and with llama.cpp's own ChatML."""
    folder = make_chat(tmp_path, template)
    file = _saved(folder, tmp_path / "out")
    theirs = InLlamaCpp(file, vocab_only=True)
    messages = talk("Hello 😀!\n", "It is four.", " नमस्ते ", system="Be\n\nbrief.")
    stored = theirs.model.metadata["tokenizer.chat_template"]
    spelt = [
        theirs.model._model.token_get_text(n) for n in (theirs.model.token_eos(), theirs.model.token_bos())
    ]
    jinja = llama_cpp.llama_chat_format.Jinja2ChatFormatter(stored, *spelt)(messages=messages).prompt
    array = (llama_cpp.llama_chat_message * len(messages))(
        *((m["role"].encode(), m["content"].encode()) for m in messages)
    )
    space = ctypes.create_string_buffer(4096)
    size = llama_cpp.llama_chat_apply_template(stored.encode(), array, len(messages), True, space, len(space))
    expected = ChatTemplate(folder).prompt(Conversation(messages))
    assert theirs.ids(jinja, special=True, start=True) == expected
    assert theirs.ids(space.raw[:size].decode(), special=True, start=True) == expected


@pytest.mark.parametrize(
    ("token", "reason"), [("<|im_end|>", "stop"), ("<|endoftext|>", "stop"), ("a", "length")]
)
def test_a_chat_ends_with_its_end(token: str, reason: str, tmp_path: Path) -> None:
    """Uses a model that answers with this one token."""
    folder = make_chat(tmp_path)
    messages = talk("What is two plus two?")
    model = random_model(vocab_size=512)
    ids = ChatTemplate(folder).prompt(Conversation(messages))
    _answers(model, ids, bpe.load(folder).token_to_id(token))
    file = save_gguf(model, gguf_tokenizer(folder, 512, 0), tmp_path / "out").file
    answer = InLlamaCpp(file).model.create_chat_completion(messages, max_tokens=1, temperature=0.0)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["finish_reason"] == reason


def test_ends_that_llama_cpp_does_not_know_by_name(tmp_path: Path) -> None:
    folder = make_chat(tmp_path)
    coder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    coder.add_special_tokens(["<|fin|>", "<|stop|>"])
    coder.save(str(folder / "tokenizer.json"))
    ends = [coder.token_to_id(token) for token in ("<|fin|>", "<|stop|>")]
    known = {coder.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), "utf-8")
    theirs = InLlamaCpp(_saved(folder, tmp_path / "out"), vocab_only=True)
    assert theirs.ends == {*ends, *known}


def _saved(folder: Path, out: Path) -> Path:
    """Save the file of a tiny model with this tokenizer."""
    model = random_model(vocab_size=512)
    return save_gguf(model, gguf_tokenizer(folder, 512, 0), out).file


@torch.no_grad()
def _answers(model: Transformer, ids: list[int], token: int) -> None:
    """Return a model that answers this token after these tokens: its row of the head equals the last hidden vector."""
    hidden_TD = model.hidden(torch.tensor([ids]))[0]
    assert model.head is not None
    weight = next(model.head.parameters())
    weight.zero_()
    weight[token] = hidden_TD[-1]


# Rows of whole blocks of 256, in three families.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}


@pytest.mark.parametrize(("dtype", "most"), [("q6_k", 0.1), ("q5_k_m", 0.2), ("q4_k_m", 0.35)])
@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama", "gpt2"])
def test_k_quants_are_near(
    case: str, dtype: GgufType, most: float, tokenizer: GgufTokenizer, tmp_path: Path
) -> None:
    """Every matrix has a k-type, llama.cpp loads the file, and its logits are near those of the model."""
    model = random_model(**{**CASES[case], **WIDE}, vocab_size=VOCAB).eval()
    saved = save_gguf(model, tokenizer, tmp_path / "out", dtype, texts={"note": "kept"})
    assert saved.fallback == () and saved.file.name == f"model-{dtype.upper()}.gguf"
    assert sorted(p.name for p in saved.file.parent.iterdir()) == ["deskside.json", saved.file.name, "note"]
    stored = {t.name: t.tensor_type.name for t in gguf.GGUFReader(saved.file).tensors}
    assert stored["blk.0.ffn_up.weight"] == dtype.upper()[:4]
    with torch.no_grad():
        error = relative_errors(
            model(torch.tensor([prompt()]))[0], InLlamaCpp(saved.file).logits(prompt())
        ).max()
    assert most / 20 < error < most


def test_rows_that_are_no_whole_k_blocks(tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    model = random_model(**BLOCKS, vocab_size=VOCAB).eval()
    saved = save_gguf(model, tokenizer, tmp_path / "out", "q4_k_m")
    assert "blk.0.ffn_up.weight" in saved.fallback
    with torch.no_grad():
        ours = model(torch.tensor([prompt()]))[0]
    assert relative_errors(ours, InLlamaCpp(saved.file).logits(prompt())).mean() < 0.25


def test_a_damaged_k_quant_is_found(
    tokenizer: GgufTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a disk that changes a scale, and one that is full when llama.cpp writes."""
    model = random_model(**{**CASES["qwen3"], **WIDE}, vocab_size=VOCAB)
    write = llama_cpp.llama_model_quantize

    def flip(source: bytes, target: bytes, options: Any) -> int:
        code = write(source, target, options)
        reader = gguf.GGUFReader(target.decode(), "r+")
        reader.tensors[-1].data.reshape(-1)[:2] = 0x7B  # a scale of 61,000
        return int(code)

    monkeypatch.setattr(llama_cpp, "llama_model_quantize", flip)
    with pytest.raises(RunError, match="reads back differently"):
        save_gguf(model, tokenizer, tmp_path / "out", "q4_k_m")
    full = lambda source, _, options: write(source, b"/dev/full", options)  # noqa: E731
    monkeypatch.setattr(llama_cpp, "llama_model_quantize", full)
    with pytest.raises(RunError, match="could not write"):
        save_gguf(model, tokenizer, tmp_path / "out", "q4_k_m")
    assert not list(tmp_path.iterdir())
