"""Bits per byte of a stream, compared token by token with transformers' logits and a float64 log-softmax."""

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.evaluate.stream_bpb import read_stream, stream_bpb, transformers_loss
from deskside.utils.errors import UsageError
from tests.evaluate.made_model import Made, make

LENGTH = 32
TEXTS = ["the sea and the ships, naïve 東京 😀", "a stone", "old ships waited for morning light " * 9] * 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text whose validation split has several shards."""
    folder = tmp_path_factory.mktemp("data")
    for name, texts in (("val", TEXTS), ("train", ["nothing else"])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = CorpusOptions(
        tokenizer=str(made.folder),
        workers=1,
        quiet=True,
        shard_bytes=400,
        val_sources=[str(folder / "val.jsonl")],
    )
    prepare([str(folder / "train.jsonl")], folder / "out", options)
    assert len(list((folder / "out").glob("val-*.bin"))) > 1
    return folder / "out"


def test_against_transformers_row_by_row(made: Made, data: Path) -> None:
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    stream = [t for text in TEXTS for t in (made.end, *tokenizer.encode(text, add_special_tokens=False).ids)]
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float64)
    nats = 0.0
    for first in range(0, len(stream) - 1, LENGTH):
        inputs, targets = stream[first : first + LENGTH], stream[first + 1 : first + LENGTH + 1]
        with torch.no_grad():
            log_p = model(torch.tensor([inputs])).logits[0].log_softmax(-1)
        nats -= sum(float(log_p[i, t]) for i, t in enumerate(targets) if t != made.end)
    size = sum(len(text.encode()) for text in TEXTS)
    loss = transformers_loss(made.folder, LENGTH, CPU)
    for batch_rows in (1, 3, 64):
        found = stream_bpb(loss, read_stream(data), LENGTH, batch_rows, CPU)
        assert (found.bytes, found.tokens) == (size, len(stream) - len(TEXTS))
        assert found.bpb == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_refused(made: Made, data: Path) -> None:
    with pytest.raises(UsageError, match="at most"):
        transformers_loss(made.folder, 10**6, CPU)
    with pytest.raises(UsageError, match=r"config\.json"):
        transformers_loss(data, LENGTH, CPU)
    with pytest.raises(UsageError, match="split"):
        read_stream(data, "test")
