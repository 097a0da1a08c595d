"""A compact trainer that a skilled person could write in an afternoon, as a baseline for every framework.

It has the shape of the configuration (Qwen3's block). It is fast because it computes q, k and v in one product and gate
and up in another, casts float32 weights in the forward pass, uses cuDNN attention, keeps the loss inside the graph, and
wraps everything in one torch.compile.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.config.model import INITIALIZER_RANGE, ModelConfig


class CastLinear(nn.Linear):
    """Linear layer with float32 weights that multiplies in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class Norm(nn.Module):
    """RMSNorm in float32. (..., size) -> (..., size)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Layer(nn.Module):
    """One block on x (B, T, D)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, C = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, C
        self.attention_norm, self.mlp_norm = Norm(D, config.norm_eps), Norm(D, config.norm_eps)
        self.qkv = CastLinear(D, (self.heads + 2 * self.kv_heads) * C, bias=False)
        self.q_norm, self.k_norm = Norm(C, config.norm_eps), Norm(C, config.norm_eps)
        self.out = CastLinear(self.heads * C, D, bias=False)
        self.gate_up = CastLinear(D, 2 * config.intermediate_size, bias=False)
        self.down = CastLinear(config.intermediate_size, D, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(self.attention_norm(x_BTD)).view(B, T, -1, self.head_dim).split(heads, dim=2)
        q, k = apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin)
        o_BHTC = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        x_BTD = x_BTD + self.out(o_BHTC.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.gate_up(self.mlp_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(F.silu(gate) * up)


class Prototype(nn.Module):
    """Language model: tokens, targets (B, T) -> mean loss, computed in `dtype` with float32 weights."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, sequence_length: int, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.head = CastLinear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INITIALIZER_RANGE)
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(sequence_length).float(), config.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos()[None, :, None])
        self.register_buffer("sin", angles.sin()[None, :, None])

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT).to(self.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.cos, self.sin)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def apply_rope(x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding. Channels c and c + C / 2 are a pair."""
    first, second = x_BTHC.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHC.dtype)
