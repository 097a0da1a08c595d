"""Fine-tuning on the command line that continues the adapters of a PEFT directory."""

import json
from pathlib import Path

import pytest
import torch

from deskside.cli.main import main
from deskside.run.directory import RunDirectory
from deskside.train.state.init_weights import InitialWeights
from deskside.weights.merge_adapters import load_adapted_run
from tests.serve.made_run import make

SMALL = [
    "--compute.device", "cpu", "--compute.attention", "reference", "--batch.sequence_length", "64", "--batch.tokens",
    "128",
]  # fmt: skip
ADAPTER = {
    "rank": "3",
    "alpha": "6",
    "targets": "q_proj,o_proj",
    "dora": "true",
    "modules_to_save": "embed_tokens,lm_head",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, conversations, and briefly trained adapters of that run."""
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    chats = [
        [{"role": "user", "content": f"the sea {n}"}, {"role": "assistant", "content": f"was {n} wide"}]
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    options = [word for key, value in ADAPTER.items() for word in (f"--adapter.{key}", value)]
    assert main(["sft", "runs/small", *tuning("first", "1e-2"), *options]) == 0
    assert main(["export", "runs/first", "--to", "peft", "--out", "peft"]) == 0
    return tmp_path


def tuning(name: str, lr: str) -> list[str]:
    return [
        "--data",
        "chats.jsonl",
        "--name",
        name,
        "--steps",
        "3",
        "--optim.lr",
        lr,
        *SMALL,
    ]


def test_adapters_are_trained_further(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a learning rate that changes nothing, the adapters keep their values."""
    assert main(["sft", "runs/small", "--resume-from", "peft", *tuning("second", "1e-12")]) == 0
    first, second = (load_adapted_run(place / "runs" / name, pytest.fail) for name in ("first", "second"))
    assert second.adapter.model_dump() == first.adapter.model_dump()
    trained = {name: p for name, p in first.model.named_parameters() if p.requires_grad}
    assert any("magnitudes" in name for name in trained) and "embed.weight" in trained
    for name, parameter in second.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter, trained[name], rtol=0, atol=1e-6)
    facts = json.loads((place / "runs/second/run.json").read_text())
    assert (facts["adapters"], Path(facts["init"]).name) == ("peft", "small")
    run = RunDirectory.open(place / "runs/second")
    # Covers a run that is stopped before its first checkpoint.
    again = InitialWeights.recorded(run, run.config())
    assert again is not None and again.adapters is not None
    assert again.adapters.folder.resolve() == place / "peft"
    capsys.readouterr()
    refused = ["sft", "runs/small", "--resume-from", "peft", *tuning("third", "1e-3"), "--adapter.rank", "8"]
    assert main(refused) == 2
    assert "--adapter.rank" in capsys.readouterr().err
    assert main(["sft", "--resume-from", "runs/small", *tuning("third", "1e-3")]) == 2
    assert not (place / "runs/third").exists()
    # With the directory as the model, the adapters are merged and all weights train.
    file = place / "peft/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "runs/small"}))
    assert main(["sft", "peft", *tuning("merged", "1e-4")]) == 0
