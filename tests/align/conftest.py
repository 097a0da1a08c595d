"""Fixtures of the alignment tests: one thread for runs in this process, and
the models that several files start from.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deskside.align import samples
from deskside.cli import sft as sft_command
from deskside.report import run_figures
from tests.align import tiny


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Run with one thread, because the last bits of a sum depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")  # not the session: other tests of this process draw figures
def short_ends() -> Iterator[None]:
    """Sample short answers and draw no figures, which take half of the time of a run of a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "ANSWER_TOKENS", 24)
        patch.setattr(run_figures, "draw", lambda *_: ([], []))
        yield


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model."""
    return tiny.model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="session")
def taught(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `deskside sft`. It answers with the digit after the one in the question,
    and in 8 of 100 cases with the same digit.
    """
    folder = tmp_path_factory.mktemp("taught")
    data = tiny.jsonl(folder / "chats.jsonl", tiny.mostly_wrong())
    argv = [str(base), "--data", str(data), "--data.path", str(folder / "prepared"), "--runs", str(folder)]
    argv += ["--name", "taught", *tiny.RUN, "--batch.sequence_length", "128", "--batch.tokens", "2048"]
    assert sft_command.run([*argv, "--schedule.steps", "150", "--optim.lr", "5e-3"]) == 0
    return folder / "taught"
