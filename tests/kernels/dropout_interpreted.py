"""The dropout kernel in Triton's interpreter, compared with plain torch."""

import torch
import triton
import triton.language as tl

from deskside.kernels import dropout, dropout_triton

POSITION = (2**62 + 12345, 7, 123456, 2**32 - 5)  # the token's number wraps around at 32 bits
COUNTER = (0xFFFFFFF0, 0x85A308D3, 0x13198A2E, 0x03707344)


def kernels() -> dict[str, list[float]]:
    """Return, by channels and type, the number of values that only one of them drops, and
    the others' largest relative difference.
    """
    found = {}
    for channels, dtype in ((768, torch.float32), (300, torch.bfloat16), (5, torch.float32)):
        x = torch.randn(3, 11, channels, generator=torch.Generator().manual_seed(0)).to(dtype)
        position = torch.tensor(POSITION)
        ours = dropout_triton.dropout(x, position, dropout.threshold(0.2)).double()
        plain = dropout.dropout(x, position, 0.2).double()
        both = (plain != 0) & (ours != 0)
        found[f"{channels} {dtype}"] = [
            float(((plain == 0) != (ours == 0)).sum()),
            float(((ours - plain).abs() / plain.abs())[both].max()),
        ]
    return found


@triton.jit
def _philox(SEED, COUNTER, OUT, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at, zeros = tl.arange(0, N), tl.zeros((N,), tl.uint32)
    words = tl.philox(
        tl.load(SEED),
        (tl.load(COUNTER) + at).to(tl.uint32),
        zeros + tl.load(COUNTER + 1).to(tl.uint32),
        zeros + tl.load(COUNTER + 2).to(tl.uint32),
        zeros + tl.load(COUNTER + 3).to(tl.uint32),
    )
    for word in tl.static_range(4):
        tl.store(OUT + 4 * at + word, words[word].to(tl.int64))


def philox() -> bool:
    """Return True if plain torch computes the same words as Triton's own generator."""
    theirs, seed, counter = (
        torch.zeros(8, 4, dtype=torch.int64),
        torch.tensor(POSITION[0]),
        torch.tensor(COUNTER),
    )
    _philox[(1,)](seed, counter, theirs, 8)
    first, *others = counter
    words = dropout.philox((first + torch.arange(8), *others), (seed & dropout.MASK, seed >> 32))
    return all(torch.equal(word, theirs[:, i]) for i, word in enumerate(torch.broadcast_tensors(*words)))


def both() -> tuple[dict[str, list[float]], bool]:
    """Return both comparisons, so that they run in one process."""
    return kernels(), philox()
