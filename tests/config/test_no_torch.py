"""Configuration, budget, facts and the command line do not import torch, so that plans and dry runs start fast."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = [
    "import deskside.config.merge",
    "import deskside.cli.options",
    "import deskside.config.presets",
    "import deskside.cli.main",
    "import deskside.cli.train",
    "import importlib, pkgutil, deskside.config, deskside.budget, deskside.facts\n"
    "for package in (deskside.config, deskside.budget, deskside.facts):\n"
    "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
    "        importlib.import_module(module.name)",
    "from deskside.cli.main import main; assert main([]) == 0",
    "from deskside.cli.main import main; assert main(['train', '124m', '--hours', '2', '--dry-run']) == 0",
    "from deskside.cli.main import main; assert main(['train', '124m', '--dry-run', '--json']) == 0",
    "from deskside.cli.main import main; assert main(['train', 'nope']) == 2",
    "import deskside.train.text_rows, deskside.study.execute.check_arm",
]


@pytest.mark.parametrize("code", WITHOUT_TORCH, ids=[code.splitlines()[0][-60:] for code in WITHOUT_TORCH])
def test_no_torch(code: str) -> None:
    heavy = "{'torch', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules)"
    check = f"\nimport sys\nassert not {heavy}, {heavy}"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
