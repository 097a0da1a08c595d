"""No warning about a missing CUDA context from cuBLAS appears, whatever a process runs first in a backward."""

import subprocess
import sys

import pytest

from tests.gpu import card

pytestmark = card.NEEDS_CARD

FIRST = {  # each one's first backward begins with a product; torch warns once per process
    "self-check": "from deskside.precision import check; assert check('bf16', 'cuda').ok",
    "trial": (
        "import torch; from deskside.kernels.attention import Requirements, choose;"
        "choose(Requirements(1, 64, 2, 2, 64, torch.bfloat16, torch.device('cuda')), ['reference'])"
    ),
    "doctor": (
        "from deskside.doctor.check_tools import run_check;"
        "found = run_check('deskside.doctor.check_attention:check',"
        " {'backend': 'reference', 'window': False, 'device': 'cuda'}); assert found['verdict'] == 'works', found"
    ),
}


@pytest.mark.parametrize("first", FIRST)
def test_a_first_backward_warns_nobody(first: str) -> None:
    done = subprocess.run([sys.executable, "-c", FIRST[first]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cuBLAS" not in done.stderr
