"""A GPU and a CPU for the tests of the phases before training."""

from deskside.utils.machine import Machine

CARD = Machine(
    "NVIDIA GeForce RTX 4090",
    "cuda",
    int(23.5 * 2**30),
    0,
    "580.95",
    450,
    "2.13.0",
    "13.0",
    "3.6.0",
    "0.1.0+x",
)
CPU = Machine("Some CPU", "cpu", 16 * 2**30, 2, None, None, "2.13.0", None, None, "0.1.0+x")
