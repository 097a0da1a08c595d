"""What the products of quack-kernels compute, in torch, and a place to put it."""

import pytest
import torch
from torch import Tensor

from deskside.kernels import quack_matmul
from deskside.kernels.quack_matmul import MatmulTile

TILE = MatmulTile(128, 128, True, 2)


def launch(name: str, tile: MatmulTile, *operands: Tensor, out: dict[str, Tensor]) -> None:
    """Like `quack_matmul._launch`, in float32 or wider until the results are rounded."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in operands]
    product = wide[0] @ wide[1]
    if name == "plain":
        out["D"].copy_(product)
    elif name == "gate":
        out["D"].copy_(product)
        out["hidden"].copy_(torch.nn.functional.silu(product[:, 0::2]) * product[:, 1::2])
    else:
        gate, up = (wide[2][:, i::2].clone().requires_grad_() for i in range(2))
        torch.autograd.backward(torch.nn.functional.silu(gate) * up, product)
        assert gate.grad is not None and up.grad is not None
        out["D"].copy_(torch.stack((gate.grad, up.grad), 2).flatten(1))


def use_reference(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compute the products of the package in torch. Returns the list to which the name of each is added."""
    launched: list[str] = []

    def recorded(name: str, tile: MatmulTile, *operands: Tensor, out: dict[str, Tensor]) -> None:
        launched.append(name)
        with torch.enable_grad():
            launch(name, tile, *(t.detach() for t in operands), out=out)

    monkeypatch.setattr(quack_matmul, "_launch", recorded)
    return launched
