"""Reference implementations that `make install` installs where only tests find them."""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = "deskside_oracles"


@cache
def oracle(name: str, may_be_package: bool = False) -> Path:
    """Return the folder of an oracle: transformer_engine (sources only), or megatron_core.

    Skips the test if it is not installed, and fails where `make` runs the tests: a skip there would go unnoticed.
    may_be_package: an installed package of this name will do.
    """
    folders = [location / name for location in _locations(FOLDER)]
    if may_be_package:
        folders += _locations(name)
    if found := [folder for folder in folders if folder.is_dir()]:
        return found[0]
    reason = f"needs {name} in {FOLDER} (make install)"
    if os.environ.get("DESKSIDE_REQUIRE_ORACLES"):
        pytest.fail(reason)
    pytest.skip(reason)


def _locations(package: str) -> list[Path]:
    spec = find_spec(package)
    return [
        Path(location) for location in (spec.submodule_search_locations if spec is not None else None) or ()
    ]
