"""Directories from strangers: whatever a file contains, reading it executes nothing.

Every command that reads a directory is given hostile ones. Two traps detect execution: a payload that creates a file,
and an audit hook that sees every global that any unpickler in this process looks up.
"""

import ast
import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deskside.cli.main import main
from deskside.pipeline.pipeline_state import PipelineState
from deskside.run.directory import RunDirectory
from deskside.study.execute.trial_process import TrialJob, train
from tests.serve import made_run
from tests.sources import PACKAGE, ROOT, files
from tests.weights.test_load import list_files

LOOKED_UP: list[str] = []
_watching = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "pickle.find_class":
        LOOKED_UP.append(".".join(map(str, arguments)))


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Record the globals that unpicklers look up. An audit hook cannot be removed, so it is switched on and off."""
    global _watching
    LOOKED_UP.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(_hook)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = made_run.make(tmp_path_factory.mktemp("good"))
    file = made.path / "run.json"
    run = json.loads(file.read_text())
    run["config"]["schedule"]["length"] = "3 steps"
    run["config"]["compute"] = {"device": "cpu", "attention": "reference"}
    file.write_text(json.dumps(run))
    return made.path


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def torch_file(path: Path, mark: Path) -> None:
    torch.save({"weight": Payload(mark)}, path)


def sharded(run: Path, mark: Path) -> None:
    """Write a sharded checkpoint in torch.distributed.checkpoint's own format, whose metadata is a pickle."""
    folder = run / "checkpoints" / "step-000000030" / "sharded"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    torch_file(folder / "__0_0.distcp", mark)
    (folder.parent / "state.json").write_text("{}")
    list_files(folder.parent)


