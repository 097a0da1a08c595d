"""Data for all training tests, one thread for runs in this process, and runs without needless work."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.train import text_samples
from deskside.train.prepare import prepared_run
from tests.train.tiny_run import write_text


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text.txt")
    out = folder / "data"
    prepare(
        [str(folder / "text.txt")],
        out,
        CorpusOptions(vocab_size=300, val_fraction=0.1, workers=1, quiet=True),
    )
    return out


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Run with one thread, because the last bits of a sum depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def short_ends() -> Iterator[None]:
    """Sample few tokens and skip the matmul peak, which take half of the time of a run of a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_samples, "SAMPLE_TOKENS", 12)
        patch.setattr(prepared_run, "measure_matmul_peak", lambda *_: 5e10)
        yield
