"""Rows of 16,384 tokens: stages up to them with document masks, YaRN on trained weights, export and generation."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from benchmarks.serve_load import served
from deskside.cli.main import main
from deskside.config.run import RunConfig
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.engine.generate import generate
from deskside.weights.load import load_model
from tests.train import tiny_run

pytestmark = pytest.mark.full  # a minute on an idle machine
LONG = 16384
SHORT = {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 8, "intermediate_size": 32}
STAGES = [{"until": 0.5, "sequence_length": 2048}, {"until": 1.0, "sequence_length": LONG}]


@pytest.fixture(scope="module")
def long_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of about 900 and of about 20,000 tokens."""
    folder = tmp_path_factory.mktemp("long")
    for number, lines in enumerate((100, 100, 2500, 100, 2500)):
        tiny_run.write_text(folder / f"{number}.txt", lines)
    sources = [str(path) for path in sorted(folder.glob("*.txt"))]
    options = CorpusOptions(vocab_size=300, val_fraction=0.2, workers=1, quiet=True)
    prepare(sources, folder / "data", options)
    return folder / "data"


def long_config(data: Path, **changes: Any) -> RunConfig:
    model = {**SHORT, "max_position_embeddings": LONG, "rope_theta": 5e5, **changes.pop("model", {})}
    return tiny_run.config(
        data,
        model=model,
        data={"document_mask": True},
        compute={"attention": "auto"},
        batch={"sequence_length": LONG, "tokens": LONG},
        **{"schedule": {"length": "4 steps", "stages": STAGES}, **changes},
    )


@pytest.fixture(scope="module")
def trained(long_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.train(tmp_path_factory.mktemp("runs"), long_config(long_data)).run.path


def test_stages_reach_16k_and_transformers_computes_the_same(trained: Path) -> None:
    losses = [row["loss"] for row in tiny_run.rows(trained)]
    assert len(losses) == 4 and losses[3] < losses[0]
    summary = json.loads((trained / "summary.json").read_text("utf-8"))
    assert [b["stop"] for b in summary["bpb_by_position"]] == [1024, 2048, 4096, 8192, LONG]
    loaded = load_model(trained)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained / "model", attn_implementation="sdpa")
    tokens = torch.randint(0, 300, (1, LONG), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(loaded.model(tokens), expected, rtol=1e-3, atol=1e-3)


def test_the_engine_takes_16k_prompts(trained: Path) -> None:
    loaded = load_model(trained)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained / "model", attn_implementation="sdpa")
    prompt = torch.randint(0, 300, (1, LONG - 8), generator=torch.Generator().manual_seed(1))
    expected = theirs.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None)[0, LONG - 8 :]
    (output,) = generate(loaded.model, prompt.tolist(), max_new_tokens=8)
    assert output.tokens == expected.tolist()


def test_yarn_lengthens_a_trained_model(long_data: Path, tmp_path: Path) -> None:
    """A run on rows of 2,048 continues with rows of 16,384, and its export has the new frequencies."""
    short = tiny_run.config(
        long_data, model={**SHORT, "max_position_embeddings": 2048}, schedule={"length": "3 steps"}
    )
    base = tiny_run.train(tmp_path, short, "base").run.path
    yarn = [
        "--model.rope_scaling.factor",
        "8",
        "--model.rope_scaling.original_max_position_embeddings",
        "2048",
    ]
    argv = ["train", "--init", str(base), "--runs", str(tmp_path), "--name", "longer", "--steps", "2"]
    argv += [*yarn, "--model.max_position_embeddings", str(LONG), "--batch.sequence_length", str(LONG)]
    argv += ["--batch.tokens", str(LONG), "--data.path", str(long_data), "--data.document_mask", "true"]
    assert main([*argv, "--compute.device", "cpu"]) == 0
    loaded = load_model(tmp_path / "longer")
    assert loaded.config.rope_scaling is not None and loaded.config.rope_scaling.factor == 8
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "longer" / "model")
    assert theirs.config.rope_parameters["rope_type"] == "yarn"
    tokens = torch.randint(0, 300, (1, LONG), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens), theirs(tokens).logits, rtol=1e-3, atol=1e-3)


def test_serve_takes_16k_prompts(trained: Path) -> None:
    loaded = load_model(trained)
    prompt = torch.randint(1, 300, (1, LONG - 8), generator=torch.Generator().manual_seed(2)).tolist()
    (expected,) = generate(loaded.model, prompt, max_new_tokens=8, eos_tokens=loaded.eos_tokens)
    with served([str(trained), "--device", "cpu"], {"OMP_NUM_THREADS": "1"}) as (base, _):
        body = {"prompt": prompt[0], "temperature": 0, "max_tokens": 8}
        answer = httpx.post(f"{base}/v1/completions", json=body, timeout=300).raise_for_status().json()
        body = {"prompt": [*prompt[0], *prompt[0]], "temperature": 0, "max_tokens": 8}
        refused = httpx.post(f"{base}/v1/completions", json=body, timeout=300)
    assert answer["usage"]["prompt_tokens"] == LONG - 8
    assert answer["choices"][0]["text"] == loaded.tokenizer.decode(expected.tokens)
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
