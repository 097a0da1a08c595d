"""The load of experts by language, compared with transformers' router logits."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deskside.cli.main import main
from deskside.config.model import ModelConfig
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.loader import validation_batches
from deskside.data.reading.rows import IGNORE, PackedDataset
from deskside.evaluate.bpb import WorkShare, evaluate_dataset
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.weights.hf import save_hf

transformers = pytest.importorskip("transformers")
LENGTH, LAYERS, EXPERTS = 32, 3, 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("languages")
    lines = [
        {
            "text": "नमस्ते " * 9 + str(n) if n % 3 == 0 else f"{n} ships went to the sea " * 4,
            "lang": "hi" if n % 3 == 0 else "en",
        }
        for n in range(60)
    ]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    prepare(
        [str(folder / "text.jsonl")],
        folder / "data",
        CorpusOptions(vocab_size=300, val_fraction=0.4, workers=1, quiet=True),
    )
    return folder / "data"


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=LENGTH,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    model = Transformer(config)
    initialize(model, 0, InitOptions(output="fan_in"))
    return model


def expected(model: Transformer, dataset: PackedDataset, folder: Path) -> Tensor:
    """Return the counts (languages, layers, experts) of the tokens whose target is text."""
    save_hf(model, model.config, None, folder)
    theirs: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    is_text = torch.from_numpy(dataset.token_bytes > 0)
    counts = torch.zeros(len(dataset.languages), LAYERS, EXPERTS)
    for batch in validation_batches(dataset, 2, "cpu", None, False):
        with torch.no_grad():
            logits = theirs(batch.tokens_BT, output_router_logits=True).router_logits
        assert batch.languages_BT is not None
        kept = (batch.targets_BT != IGNORE) & is_text[batch.targets_BT.clamp(min=0)]
        for layer, logits_NE in enumerate(logits):
            chosen = logits_NE.topk(2).indices
            for language in range(len(dataset.languages)):
                of_language = (kept & (batch.languages_BT == language)).flatten()
                counts[language, layer] += torch.bincount(chosen[of_language].flatten(), minlength=EXPERTS)
    return counts


def test_each_language_has_the_load_of_transformers(data: Path, model: Transformer, tmp_path: Path) -> None:
    dataset = PackedDataset(data, "val", LENGTH)
    counts = expected(model, dataset, tmp_path)
    truth = counts / counts.sum(2, keepdim=True)
    found = evaluate_dataset(model, dataset, micro_rows=3).expert_load
    assert list(found) == dataset.languages == ["en", "hi"]
    torch.testing.assert_close(torch.tensor(list(found.values())), truth, atol=2e-6, rtol=0)
    assert (truth[0] - truth[1]).abs().max() > 0.05  # otherwise the languages could be swapped unnoticed
    fused = convert(model, "fp32", fused=True)
    assert all(fused.is_fused(layer.mlp) for layer in model.layers)
    assert evaluate_dataset(model, dataset, micro_rows=3).expert_load == found
    assert all(layer.mlp.mixture.choices_observer is None for layer in model.layers)  # type: ignore[union-attr]


def test_processes_share_the_choices(data: Path, model: Transformer) -> None:
    dataset = PackedDataset(data, "val", LENGTH)
    whole = evaluate_dataset(model, dataset, micro_rows=2).expert_load
    parts: list[list[Tensor]] = []
    for rank in range(2):
        sums: list[Tensor] = []
        evaluate_dataset(
            model,
            dataset,
            micro_rows=2,
            share=WorkShare(rank, 2, lambda values, sums=sums: sums.append(values.clone())),  # type: ignore[misc]
        )
        parts.append(sums)
    total = parts[0][-1] + parts[1][-1]
    shares = total / total.sum(2, keepdim=True)
    torch.testing.assert_close(shares.tolist(), list(whole.values()), atol=2e-6, rtol=0)


def test_the_command_and_models_without_experts(
    data: Path, model: Transformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf(model, model.config, data / "tokenizer.json", tmp_path / "hf")
    argv = ["eval", str(tmp_path / "hf"), "--data", str(data), "--sequence-length", str(LENGTH), "--json"]
    assert main([*argv, "--device", "cpu"]) == 0
    load = json.loads(capsys.readouterr().out)["expert_load"]
    assert list(load) == ["en", "hi"]
    assert all(sum(layer) == pytest.approx(1, abs=1e-5) for layers in load.values() for layer in layers)
    dense = Transformer(model.config.model_copy(update={"num_experts": 0, "intermediate_size": 32}))
    initialize(dense, 0)
    assert evaluate_dataset(dense, PackedDataset(data, "val", LENGTH), micro_rows=2).expert_load == {}
