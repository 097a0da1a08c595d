"""The end of a decoding step, after the model: the most probable tokens, and the new state of the rows.

In torch these are a dozen kernels, each of which takes longer to start than to compute.
"""

import torch
from torch import Tensor

FIXED_POINT_ONE = 2.0**52  # probability 1 in fixed point, in which top_p sums
NOT_FINITE = -1  # in place of a token, if the logits contain NaN or +inf, or only -inf


def greedy_tokens(logits_BV: Tensor) -> Tensor:
    """Return the token of the largest logit in each row, the first of several, or NOT_FINITE: int64 (B,)."""
    if logits_BV.is_cuda:
        from deskside.kernels.decode_step_triton import greedy_tokens as kernel

        return kernel(logits_BV)
    token_B = logits_BV.argmax(-1)  # the first NaN, if there is one
    largest_B = logits_BV.gather(1, token_B[:, None])[:, 0]
    return torch.where(largest_B.isfinite(), token_B, NOT_FINITE)


def write_state(
    state_S3: Tensor, lanes_B: Tensor, token_B: Tensor, length_B: Tensor, count_B: Tensor, added: int = 0
) -> None:
    """Store the newest token, or 0 for NOT_FINITE, length and count of some rows, all int64.

    added: number to add to lengths and counts.

    Rows that occur several times in `lanes` may get any of their values. The last row of the state stays zero.
    """
    if state_S3.is_cuda:
        from deskside.kernels.decode_step_triton import write_state as kernel

        kernel(state_S3, lanes_B, token_B, length_B, count_B, added)
    else:
        state_S3[lanes_B] = torch.stack((token_B.clamp(min=0), length_B + added, count_B + added), dim=1)
        state_S3[-1].zero_()
