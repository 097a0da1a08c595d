"""`deskside doctor`: only JSON on standard output, exit codes, a table of 80
columns, and a quick look at this machine.
"""

import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import pytest

from deskside.cli import doctor as doctor_command
from deskside.cli.main import main
from deskside.doctor import check_list, examine, summary
from deskside.utils import child_process
from deskside.utils.printer import Printer
from tests.doctor import samples

ROOT = Path(__file__).parents[2]
COLUMNS = 80


def shown(found: dict[str, Any]) -> str:
    out = io.StringIO()
    summary.show(found, Printer(out, COLUMNS))
    return out.getvalue()


def examined(**changes: dict[str, Any]) -> dict[str, Any]:
    return {"quick": False, **examine.conclude(samples.facts(), samples.results(**changes), quick=False)}


def test_table_of_a_card() -> None:
    text = shown(examined())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= COLUMNS
    for expected in (
        "NVIDIA GeForce RTX 5090, 31.4 GiB, 31.0 free",
        "power limit 575 W (default 575, 400 to 600 can be set)",
        "PCIe 5 x16 under load, of 5 x16",
        "under load 571 W, 62 degrees (measured)",
        "data sheet: 210 TFLOP/s BF16, 1.79 TB/s (published)",
        "205 TFLOP/s",
        "1.53 TB/s",
        "1.63 x eager",
        "not finite",
        "torch FP8 row: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED",
        "cudnn: has no sliding window",
        "pip install bitsandbytes",
        "published for",
    ):
        assert expected in text, text
    table = re.sub(r"\s+", " ", text)
    assert "MXFP8 works 640 TFLOP/s 3.12 3.8e-02" in table
    assert "fp8-delayed works native 5.9e-02" in table and "nvfp4 works emulated 1.8e-01" in table
    assert "emulated, no NVFP4 products in this torch: nvfp4" in table
    assert text.index("Use on this machine") < text.index("Fix, most important first")


def test_what_the_driver_hides_is_left_out() -> None:
    link = {"generation": 3, "lanes": 8, "highest_generation": 5, "highest_lanes": None}
    facts = samples.facts(driver_cuda=None)
    results = samples.results(copy={"details": {"link": link}})
    text = shown({"quick": False, **examine.conclude(facts, results, quick=False)})
    assert "None" not in text and "PCIe" not in text and "for CUDA up to" not in text, text


def test_a_reason_that_several_share_is_told_once() -> None:
    same = {"verdict": "unsupported", "reason": "the package is empty"}
    text = re.sub(r"\s+", " ", shown(examined(te_nvfp4=same, bitsandbytes=same)))
    assert "bitsandbytes, transformer-engine NVFP4: the package is empty" in text


def test_table_of_a_machine_that_cannot_train() -> None:
    broken = {"verdict": "wrong numbers", "reason": "loss is not finite"}
    found = examined(step_fp32=broken, step_bf16=broken)
    assert not found["trains"] and "loss is not finite" in found["why"]
    text = shown(found)
    assert "Training cannot work here" in text and "Use on this machine" not in text


def planted(monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
    """Return an examination with the sample's facts, in which training steps have this verdict."""
    outcome = child_process.ProcessOutcome("ok", samples.facts(), "", 0.1)
    monkeypatch.setattr(child_process, "run", lambda *_: outcome)
    steps = [
        check_list.Check(
            f"step_{p}", "training", p, precomputed_result={"verdict": verdict, "reason": "planted"}
        )
        for p in ("fp32", "bf16")
    ]
    ways = [
        check_list.Check(id, "training", id, precomputed_result={"verdict": "unsupported", "reason": "x"})
        for id in ("fused", "compile")
    ]
    copy = check_list.Check("copy", "memory", "copy", precomputed_result={"verdict": "works", "reason": ""})
    bf16 = check_list.Check("bf16", "matmul", "BF16", precomputed_result={"verdict": "works", "reason": ""})
    monkeypatch.setattr(check_list, "all_checks", lambda facts, quick: [bf16, copy, *steps, *ways])


@pytest.mark.parametrize(("verdict", "code"), [("works", 0), ("wrong numbers", 1), ("crashed", 1)])
def test_exit_code_and_json_alone(
    verdict: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(monkeypatch, verdict)
    assert doctor_command.run(["--json"]) == code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["trains"] is (code == 0) and bool(found["why"]) is (code == 1)
    assert "looking at the machine" in captured.err
    assert doctor_command.run([]) == code
    assert ("Training cannot work here" in capsys.readouterr().out) is (code == 1)


def test_torch_that_does_not_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = child_process.ProcessOutcome("failed", None, "ImportError: libcudart.so.13: cannot open", 0.1)
    monkeypatch.setattr(child_process, "run", lambda *_: outcome)
    assert doctor_command.run([]) == 1
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "torch does not start here: ImportError: libcudart.so.13" in text and "pip install" in text


def test_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--qick"]) == 2
    assert (
        capsys.readouterr().err.strip() == "deskside: --qick: there is no such option; did you mean --quick?"
    )


def test_the_parent_imports_no_torch() -> None:
    code = "import sys; import deskside.doctor.examine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.full
def test_quick_look_at_this_machine_in_a_terminal_of_80_columns() -> None:
    main, side = pty.openpty()
    ioctl(side, TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "deskside", "doctor", "--quick"]
    with subprocess.Popen(
        command, stdin=side, stdout=side, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT
    ) as process:
        os.close(side)
        text = b"".join(iter(lambda: _read(main), b"")).decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert process.returncode == 0, plain
    assert "FP32 step" in plain and "Use on this machine" in plain and "torch" in plain
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= COLUMNS
    assert "\x1b[" in text, "a terminal gets colours"


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the reader has closed its end
        return b""
