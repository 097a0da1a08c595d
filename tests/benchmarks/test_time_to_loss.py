"""The comparison of trainers by seconds and tokens to a loss: tables, data for the scripts, and complete tiny runs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import time_to_loss, time_to_loss_peers
from benchmarks.time_to_loss import comparisons, line, time_to
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.rows import PackedDataset
from deskside.evaluate.stream_bpb import read_stream
from deskside.utils.errors import UsageError
from tests.train import tiny_run

OURS = [
    {"trainer": "deskside", "status": "ok", "seconds": s, "steps": 9, "tokens": 1e6 * s, "bits_per_byte": b}
    for s, b in ((100.0, 1.2), (200.0, 1.1), (400.0, 1.05))
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    tiny_run.write_text(folder / "text.txt", 3000)
    lines = (folder / "text.txt").read_text().splitlines()
    documents = [" ".join(lines[i : i + 10]) for i in range(0, len(lines), 10)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    options = CorpusOptions(vocab_size=300, val_fraction=0.2, workers=1, quiet=True, shard_bytes=50_000)
    prepare([str(folder / "text.jsonl")], folder / "out", options)
    return str(folder / "out")


def test_when_a_loss_is_reached() -> None:
    seconds, tokens = time_to(OURS, 1.15) or (0, 0)
    assert (seconds, tokens) == pytest.approx((math.sqrt(100 * 200), 1e6 * math.sqrt(100 * 200)))
    assert time_to(OURS, 1.05) == pytest.approx((400, 4e8))
    assert time_to(OURS, 1.25) is None and time_to(OURS, 1.0) is None
    peer = {**OURS[0], "trainer": "nanochat", "bits_per_byte": 1.15}
    texts = comparisons([peer, *OURS], 1.0)
    assert "141 s" in texts[0] and "141.4M" in texts[0] and "not reached" in texts[1]
    assert all(len(line(row)) <= 80 for row in [peer, *OURS])
    assert len(line({"trainer": "track 3", "status": "oom", "error": "x" * 200})) == 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ours abc", "--ours"),
        ("--ours -1", "more than 0"),
        ("--ours=", "nothing to run"),
        ("--record none", "no such record"),
        ("--track3 x --track3-steps 100", "125"),
    ],
)
def test_wrong_usage_is_one_line(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert time_to_loss.main(["--data", "x", "--out", str(tmp_path / "out"), *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_an_interrupted_run_is_continued_with_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(spec: object, folder: Path) -> None:
        (folder / "run").mkdir(exist_ok=True)
        raise RuntimeError("killed")

    monkeypatch.setattr(time_to_loss, "run_ours", killed)
    spec = {"seconds": 2.0, "seed": 1, "options": ["demo"]}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            time_to_loss.run(time_to_loss.OURS, spec, tmp_path)
    with pytest.raises(UsageError, match="other options"):
        time_to_loss.run(time_to_loss.OURS, {**spec, "options": ["124m"]}, tmp_path)
    with pytest.raises(SystemExit):
        time_to_loss.arguments(["--data", "x", "--out", "y", "--record", "z", "--options", "demo"])


def test_seconds_of_track3_are_without_compilation() -> None:
    log = "step:0/200 val_loss:9 train_time:0.1s step_avg:nanms\nstep:125/200 val_loss:4 train_time:160.0s step_avg\n"
    assert (
        time_to_loss_peers.track3_seconds(f"{log}step:200/200 val_loss:3 train_time:220.0s s", 200) == 160.0
    )
    with pytest.raises(UsageError):
        time_to_loss_peers.track3_seconds(log, 200)


def test_another_script_is_refused(data: str, tmp_path: Path) -> None:
    spec = {"checkout": str(tmp_path), "data": data, "out": str(tmp_path), "steps": 130, "row_tokens": 64}
    spec |= {"seed": 1, "tiny": True}
    with pytest.raises(UsageError, match="does not exist"):
        time_to_loss_peers.track3(spec)
    script = tmp_path / time_to_loss_peers.TRACK3_SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text("train_steps = 3250\n")
    with pytest.raises(UsageError, match="val_tokens"):
        time_to_loss_peers.track3(spec)


def test_every_epoch_has_every_document(data: str, tmp_path: Path) -> None:
    dataset, stream = PackedDataset(data, "train", 64), read_stream(data, "train").tokens
    first, second, *_ = time_to_loss_peers._epochs(dataset, 2 * len(stream), 64, seed=1)
    documents = [sorted(map(tuple, np.split(t, np.flatnonzero(t == 0)[1:]))) for t in (stream, first, second)]
    assert documents[0] == documents[1] == documents[2] and len(documents[0]) > 100
    assert not np.array_equal(first, second) and not np.array_equal(first, stream)
    time_to_loss_peers._write_shard(tmp_path / "shard.bin", first)
    written = np.fromfile(tmp_path / "shard.bin", "<u2")
    header = np.fromfile(tmp_path / "shard.bin", np.int32, 256)
    assert header[:3].tolist() == [20240520, 1, len(first)] and np.array_equal(written[512:], first)


NANOCHAT = """
import argparse, time, contextlib, torch, wandb
from nanochat.common import compute_init
from nanochat.dataloader import tokenizing_distributed_data_loader_with_state_bos_bestfit as rows
from nanochat.tokenizer import get_tokenizer, get_token_bytes
from nanochat.engine import Engine
from scripts.base_eval import evaluate_core
parser = argparse.ArgumentParser()
for name in ("depth", "max-seq-len", "num-iterations", "total-batch-size", "device-batch-size", "eval-every",
             "core-metric-every", "sample-every"):
    parser.add_argument("--" + name, type=int)
