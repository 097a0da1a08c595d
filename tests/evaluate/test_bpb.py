"""Bits per byte, compared with transformers' logits and a float64 log-softmax computed piece by piece."""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from deskside.config.model import ModelConfig
from deskside.data import tokenizer as bpe
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.rows import PackedDataset
from deskside.evaluate.bpb import BitsPerByte, WorkShare, evaluate_dataset, evaluate_text
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf import save_hf

LENGTH = 32
WORDS = [
    "the",
    "of",
    "naïve",
    "café",
    "東京",
    "sea",
    "and",
    "12",
    "ships,",
    "नमस्ते",
    "went",
    "to",
    "😀",
    "a\n",
]


@dataclass
class Setting:
    data: Path
    tokenizer: Tokenizer
    end: int
    model: Transformer
    oracle: torch.nn.Module  # transformers' model with the same weights, in float64
    texts: list[str]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("bpb")
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(WORDS, size=int(n))) for n in rng.integers(3, 90, size=16)]
    (folder / "text.jsonl").write_text("".join(_line(text) for text in texts), "utf-8")
    prepare(
        [str(folder / "text.jsonl")],
        folder / "data",
        CorpusOptions(vocab_size=300, val_fraction=0.4, workers=1, quiet=True),
    )
    tokenizer = bpe.load(folder / "data")
    config = ModelConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
    )
    model = Transformer(config)
    initialize(model, seed=3, options=InitOptions(head_std=0.4, output="fan_in"))
    save_hf(model, config, folder / "data" / "tokenizer.json", folder / "hf")
    oracle = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float64)
    return Setting(folder / "data", tokenizer, bpe.end_of_text(tokenizer)[1], model, oracle, texts)


