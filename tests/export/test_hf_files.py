"""Model directories: ours loads what transformers wrote, transformers loads what we wrote, and bad ones are named."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deskside.config.model import ModelConfig
from deskside.model.transformer import Transformer
from deskside.utils import files
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf import load_hf, save_hf
from deskside.weights.hf_config import from_hf_config, to_hf_config
from deskside.weights.load import load_model
from tests.export.test_hf_parity import CASES, GPT2, MOE, TINY, batch, random_model

transformers = pytest.importorskip("transformers")
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3}


def published(name: str) -> Any:
    """Small models that transformers itself creates and saves."""
    torch.manual_seed(0)
    common = {"vocab_size": 61, "intermediate_size": 48, "max_position_embeddings": 64, **SIZES}
    if name == "qwen3":
        config = transformers.Qwen3Config(
            head_dim=16,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=1,
            rope_theta=5e5,
            **common,
        )
        return transformers.Qwen3ForCausalLM(config)
    if name == "moe":
        config = transformers.Qwen3MoeConfig(
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            **common,
        )
        return transformers.Qwen3MoeForCausalLM(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **common))
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 61}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "moe", "llama", "gpt2"])
def test_published_checkpoints_load(name: str, shards: bool, tmp_path: Path) -> None:
    theirs = published(name).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    config, model = load_hf(tmp_path)
    inputs, _ = batch()
    torch.testing.assert_close(model(inputs), theirs(inputs).logits, atol=1e-4, rtol=1e-4)
    if name == "qwen3":
        assert [config.layer_window(i) for i in range(3)] == [None, 6, 6] and config.rope_theta == 5e5


@pytest.mark.parametrize("shards_are_left", [False, True])
def test_one_file_replaces_the_shards_of_an_index(shards_are_left: bool, tmp_path: Path) -> None:
    published("qwen3").save_pretrained(tmp_path, max_shard_size="20KB")
    shards = {path: path.read_bytes() for path in tmp_path.glob("model-*")}
    newer = published("qwen3")
    newer.model.norm.weight.data += 1
    newer.save_pretrained(tmp_path)  # deletes the shards, and not their index
    assert (tmp_path / "model.safetensors.index.json").exists() and not list(tmp_path.glob("model-*"))
    for path, content in shards.items() if shards_are_left else ():
        path.write_bytes(content)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs, _ = batch()
    torch.testing.assert_close(load_hf(tmp_path)[1](inputs), theirs(inputs).logits, atol=1e-4, rtol=1e-4)


def test_gpt2_as_openai_published_it(tmp_path: Path) -> None:
    """Names lack the prefix, and the causal masks are stored like weights."""
    theirs = published("gpt2").eval()
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {name.removeprefix("transformer."): tensor.clone() for name, tensor in state.items()}
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(3)}
    save_file(state, tmp_path / "model.safetensors")
    _, model = load_hf(tmp_path)
    inputs, _ = batch()
    torch.testing.assert_close(model(inputs), theirs(inputs).logits, atol=1e-4, rtol=1e-4)


def test_config_of_before_transformers_5() -> None:
    """rope_theta is a top-level field, and a Llama has no layer_types and no head_dim."""
    base = {"vocab_size": 61, "intermediate_size": 48, "max_position_embeddings": 64, **SIZES}
    llama = from_hf_config({**base, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": None})
    assert llama.rope_theta == 5e5 and llama.head_dim == 8 and not llama.qk_norm
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    qwen = from_hf_config({**base, "model_type": "qwen3", "head_dim": 8, **window})
    assert [qwen.layer_window(i) for i in range(3)] == [None, None, 4]
    off = from_hf_config({**base, "model_type": "qwen3", **window, "use_sliding_window": False})
    assert off.sliding_window is None and off.head_dim == 128


@pytest.mark.parametrize(
    "given",
    [
        {"sliding_window": 4},
        {"sliding_window": 4, "max_window_layers": 2},
        {"sliding_window": 4, "max_window_layers": 2, "use_sliding_window": False},
        {"sliding_window": None, "max_window_layers": 2},
    ],
)
def test_windows_of_dots1_are_those_of_transformers(given: dict[str, Any]) -> None:
    """dots1 has no option use_sliding_window, and its default of max_window_layers differs from Qwen's."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    base = {"vocab_size": 61, "intermediate_size": 48, "max_position_embeddings": 64, **SIZES, **experts}
    base |= {"num_hidden_layers": 64}
    config = from_hf_config({**base, "model_type": "dots1", **given})
    windows = [config.layer_window(layer) is not None for layer in range(64)]
    theirs = transformers.Dots1Config(**base, **given)
    assert windows == [kind == "sliding_attention" for kind in theirs.layer_types]


