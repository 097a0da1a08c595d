"""Sample facts and results of a GPU examination, which the tests of the advice and of the table modify."""

from copy import deepcopy
from typing import Any

GIB = 2**30
FACTS: dict[str, Any] = {
    "deskside": "0.1.0",
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "platform": "Linux",
    "cpu": "AMD Ryzen 9 7950X 16-Core Processor",
    "cpu_cores": 16,
    "torch_threads": 16,
    "memory_gib": 62.7,
    "disk_free_gib": 412.0,
    "device": "cuda",
    "packages": {"triton": "3.6.0"},
    "driver": "580.95.05",
    "driver_cuda": "13.0",
    "cards": 1,
    "error": "",
    "cuda": "13.0",
    "cudnn": 91900,
    "cudnn_package": "9.19.0.56",
    "cuda_error": "",
    "visible_devices": None,
    "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    "memory_available_gib": 55.2,
    "memory_limit_gib": None,
    "shm": {"path": "/dev/shm", "total_gib": 31.3, "free_gib": 31.3},
    "temporary": {"path": "/tmp", "total_gib": 900.0, "free_gib": 412.0},
    "triton": "3.6.0",
    "c_compiler": "/usr/bin/gcc",
    "cxx_compiler": "/usr/bin/g++",
    "python_headers": True,
    "libraries": {},
    "attention_backends": [],
    "gpus": [
        {
            "index": 0,
            "name": "NVIDIA GeForce RTX 5090",
            "uuid": "GPU-1",
            "compute_capability": "12.0",
            "multiprocessors": 170,
            "usable_bytes": int(31.4 * GIB),
            "total_bytes": int(31.8 * GIB),
            "free_bytes": int(31.0 * GIB),
            "used_bytes": int(0.8 * GIB),
            "processes": [],
            "power": {
                "limit_watts": 575.0,
                "default_watts": 575.0,
                "lowest_watts": 400.0,
                "highest_watts": 600.0,
                "drawn_watts": 30.0,
            },
            "pcie": {"generation": 1, "lanes": 16, "highest_generation": 5, "highest_lanes": 16},
            "data_sheet": {
                "name": "RTX 5090",
                "bf16_flops": 209.5e12,
                "bandwidth": 1.79e12,
                "watts": 575.0,
                "source": "published",
            },
        }
    ],
}


def row(id: str, group: str, name: str, verdict: str = "works", **more: Any) -> dict[str, Any]:
    return {"id": id, "group": group, "name": name, "verdict": verdict, "reason": "", "seconds": 1.0} | more


def flops(value: float) -> dict[str, Any]:
    return {"value": value, "unit": "FLOP/s", "source": "measured"}


def _attention(name: str, milliseconds: float, kv_heads: int = 3) -> dict[str, Any]:
    details = {"heads": 12, "kv_heads": kv_heads, "head_dim": 64, "milliseconds": milliseconds}
    return row(
        f"attention_{name}",
        "attention",
        name.replace("_", ", "),
        errors={"output": 3e-3, "dq": 4e-3, "dk": 4e-3, "dv": 3e-3},
        tolerance=2e-2,
        speed=flops(0.36 / milliseconds * 1e15),
        details=details,
    )


def _recipe(name: str, error: float, emulated_because: str = "") -> dict[str, Any]:
    errors = {"output": error / 2, "input gradient": error, "weight gradient": error}
    details = {"native": not emulated_because, "emulated_because": emulated_because}
    return row(f"recipe_{name}", "precision", name, errors=errors, tolerance=0.25, details=details)


RESULTS: list[dict[str, Any]] = [
    row(
        "bf16",
        "matmul",
        "BF16",
        speed=flops(205e12),
        errors={"output": 2.9e-3, "input gradient": 2.9e-3},
        details={"watts": 571.0, "celsius": 62, "throttled": True},
    ),
    row("fp16", "matmul", "FP16", speed=flops(206e12), errors={"output": 3.6e-4}),
    row("fp32", "matmul", "FP32", speed=flops(82e12), errors={"output": 3e-7}),
    row("fp8_tensor", "matmul", "torch FP8 tensor", speed=flops(398e12), errors={"output": 3.7e-2}),
    row(
        "fp8_row",
        "matmul",
        "torch FP8 row",
        "unsupported",
        reason="CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic( ltHandle, "
        "computeDesc.descriptor(), Adesc.descriptor(), Bdesc.descriptor(), Cdesc.descriptor())`",
    ),
    row("mxfp8", "matmul", "torch MXFP8", speed=flops(640e12), errors={"output": 3.8e-2}),
    row(
        "nvfp4",
        "matmul",
        "torch NVFP4",
        "wrong numbers",
        reason="input gradient is all zero",
        errors={"output": 0.13, "input gradient": None},
        speed=flops(1210e12),
    ),
    _recipe("fp8-delayed", 5.9e-2),
    _recipe("fp8-rowwise", 3.7e-2, "cannot run here: CUBLAS_STATUS_NOT_SUPPORTED"),
    _recipe("nvfp4", 1.8e-1, "no NVFP4 products in this torch"),
    row(
        "copy",
        "memory",
        "device copy",
        speed={"value": 1.53e12, "unit": "B/s", "source": "measured"},
        details={
            "link": {
                "host_to_device": {"value": 5.5e10, "unit": "B/s", "source": "measured"},
                "generation": 5,
                "lanes": 16,
                "highest_generation": 5,
                "highest_lanes": 16,
            }
        },
    ),
    _attention("reference", 61.0),
    _attention("sdpa", 3.1),
    _attention("cudnn", 2.9),
    row(
        "attention_cudnn_window",
        "attention",
        "cudnn, window",
        "unsupported",
        reason="has no sliding window",
        declared=True,
    ),
    _attention("efficient", 2.0, kv_heads=12),
    _attention("flex_window", 1.4),
    row("step_fp32", "training", "FP32 step", errors={"loss": 1e-7, "gradients": 2e-6}),
    row("step_bf16", "training", "BF16 step", errors={"loss": 1e-5, "gradients": 2e-2}),
    row(
        "fused",
        "training",
        "hand-written, BF16",
        errors={"loss": 1e-5, "gradients": 2e-2},
        details={"compile_seconds": 4.0, "times_eager": 2.1},
        speed={"value": 1.2e6, "unit": "tokens/s", "source": "measured"},
    ),
    row(
        "compile",
        "training",
        "torch.compile, BF16",
        errors={"loss": 1e-5, "gradients": 2e-2},
        details={"compile_seconds": 21.0, "times_eager": 1.63},
        speed={"value": 9e5, "unit": "tokens/s", "source": "measured"},
    ),
    row("bitsandbytes", "libraries", "bitsandbytes", "not installed", reason="pip install bitsandbytes"),
    row(
        "te_nvfp4",
        "libraries",
        "transformer-engine NVFP4",
        "crashed",
        reason="the process was ended by SIGSEGV",
    ),
]


def facts(**changes: Any) -> dict[str, Any]:
    return {**deepcopy(FACTS), **changes}


def results(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results, with changes to those that have the given ids."""
    return [result | changes.get(result["id"], {}) for result in deepcopy(RESULTS)]
