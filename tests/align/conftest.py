"""One thread for runs in this process, and models that several files begin with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deskside.cli import sft as sft_command
from tests.align import tiny


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The last bits of a sum depend on how many threads share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing."""
    return tiny.model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="session")
def taught(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `deskside sft`: it answers with the digit that follows the one in the question, and in 8 of 100 cases
    with that digit itself."""
    folder = tmp_path_factory.mktemp("taught")
    data = tiny.jsonl(folder / "chats.jsonl", tiny.mostly_wrong())
    argv = [str(base), "--data", str(data), "--data.path", str(folder / "prepared"), "--runs", str(folder)]
    argv += ["--name", "taught", *tiny.RUN, "--batch.sequence_length", "128", "--batch.tokens", "2048"]
    assert sft_command.run([*argv, "--schedule.steps", "150", "--optim.lr", "5e-3"]) == 0
    return folder / "taught"
