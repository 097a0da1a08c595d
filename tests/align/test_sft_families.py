"""Every model family on the command line: full fine-tuning, adapters, and export to the same architecture."""

import json
from pathlib import Path

import pytest

from benchmarks.families import small_config, trains_adapters
from deskside.cli.main import main
from deskside.weights.hf import save_hf
from deskside.weights.hf_families import FAMILIES
from tests.export.test_hf_files import tokenizer_file
from tests.export.test_hf_parity import random_model

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.full
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_sft_and_export(
    model_type: str, adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_file(tmp_path / "tokenizer").parent
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    talks = [
        [
            {"role": "user", "content": f"the fox {i}"},
            {"role": "assistant", "content": f"jumps over {i} dogs"},
        ]
        for i in range(40)
    ]
    Path("talks.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks), "utf-8")
    family = FAMILIES[model_type]
    model = random_model(**{**small_config(family).model_dump(), "vocab_size": 512})
    save_hf(model, model.config, tokenizer, Path("hf"))
    argv = ["sft", "hf", "--data", "talks.jsonl", "--steps", "3", "--name", "run"]
    argv += ["--batch.sequence_length", "64", *(["--adapter.rank", "4"] if adapters else [])]
    if adapters and not trains_adapters(family):
        assert main(argv) == 2
        return
    assert main(argv) == 0
    assert main(["export", "runs/run", "--to", "hf", "--out", "out"]) == 0
    written = json.loads(Path("out/config.json").read_text("utf-8"))
    assert written["architectures"] == [family.architecture]
