"""MXFP4 compared with ml_dtypes and transformers."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from deskside.utils.errors import RunError
from deskside.weights.hf import load_hf
from deskside.weights.mxfp4 import dequantize_mxfp4

EXPERTS, WIDTH, LAYERS = 4, 64, 2


def packed(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes, and exponents near those of weights of size one."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, (EXPERTS, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_values_are_those_of_ml_dtypes() -> None:
    blocks, scales = packed(8, 64, 0)
    codes = np.stack([blocks.numpy() & 15, blocks.numpy() >> 4], axis=-1).reshape(EXPERTS, 8, 2, 32)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    powers = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    expected = (values * powers[..., None]).reshape(EXPERTS, 8, 64)
    assert len(np.unique(codes)) == 16
    np.testing.assert_array_equal(dequantize_mxfp4(blocks, scales).numpy(), expected)


def quantized_checkpoint(folder: Path) -> GptOssForCausalLM:
    """Write a checkpoint like the published ones, and return transformers' model with the weights that it holds."""
    shape = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "head_dim": 16}
    config = GptOssConfig(
        **shape, num_key_value_heads=2, num_hidden_layers=LAYERS, num_local_experts=EXPERTS, num_experts_per_tok=2,
        vocab_size=61, max_position_embeddings=64, sliding_window=5, initializer_range=0.3,
    )  # fmt: skip
    theirs = GptOssForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        experts = theirs.model.layers[layer].mlp.experts
        for name, rows in (("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)):
            blocks, scales = packed(rows, WIDTH, layer)
            prefix = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[prefix]
            tensors |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
            getattr(experts, name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(content))
    return theirs


def test_a_published_checkpoint_loads_as_in_transformers(tmp_path: Path) -> None:
    theirs = quantized_checkpoint(tmp_path)
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    _, ours = load_hf(tmp_path)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_blocks_that_do_not_fit_their_scales_are_named(tmp_path: Path) -> None:
    quantized_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="down_proj: MXFP4 blocks"):
        load_hf(tmp_path)
