"""`deskside sft` from a tiny pretrained model to answers: losses, resuming, the deadline, and mistyped options."""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from deskside.align import samples
from deskside.align.sft import Sft
from deskside.cli import sft as sft_command
from deskside.cli.main import main
from deskside.data import tokenizer
from deskside.data.reading.loader import validation_batches
from deskside.data.reading.rows import IGNORE
from deskside.engine.sampling import GREEDY
from deskside.evaluate.bpb import evaluate_dataset
from deskside.kernels.attention import AttentionContext
from deskside.serve.chat import ChatOptions, ChatSession
from deskside.train import training_run
from deskside.train.prepare.batch_size_finder import BatchSizeFinder
from deskside.utils.errors import UsageError
from deskside.weights.load import load_model
from tests.align import tiny
from tests.train import tiny_run
from tests.train.loop.graph_stand_ins import Checking
from tests.train.test_graphed_runs import allow_a_cpu
from tests.train.tiny_run import curve, kill_at_step, plan, rows

COLOURS = {"sea": "blue", "grass": "green", "coal": "black", "snow": "white", "blood": "red", "sun": "yellow"}
OPENINGS = ("What colour is the {}?", "Tell me: the {}, which colour?", "The {} is what colour?")
SMALL = ["--compute.device", "cpu", "--compute.attention", "reference", "--batch.sequence_length", "64"]
MODEL = {**tiny_run.SHAPE, "vocab_size": 384, "hidden_size": 64, "head_dim": 32, "intermediate_size": 128}


def colours() -> list[list[dict[str, str]]]:
    """Return every question with its answer, and pairs of them as conversations of two turns."""
    single = [
        [{"role": "user", "content": o.format(a)}, {"role": "assistant", "content": f"The {a} is {c}."}]
        for o in OPENINGS
        for a, c in COLOURS.items()
    ]
    return single + [a + b for a, b in zip(single, single[1:] + single[:1], strict=True)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations and a base model that has seen their words as plain text."""
    folder = tmp_path_factory.mktemp("sft")
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": m, "source": "colours"}) + "\n" for m in colours() * 4)
    )
    # The training data asks these questions alone, so the held-out conversations can be learned.
    (folder / "held.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in colours()[-6:]))
    (folder / "text.txt").write_text(
        "\n".join(" ".join(m["content"] for m in c) for c in colours() * 6) + "\n"
    )
    with within(folder):
        assert main(["data", "prepare", "text.txt", "--out", "text", "--vocab-size", "384"]) == 0
        config = tiny_run.config(
            "text",
            model=MODEL,
            batch={"sequence_length": 64, "tokens": 1024},
            schedule={"length": "40 steps"},
        )
        tiny_run.train(folder / "runs", config, "base")
    return folder


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "grpo"])
def test_another_shape_than_that_of_the_weights_is_refused(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before any data is prepared. It used to train a model that the weights do not fit."""
    with within(place):
        argv = [name, "runs/base", "--data", "nothing-there.jsonl", "--model.rope_theta", "5"]
        assert main(argv) == 2
    assert "model.rope_theta: the weights of runs/base are" in capsys.readouterr().err


class within:
    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None:
        self.before = os.getcwd()
        os.chdir(self.folder)

    def __exit__(self, *error: object) -> None:
        os.chdir(self.before)


def arguments(name: str, *more: str) -> list[str]:
    return ["sft", "runs/base", "--data", "chats.jsonl", "--val", "held.jsonl", "--name", name, *SMALL, *more]


def sft(place: Path, name: str, *more: str) -> Path:
    """Run the command in this process."""
    with within(place):
        assert main(arguments(name, *more)) == 0
    return place / "runs" / name


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    return sft(place, "chat", "--optim.lr", "4e-3", "--schedule.steps", "250", "--batch.tokens", "512")


def test_it_learns_to_answer_in_the_template(finished: Path) -> None:
    """The loss on held-out conversations falls, and answers become right and end by themselves."""
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["objective"] == "sft" and summary["val_loss"] < 0.2 * summary["before"]["val_loss"]
    assert plan(finished)["before"] == summary["before"]
    assert len(summary["samples"]) == 4
    assert all(s["text"] == s["reference"] != s["before"] for s in summary["samples"])
    loaded = load_model(finished)
    conversation = ChatSession(loaded, ChatOptions(GREEDY, 40, 0, None))
    assert "".join(conversation.reply("What colour is the snow?")) == "The snow is white."
    assert conversation.reason == "eos"
    assert "".join(conversation.reply("Tell me: the coal, which colour?")) == "The coal is black."


def test_the_report_says_before_and_after(finished: Path) -> None:
    page, summary = (finished / "report.md").read_text(), json.loads((finished / "summary.json").read_text())
    before, after = summary["before"]["val_loss"], summary["val_loss"]
    for shown in (f"{after:.3f}", f"{before:.3f}", summary["samples"][0]["reference"]):
        assert shown in page


def test_transformers_answers_the_same(finished: Path) -> None:
    """The exported model is complete: chat template, tokens that end an answer, and weights."""
    coder = AutoTokenizer.from_pretrained(finished / "model")
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    messages = [{"role": "user", "content": "The sun is what colour?"}]
    prompt = coder.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    tokens = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :]
    assert coder.decode(tokens) == "The sun is yellow.<|im_end|>"