def tensors(run: Path, mark: Path) -> None:
    """Write pickles under the names of safetensors files, and of everything else in a checkpoint."""
    for step, names in (
        (30, ["model.safetensors", "optimizer.safetensors"]),
        (40, ["sharded/a.safetensors"]),
    ):
        folder = run / "checkpoints" / f"step-{step:09d}"
        for name in (*names, "state.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            torch_file(folder / name, mark)
        list_files(folder)
    for old in ("step-000000010", "step-000000020"):
        shutil.rmtree(run / "checkpoints" / old)


def tokenizer(run: Path, mark: Path) -> None:
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer.pkl", "tokenizer_config.json"):
        (run / name).write_bytes(pickle.dumps(Payload(mark)))


def configuration(run: Path, mark: Path) -> None:
    for name in ("run.json", "plan.json", "metrics.jsonl", "summary.json", "go.json"):
        (run / name).write_bytes(pickle.dumps(Payload(mark)))


def hugging_face(run: Path, mark: Path, weights: Callable[[Path, Path], None]) -> None:
    from deskside.weights.hf import save_hf
    from deskside.weights.load import load_model

    loaded = load_model(run)
    made = run.with_name("hf")
    save_hf(loaded.model, loaded.config, run, made)
    shutil.rmtree(run)
    made.rename(run)
    weights(run, mark)
    code = f"import os\nos.system(\"touch '{mark}'\")\n"
    for name in ("modeling_evil.py", "tokenization_evil.py", "__init__.py", "sitecustomize.py"):
        (run / name).write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((run / name).read_text()) if (run / name).exists() else {}
        content["auto_map"] = {
            "AutoModelForCausalLM": "modeling_evil.M",
            "AutoTokenizer": "tokenization_evil.T",
        }
        (run / name).write_text(json.dumps(content))
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch_file(run / name, mark)


def bin_weights(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch_file(folder / "pytorch_model.bin", mark)


def indexed_weights(folder: Path, mark: Path) -> None:
    from safetensors.torch import load_file

    names = load_file(folder / "model.safetensors")
    bin_weights(folder, mark)
    index = json.dumps({"weight_map": dict.fromkeys(names, "pytorch_model.bin")})
    (folder / "model.safetensors.index.json").write_text(index)


def disguised_weights(folder: Path, mark: Path) -> None:
    torch_file(folder / "model.safetensors", mark)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "sharded": sharded,
    "tensors": tensors,
    "tokenizer": tokenizer,
    "configuration": configuration,
    "bin": lambda run, mark: hugging_face(run, mark, bin_weights),
    "index": lambda run, mark: hugging_face(run, mark, indexed_weights),
    "disguise": lambda run, mark: hugging_face(run, mark, disguised_weights),
}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
QUESTION = {"prompt": "1 + 1?", "answer": "2"}


def commands(path: Path, folder: Path, is_run: bool) -> list[list[str]]:
    for name, row in (("chat", CHAT), ("pair", PAIR), ("question", QUESTION)):
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 8)
    (folder / "text.txt").write_text("some words\n" * 20)
    run, runs = str(path), str(folder / "made")
    found = [
        ["chat", run, "--prompt", "hi"],
        ["eval", run, "--data", str(folder / "text.txt")],
        ["export", run, "--to", "hf", "--out", str(folder / "out")],
        ["export", run, "--to", "gguf", "--out", str(folder / "out.gguf")],
        ["export", run, "--to", "peft", "--out", str(folder / "out-peft")],
        ["serve", run, "--port", "0"],
        ["sft", run, "--data", str(folder / "chat.jsonl"), "--runs", runs],
        ["dpo", run, "--data", str(folder / "pair.jsonl"), "--runs", runs],
        ["kto", run, "--data", str(folder / "labelled.jsonl"), "--runs", runs],
        ["grpo", run, "--data", str(folder / "question.jsonl"), "--runs", runs],
        ["train", "--init", run, "--schedule.steps", "2", "--runs", runs],
        ["data", "prepare", str(folder / "text.txt"), "--tokenizer", run, "--out", str(folder / "prepared")],
        ["report", run],
    ]
    if is_run:
        found += [[command, "--resume", run] for command in ("train", "sft", "dpo", "kto", "grpo", "go")]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_executes_what_a_directory_holds(
    kind: str, good: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "evil"
    shutil.copytree(good, path)
    KINDS[kind](path, mark)
    if kind == "sharded":
        begin_pipeline(path)
    for argv in commands(path, tmp_path, is_run=kind not in ("bin", "index", "disguise")):
        with watched():
            code = main(argv)
        said = capsys.readouterr().err
        assert not mark.exists() and not LOOKED_UP, (argv, LOOKED_UP)
        assert "unexpected" not in said and "Traceback" not in said, (argv, said)
        if argv[0] not in ("report", "data"):  # these two need no weights
            assert code in (1, 2), (argv, code, said)
            # dpo, kto and grpo refuse to resume a run of `train`; runs of their own kind are tested below
            if kind == "sharded" and argv[:2] not in ([c, "--resume"] for c in ("dpo", "kto", "grpo")):
                assert "--init DIR" in said, (argv, said)


def begin_pipeline(run: Path) -> None:
    """Begin a pipeline in the run, in the phase in which it resumes training."""
    config = json.loads((run / "run.json").read_text())["config"]
    options = {
        "preset": "demo",
        "data": config["data"]["path"],
        "given": {},
        "gpu_budget": None,
        "target_loss": None,
        "probes": "probes",
        "directory": str(run),
    }
    skipped = {"status": "skipped", "reason": "a test"}
    plan = {**skipped, "pretrain_seconds": 100.0, "config": {"data": {"path": config["data"]["path"]}}}
    results = {"doctor": skipped, "probe": skipped, "plan": plan}
    PipelineState.begin(RunDirectory(run), 1.0, options, "a test", phase="train", results=results)


@pytest.fixture(scope="module")
def aligned(good: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Unfinished runs of dpo and grpo."""
    folder = tmp_path_factory.mktemp("aligned")
    for name, rows in (
        ("pair", [{"prompt": f"a {n}", "chosen": "b", "rejected": "c"} for n in range(40)]),
        ("question", [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--runs", str(folder), "--steps", "2", "--compute.device", "cpu"]
    short = ["--questions", "2", "--align.answer_tokens", "4"]
    grpo = ["grpo", str(good), "--data", str(folder / "question.jsonl"), "--name", "grpo", *short, *common]
    with contextlib.chdir(folder):
        assert main(["dpo", str(good), "--data", str(folder / "pair.jsonl"), "--name", "dpo", *common]) == 0
        assert main(grpo) == 0
    for command in ("dpo", "grpo"):
        file = folder / command / "run.json"
        run = json.loads(file.read_text())
        run["config"]["schedule"]["length"] = "4 steps"
        file.write_text(json.dumps(run))
        (folder / command / "summary.json").unlink()
    return {command: folder / command for command in ("dpo", "grpo")}


@pytest.mark.full  # two training runs
@pytest.mark.parametrize("command", ["dpo", "grpo"])
def test_an_alignment_run_executes_nothing_on_resume(
    command: str, aligned: dict[str, Path], mark: Path, tmp_path: Path, capsys: Any
) -> None:
    for kind in ("sharded", "tensors", "tokenizer", "configuration"):
        run = tmp_path / kind / command
        shutil.copytree(aligned[command], run)
        for old in ("step-000000010", "step-000000020"):  # `tensors` replaces these two
            (run / "checkpoints" / old).mkdir()
        KINDS[kind](run, mark)
        with watched():
            code = main([command, "--resume", str(run)])
        said = capsys.readouterr().err
        assert not mark.exists() and not LOOKED_UP, (kind, LOOKED_UP)
        assert "unexpected" not in said and "Traceback" not in said, (kind, said)
        # There is a valid checkpoint before the damaged ones.
        assert code in ((0, 1, 2) if kind == "tensors" else (1, 2)), (kind, code, said)
        if kind == "sharded":
            assert "--init DIR" in said, said


def test_a_trial_of_a_study_executes_nothing_on_resume(good: Path, mark: Path, tmp_path: Path) -> None:
    run = tmp_path / "trial"
    shutil.copytree(good, run)
    sharded(run, mark)
    config = json.loads((run / "run.json").read_text())["config"]
    with watched(), pytest.raises(Exception, match="--init DIR"):
        train(TrialJob("", str(run), config, "a test", True, 1.0))
    assert not mark.exists() and not LOOKED_UP


def test_prepared_data_executes_nothing(good: Path, mark: Path, tmp_path: Path, capsys: Any) -> None:
    """Object arrays of numpy are pickles."""
    config = json.loads((good / "run.json").read_text())["config"]
    data = tmp_path / "data"
    shutil.copytree(config["data"]["path"], data)
    for table in data.rglob("*.npy"):
        np.save(table, np.array([Payload(mark)], dtype=object), allow_pickle=True)
    for argv in (
        ["data", "verify", str(data)],
        ["data", "show", str(data)],
        [
            "train",
            "demo",
            "--data.path",
            str(data),
            "--schedule.steps",
            "2",
            "--runs",
            str(tmp_path / "runs"),
        ],
    ):
        with watched():
            code = main(argv)
        assert code in (1, 2) and not mark.exists() and not LOOKED_UP, (argv, capsys.readouterr().err)


# What reads files


FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "joblib", "shelve", "cloudpickle", "marshal"}
CALLS = {"torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "pd.read_pickle", "numpy.load"}


def aliased_yaml(alias: ast.alias) -> bool:
    """Return True if an import hides yaml's calls from the check below."""
    return alias.name.split(".")[0] == "yaml" and (alias.name, alias.asname) != ("yaml", None)


def offences(source: str) -> list[str]:
    """Return the lines of a module that read or write a format that executes code when it is loaded."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            found += [
                f"{node.lineno}: yaml under another name" for alias in node.names if aliased_yaml(alias)
            ]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module).split(".")[0]]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
            if names[0] == "yaml":
                found.append(f"{node.lineno}: from yaml import; write yaml.safe_load")
        found += [f"{node.lineno}: import {name}" for name in names if name in FORBIDDEN | CALLS]  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in CALLS or called.endswith((".read_pickle", ".to_pickle")):
                found.append(f"{node.lineno}: {called}")
            if called.startswith("yaml.") and called not in ("yaml.safe_load", "yaml.dump"):
                found.append(f"{node.lineno}: {called}, where yaml.safe_load makes plain values only")
            if called == "np.load" and given.get("allow_pickle") != "False":
                found.append(f"{node.lineno}: {called} without allow_pickle=False")
            if called == "dcp.load" and "storage_reader" not in given:
                found.append(f"{node.lineno}: {called} without a storage_reader")
            if called in ("dcp.save", "dcp.async_save") and "storage_writer" not in given:
                found.append(f"{node.lineno}: {called} without a storage_writer")
            if given.get("trust_remote_code", "False") != "False" or given.get("weights_only") == "False":
                found.append(f"{node.lineno}: {called} runs code of others")
    return found


def test_no_module_reads_a_format_that_executes() -> None:
    modules = [*files(PACKAGE, "*.py"), *files(ROOT / "benchmarks", "*.py")]
    found = {str(path.relative_to(ROOT)): offences(path.read_text("utf-8")) for path in modules}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(p)",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "dcp.load(s, checkpoint_id=p)",
        "dcp.save(s, checkpoint_id=p)",
        "import yaml as y",
        "from yaml import load",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
    ],
)
def test_an_offence_is_found(source: str) -> None:
    assert offences(source)


def test_the_safe_loader_of_yaml_is_no_offence() -> None:
    assert not offences("import yaml\nyaml.safe_load(text)")
