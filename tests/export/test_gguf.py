"""GGUF files: transformers reads them and computes the same; their bytes,
keys and error bounds, and refused models.
"""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deskside.data import tokenizer as bpe
from deskside.export.gguf import GgufType, gguf_name, rounding_bound, save_gguf
from deskside.export.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf import to_hf
from tests.data.chat_tokenizer import make as make_chat
from tests.export.test_hf_parity import GPT2, MOE, YARN, random_model

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

VOCAB = 304
BLOCKS = {"intermediate_size": 64}  # rows of whole blocks of 32, so that every matrix can be q8_0
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 tied, mqa, wide heads, separate": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 1e6,
        "norm_eps": 1e-3,
        "fused_qkv": False,
        "fused_gate_up": False,
    },
    "qwen3 moe": MOE,
    "qwen3 moe, yarn": {**MOE, "rope_scaling": YARN},
    "qwen3 moe, tied": {**MOE, "tie_word_embeddings": True},
    "llama": {"qk_norm": False},
    "llama mha, biases": {
        "qk_norm": False,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama, llama3 rope, tied": {
        "qk_norm": False,
        "tie_word_embeddings": True,
        "rope_scaling": {**YARN, "rope_type": "llama3"},
    },
    "llama, linear rope": {"qk_norm": False, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "gpt2": {**GPT2, "tie_word_embeddings": True},
    "gpt2 untied": GPT2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    bpe.save(bpe.train(["one two three, naïve 東京 don't stop 12 34 " * 20], 300), out)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> GgufTokenizer:
    return gguf_tokenizer(folder, VOCAB, 0)


def their_model(file: Path, model: Transformer) -> Any:
    """Return transformers' model of the file. It does not read some fields, so they come from our config.json."""
    config = transformers.AutoConfig.for_model(**to_hf(model, model.config)[0])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=config, dtype=torch.float32
    )
    return loaded.eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(3))


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same(case: str, tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    model = random_model(**{**BLOCKS, **CASES[case]}, vocab_size=VOCAB)
    saved = save_gguf(model, tokenizer, tmp_path / "out")
    theirs = their_model(saved.file, model)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens()).logits, model(tokens()), atol=1e-4, rtol=1e-4)
    assert saved.fallback == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("case", ["qwen3", "llama", "gpt2"])
def test_smaller_types_are_read_as_they_round(
    case: str, dtype: GgufType, tokenizer: GgufTokenizer, tmp_path: Path
) -> None:
    """transformers' weights are the source's, rounded as torch rounds, or within the bound of q8_0."""
    model = random_model(**{**BLOCKS, **CASES[case]}, vocab_size=VOCAB)
    saved = save_gguf(model, tokenizer, tmp_path / "out", dtype)
    theirs = their_model(saved.file, model).state_dict()
    lossy = 0
    for name, tensor in to_hf(model, model.config)[1].items():
        found, source = theirs[name], tensor.float()
        if source.ndim == 1 or "wpe" in name:
            expected = source
        elif dtype == "q8_0":
            blocks = (source.T if case == "gpt2" and ".h." in name else source).reshape(-1, 32)
            back = (found.T if case == "gpt2" and ".h." in name else found).reshape(-1, 32)
            error, d = (back - blocks).abs(), blocks.abs().amax(1, keepdim=True) / 127
            assert (error <= 0.57 * d + 1e-5).all(), name
            lossy += 1
            continue
        else:
            expected = source.to(getattr(torch, dtype)).float()
            lossy += int(not torch.equal(expected, source))
        assert torch.equal(found, expected), name
    assert lossy >= 8


