"""A CUDA context for the thread that runs a GPU's backward."""

import torch


def give_context(device: torch.device | str) -> None:
    """Have autograd's thread of this device launch one ordinary kernel. Nothing on a CPU.

    That thread begins without a CUDA context: torch sets its device, but asks CUDA for that only where it is not the
    current one already, which the first GPU is. The runtime binds the context at the first kernel that it launches.
    cuBLAS goes by the driver and does not, so a process whose first backward begins with a product is warned of
    "no current CUDA context" (pytorch/pytorch 92055, 120131, 155900).
    """
    device = torch.device(device)
    if device.type != "cuda":
        return
    with torch.enable_grad():
        one = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.grad(one.exp(), one)  # backward: a multiplication
