import time

import torch

from deskside.kernels.matmul_peak import measure_matmul_peak


def test_cpu_peak_is_a_speed_of_this_machine() -> None:
    start = time.perf_counter()
    peak = measure_matmul_peak("cpu", torch.float32, size=512)
    assert time.perf_counter() - start < 5
    left = torch.randn(512, 512)
    start = time.perf_counter()
    left @ left
    once = 2 * 512**3 / (time.perf_counter() - start)
    assert 1e8 < peak < 1e14
    assert 0.02 < once / peak < 50
