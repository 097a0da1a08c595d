"""eval and export on a synthetic run: their numbers, their JSON, and their errors."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deskside.cli.chat import run as run_chat
from deskside.cli.eval import run as run_eval
from deskside.cli.export import run as run_export
from deskside.data.reading.rows import PackedDataset
from deskside.engine.generate import generate
from deskside.evaluate.bpb import evaluate_dataset
from deskside.utils.errors import RunError, UsageError
from tests.serve.made_run import MadeRun, make


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make(tmp_path_factory.mktemp("serve"))


def test_eval_of_a_run_is_its_validation(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_eval([str(made.path), "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    dataset = PackedDataset(str(made.config.data.path), "val", 64)
    expected = evaluate_dataset(made.model, dataset, micro_rows=4)
    assert found["bpb"] == pytest.approx(expected.bpb, rel=1e-5)
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert (found["tokens"], found["bytes"], found["tasks"]) == (expected.tokens, expected.bytes, {})
    assert found["step"] == 20
    assert 0 < found["gzip_bpb"] < 8


def test_eval_of_a_text(made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["the sea was wide", "sailors sang 東京 songs " * 40]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
    assert run_eval([str(made.path), "--text", str(tmp_path / "a.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == sum(len(t.encode()) for t in texts)
    assert found["bpb"] * found["bytes"] == pytest.approx(
        found["loss"] * found["tokens"] / 0.69314718, rel=1e-6
    )
    assert run_eval([str(made.path), "--text", str(tmp_path / "a.jsonl")]) == 0
    assert f"{found['bpb']:.4f} bits per byte." in " ".join(capsys.readouterr().out.split())


def test_export_loads_with_plain_transformers(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hf"
    assert run_export([str(made.path), "--to", "hf", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20
    theirs = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("the sea was", return_tensors="pt").input_ids
    torch.testing.assert_close(theirs(prompt).logits, made.model(prompt), atol=1e-4, rtol=1e-4)
    text = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)[0].tolist()
    assert text == prompt[0].tolist() + generate(made.model, prompt.tolist(), max_new_tokens=20)[0].tokens
    # The export itself can be evaluated: the same weights and the same text give the same number.
    (tmp_path / "a.txt").write_text("the ship went to the sea " * 20)
    values = []
    for model in (made.path, out):
        run_eval([str(model), "--text", str(tmp_path / "a.txt"), "--sequence-length", "64", "--json"])
        values.append(json.loads(capsys.readouterr().out)["bpb"])
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_export_replaces_only_what_it_made(made: MadeRun, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    assert run_export([str(made.path), "--out", str(out)]) == 0
    assert run_export([str(made.path), "--out", str(out), "--dtype", "bfloat16"]) == 0
    stored = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert stored.dtype == torch.bfloat16
    (out / "deskside.json").unlink()  # now it could be any model
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(UsageError, match="did not write"):
        run_export([str(made.path), "--out", str(out)])
    (out / "deskside.json").write_text("[]")
    with pytest.raises(RunError, match=r"deskside\.json is damaged: it does not hold a JSON object"):
        run_export([str(made.path), "--out", str(out)])
    (out / "deskside.json").unlink()
    assert sorted(path.name for path in out.iterdir()) == before
    with pytest.raises(UsageError, match="is a file"):
        run_export([str(made.path), "--out", str(out / "config.json")])
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "core"], "--tasks core: where is the data"),
        (["--text", "a.txt", "--data", "b"], "give one of them"),
        (["--sequence-length", "9999"], "takes 2 to 4096 tokens"),
        (["--sequence-length", "0"], "--sequence-length 0: this model takes 2 to"),
        (["--text", ""], "--text '': is empty"),
        (["--data", ""], "--data '': is empty"),
        (["--batch-tokens", "0"], "at least 1"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_eval_refuses(made: MadeRun, arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_eval([str(made.path), *arguments])


def test_eval_says_nothing_of_options_that_it_lacks(made: MadeRun, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"body": 1}\n')
    with pytest.raises(
        UsageError, match=r"a\.jsonl:1 .*: JSON without the field\. .* it, or leave it out\.$"
    ):
        run_eval([str(made.path), "--text", str(tmp_path / "a.jsonl")])


def test_data_of_another_tokenizer_is_refused(made: MadeRun, tmp_path: Path) -> None:
    other = make(tmp_path)
    file = other.path / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(UsageError, match="a different tokenizer"):
        run_eval([str(other.path)])


@pytest.mark.parametrize(
    "arguments", [["--temperature", "-1"], ["--top_p", "2"], ["--max-new-tokens", "0"], ["--seed", "-3"]]
)
def test_chat_refuses(made: MadeRun, arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=arguments[0].lstrip("-").replace("_", ".")):
        run_chat([str(made.path), *arguments])


def test_an_unknown_option_names_the_nearest(made: MadeRun) -> None:
    with pytest.raises(UsageError, match="--jsn: there is no such option; did you mean --json"):
        run_eval([str(made.path), "--jsn"])
