"""The kernels of a decoding step's layers and end in Triton's interpreter, compared with float64 and torch."""

import torch

from deskside.kernels import decode_step, decode_step_triton, few_tokens, few_tokens_triton
from deskside.kernels.few_tokens import AddNorm


def products() -> dict[str, float]:
    """Return the largest relative error of the output and of the sum by case."""
    found = {}
    for N, K, F in (
        (1, 48, 24),
        (1, 2100, 5),
        (2, 96, 40),
        (4, 2100, 9),
        (5, 40, 6),
        (16, 300, 17),
        (33, 128, 5),
        (64, 96, 1),
    ):
        for activation, gated in ((None, False), ("silu", True), ("gelu_new", False)):
            for norm in (False, True):
                x, weight = torch.randn(N, K), torch.randn(F * (2 if gated else 1), K) / K**0.5
                bias = torch.randn(len(weight)) if norm else None
                add_norm = AddNorm(torch.randn(N, K), torch.rand(K) + 0.5, 1e-6) if norm else None
                ours = few_tokens_triton.launch(x, add_norm, weight, bias, activation, gated)
                wide_bias = None if bias is None else bias.double()
                function = (weight.double(), wide_bias, activation, gated)
                if add_norm is None:
                    truth = x.double(), few_tokens.linear(x.double(), *function)
                else:
                    wide = AddNorm(add_norm.delta_NK.double(), add_norm.weight_K.double(), 1e-6)
                    truth = few_tokens.add_norm_linear(x.double(), wide, *function)
                found[f"{N} x {K} x {F}, {activation}, norm {norm}"] = max(
                    float((a - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)
                )
    return found


def step_end() -> dict[str, float]:
    """Return the number of different values by case."""
    found = {}
    for V in (5, 4096, 10_000):
        logits = torch.randn(9, V + 3, dtype=torch.bfloat16)[:, :V]
        logits[1, 2] = logits[1, 4] = 9.0
        logits[2, V - 1] = float("nan")
        logits[3] = float("-inf")
        logits[4, 1] = float("inf")
        logits[5, 3] = float("-inf")
        logits[6] = -3.0
        ours, truth = decode_step_triton.greedy_tokens(logits), decode_step.greedy_tokens(logits)
        assert truth[1:5].tolist() == [2, -1, -1, -1] and truth[6] == 0
        found[f"greedy of {V}"] = float((ours != truth).sum())
    lanes, values = torch.randperm(90)[:70], torch.randint(-1, 2**40, (3, 70))
    lanes[-3:] = 90  # padding: the last row of the state
    state = torch.randint(0, 9, (91, 3))
    state[-1] = 0
    for added in (0, 1):
        ours, truth = state.clone(), state.clone()
        token, length, count = values.T.contiguous().T  # with strides
        decode_step_triton.write_state(ours, lanes, token, length, count, added)
        decode_step.write_state(truth, lanes, token, length, count, added)
        found[f"state, {added} added"] = float((ours != truth).sum())
    return found