def _line(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


@torch.no_grad()
def oracle_nats(setting: Setting, stream: list[int], ignore: int | None) -> tuple[float, int]:
    """Return the sum of -log p of each token of `stream` except its first, in pieces of LENGTH inputs, and the count.
    Targets equal to `ignore` are not counted.
    """
    nats, tokens = 0.0, 0
    for start in range(0, len(stream) - 1, LENGTH):
        inputs = stream[start : start + LENGTH]
        targets = stream[start + 1 : start + LENGTH + 1]
        logits = setting.oracle(torch.tensor([inputs])).logits[0]
        for position, target in enumerate(targets):
            if target != ignore:
                row = logits[position]
                nats += float(torch.log(torch.exp(row - row.max()).sum()) + row.max() - row[target])
                tokens += 1
    return nats, tokens


def test_text_equals_the_oracle(setting: Setting) -> None:
    nats, tokens, size = 0.0, 0, 0
    for text in setting.texts:
        ids = setting.tokenizer.encode(text, add_special_tokens=False).ids
        some, count = oracle_nats(setting, [setting.end, *ids], None)
        nats, tokens, size = nats + some, tokens + count, size + len(text.encode())
    for batch_tokens in (LENGTH, 7 * LENGTH + 3):
        result = evaluate_text(
            setting.model,
            setting.tokenizer,
            setting.end,
            [("en", text) for text in setting.texts],
            sequence_length=LENGTH,
            batch_tokens=batch_tokens,
        )
        assert (result.tokens, result.bytes) == (tokens, size)
        assert result.nats == pytest.approx(nats, rel=1e-6)
        assert result.bpb == pytest.approx(nats / size / math.log(2), rel=1e-6)
        assert result.loss == pytest.approx(nats / tokens, rel=1e-6)


def validation_streams(dataset: PackedDataset) -> list[list[int]]:
    """Return each validation document's tokens, between the E before and the E after it, read from the flat shard."""
    (shard,) = dataset.index.splits["val"].shards
    flat = np.fromfile(dataset.directory / shard.file, dtype=dataset.index.dtype).tolist()
    ends = [i for i, token in enumerate(flat) if token == dataset.index.tokenizer.eos_id]
    return [flat[a : b + 1] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("micro_rows", [1, 5])
def test_dataset_equals_the_oracle(setting: Setting, micro_rows: int) -> None:
    """With masked documents, every piece is evaluated alone, whatever it is packed with."""
    dataset = PackedDataset(setting.data, "val", LENGTH)
    streams = validation_streams(dataset)
    sums = [oracle_nats(setting, stream, setting.end) for stream in streams]
    nats, tokens = sum(n for n, _ in sums), sum(t for _, t in sums)
    size = sum(len(setting.tokenizer.decode(stream).encode()) for stream in streams)
    result = evaluate_dataset(setting.model, dataset, micro_rows=micro_rows, document_mask=True)
    assert (result.tokens, result.bytes) == (tokens, size)
    assert result.nats == pytest.approx(nats, rel=1e-6)
    # the end token of each document is not counted
    assert result.tokens == dataset.num_tokens - len(streams)
    seen = evaluate_dataset(setting.model, dataset, micro_rows=micro_rows)
    assert (seen.tokens, seen.bytes) == (tokens, size)
    assert seen.nats != pytest.approx(nats, rel=1e-6)  # without a mask, documents see each other


def test_text_and_dataset_agree(setting: Setting) -> None:
    dataset = PackedDataset(setting.data, "val", LENGTH)
    texts = [setting.tokenizer.decode(stream[1:-1]) for stream in validation_streams(dataset)]
    by_text = evaluate_text(
        setting.model,
        setting.tokenizer,
        setting.end,
        [("en", text) for text in texts],
        sequence_length=LENGTH,
        batch_tokens=256,
    )
    by_dataset = evaluate_dataset(setting.model, dataset, micro_rows=4, document_mask=True)
    assert by_text.bpb == pytest.approx(by_dataset.bpb, rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_processes_share_the_work(setting: Setting, world_size: int) -> None:
    """Each process runs the model equally often, and the sums are those of one process."""
    dataset = PackedDataset(setting.data, "val", LENGTH)
    whole = evaluate_dataset(setting.model, dataset, micro_rows=3)
    parts: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    calls = []
    forward = setting.model.token_losses

    def counted(*args: torch.Tensor) -> torch.Tensor:
        calls[-1] += 1
        return forward(*args)

    setting.model.token_losses = counted  # type: ignore[assignment,method-assign]
    try:
        for rank in range(world_size):
            calls.append(0)

            # A process may have nothing to count itself, so it must receive the others' sums before it looks.
            def gather(sums: torch.Tensor) -> None:
                (parts if sums.shape == (5,) else positions).append(sums.clone())
                sums += 1

            evaluate_dataset(
                setting.model,
                dataset,
                micro_rows=3,
                share=WorkShare(rank, world_size, gather),
            )
    finally:
        del setting.model.token_losses
    nats, size, tokens, target_nats, targets = torch.stack(parts).sum(0).tolist()
    assert (int(size), int(tokens), int(targets)) == (whole.bytes, whole.tokens, whole.targets)
    assert target_nats == pytest.approx(whole.target_nats, rel=1e-9)
    assert nats == pytest.approx(whole.nats, rel=1e-9)
    bucket = torch.stack(positions).sum(0)
    assert bucket.tolist() == [[pytest.approx(whole.nats, rel=1e-9), whole.bytes, whole.tokens]]
    batches = math.ceil(dataset.num_rows / 3)
    assert set(calls) == {math.ceil(batches / world_size)}


def test_max_tokens_takes_about_as_many(setting: Setting) -> None:
    dataset = PackedDataset(setting.data, "val", LENGTH)
    result = evaluate_dataset(setting.model, dataset, micro_rows=2, max_tokens=4 * LENGTH)
    assert 2 * LENGTH < result.tokens <= 4 * LENGTH
    assert result.bpb > 0


def test_no_text_and_broken_weights_are_said(setting: Setting) -> None:
    def run(texts: list[str], length: int = LENGTH) -> BitsPerByte:
        return evaluate_text(
            setting.model,
            setting.tokenizer,
            setting.end,
            [("en", text) for text in texts],
            sequence_length=length,
            batch_tokens=64,
        )

    with pytest.raises(UsageError, match="holds no text"):
        run([])
    with pytest.raises(UsageError, match="this model takes 2 to 32 tokens"):
        run(["a"], LENGTH + 1)
    weight = setting.model.head_weight
    kept = weight.detach().clone()
    try:
        weight.data[0, 0] = math.nan
        with pytest.raises(RunError, match="not finite"):
            run(["some text"])
    finally:
        weight.data.copy_(kept)


@pytest.fixture(scope="module")
def two_languages(
    setting: Setting, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[str]]]:
    """Prepared validation documents in "hi", in "en" and without a language, and their texts."""
    folder = tmp_path_factory.mktemp("languages")
    texts: dict[str, list[str]] = {"": [], "en": [], "hi": []}
    for number, text in enumerate(setting.texts):
        texts[("hi", "en", "", "en")[number % 4]].append(f"{number} {text}")
    lines = [
        json.dumps({"text": text, "lang": lang}) + "\n" for lang, group in texts.items() for text in group
    ]
    (folder / "val.jsonl").write_text("".join(lines), "utf-8")
    (folder / "train.jsonl").write_text(_line("other"), "utf-8")
    options = CorpusOptions(
        tokenizer=setting.data, val_sources=[str(folder / "val.jsonl")], workers=1, quiet=True
    )
    prepare([str(folder / "train.jsonl")], folder / "data", options)
    return folder / "data", {lang or "unknown": group for lang, group in texts.items()}


@pytest.mark.parametrize("micro_rows", [1, 4])
def test_each_language_equals_the_oracle(
    setting: Setting, two_languages: tuple[Path, dict[str, list[str]]], micro_rows: int
) -> None:
    data, texts = two_languages
    dataset = PackedDataset(data, "val", LENGTH)
    assert dataset.languages == ["en", "hi", "unknown"]
    result = evaluate_dataset(setting.model, dataset, micro_rows=micro_rows, document_mask=True)
    by_text = evaluate_text(
        setting.model,
        setting.tokenizer,
        setting.end,
        [(language, text) for language, group in texts.items() for text in group],
        sequence_length=LENGTH,
        batch_tokens=5 * LENGTH,
    )
    for found in (result, by_text):
        assert list(found.by_language) == ["en", "hi", "unknown"]
        for language, group in texts.items():
            nats, tokens = 0.0, 0
            for text in group:
                ids = setting.tokenizer.encode(text, add_special_tokens=False).ids
                some, count = oracle_nats(setting, [setting.end, *ids], None)
                nats, tokens = nats + some, tokens + count
            one = found.by_language[language]
            assert (one.tokens, one.bytes) == (tokens, sum(len(text.encode()) for text in group))
            assert one.nats == pytest.approx(nats, rel=1e-6)
        assert sum(one.nats for one in found.by_language.values()) == pytest.approx(found.nats, rel=1e-9)
        for name, values in found.languages_as_dict().items():
            assert values["bpb"] == found.by_language[name].bpb


def test_processes_share_the_languages(
    setting: Setting, two_languages: tuple[Path, dict[str, list[str]]]
) -> None:
    dataset = PackedDataset(two_languages[0], "val", LENGTH)
    whole = evaluate_dataset(setting.model, dataset, micro_rows=3)
    parts: list[torch.Tensor] = []

    def gather(sums: torch.Tensor) -> None:
        if sums.ndim == 1:  # the sums by position are a matrix
            parts.append(sums.clone())
            sums.copy_(torch.stack(parts).sum(0))

    for rank in range(2):
        last = evaluate_dataset(setting.model, dataset, micro_rows=3, share=WorkShare(rank, 2, gather))
    for language, one in whole.by_language.items():
        shared = last.by_language[language]
        assert (shared.bytes, shared.tokens) == (one.bytes, one.tokens)
        assert shared.nats == pytest.approx(one.nats, rel=1e-9)


def test_one_language_is_not_listed(setting: Setting) -> None:
    dataset = PackedDataset(setting.data, "val", LENGTH)
    assert evaluate_dataset(setting.model, dataset, micro_rows=4).by_language == {}
