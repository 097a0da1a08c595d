"""The shared expert of a mixture: an MLP that every token uses, in addition to the experts that the router chooses.

In dots.llm1, its output is added to that of the experts. In Qwen2-MoE, its output is first multiplied by a gate, the
sigmoid of one more projection.
"""

import torch
from torch import Tensor, nn

from deskside.kernels.functional import activate, at_least_float32
from deskside.ops.composite import Activation
from deskside.ops.linear import Linear


class SharedExpert(nn.Module):
    """An MLP: activation(gate) * up, or activation(up) if not `gated`, then the down projection. (N, D) -> (N, D).

    has_token_gate: multiply the output of each token by a gate.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        gated: bool,
        has_token_gate: bool,
    ):
        super().__init__()
        self.activation = activation
        names = ("gate_proj", "up_proj") if gated else ("up_proj",)
        self.input = Linear(hidden_size, [(name, intermediate_size) for name in names])
        self.output = Linear(intermediate_size, [("down_proj", hidden_size)])
        self.token_gate = Linear(hidden_size, [("token_gate", 1)]) if has_token_gate else None

    def forward(self, x_ND: Tensor) -> Tensor:
        inner = self.input(x_ND)
        out_ND = self.output(activate(self.activation, *inner.chunk(len(self.input.slices), dim=-1)))
        if self.token_gate is None:
            return out_ND
        logits_N1 = self.token_gate(x_ND)
        return out_ND * torch.sigmoid(logits_N1.to(at_least_float32(logits_N1))).to(out_ND.dtype)
