"""One server for all browser tests of a process, and one browser for those of a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chromium import launched_chromium
from tests.dashboard import made_up
from tests.dashboard.browsing import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def served_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Studies, a search, runs (one of them training), and broken directories."""
    folder = tmp_path_factory.mktemp("work")
    made_up.study(folder / "studies/made")
    made_up.two_groups(folder / "studies/two")
    made_up.many_arms(folder / "studies/many")
    made_up.search(folder / "searches/made")
    made_up.broken(folder)
    made_up.run(folder / "runs/first")
    made_up.run(folder / "runs/second", seed=2)
    with made_up.running(folder / "runs/now"):
        yield folder


@pytest.fixture(scope="session")
def address(served_root: Path) -> Iterator[str]:
    """The address that `deskside dashboard` prints."""
    with serving(served_root) as found:
        yield found


# Module scope, because playwright keeps an event loop running, which breaks other tests that use asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with launched_chromium() as launched:
        yield launched
