"""`deskside export`: the three formats, their JSON output, refused options, full disks and damaged runs."""

import json
import re
import resource
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from deskside.cli.export import run as run_export
from deskside.config.model import ModelConfig
from deskside.config.sections import AdapterConfig
from deskside.export.peft import to_peft
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError, UsageError
from deskside.weights import frozen_base
from deskside.weights.checkpoint_folder import folder_name
from deskside.weights.hf import save_hf
from tests.export.adapted import TINY, trained
from tests.serve.made_run import MadeRun, make
from tests.weights.test_frozen_base import write_run

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make(tmp_path_factory.mktemp("export"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_becomes_one_gguf_file(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_export([str(made.path), "--to", "gguf", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "out": str(out),
        "to": "gguf",
        "dtype": "float32",
        "step": 20,
        "file": str(out / "small-F32.gguf"),
        "fallback": [],
    }
    assert names(out) == ["Modelfile", "README.md", "deskside.json", "small-F32.gguf"]
    assert "pre-tokenizer `qwen35`" in (out / "README.md").read_text("utf-8")
    stored = {t.name: t for t in gguf.GGUFReader(out / "small-F32.gguf").tensors}
    embedding = torch.from_numpy(stored["token_embd.weight"].data.copy())
    assert torch.equal(embedding, made.model.embed.weight.detach().reshape(embedding.shape))


def test_gguf_of_a_tokenizer_with_nfc_has_a_note(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "hf", tmp_path / "out"
    assert run_export([str(made.path), "--out", str(model)]) == 0
    file = model / "tokenizer.json"
    spec = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**spec, "normalizer": {"type": "NFC"}}), "utf-8")
    assert run_export([str(model), "--to", "gguf", "--out", str(out)]) == 0
    note = "give it text that is in NFC"
    assert note in capsys.readouterr().err and note in (out / "README.md").read_text("utf-8")


def test_q8_0_reports_tensors_in_float16(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_export([str(made.path), "--to", "gguf", "--dtype", "q8_0", "--out", str(out)]) == 0
    output = capsys.readouterr()
    assert output.out == f"{out / 'small-Q8_0.gguf'}\n"
    assert "2 tensors in float16, such as blk.0.ffn_down.weight" in output.err  # the MLP is 48 wide
    assert f"llama-server -m {out / 'small-Q8_0.gguf'}" in output.err
    # A new export replaces only files that the program itself has written.
    assert run_export([str(made.path), "--to", "gguf", "--out", str(out)]) == 0
    assert names(out) == ["Modelfile", "README.md", "deskside.json", "small-F32.gguf"]


def test_the_commands_for_a_gguf_file_can_be_pasted(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run = tmp_path / "my models", tmp_path / "run"
    shutil.copytree(made.path, run)
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, "name": "My Run"}))
    assert run_export([str(run), "--to", "gguf", "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert shlex.split(shown[shown.index("llama-server") :])[:3] == [
        "llama-server",
        "-m",
        str(out / "My-Run-F32.gguf"),
    ]
    words = shlex.split(shown[shown.index("ollama create") :])
    assert words == ["ollama", "create", "my-run", "-f", str(out / "Modelfile")]


def test_an_edited_model_card_is_not_overwritten(made: MadeRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_export([str(made.path), "--out", str(out)])
    assert "# small" in (out / "README.md").read_text("utf-8")
    (out / "README.md").write_text("my own words")
    for to in ("hf", "gguf"):
        with pytest.raises(UsageError, match=r"contains README\.md, which .* was changed since"):
            run_export([str(made.path), "--to", to, "--out", str(out)])
    assert (out / "README.md").read_text() == "my own words"


def test_the_export_of_another_model_is_not_replaced_without_a_word(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(made.path, tmp_path / "other")
    told = []
    for source in (made.path, made.path, other):
        assert run_export([str(source), "--out", str(tmp_path / "out")]) == 0
        told.append(f"replaces the export of {made.path}" in capsys.readouterr().err)
    assert told == [False, False, True]


def test_export_of_a_run_with_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--to peft writes the adapters, --to hf the merged model."""
    model, _ = trained()
    run = tmp_path / "run"
    run.mkdir()
    write_run(run, model, {})
    assert run_export([str(run), "--to", "peft", "--out", str(tmp_path / "peft"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 7
    assert names(tmp_path / "peft") == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "deskside.json",
    ]
    content = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert content["r"] == 4 and content["base_model_name_or_path"] == "some/model"
    assert "LoRA of rank 4" in (tmp_path / "peft" / "README.md").read_text("utf-8")
    recorded = json.loads((run / "run.json").read_text("utf-8"))
    for init, merges in (("some/model", False), (str(tmp_path / "peft"), True)):
        (run / "run.json").write_text(json.dumps({**recorded, "init": init}), "utf-8")
        assert run_export([str(run), "--to", "peft", "--out", str(tmp_path / f"peft-{merges}")]) == 0
        assert (f"deskside export {init} --out BASE" in capsys.readouterr().err) == merges
    (run / "run.json").write_text(json.dumps(recorded), "utf-8")
    capsys.readouterr()
    assert run_export([str(run), "--out", str(tmp_path / "hf")]) == 0
    assert re.search(r"kept in (bf16|int8|nf4), .*--to peft", capsys.readouterr().err)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=2e-3, rtol=2e-3)


def test_the_adapters_are_those_of_the_checkpoint_that_was_named(tmp_path: Path) -> None:
    run, expected = tmp_path / "run", {}
    run.mkdir()
    for step in (7, 9):
        model, options = trained()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= step if parameter.requires_grad else 1
        write_run(run, model, {}, (step,))
        expected[step] = to_peft(model, options, None)[1]
    for step in expected:
        named, out = run / "checkpoints" / folder_name(step), tmp_path / str(step)
        assert run_export([str(named), "--to", "peft", "--out", str(out)]) == 0
        found = load_file(out / "adapter_model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected[step].items())
        assert json.loads((out / "deskside.json").read_text())["step"] == step


@pytest.mark.parametrize("kept", ["bf16", "int8"])
def test_adapters_are_merged_into_the_original_weights(
    kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result equals PEFT's. If the original model has changed, the rounded weights of the run are used instead."""
    peft = pytest.importorskip("peft")
    config, options = ModelConfig(**TINY), AdapterConfig(rank=4, alpha=8, base=kept)
    plain = Transformer(config)
    initialize(plain, 3, InitOptions(output="fan_in", head_std=0.2, embedding_std=0.5))
    given = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    model = frozen_base.build(config, options, 5, given, "cpu")
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    run, original = tmp_path / "run", tmp_path / "original"
    run.mkdir()
    write_run(run, model, {"base": kept})
    save_hf(plain, config, run, original)
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "init": str(original)}))
    assert run_export([str(run), "--to", "peft", "--out", str(tmp_path / "peft")]) == 0
    assert run_export([str(run), "--out", str(tmp_path / "hf")]) == 0
    assert f"original weights, {original}" in capsys.readouterr().err
    assert run_export([str(run), "--dtype", "float16", "--out", str(tmp_path / "half")]) == 0
    assert f"original weights, {original}" in capsys.readouterr().err
    theirs = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft").merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)

    plain.get_parameter("layers.1.mlp.output.projection.weight").data[0, 0] += 1.0
    save_hf(plain, config, run, original)
    assert run_export([str(run), "--out", str(tmp_path / "hf")]) == 0
    assert f"kept in {kept}" in (said := capsys.readouterr().err) and "not exactly the original" in said
    rounded = load_file(tmp_path / "hf" / "model.safetensors")
    assert any(float((rounded[name] - expected[name]).abs().max()) > 1e-4 for name in rounded)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "q8_0"], "--dtype q8_0"),
        (["--to", "peft", "--dtype", "float16"], "--dtype float16: adapters"),
        (["--to", "peft"], "was trained without adapters"),
        (["--to", "onnx"], "--to: input should be 'hf', 'gguf' or 'peft', not 'onnx'"),
    ],
)
def test_export_refuses(made: MadeRun, arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        run_export([str(made.path), "--out", str(tmp_path / "out"), *arguments])
    assert not list(tmp_path.iterdir())


def test_peft_export_needs_a_run(made: MadeRun, tmp_path: Path) -> None:
    run_export([str(made.path), "--out", str(tmp_path / "hf")])
    with pytest.raises(UsageError, match="is not a run"):
        run_export([str(tmp_path / "hf"), "--to", "peft", "--out", str(tmp_path / "out")])
    assert run_export([str(tmp_path / "hf"), "--to", "gguf", "--out", str(tmp_path / "gguf")]) == 0
    assert (tmp_path / "gguf" / "hf-F32.gguf").is_file()


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_damaged_checkpoints_are_an_error(to: str, tmp_path: Path) -> None:
    run = make(tmp_path).path
    for file in run.glob("checkpoints/*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match="all 2 checkpoints are damaged"):
        run_export([str(run), "--to", to, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_a_full_disk_keeps_the_earlier_export(to: str, made: MadeRun, tmp_path: Path) -> None:
    """A file size limit of 30 kB simulates a full disk."""
    out = tmp_path / "out"
    run_export([str(made.path), "--to", to, "--out", str(out)])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(RunError, match=r"out.*: cannot be written: .*(File too large|disk is full)"):
            run_export([str(made.path), "--to", to, "--out", str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert names(tmp_path) == ["out"]


def test_export_in_float16(made: MadeRun, tmp_path: Path) -> None:
    run_export([str(made.path), "--out", str(tmp_path / "hf"), "--dtype", "float16"])
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "gguf", "--dtype", "q4_k_m"], r"deskside\[llama-cpp\]"),
        (["--to", "hf", "--dtype", "q6_k"], "exists only in GGUF"),
        (["--public"], "--push"),
        (["--push", "no-owner"], "owner/name"),
    ],
)
def test_refused_before_the_model_is_loaded(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UsageError, match=message) as error:
        run_export([str(tmp_path / "none"), "--out", str(tmp_path / "out"), *options])
    assert "\n" not in str(error.value)
