"""Presets: their shapes, parameter counts equal to those of transformers, and files that build on others."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3MoeConfig

from deskside.budget.shape import active_params, num_params
from deskside.config import presets
from deskside.config.depth_series import of_depth
from deskside.config.merge import build
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError

# layers, hidden size, heads, key-value heads, head channels, MLP
SHAPES = {
    "124m": (12, 768, 12, 3, 64, 2048),
    "124m-windows": (12, 768, 6, 2, 128, 2048),
    "340m": (24, 1024, 16, 4, 64, 2816),
    "710m": (36, 1280, 20, 5, 64, 3456),
    "1.3b": (48, 1536, 24, 6, 64, 4096),
    "3b": (28, 3072, 24, 8, 128, 8192),
    "7.2b": (36, 4096, 32, 8, 128, 12288),
    "d12": (12, 768, 6, 6, 128, 2048),
    "d14": (14, 896, 7, 7, 128, 2432),
    "d16": (16, 1024, 8, 8, 128, 2816),
    "d18": (18, 1152, 9, 9, 128, 3072),
    "d20": (20, 1280, 10, 10, 128, 3456),
    "small": (8, 512, 8, 2, 64, 2048),
    "medium": (12, 768, 12, 3, 64, 3072),
    "large": (16, 1024, 16, 4, 64, 4096),
    "xlarge": (20, 1280, 20, 5, 64, 5120),
}


def test_every_preset_is_in_shapes() -> None:
    assert set(presets.names()) == (
        {name for name in SHAPES if name[0] != "d"} | {"demo", "gpt2"} | EXPERTS.keys()
    )


@pytest.mark.parametrize("name", SHAPES)
def test_shape_and_parameters(name: str) -> None:
    """The parameter count equals that of Qwen3 in transformers and that of our model on the meta device."""
    model = build(presets.layers(name)).model
    layers, hidden, heads, kv_heads, head_dim, ffn = SHAPES[name]
    theirs = Qwen3Config(
        vocab_size=32768,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        counted = sum(p.numel() for p in AutoModelForCausalLM.from_config(theirs).parameters())
        ours = sum(p.numel() for p in Transformer(model).parameters())
    assert num_params(model) == ours == counted
    assert model.max_position_embeddings == build(presets.layers(name)).batch.sequence_length == 2048
    assert (model.num_hidden_layers, model.num_attention_heads) == (layers, heads)


# layers, hidden size, heads, key-value heads, head channels, an expert's width, parameters, sequence length
EXPERTS = {
    "indicmoe-60m": (10, 256, 4, 1, 64, 512, 58_878_464, 2048),
    "indicmoe-300m": (12, 768, 12, 3, 64, 896, 293_236_992, 4096),
    "indicmoe-3b": (24, 2048, 16, 4, 128, 2176, 3_025_117_184, 16384),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_parameters_with_experts(name: str) -> None:
    """The parameter count equals Qwen3-MoE's in transformers. The dense model of the
    same active size differs only by the router.
    """
    config = build(presets.layers(name))
    model = config.model
    layers, hidden, heads, kv_heads, head_dim, width, parameters, length = EXPERTS[name]
    shape = {
        "vocab_size": 50304,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**shape, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=width)
        )
        dense = AutoModelForCausalLM.from_config(
            Qwen3Config(**shape, intermediate_size=2 * width, tie_word_embeddings=False)
        )
    assert num_params(model) == sum(p.numel() for p in theirs.parameters()) == parameters
    assert model.max_position_embeddings == config.batch.sequence_length == length
    override = {"model": {"num_experts": 0, "intermediate_size": 2 * width}}
    overridden = build([*presets.layers(name), override]).model
    router = layers * 8 * hidden
    assert num_params(overridden) == sum(p.numel() for p in dense.parameters())
    assert num_params(overridden) + router == active_params(model)
    if name != "indicmoe-3b":
        comment = resources.files("deskside.config").joinpath(f"presets/{name}.toml").read_text("utf-8")
        assert f"--model.intermediate_size {2 * width}" in comment


def test_gpt2_is_gpt2() -> None:
    model = build(presets.layers("gpt2")).model
    with torch.device("meta"):
        counted = sum(p.numel() for p in GPT2LMHeadModel(GPT2Config()).parameters())
    assert num_params(model) == counted == 124_439_808


def test_demo_is_small_and_short() -> None:
    config = build(presets.layers("demo"))
    assert num_params(config.model) < 2_000_000
    assert str(config.schedule.length) == "3m"
    assert config.data.sources == ("bundled:tiny_shakespeare.txt",)


@pytest.mark.parametrize("number", [-2, 0, 1, 7, 13])
def test_an_invalid_depth(number: int) -> None:
    with pytest.raises(UsageError, match="must be even and at least 2"):
        of_depth(number)


def test_a_file_builds_on_a_file_that_builds_on_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide.toml").write_text(
        'base = "124m"\n[model]\nintermediate_size = 3072\n[batch]\ntokens = 65536\n'
    )
    deep = tmp_path / "deep.toml"
    deep.write_text('base = "wide.toml"\n[model]\nnum_hidden_layers = 14\n')
    monkeypatch.chdir(tmp_path.parent)  # `base` is relative to its file
    model = build(presets.layers(str(deep))).model
    assert (model.num_hidden_layers, model.intermediate_size, model.num_key_value_heads) == (14, 3072, 3)
    (tmp_path / "depth.toml").write_text('base = "d14"\nseed = 4\n')
    assert build(presets.layers(str(tmp_path / "depth.toml"))).model.hidden_size == 896


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model\n", "not valid TOML: .*line 1"),
        ("seed = \n", "not valid TOML"),
        ("seed = 1\nseed = 2\n", "not valid TOML"),
        ("base = 'nope'\n", "nope: no such preset; use one of 1.3b, 124m"),
        ("base = 'me.toml'\n", "me.toml: builds on itself"),
        ("base = 124\n", "base: .*124.* must be the name of a preset or file"),
        ("base = 'gone.toml'\n", "gone.toml: no such file"),
        ("[optim]\nnam = 'muon'\n", "optim.nam: there is no such option; did you mean optim.name"),
        ("model = 3\n", "model: "),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "me.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        build(presets.layers(str(file)))
    assert "\n" not in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.toml: no such file; presets that ship are 1.3b"):
        presets.layers(str(tmp_path / "gone.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (folder, binary):
        with pytest.raises(UsageError, match="cannot be read as a TOML file"):
            presets.layers(str(path))
    with pytest.raises(UsageError, match="125m: no such preset"):
        presets.layers("125m")
