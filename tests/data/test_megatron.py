"""Megatron-LM's own reader finds the prepared documents, each followed by the end-of-text token."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from deskside.data import megatron
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.index import SplitInfo, read_index
from deskside.data.reading.shards import EncodedDocument, publish, write_shard
from deskside.utils.errors import UsageError
from tests.oracles import oracle

# Skips the packages' own __init__.py, which import all of Megatron for several seconds.
READ = """
import json, sys, types
for name in ("megatron", "megatron.core", "megatron.core.datasets"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"{sys.argv[1]}/{name.replace('.', '/')}"]
import megatron.core.parallel_state  # before utils, which imports it in turn
from megatron.core.datasets.indexed_dataset import IndexedDataset
for prefix in sys.argv[2:]:
    data = IndexedDataset(prefix)
    print(json.dumps([[part.tolist() for part in data], data.document_indices.tolist(), str(data.index.dtype)]))
"""
TEXTS = [f"Document {number} says: {'la ' * (number % 7)}end." for number in range(300)]


def read(*prefixes: Path) -> list[list[Any]]:
    """Return what megatron-core reads of each data set: the sequences, the table of documents, and the type."""
    command = [sys.executable, "-c", READ, str(oracle("megatron_core")), *map(str, prefixes)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(prefixes) :]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = CorpusOptions(vocab_size=300, val_fraction=0.1, workers=1, shard_bytes=4000, quiet=True)
    prepare([str(folder / "text.jsonl")], folder / "data", options)
    return folder / "data"


def test_megatron_reads_the_same_documents(prepared: Path, tmp_path: Path) -> None:
    index = read_index(prepared)
    assert len(index.splits["train"].shards) > 1  # otherwise the seams between shards are not tested
    written = megatron.convert(prepared, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = []
    found = read(*(tmp_path / split for split in written))
    for (count, tokens), (sequences, documents, dtype) in zip(written.values(), found, strict=True):
        assert dtype == "<class 'numpy.uint16'>" and documents == list(range(count + 1))
        assert sum(map(len, sequences)) == tokens
        for sequence in sequences:
            assert sequence[-1] == index.tokenizer.eos_id and index.tokenizer.eos_id not in sequence[:-1]
            texts.append(tokenizer.decode(sequence[:-1]))
    assert sorted(texts) == sorted(TEXTS)


@pytest.mark.full
def test_a_large_vocabulary_has_the_type_that_megatron_knows(tmp_path: Path) -> None:
    """uint32 in shards becomes int32 in .bin. The shard is written by hand, because
    training such a tokenizer takes minutes.
    """
    documents = [
        EncodedDocument(np.array(ids, dtype=np.uint32), 0) for ids in ([70000, 1], [2], [], [3, 69999, 4])
    ]
    lengths = np.ones(70001, dtype=np.uint32)
    info = write_shard(
        tmp_path, "x", documents, eos_id=0, dtype="uint32", text_bytes=6, token_bytes=lengths, key="k"
    )
    publish(tmp_path, info)
    assert megatron.convert_split(tmp_path, "uint32", SplitInfo.of([info]), tmp_path / "train") == (4, 10)
    expected = [[70000, 1, 0], [2, 0], [0], [3, 69999, 4, 0]]
    assert read(tmp_path / "train") == [[expected, [0, 1, 2, 3, 4], "<class 'numpy.int32'>"]]


def test_nothing_is_overwritten_and_bad_input_is_one_line(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatron.main([str(prepared), "--out", str(tmp_path)]) == 0
    with pytest.raises(UsageError, match="already"):
        megatron.convert(prepared, tmp_path)
    capsys.readouterr()
    assert megatron.main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert megatron.main([str(prepared), "--out", str(tmp_path / "file/out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_leaves_no_part_of_a_data_set(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bytes_of_train = sum(shard.tokens for shard in read_index(prepared).splits["train"].shards) * 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_of_train // 2, hard))
        assert megatron.main([str(prepared), "--out", str(tmp_path)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert capsys.readouterr().err.count("\n") == 1 and list(tmp_path.iterdir()) == []
