"""The commands that `benchmarks/kills.py` kills: how each starts and resumes, and what must be as without kills."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOML = """
[model]
vocab_size = 300
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 64
max_position_embeddings = 128
[batch]
sequence_length = 64
tokens = 512
[compute]
device = "DEVICE"
attention = "reference"
[checkpoint]
every = "5 steps"
[evaluate]
every = "20 steps"
"""
# A mixture of experts as it is trained on a small card: fused, with weights in bfloat16, 8-bit optimizer states, and
# the states and the activations in host memory.
EXPERTS = """
base = "tiny.toml"
[model]
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 32
[batch]
micro_tokens = 256
[precision]
name = "bf16"
[optim]
name = "adamw"
weights = "bfloat16"
states = "8bit"
offload = true
[compute]
compile = "fused"
activation_checkpointing = "block"
activation_offloading = true
"""
STUDY = """
name = "kills"
question = "Does it go on?"
base = "tiny.toml"
seeds = 1
[budget]
steps_per_arm = 30
[[factor]]
name = "depth"
[[factor.level]]
name = "one"
set.model.num_hidden_layers = 1
[[factor.level]]
name = "two"
set.model.num_hidden_layers = 2
"""


@dataclass(frozen=True)
class Command:
    """A command under test.

    Args:
        start: Returns the arguments of a new run in a folder.
        resume: Returns the arguments that resume the run.
        outcome: Reads from the folder what must be the same as without kills.
        can_resume: Returns True if the folder contains a run that can be resumed.
        checkpoints: True if the folder contains the checkpoints of one run.
    """

    name: str
    start: Callable[[Path], list[str]]
    resume: Callable[[Path], list[str]]
    outcome: Callable[[Path], Any]
    can_resume: Callable[[Path], bool]
    checkpoints: bool = True


def make_commands(work: Path, device: str = "cpu") -> dict[str, Command]:
    """Write the data and configuration files, and return the commands by name."""
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("riv", "sto", "shi", "lig") for b in ("er", "ne", "p", "ht")]
    records = [
        {"text": " ".join(rng.choices(words, k=60)) + ".\n", "lang": "en" if i % 2 else "xx"}
        for i in range(600)
    ]
    _jsonl(work / "text.jsonl", records)
    letters = ["".join(rng.choices("abcdef", k=3)) + f" {i % 10}" for i in range(240)]
    _jsonl(
        work / "chats.jsonl",
        [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": q[-1]}]}
            for q in letters
        ],
    )
    _jsonl(
        work / "pairs.jsonl",
        [{"prompt": q, "chosen": f"yes {q[-1]}", "rejected": f"no {q[:2]}"} for q in letters],
    )
    _jsonl(work / "questions.jsonl", [{"prompt": q, "answer": q[-1]} for q in letters])
    (work / "tiny.toml").write_text(TOML.replace("DEVICE", device))
    (work / "experts.toml").write_text(EXPERTS)
    (work / "study.toml").write_text(STUDY)

    def training(name: str, head: list[str], more: list[str], label: str | None = None) -> Command:
        def start(folder: Path) -> list[str]:
            return [name, *head, "--runs", str(folder.parent), "--name", folder.name, *more]

        return Command(
            label or name,
            start,
            lambda folder: [name, "--resume", str(folder)],
            run_outcome,
            lambda p: (p / "run.json").exists(),
        )

    def alignment(name: str, base: str, data: str, *more: str) -> Command:
        head = [str(work / base), "--data", str(work / data)]
        common = [
            "--data.path",
            str(work / f"{name}-data"),
            "--batch.sequence_length",
            "64",
            "--compute.device",
            device,
        ]
        return training(
            name, head, [*common, "--checkpoint.every", "4 steps", "--evaluate.every", "none", *more]
        )

    def study(folder: Path) -> list[str]:
        data = ["--data.path", str(work / "data")]
        return ["study", str(work / "study.toml"), "--out", str(folder), *data]

    def go(folder: Path) -> list[str]:
        where = [
            "--preset",
            str(work / "tiny.toml"),
            "--data",
            str(work / "data"),
            "--runs",
            str(folder.parent),
        ]
        return ["go", "--hours", "0.006", "--name", folder.name, "--yes", *where]

    def data(folder: Path) -> list[str]:
        source = ["data", "prepare", str(work / "text.jsonl"), "--out", str(folder)]
        return [*source, "--vocab-size", "300", "--workers", "1"]

    prepared = ["--data.path", str(work / "data")]
    return {
        "train": training("train", [str(work / "tiny.toml")], [*prepared, "--schedule.steps", "60"]),
        "experts": training("train", [str(work / "experts.toml")], [*prepared, "--schedule.steps", "60"], "experts"),
        "sft": alignment("sft", "train-reference", "chats.jsonl", "--schedule.steps", "30", "--batch.tokens", "512"),
        "dpo": alignment("dpo", "sft-reference", "pairs.jsonl", "--schedule.steps", "20", "--batch.tokens", "1024"),
        "grpo": alignment(
            "grpo", "sft-reference", "questions.jsonl", "--schedule.steps", "10", "--questions", "4",
            "--align.group", "4", "--align.answer_tokens", "4", "--align.steps_per_rollout", "2",
        ),
        "data": Command("data", data, data, data_outcome, lambda p: True, checkpoints=False),
        "study": Command(
            "study", study, lambda p: ["study", str(p), "--resume"], study_outcome,
            lambda p: (p / "study.json").exists(), checkpoints=False,
        ),
        "go": Command(
            "go", go, lambda p: ["go", "--resume", str(p), "--yes"], go_outcome, lambda p: (p / "go.json").exists()
        ),
    }  # fmt: skip


def _jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_outcome(run: Path) -> dict[str, Any]:
    return {"curve": curve(run), "weights": weights(run)}


def study_outcome(study: Path) -> dict[str, Any]:
    results = json.loads((study / "results.json").read_text())
    trials = [
        (arm["id"], t["seed"], t["status"], t["metrics"].get("val_bpb"))
        for arm in results["arms"]
        for t in arm["trials"]
    ]
    curves = {p.parent.name: curve(p.parent) for p in sorted(study.glob("runs/*/metrics.jsonl"))}
    return {"trials": [list(t) for t in trials], "curves": curves}


def data_outcome(folder: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.iterdir()
        if p.name != ".verified.json"
    }


def go_outcome(run: Path) -> dict[str, Any]:
    """Return the results of `go` that do not depend on the speed of the machine."""
    steps = [row[0] for row in curve(run)]
    state = json.loads((run / "go.json").read_text())
    return {
        "phase": state["phase"],
        "each_step_once": steps == list(range(1, len(steps) + 1)) and bool(steps),
        "model": (run / "model" / "model.safetensors").exists(),
        "report": (run / "report.html").exists(),
    }


def curve(run: Path) -> list[list[Any]]:
    """Return step, tokens, learning rate, loss, gradient norm and validation bits per byte of every step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[row.get(k) for k in ("step", "tokens", "lr", "loss", "grad_norm", "val_bpb")] for row in rows]


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()
