"""Identification of this machine, compared with torch itself and with a fake NVML."""

import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import deskside
from deskside.utils import machine as identity
from deskside.utils.errors import RunError, UsageError

QUICK = """
import sys
from deskside.utils.machine import this_machine
this_machine()
assert not {"torch", "numpy", "pydantic"} & set(sys.modules), sorted(sys.modules)
"""


class NVMLError(Exception):
    pass


class Nvml(types.ModuleType):
    """The part of pynvml that is used. `cards` are (name, total, reserved, watts or None). used: bytes of other
    programs; old: a driver that does not report its reserved memory.
    """

    NVMLError = NVMLError
    nvmlMemory_v2 = 2

    def __init__(self, cards: list[tuple[str, int, int, int | None]], works: bool = True) -> None:
        super().__init__("pynvml")
        self.cards, self.works = cards, works
        self.used, self.old = 0, False

    def nvmlInit(self) -> None:
        if not self.works:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-second":
            raise NVMLError("Not Found")
        return 1

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.cards[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        _, total, reserved, _ = self.cards[handle]
        free = total - reserved - self.used
        if version is None:
            return types.SimpleNamespace(total=total, free=free)
        if self.old:
            raise NVMLError("Function Not Found")
        return types.SimpleNamespace(total=total, reserved=reserved, free=free)

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        watts = self.cards[handle][3]
        if watts is None:
            raise NVMLError("Not Supported")
        return 1000 * watts


ONE = [("NVIDIA GeForce RTX 4090", 24564 * 2**20, 500 * 2**20, 450)]
MIXED = [("NVIDIA GeForce RTX 3060", 12 * 2**30, 0, 170), ("NVIDIA GeForce RTX 4090", 24 * 2**30, 0, None)]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(identity, "_torch_versions", lambda: ("2.11.0+cu128", "12.8"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return monkeypatch


def use(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_a_card(cuda: pytest.MonkeyPatch) -> None:
    use(cuda, Nvml(ONE))
    machine = identity.this_machine()
    assert (machine.card, machine.device, machine.driver, machine.power_limit_watts) == (
        "NVIDIA GeForce RTX 4090", "cuda", "580.1", 450,
    )  # fmt: skip
    assert machine.memory_bytes == (24564 - 500) * 2**20
    assert machine.key()["memory_gib"] == 24
    assert (machine.torch, machine.cuda, machine.cores) == ("2.11.0+cu128", "12.8", 0)


@pytest.mark.parametrize(("visible", "count"), [(None, 3), ("", 0), ("0", 1), ("2,0", 2)])
def test_gpus_that_are_hidden_are_not_counted(
    cuda: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    use(cuda, Nvml(ONE * 3))
    if visible is not None:
        cuda.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert identity.this_machine().gpus == count


def test_a_run_on_the_cpu_of_a_machine_with_a_card(cuda: pytest.MonkeyPatch) -> None:
    use(cuda, Nvml(ONE))
    machine = identity.this_cpu()
    assert (machine.device, machine.driver, machine.cuda) == ("cpu", None, None) and machine.cores > 0


def test_what_is_in_use_is_told_and_is_no_part_of_the_key(cuda: pytest.MonkeyPatch) -> None:
    nvml = Nvml(ONE)
    use(cuda, nvml)
    idle = identity.this_machine()
    assert idle.free_bytes == idle.memory_bytes
    nvml.used = 2 * 2**30
    desktop = identity.this_machine()
    assert desktop.free_bytes == (24564 - 500 - 2048) * 2**20
    assert desktop.memory_bytes == idle.memory_bytes
    assert (desktop.key(), desktop) == (idle.key(), idle)
    nvml.old = True
    assert (identity.this_machine().memory_bytes, identity.this_machine().free_bytes) == (
        24564 * 2**20,
        (24564 - 500 - 2048) * 2**20,
    )
    use(cuda, Nvml(ONE, works=False))
    assert identity.this_machine().free_bytes is None


def test_different_cards_must_be_told_apart(cuda: pytest.MonkeyPatch) -> None:
    use(cuda, Nvml(MIXED))
    with pytest.raises(UsageError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        identity.this_machine()
    cuda.setenv("CUDA_VISIBLE_DEVICES", "GPU-second")
    assert identity.this_machine().card == "NVIDIA GeForce RTX 4090"
    assert identity.this_machine().power_limit_watts is None
    cuda.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cuda.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert identity.this_machine().card == "NVIDIA GeForce RTX 3060"
    cuda.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(UsageError, match="there is no GPU 5"):
        identity.this_machine()
    cuda.setenv("CUDA_VISIBLE_DEVICES", "GPU-none")
    with pytest.raises(RunError, match="cannot be identified: NVML reports Not Found"):
        identity.this_machine()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_card_is_none(cuda: pytest.MonkeyPatch, hidden: str) -> None:
    use(cuda, Nvml(ONE))
    cuda.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert identity.this_machine().device == "cpu"


def test_without_a_driver_it_is_the_cpu(cuda: pytest.MonkeyPatch) -> None:
    use(cuda, Nvml(ONE, works=False))
    machine = identity.this_machine()
    assert machine.device == "cpu" and machine.driver is None and machine.cores >= 1


def test_versions_are_those_of_torch_itself() -> None:
    import torch

    assert identity._torch_versions() == (torch.__version__, torch.version.cuda)


def test_it_is_cheap_and_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", QUICK], check=True, timeout=60)


def test_the_code_is_read_once_and_is_what_a_step_runs() -> None:
    identity.code_version.cache_clear()
    assert identity.code_version() == identity.code_version()
    assert identity.code_version.cache_info().misses == 1
    assert identity.code_version().startswith(f"{deskside.__version__}+")


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("kernels/muon.py", True),
        ("config/recipes.py", True),  # the properties that a self-check depends on
        ("precision/selfcheck.py", True),
        ("train/prepare/check_step.py", True),
        ("train/prepare/setup.py", True),
        ("cli/doctor.py", False),
    ],
)
def test_the_code_is_that_of_a_step_and_of_its_checks(
    file: str, changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "deskside"
    shutil.copytree(Path(deskside.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(deskside, "__file__", str(copy / "__init__.py"))
    code_version = identity.code_version.__wrapped__
    before = code_version()
    with (copy / file).open("a", encoding="utf-8") as changed:
        changed.write("# changed\n")
    assert (code_version() != before) == changes