def test_the_loss_is_that_of_transformers(finished: Path) -> None:
    """The loss of packed rows equals transformers' loss of each conversation alone, with
    label -100 outside the assistant's turns.
    """
    dataset = Sft().open(*opened(finished))
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    coder = AutoTokenizer.from_pretrained(finished / "model")
    mine, ends = load_model(finished).model, coder.convert_tokens_to_ids("<|im_end|>")
    theirs, counted = 0.0, 0
    for line in (finished.parent.parent / "held.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        ids = coder.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        labels = torch.full_like(ids, -100)
        for n in range(1, len(messages), 2):
            prompt = coder.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False)
            end = ids[0].tolist().index(ends, len(prompt)) + 1
            labels[0, len(prompt) : end] = ids[0, len(prompt) : end]
        count = int((labels != -100).sum())
        theirs += model(ids, labels=labels).loss.item() * count
        counted += count
    ours = 0.0
    for batch in validation_batches(dataset, 2):
        context = AttentionContext(cu_seqlens=batch.cu_seqlens, max_seqlen=batch.tokens_BT.shape[1])
        ours += float(mine.loss(batch.tokens_BT, batch.targets_BT, context, positions_BT=batch.positions_BT))
    assert counted == dataset.num_tokens
    # Float32 computes a token's loss to about 1e-6, and after this training the loss is only 0.004 nats.
    expected = pytest.approx(theirs, rel=1e-5, abs=1e-6 * counted)
    assert ours == expected
    found = evaluate_dataset(mine, dataset, micro_rows=2, document_mask=True)
    assert found.target_nats == expected and found.targets == counted
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["val_loss"] * counted == expected


def opened(run: Path) -> tuple[Any, Path, str, int]:
    from deskside.run.directory import RunDirectory

    config = RunDirectory.open(run).config()
    return config, run.parent.parent / str(config.data.path), "val", config.batch.sequence_length


def test_conversations_in_one_row_do_not_see_each_other(finished: Path) -> None:
    """The losses of packed rows are those of rows with one conversation each."""
    dataset = Sft().open(*opened(finished))
    model = load_model(finished).model
    # several conversations share a row
    assert int((dataset.rows_by_number(np.array([0])).positions == 0).sum()) > 1
    packed, alone = 0.0, 0.0
    for batch in validation_batches(dataset, 1):
        context = AttentionContext(cu_seqlens=batch.cu_seqlens, max_seqlen=batch.tokens_BT.shape[1])
        packed += float(
            model.loss(batch.tokens_BT, batch.targets_BT, context, positions_BT=batch.positions_BT)
        )
        edges = sorted({*batch.cu_seqlens.tolist()}) if batch.cu_seqlens is not None else []
        for a, b in itertools.pairwise(edges):
            if bool((batch.targets_BT[0, a:b] != IGNORE).any()):
                alone += float(model.loss(batch.tokens_BT[:, a:b], batch.targets_BT[:, a:b]))
    assert packed == pytest.approx(alone, rel=1e-5)


