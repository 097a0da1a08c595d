"""PEFT adapter directories on the command line: they are exported, chatted with and evaluated like other models."""

import json
from pathlib import Path

import pytest
import torch

from deskside.cli.chat import run as run_chat
from deskside.cli.eval import run as run_eval
from deskside.cli.export import run as run_export
from deskside.utils.errors import UsageError
from tests.weights.test_peft_adapters import ATTENTION, QWEN, TOKENS, adapted, change

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    adapted(tmp_path, QWEN, {}, {"target_modules": ATTENTION, "use_dora": True})
    return tmp_path / "adapter"


def test_an_export_is_merged(tmp_path: Path) -> None:
    theirs = adapted(tmp_path, QWEN, {}, {"target_modules": ATTENTION, "use_rslora": True})
    folder, out = tmp_path / "adapter", tmp_path / "merged"
    change(folder, base_model_name_or_path="owner/name")
    assert run_export([str(folder), "--base", str(tmp_path / "base"), "--out", str(out)]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match=r"is not a run"):
        run_export(
            [str(folder), "--base", str(tmp_path / "base"), "--to", "peft", "--out", str(tmp_path / "no")]
        )


def test_chat_and_eval_use_the_adapters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, likelihoods = [], []
    text = tmp_path / "text.txt"
    text.write_text("ABC" * 50)
    for model in (folder, tmp_path / "base"):
        options = ["--prompt", "ABCDE", "--temperature", "0", "--max-new-tokens", "12", "--device", "cpu"]
        assert run_chat([str(model), *options]) == 0
        answers.append(capsys.readouterr().out)
        assert run_eval([str(model), "--text", str(text), "--device", "cpu", "--json"]) == 0
        likelihoods.append(json.loads(capsys.readouterr().out)["bpb"])
    assert answers[0] != answers[1] and likelihoods[0] != likelihoods[1]