parser.add_argument("--window-pattern")
args = parser.parse_args()
device = compute_init("cpu")
size = get_tokenizer().get_vocab_size()
assert get_token_bytes(device=device).shape == (size,)
class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(size, size)
    def forward(self, x, y, loss_reduction="mean"):
        logits = self.table(x).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction=loss_reduction)
orig_model = Bigram()
optimizer = torch.optim.Adam(orig_model.parameters(), 0.1)
loader = rows(None, args.device_batch_size, args.max_seq_len, split="train", device=device)
total_training_time = 0
for step in range(args.num_iterations):
    began = time.time()
    for _ in range(args.total_batch_size // (args.device_batch_size * args.max_seq_len)):
        x, y, state = next(loader)
        orig_model(x, y).backward()
    optimizer.step(); optimizer.zero_grad()
    total_training_time += (time.time() - began) * (step > 10)
disable_fp8 = lambda model: contextlib.nullcontext()
"""


@pytest.mark.full
def test_command(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs a stand-in for nanochat, and deskside; checks rows and JSON, and that a second call repeats nothing."""
    checkout, out = tmp_path / "nanochat", tmp_path / "out"
    for name, text in (
        ("scripts/base_train.py", NANOCHAT),
        ("nanochat/__init__.py", ""),
        ("nanochat/common.py", "import torch\ndef compute_init(kind):\n    return torch.device(kind)\n"),
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    preset = tmp_path / "tiny.toml"
    shape = "\n".join(f"{key} = {value}" for key, value in tiny_run.SHAPE.items())
    preset.write_text(
        f"[model]\n{shape}\n[batch]\nsequence_length = 64\ntokens = 512\n[compute]\ndevice = 'cpu'\n"
    )
    words = [
        "--data",
        data,
        "--out",
        str(out),
        "--ours",
        "1,3",
        "--options",
        str(preset),
        "--row-tokens",
        "64",
    ]
    words += ["--nanochat", str(checkout), "--nanochat-steps", "60", "--nanochat-tokens", "512"]
    words += ["--nanochat-rows", "4", "--nanochat-depth", "1", "--target", "0.1"]
    assert time_to_loss.main(words) == 0
    rows = json.loads((out / "time_to_loss.json").read_text())["rows"]
    assert [row["trainer"] for row in rows] == ["nanochat", "deskside", "deskside"]
    assert rows[0]["tokens"] == 60 * 512 and rows[0]["steps"] == 60 and rows[0]["seconds"] > 0
    text_tokens, text_bytes = (read_stream(data).tokens > 0).sum(), None
    uniform = math.log2(300) * float(text_tokens)
    text_bytes = float(read_stream(data).bytes_V[read_stream(data).tokens].sum())
    # a bigram model has learned something
    assert 0.1 < rows[0]["bits_per_byte"] < 0.7 * uniform / text_bytes
    assert rows[1]["seconds"] <= 1.05 and rows[2]["bits_per_byte"] < rows[1]["bits_per_byte"]
    printed = capsys.readouterr().out
    assert time_to_loss.main(words) == 0
    assert capsys.readouterr().out == printed
    assert time_to_loss.main([*words, "--seed", "1", "--row-tokens", "32"]) == 2


def test_nanochat_rows_are_desksides(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that replace those of nanochat's loader are those of a deskside run, in the same order."""
    import sys
    from types import ModuleType

    common = ModuleType("nanochat.common")
    common.compute_init = lambda: None  # type: ignore[attr-defined]
    replaced = (
        "nanochat",
        "nanochat.common",
        "nanochat.tokenizer",
        "nanochat.dataloader",
        "nanochat.loss_eval",
    )
    others = ("nanochat.checkpoint_manager", "nanochat.engine", "scripts", "scripts.base_eval", "wandb")
    for name in (*replaced, *others):
        monkeypatch.setitem(sys.modules, name, common if name == "nanochat.common" else ModuleType(name))
    dataset = PackedDataset(data, "train", 64)
    time_to_loss_peers._replace_nanochat_modules(dataset, {"seed": 3, "tokens": 512})
    loader = vars(sys.modules["nanochat.dataloader"])
    rows = loader["tokenizing_distributed_data_loader_with_state_bos_bestfit"](
        None, 4, 64, split="train", device=torch.device("cpu")
    )
    wanted = dataset.rows(3, np.arange(8))
    for first in (0, 4):
        tokens, targets, _ = next(rows)
        assert np.array_equal(tokens, wanted.inputs[first : first + 4])
        want = np.where(wanted.targets[first : first + 4] == -100, -1, wanted.targets[first : first + 4])
        assert np.array_equal(targets, want)
    rows.close()