def test_a_killed_run_goes_on_exactly(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "ANSWER_TOKENS", 96)  # as in the process that is killed
    more = ["--schedule.steps", "24", "--checkpoint.every", "5 steps"]
    more += ["--batch.tokens", "512", "--evaluate.every", "none"]
    whole = sft(place, "straight", *more)
    with within(place):
        child = tiny_run.command(arguments("killed", *more), tmp_path / "log")
        run = place / "runs" / "killed"
        kill_at_step(run, 12, lambda: child.kill(signal.SIGKILL), child.alive)
        child.wait()
        assert not (run / "summary.json").exists()
        assert main(["train", "--resume", str(run)]) == 0  # the objective is recognised without an option
    assert curve(run) == curve(whole)
    a, b = (json.loads((r / "summary.json").read_text()) for r in (run, whole))
    assert a["val_loss"] == b["val_loss"] and a["before"] == b["before"] and a["samples"] == b["samples"]


@pytest.mark.parametrize(
    "adapter",
    [(), ("--adapter.rank", "4")],
    ids=["weights", "adapters"],
)
@pytest.mark.full
def test_killed_before_the_first_checkpoint_it_starts_over(
    adapter: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes before the plan, or between the plan and the first checkpoint. New
    chat tokens get the same initial values.
    """
    more = ["--schedule.steps", "3", "--batch.tokens", "512", "--evaluate.every", "none", *adapter]
    kind = f"early{len(adapter)}"
    whole = sft(place, f"{kind}-straight", *more)

    def killed(*_: object) -> None:
        raise tiny.Killed

    for when in ("planning", "saving"):
        with monkeypatch.context() as patch, within(place), pytest.raises(tiny.Killed):
            if when == "planning":
                patch.setattr(BatchSizeFinder, "find", killed)
                # A killed process cannot clean up.
                patch.setattr(training_run, "shutil", SimpleNamespace(rmtree=lambda *_, **__: None))
            else:
                tiny.kill_at(patch, 0)
            sft_command.run(arguments(f"{kind}-{when}", *more)[1:])
        run = place / "runs" / f"{kind}-{when}"
        assert (run / "plan.json").exists() == (when == "saving")
        with within(place):
            assert main(["sft", "--resume", str(run)]) == 0
        assert curve(run) == curve(whole)
        weights = "model/model.safetensors"
        assert (run / weights).read_bytes() == (whole / weights).read_bytes()


def test_epochs_are_times_through_the_data(place: Path) -> None:
    run = sft(place, "epochs", "--epochs", "2", "--batch.tokens", "256")
    made = json.loads((run / "run.json").read_text())["config"]
    dataset = Sft().open(*opened(run)[:2], "train", 64)
    assert made["schedule"]["length"] == "2 epochs"
    assert rows(run)[-1]["step"] == -(-2 * dataset.num_rows * 64 // 256)


@pytest.mark.full
def test_a_run_in_time_ends_on_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_run.VirtualTime(monkeypatch, lambda step: 0.05)
    run = sft(
        place, "timed", "--schedule.length", "5s", "--batch.tokens", "256", "--schedule.clock", "training"
    )
    summary = json.loads((run / "summary.json").read_text())
    assert 4.5 <= summary["seconds"] <= 5.0
    lrs = [r["lr"] for r in rows(run)]
    assert lrs[-1] < 0.05 * max(lrs)


@pytest.mark.full
def test_muon_and_fp8_are_only_options(place: Path) -> None:
    more = [
        "--schedule.steps",
        "3",
        "--batch.tokens",
        "256",
        "--optim.name",
        "muon",
        "--precision.name",
        "fp8",
    ]
    summary = json.loads((sft(place, "fp8", *more) / "summary.json").read_text())
    assert summary["precision"].startswith("fp8") and summary["emulated"]


@pytest.mark.full
def test_replayed_passes_change_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--schedule.steps", "8", "--batch.tokens", "256", "--batch.micro_tokens", "128"]
    more += ["--precision.name", "bf16", "--compute.compile", "fused"]
    plain = sft(place, "without-graphs", *more)
    allow_a_cpu(monkeypatch, Checking)
    graphs = sft(place, "with-graphs", *more, "--compute.cuda_graph", "on")
    assert curve(graphs) == curve(plain) and len(curve(plain)) == 8
    assert tiny_run.events(graphs).count("captured a pass of") == 1
    assert Checking.made[0].replays == 6 * 3  # two passes and the conversion of the weights


def test_prepared_conversations_are_used_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft(place, "again-1", "--schedule.steps", "2", "--batch.tokens", "256")
    before = sorted(p.name for p in (place / "data").iterdir())
    capsys.readouterr()
    sft(place, "again-2", "--schedule.steps", "2", "--batch.tokens", "256")
    assert sorted(p.name for p in (place / "data").iterdir()) == before
    error = capsys.readouterr().err
    assert "render:" not in error
    # The user is told where the run is.
    assert sum(f"data/{name} " in error.replace(";", " ") for name in before) == 1


@pytest.mark.full
def test_two_processes_train_as_one(place: Path, tmp_path: Path) -> None:
    """One process prepares the conversations while the other waits. The loss equals that of one process."""
    more = [
        "--schedule.steps",
        "6",
        "--batch.tokens",
        "512",
        "--evaluate.every",
        "none",
        "--align.turns",
        "last",
    ]
    alone = sft(place, "alone", *more)
    with within(place):
        (place / "data").rename(place / "data-before")
        child = tiny_run.command(arguments("both", *more), tmp_path / "log", ranks=2)
        assert child.wait() == 0, child.text()
    both = place / "runs" / "both"
    for a, b in zip(rows(alone), rows(both), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    first, second = (json.loads((r / "summary.json").read_text())["val_loss"] for r in (alone, both))
    assert first == pytest.approx(second, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        pytest.param("qwen3", True, marks=pytest.mark.full),
        ("llama", False),
        pytest.param("qwen3_moe", True, marks=pytest.mark.full),
        pytest.param("qwen3_moe", False, marks=pytest.mark.full),
        pytest.param("qwen3", False, marks=pytest.mark.full),
        pytest.param("llama", True, marks=pytest.mark.full),
    ],
)
def test_published_checkpoints(family: str, adapted: bool, place: Path, tmp_path: Path) -> None:
    """A Hugging Face model whose tokenizer lacks chat tokens gains them, trains, and is exported completely."""
    shape = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}[family]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = shape(
        vocab_size=301,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=family == "qwen3",
        **(experts if family == "qwen3_moe" else {}),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    made = tokenizer.train(place.joinpath("text.txt").read_text().splitlines(), 301)
    spec = json.loads(made.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] == tokenizer.END_OF_TEXT]
    for number, token in enumerate(tokenizer.CHAT_TOKENS):
        spec["model"]["vocab"][f"word{number}"] = spec["model"]["vocab"].pop(token)
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(spec))
    source = tmp_path / "hf"
    more = ["--adapter.rank", "4", "--optim.lr", "1e-2"] if adapted else ["--optim.lr", "1e-2"]
    with within(place):
        argv = arguments(f"{family}-{adapted}", "--schedule.steps", "60", "--batch.tokens", "512", *more)
        assert main(["sft", str(source), *argv[2:]]) == 0
    run = place / "runs" / f"{family}-{adapted}"
    summary = json.loads((run / "summary.json").read_text())
    share = 0.95 if adapted else 0.8  # frozen random weights leave little to learn
    assert summary["val_loss"] < share * summary["before"]["val_loss"]
    theirs, ids = (
        AutoModelForCausalLM.from_pretrained(run / "model"),
        AutoTokenizer.from_pretrained(run / "model"),
    )
    assert theirs.config.vocab_size == 320  # 301 tokens and two new ones, rounded up to a multiple of 64
    new = ids.convert_tokens_to_ids(list(tokenizer.CHAT_TOKENS))
    assert new == [301, 302] and new[1] in theirs.generation_config.eos_token_id
    old = model.get_input_embeddings().weight.detach().mean(0)
    now = theirs.get_input_embeddings().weight.detach()
    if adapted:  # otherwise the softmax changes every row
        assert torch.allclose(now[310], old, atol=1e-5)
    assert (now[new] - old).abs().max() > 1e-3  # the new tokens were trained


# Mistakes on the command line


@pytest.mark.parametrize(
    "argv, reason",
    [
        ([], "MODEL is missing"),
        (["runs/base"], "--data is required"),
        (["my.toml", "--data", "chats.jsonl"], "my.toml: deskside sft starts from a model"),
        (["runs/none", "--data", "chats.jsonl"], "runs/none: no such directory"),
        (["runs/base", "--data", "none.jsonl"], "no conversation that can be used (1 x missing"),
        (["runs/base", "--data", "text.txt"], "is plain text"),
        (["runs/base", "--data", "chats.jsonl", "--epochs", "1", "--hours", "1"], "one length only"),
        (["runs/base", "--data", "chats.jsonl", "--epochs", "many"], "--epochs many"),
        (["runs/base", "--data", "chats.jsonl", "--batch.sequence_length=0"], "batch.sequence_length: "),
        (["runs/base", "--data", "chats.jsonl", "--batch.sequence_length=2k"], "batch.sequence_length: "),
        (["runs/base", "--data", "chats.jsonl", "--align.turn", "last"], "did you mean --align.turns"),
        (["runs/base", "--data", "chats.jsonl", "--align.turns", "some"], "align.turns"),
        (["runs/base", "--data", "chats.jsonl", "--align.template", "no.jinja"], "no.jinja: cannot be read"),
        (
            ["runs/base", "--data", "chats.jsonl", "--data.document_mask", "false"],
            "data.document_mask: must be true",
        ),
        (
            ["runs/base", "--data", "chats.jsonl", "--val", "chats.jsonl", "--align.val_fraction", "0.1"],
            "give one",
        ),
        (["runs/base", "--data", "chats.jsonl", "--data.path", "text"], "holds text, not conversations"),
        (["runs/base", "--data", "held.jsonl", "--data.path", "made"], "made: holds other conversations"),
        (["--resume", "runs/base"], "is finished"),
        (["--resume", "runs/none"], "is not a run"),
        (["--resume", "runs/base", "--epochs", "2"], "give no other options"),
        (["--resume", "runs/base", "--runs", "mine"], "give no other options"),
        (["--resume", "runs/base", "--config", "other.toml"], "give no other options"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], reason: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with within(place):
        if "made" in argv and not Path("made").exists():
            done = sft(place, "made", "--data.path", "made", "--schedule.steps", "1", "--batch.tokens", "256")
            shutil.rmtree(done)
            capsys.readouterr()
        before = sorted(p.name for p in (place / "runs").iterdir())
        assert main(["sft", *([] if "--resume" in argv else SMALL if argv else []), *argv]) == 2
        assert sorted(p.name for p in (place / "runs").iterdir()) == before
    error = capsys.readouterr().err.splitlines()
    assert reason in error[-1] and error[-1].startswith("deskside: ")
    assert len([line for line in error if not line.startswith("render")]) == 1


def test_an_objective_belongs_to_its_command(place: Path) -> None:
    """`train` refuses a configuration for `sft` instead of pretraining with it."""
    config = tiny_run.config(
        place / "text",
        model=MODEL,
        align={"name": "sft"},
        data={"path": str(place / "text"), "document_mask": True},
    )
    with pytest.raises(UsageError, match="a run of deskside sft"):
        training_run.start(config, (place / "runs", "x", "x"), "a test")
    plain = tiny_run.config(place / "text", model=MODEL)
    with pytest.raises(UsageError, match="a run of deskside train"):
        training_run.start(plain, (place / "runs", "x", "x"), "a test", objective=Sft())