@pytest.mark.parametrize("written", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 4.0, "original_max_position_embeddings": 16},
        {"factor": 4.0},  # transformers takes max_position_embeddings as the original length
        {"factor": None, "original_max_position_embeddings": 8, "beta_slow": 0.5, "truncate": False},
    ],
)
def test_yarn_as_published(scaling: dict[str, Any], written: str, tmp_path: Path) -> None:
    theirs = published("llama").eval()
    theirs.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["rope_parameters"]
    kind = "type" if written == "rope_scaling" else "rope_type"
    settings |= {"rope_theta": 1e4, written: {kind: "yarn", "rope_theta": 1e4, **scaling}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    _, model = load_hf(tmp_path)
    inputs, _ = batch()
    torch.testing.assert_close(model(inputs), theirs(inputs).logits, atol=1e-4, rtol=1e-4)


def test_gpt2_names_its_length_twice_as_published_files_do() -> None:
    """llama.cpp's converter reads only n_ctx."""
    written = to_hf_config(ModelConfig(**{**TINY, **GPT2, "max_position_embeddings": 48}))
    assert written["n_ctx"] == written["n_positions"] == 48


SIX_HEADS = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}


def test_transformers_still_refuses_a_llama_of_six_heads_in_64(tmp_path: Path) -> None:
    """If this fails, transformers allows the shape, and the condition for Llama
    can be removed. Qwen3 has no such rule.
    """
    with pytest.raises(StrictDataclassError, match="not a multiple of the number of attention"):
        transformers.LlamaConfig(hidden_size=64, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    model = random_model(**SIX_HEADS)
    out = save_hf(model, model.config, None, tmp_path / "out")
    assert transformers.AutoModelForCausalLM.from_pretrained(out).config.num_attention_heads == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_position": "post"}, "norm_position = post"),
        ({"hidden_act": "relu2", "gated_mlp": False}, "gated_mlp = false"),
        ({"final_logit_softcapping": 15.0}, r"final_logit_softcapping = 15\.0"),
        ({"norm": "layernorm"}, "norm = layernorm"),
        ({"mlp_bias": True}, "mlp_bias = true"),
        (
            {"model_type": "llama", "qk_norm": False, "sliding_window": 4, "window_pattern": "S"},
            "sliding_window = 4",
        ),
        ({"model_type": "qwen3", "qk_norm": False}, "qk_norm = false"),
        ({"position_embedding": "learned"}, "position_embedding = learned"),
        ({**GPT2, "num_key_value_heads": 2}, "num_key_value_heads"),
        ({**GPT2, "head_dim": 16}, "head_dim"),
        ({**GPT2, "norm": "rmsnorm"}, "norm = rmsnorm"),
        ({**MOE, "qk_norm": False, "norm_topk_prob": False}, "qk_norm = false"),
        ({**SIX_HEADS, "qk_norm": False, "model_type": "llama"}, "not a multiple of num_attention_heads"),
        ({**MOE, "sliding_window": 4, "window_pattern": "SL"}, "window_pattern"),
    ],
)
def test_what_has_no_form_is_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = random_model(**change)
    with pytest.raises(UsageError, match=named):
        save_hf(model, model.config, None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def tokenizer_file(folder: Path, special: str = "<|endoftext|>") -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[special], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog. " * 5], trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_an_end_token_above_the_vocabulary_is_refused(tmp_path: Path) -> None:
    file = tokenizer_file(tmp_path / "tokenizer")
    content = json.loads(file.read_text())
    content["added_tokens"] = []
    content["model"]["vocab"]["</s>"] = content["model"]["vocab"].pop("<|endoftext|>") + 400
    file.write_text(json.dumps(content))
    model = random_model(vocab_size=300)
    with pytest.raises(UsageError, match="has token 400, above the model's vocab_size 300"):
        save_hf(model, model.config, file, tmp_path / "hf")


@pytest.mark.parametrize("case", ["qwen3", "gpt2", "llama", "qwen3 moe"])
def test_auto_classes_just_work(case: str, tmp_path: Path) -> None:
    file = tokenizer_file(tmp_path / "tokenizer")
    model = random_model(**CASES[case], vocab_size=300)
    out = save_hf(model, model.config, file, tmp_path / "hf", torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.bfloat16
    text = "The quick  brown fox: 42 naïve 猫.\n\tEnd "
    ids = tokenizer(text)["input_ids"]
    assert ids == Tokenizer.from_file(str(file)).encode(text).ids and tokenizer.decode(ids) == text
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == theirs.config.eos_token_id == end
    assert theirs.generation_config.eos_token_id == end
    assert tokenizer("a<|endoftext|>b")["input_ids"][1] == end
    written = theirs.generate(**tokenizer("the", return_tensors="pt"), max_new_tokens=3)
    assert written.shape[1] >= 2


@pytest.mark.parametrize(("bos", "expected"), [("Q", "Q"), (None, "<|endoftext|>")])
def test_the_begin_token_is_that_of_the_tokenizer(bos: Any, expected: str, tmp_path: Path) -> None:
    """Q is in the vocabulary, but not among the added tokens. Without a begin token, a text follows an end."""
    file = tokenizer_file(tmp_path / "tokenizer")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": "<|endoftext|>"}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    model = random_model(vocab_size=300)
    out = save_hf(model, model.config, file.parent, tmp_path / "hf")
    begin = Tokenizer.from_file(str(file)).token_to_id(expected)
    assert transformers.AutoTokenizer.from_pretrained(out).bos_token_id == (None if bos is None else begin)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["bos_token_id"] == begin
    assert load_model(out).start_token == begin


def test_chat_template_comes_along(tmp_path: Path) -> None:
    file = tokenizer_file(tmp_path / "tokenizer")
    (file.parent / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    (file.parent / "additional_chat_templates").mkdir()
    (file.parent / "additional_chat_templates/tool_use.jinja").write_text("{{ tools | length }} tools")
    model = random_model(vocab_size=300)
    out = save_hf(model, model.config, file.parent, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "[user]hi"
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.apply_chat_template(talk, tools=[tool], tokenize=False) == "1 tools"


def test_bad_tokenizers_are_named(tmp_path: Path) -> None:
    model = random_model(vocab_size=300)
    with pytest.raises(UsageError, match="does not exist"):
        save_hf(model, model.config, tmp_path / "none.json", tmp_path / "hf")
    with pytest.raises(UsageError, match=r"no end-of-text token. Looked for <\|endoftext\|>"):
        save_hf(model, model.config, tokenizer_file(tmp_path / "other", "<s>"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".hf*"))


def test_export_replaces_an_export(tmp_path: Path) -> None:
    one, two = random_model(), random_model(num_hidden_layers=3)
    out = save_hf(one, one.config, None, tmp_path / "hf")
    save_hf(two, two.config, None, out)
    assert load_hf(out)[0].num_hidden_layers == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("name", ["thesis.txt", "config.json", "folder/thesis.txt", "deskside.json"])
@pytest.mark.parametrize("exported", [True, False])
def test_a_file_that_a_person_added_or_changed_is_never_replaced(
    name: str, exported: bool, tmp_path: Path
) -> None:
    model = random_model()
    out = tmp_path / "hf"
    if exported:
        save_hf(model, model.config, None, out)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text('{"years": "of work"}')
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match="did not write or which was changed since; move it away"):
        save_hf(model, model.config, None, out)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_file_that_comes_while_the_export_is_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model()
    out = save_hf(model, model.config, None, tmp_path / "hf")
    delete = files.delete_files

    def late(old: Path, own: set[str]) -> None:
        (old / "thesis.txt").write_text("years of work")
        delete(old, own)

    monkeypatch.setattr(files, "delete_files", late)
    with pytest.raises(RunError, match=r"was replaced; .*\.old"):
        save_hf(model, model.config, None, out)
    kept = [p for p in tmp_path.rglob("*") if p.name == "thesis.txt"]
    assert len(kept) == 1 and kept[0].read_text() == "years of work"
    assert load_hf(out)[0] == model.config.model_copy(update={"initializer_range": 0.02})


def test_export_into_a_link(tmp_path: Path) -> None:
    """The link may lead to a new place, an empty directory or an export. Its target is written."""
    model = random_model()
    (tmp_path / "disk").mkdir()
    (tmp_path / "hf").symlink_to(tmp_path / "disk" / "hf", target_is_directory=True)
    for made in (False, True, True):
        save_hf(model, model.config, None, tmp_path / "hf")
        assert (tmp_path / "hf").is_symlink()
        loaded, _ = load_hf(tmp_path / "disk" / "hf")
        assert loaded == model.config.model_copy(update={"initializer_range": 0.02})
        assert [p.name for p in (tmp_path / "disk").iterdir()] == ["hf"], made


@pytest.mark.parametrize("out", [".", "..", "/proc"])
def test_a_directory_that_cannot_be_renamed(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model()
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    with pytest.raises(
        UsageError, match=r"is (or contains the current directory|a mount point), and so cannot be replaced"
    ):
        save_hf(model, model.config, None, Path(out))
    assert list(tmp_path.rglob("*")) == [tmp_path / "in"]


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_the_files_follow_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    model = random_model()
    before = os.umask(mask)
    try:
        out = save_hf(model, model.config, None, tmp_path / "hf")
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in out.iterdir()} == {p.name: mode for p in out.iterdir()}
    assert out.stat().st_mode & 0o777 == mode | (mode & 0o444) >> 2


def test_a_failed_export_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    out = save_hf(model, model.config, None, tmp_path / "hf")
    before = (out / "model.safetensors").read_bytes()

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deskside.weights.hf.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_hf(model, model.config, None, out)
    assert (out / "model.safetensors").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [
        "hf"
    ]


def broken(out: Path, what: str) -> None:
    weights, config = out / "model.safetensors", out / "config.json"
    state, settings = load_file(weights), json.loads(config.read_text())
    if what == "missing tensor":
        del state["model.norm.weight"]
    elif what == "extra tensor":
        state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    elif what == "wrong shape":
        settings["intermediate_size"] = 47
    elif what == "other architecture":
        settings["model_type"] = "mamba"
    elif what == "scaled rope":
        settings["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    elif what == "impossible":
        settings["num_key_value_heads"] = 3
    elif what == "incomplete":
        del settings["hidden_size"]
    save_file(state, weights)
    config.write_text(json.dumps(settings))
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif what == "no weights":
        weights.unlink()
    elif what == "not json":
        config.write_text("{")


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("missing tensor", RunError, r"no tensor model\.norm\.weight"),
        ("extra tensor", UsageError, r"has 1 tensor that .*q_proj\.bias"),
        ("wrong shape", RunError, r"gate_proj\.weight is \(48, 32\)"),
        ("other architecture", UsageError, "'mamba' is not supported"),
        ("scaled rope", UsageError, "rope_type 'dynamic'"),
        ("impossible", RunError, "num_key_value_heads"),
        ("incomplete", RunError, "lacks 'hidden_size'"),
        ("truncated", RunError, "cannot be read"),
        ("no weights", UsageError, "no model.safetensors"),
        ("not json", RunError, "not JSON"),
        ("no directory", UsageError, "does not exist"),
    ],
)
def test_bad_directories_are_named(what: str, kind: type[Exception], message: str, tmp_path: Path) -> None:
    model = random_model()
    out = save_hf(model, model.config, None, tmp_path / "hf")
    if what == "no directory":
        out = tmp_path / "nowhere"
    else:
        broken(out, what)
    with pytest.raises(kind, match=message):
        load_hf(out)


def test_dtype_of_the_file(tmp_path: Path) -> None:
    model: Transformer = random_model()
    save_hf(model, ModelConfig(**TINY), None, tmp_path / "hf", torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    _, loaded = load_hf(tmp_path / "hf")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = random_model()
    with torch.no_grad():
        model.embed.weight[3, 4] = -7e4
    with pytest.raises(RunError, match="is beyond float16"):
        save_hf(model, model.config, None, tmp_path / "hf", torch.float16)
    assert not list(tmp_path.iterdir())
    save_hf(model, model.config, None, tmp_path / "hf", torch.bfloat16)