def test_what_llama_cpp_asks_for(folder: Path, tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    """Keys and tensors have the names in llama.cpp's loader (src/llama-model.cpp, src/models/qwen3moe.cpp)."""
    yarn = {"factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 16.0}
    model = random_model(**{**MOE, "head_dim": 16, "rope_theta": 5e5, "rope_scaling": yarn}, vocab_size=VOCAB)
    saved = save_gguf(model, tokenizer, tmp_path / "out", "bfloat16", "my model/1")
    assert saved.file.name == "my-model-1-BF16.gguf"
    found = fields(saved.file)
    config = model.config
    expected = {
        "general.architecture": "qwen3moe",
        "general.name": "my model/1",
        "general.file_type": 32,
        "qwen3moe.block_count": 2,
        "qwen3moe.context_length": 64,
        "qwen3moe.embedding_length": 32,
        "qwen3moe.feed_forward_length": config.intermediate_size,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 16,
        "qwen3moe.attention.value_length": 16,
        "qwen3moe.rope.dimension_count": 16,
        "qwen3moe.rope.freq_base": 5e5,
        "qwen3moe.rope.scaling.type": "yarn",
        "qwen3moe.rope.scaling.factor": 8.0,
        "qwen3moe.rope.scaling.original_context_length": 8,
        "qwen3moe.rope.scaling.yarn_beta_fast": 16.0,
        "qwen3moe.rope.scaling.yarn_beta_slow": 1.0,
        "qwen3moe.expert_count": 6,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 24,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found["qwen3moe.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert len(found["tokenizer.ggml.tokens"]) == len(found["tokenizer.ggml.token_type"]) == VOCAB
    coder = bpe.load(folder)
    size = coder.get_vocab_size()
    assert found["tokenizer.ggml.tokens"][:size] == [coder.id_to_token(n) for n in range(size)]
    stored = {
        t.name: (tuple(t.shape.tolist()), t.tensor_type.name) for t in gguf.GGUFReader(saved.file).tensors
    }
    block = {
        "attn_norm.weight": ((32,), "F32"),
        "ffn_norm.weight": ((32,), "F32"),
        "attn_q.weight": ((32, 64), "BF16"),
        "attn_k.weight": ((32, 32), "BF16"),
        "attn_v.weight": ((32, 32), "BF16"),
        "attn_output.weight": ((64, 32), "BF16"),
        "attn_q_norm.weight": ((16,), "F32"),
        "attn_k_norm.weight": ((16,), "F32"),
        "ffn_gate_inp.weight": ((32, 6), "F32"),
        "ffn_gate_exps.weight": ((32, 24, 6), "BF16"),
        "ffn_up_exps.weight": ((32, 24, 6), "BF16"),
        "ffn_down_exps.weight": ((24, 32, 6), "BF16"),
    }
    rest = {
        "token_embd.weight": ((32, VOCAB), "BF16"),
        "output.weight": ((32, VOCAB), "BF16"),
        "output_norm.weight": ((32,), "F32"),
    }
    assert stored == rest | {f"blk.{n}.{name}": what for n in range(2) for name, what in block.items()}


def test_a_chat_models_template_and_ends(tmp_path: Path) -> None:
    folder = make_chat(tmp_path)
    coder = bpe.load(folder)
    model = random_model(vocab_size=512)
    saved = save_gguf(model, gguf_tokenizer(folder, 512, 0), tmp_path / "out")
    found = fields(saved.file)
    turn, end = coder.token_to_id("<|im_end|>"), coder.token_to_id("<|endoftext|>")
    assert found["tokenizer.chat_template"] == (folder / "chat_template.jinja").read_text("utf-8")
    assert found["tokenizer.ggml.eos_token_id"] == found["tokenizer.ggml.eot_token_id"] == turn
    assert found["tokenizer.ggml.eom_token_id"] == end
    assert found["tokenizer.ggml.add_bos_token"] is False


def test_transformers_reads_the_tokenizer(folder: Path, tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    model = random_model(vocab_size=VOCAB)
    saved = save_gguf(model, tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(saved.file.parent, gguf_file=saved.file.name)
    text = "one two, don't stop the naïve 東京 1234\n\nthree <|endoftext|>"
    ours = bpe.load(folder)
    ours.encode_special_tokens = False
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).ids


def test_rows_that_are_no_whole_blocks_are_said(tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    model = random_model(vocab_size=VOCAB)  # its MLP is 48 wide
    saved = save_gguf(model, tokenizer, tmp_path / "out", "q8_0")
    assert saved.fallback == ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(saved.file).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q8_0"


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float32, (2, 64), elements=st.floats(-6e4, 6e4, width=32, allow_subnormal=True)),
    st.sampled_from(["F32", "F16", "BF16", "Q8_0"]),
)
def test_no_error_passes_its_bound(values: np.ndarray, kind: str) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    with np.errstate(all="ignore"):
        back = gguf.dequantize(gguf.quantize(values, qtype), qtype).reshape(values.shape)
    error = np.abs(back.astype(np.float64) - values)
    assert (error <= rounding_bound(values, kind)).all()


def test_llama3_rope_is_a_tensor_of_divisors(tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    """llama.cpp divides its own frequencies by them, and has no key for this kind of scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**YARN, "rope_type": "llama3", "original_max_position_embeddings": 64}
    model = random_model(qk_norm=False, rope_scaling=scaling, vocab_size=VOCAB)
    saved = save_gguf(model, tokenizer, tmp_path / "out", "bfloat16")
    (found,) = (t.data for t in gguf.GGUFReader(saved.file).tensors if t.name == "rope_freqs.weight")
    config = transformers.AutoConfig.for_model(**to_hf(model, model.config)[0])
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config)[0]
    plain = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(torch.from_numpy(np.array(found)), plain / scaled)
    assert len(set(found.tolist())) > 2
    assert not any("rope.scaling" in name for name in fields(saved.file))


def test_mistral_without_a_window_is_llama(tokenizer: GgufTokenizer, tmp_path: Path) -> None:
    files = []
    for model_type in ("llama", "mistral"):
        model = random_model(qk_norm=False, model_type=model_type, vocab_size=VOCAB)
        files.append(save_gguf(model, tokenizer, tmp_path / model_type).file.read_bytes())
    assert files[0] == files[1]


def test_bounds_are_tight() -> None:
    """Errors near the bounds occur, so a damaged byte could not hide below them."""
    values = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
    for kind, least in (("F16", 0.9), ("BF16", 0.9), ("Q8_0", 0.85)):
        qtype = gguf.GGMLQuantizationType[kind]
        back = gguf.dequantize(gguf.quantize(values, qtype), qtype).reshape(values.shape)
        assert (np.abs(back - values) / rounding_bound(values, kind)).max() > least


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "qwen3 cannot do hidden_act = gelu"),
        ({**GPT2, "hidden_act": "gelu"}, "gpt2 cannot do hidden_act = gelu"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"sliding_window": 4, "window_pattern": "SL"}, "sliding_window = 4"),
        ({"rope_scaling": {**YARN, "rope_type": "llama3"}}, "rope_type = llama3"),
        ({**MOE, "norm_topk_prob": False}, "norm_topk_prob = false"),
        ({"rope_scaling": {**YARN, "attention_factor": 2.0}}, "another attention factor"),
        ({"norm_position": "post"}, "does not support norm_position"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_named(
    change: dict[str, Any], named: str, tokenizer: GgufTokenizer, tmp_path: Path
) -> None:
    model = random_model(**change, vocab_size=VOCAB)
    with pytest.raises(UsageError, match=named):
        save_gguf(model, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [(7e4, "float16", "7e.04 is beyond float16"), (float("nan"), "float32", "not finite")],
)
def test_weights_that_do_not_fit_leave_nothing(
    value: float, dtype: GgufType, message: str, tokenizer: GgufTokenizer, tmp_path: Path
) -> None:
    model = random_model(vocab_size=VOCAB)
    assert model.head is not None
    with torch.no_grad():
        next(model.head.parameters())[3, 5] = value
    with pytest.raises(RunError, match=message):
        save_gguf(model, tokenizer, tmp_path / "out", dtype)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_changes_bytes_is_found(
    tokenizer: GgufTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file replaces an earlier export, which stays unchanged."""
    model = random_model(vocab_size=VOCAB)
    out = tmp_path / "out"
    before = save_gguf(model, tokenizer, out, "q8_0").file.read_bytes()
    close = gguf.GGUFWriter.close

    def flip(writer: Any) -> None:
        close(writer)
        with open(writer.path, "r+b") as file:
            file.seek(-1000, 2)
            byte = file.read(1)
            file.seek(-1000, 2)
            file.write(bytes([byte[0] ^ 0x40]))

    monkeypatch.setattr(gguf.GGUFWriter, "close", flip)
    with pytest.raises(RunError, match="reads back differently"):
        save_gguf(model, tokenizer, out, "q8_0")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "model-Q8_0.gguf").read_bytes() == before


def test_a_disk_that_is_too_small(
    tokenizer: GgufTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(vocab_size=VOCAB)
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("deskside.weights.hf.shutil.disk_usage", lambda path: usage)
    with pytest.raises(RunError, match=r"needs 0\.1 MiB, and 0\.0 MiB are free there"):
        save_gguf(model, tokenizer, tmp_path / "a" / "out")
    assert not list(tmp_path.iterdir())


def test_without_the_package(
    tokenizer: GgufTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    model = random_model(vocab_size=VOCAB)
    with pytest.raises(UsageError, match=re.escape("pip install 'deskside[gguf]'")):
        save_gguf(model, tokenizer, tmp_path / "out")


def test_names_of_files() -> None:
    assert gguf_name("demo", "float32") == "demo-F32.gguf"
    assert gguf_name("../ä b", "q8_0") == "b-Q8_0.gguf" and gguf_name("..", "float16") == "model-F16.gguf"
