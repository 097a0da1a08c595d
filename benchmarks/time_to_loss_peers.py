"""Training by the scripts of other projects, fed with deskside's prepared data. Each runs in its own process.

No code of theirs is copied. A script runs as its checkout has it, except for:

- nanochat's `scripts/base_train.py`: the modules that read its data and tokenizer are replaced by ones that yield the
  rows on which deskside trains, in the same order; those of chat, tasks, checkpoints and tracking by empty ones.
  Nothing in the script, the model or the optimizer changes.
- modded-nanogpt's `records/track_3_optimization/train_gpt_simple.py`: its data files are written, with documents in a
  new order for each epoch, and the lines in `track3_changes` are replaced: numbers of steps, validation tokens and
  vocabulary; for a rehearsal without a GPU also sizes and device. It accumulates gradients on one GPU by itself.

Both models are scored by `deskside.evaluate.stream_bpb`, like an export of deskside.
"""

import os
import re
import runpy
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.time_to_loss import UNTIMED_STEPS
from deskside.data.reading import shards
from deskside.data.reading.loader import Loader, LoaderOptions
from deskside.data.reading.rows import IGNORE, PackedDataset
from deskside.evaluate.stream_bpb import SummedLoss, read_stream, stream_bpb
from deskside.utils.errors import UsageError

NANOCHAT_SCRIPT = "scripts/base_train.py"
NANOCHAT_IGNORE = -1
TRACK3_SCRIPT = "records/track_3_optimization/train_gpt_simple.py"
TRACK3_ROW = 1024  # tokens of its rows
SCORED_TOKENS = 32768  # of a forward pass, when a model is scored


def nanochat(spec: dict[str, Any]) -> dict[str, Any]:
    """Train nanochat's model by its own script and return seconds, steps, tokens and bits per byte.

    spec: `checkout`, `data`, `out`, `steps`, `tokens` per step, `rows` of a micro-batch, `sequence_length`,
    `row_tokens` of the scored rows, `depth`, `seed` and `fp8`. Raises UsageError if the checkout has no such script.
    """
    script = _script(spec["checkout"], NANOCHAT_SCRIPT)
    length = spec["sequence_length"]
    dataset = PackedDataset(spec["data"], "train", length)
    os.environ["NANOCHAT_BASE_DIR"] = spec["out"]
    sys.path.insert(0, spec["checkout"])
    _replace_nanochat_modules(dataset, spec)
    sys.argv = [
        str(script), f"--depth={spec['depth']}", f"--max-seq-len={length}", "--window-pattern=L",
        f"--num-iterations={spec['steps']}", f"--total-batch-size={spec['tokens']}",
        f"--device-batch-size={spec['rows']}", "--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1",
        *(["--fp8"] if spec["fp8"] else []),
    ]  # fmt: skip
    state = runpy.run_path(str(script), run_name="__main__")
    model, steps = state["orig_model"].eval(), spec["steps"]

    def summed_loss(inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        targets_BT = targets_BT.masked_fill(targets_BT == IGNORE, NANOCHAT_IGNORE)
        loss: torch.Tensor = model(inputs_BT, targets_BT, loss_reduction="sum")
        return loss

    with state["disable_fp8"](model):
        bpb = _score(summed_loss, spec, state["device"], max(1, SCORED_TOKENS // spec["row_tokens"]))
    seconds = state["total_training_time"] * steps / (steps - UNTIMED_STEPS)
    return _result(spec["tokens"], steps, seconds, bpb)


def track3(spec: dict[str, Any]) -> dict[str, Any]:
    """Train modded-nanogpt's model of track 3 by its own script, like `nanochat`.

    spec: `checkout`, `data`, `out`, `steps`, `row_tokens` of the scored rows, `seed`, and `tiny` for a rehearsal on a
    CPU. The script has a batch of 524,288 tokens in rows of 1,024. Its seconds are those of all steps at the speed
    after the first evaluation, because its clock includes compilation.
    """
    source = _script(spec["checkout"], TRACK3_SCRIPT).read_text("utf-8")
    out, dataset = Path(spec["out"]), PackedDataset(spec["data"], "train", TRACK3_ROW)
    stream = read_stream(spec["data"])
    tokens, micro_rows = (2048, 1) if spec["tiny"] else (524_288, 64)
    block = micro_rows * TRACK3_ROW
    val_tokens = (len(stream.tokens) - 2) // block * block
    if val_tokens < block:
        raise UsageError(f"{spec['data']}: has fewer than {block} validation tokens, a batch of the script")
    folder = out / "data" / "fineweb10B"
    folder.mkdir(parents=True, exist_ok=True)
    _write_shard(folder / "fineweb_val_000000.bin", stream.tokens)
    for number, epoch in enumerate(_epochs(dataset, spec["steps"] * tokens, tokens, spec["seed"])):
        _write_shard(folder / f"fineweb_train_{number:06d}.bin", epoch)
    for old, new in track3_changes(spec["steps"], val_tokens, dataset.vocab_size, spec["tiny"]):
        if source.count(old) < 1:
            raise UsageError(
                f"{TRACK3_SCRIPT}: has no {old.strip()!r}; the benchmark was written for f411b3d3"
            )
        source = source.replace(old, new)
    script = out / "train_gpt_simple.py"
    script.write_text(source, "utf-8")
    os.chdir(out)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.argv = [str(script)]
    torch.manual_seed(spec["seed"])
    state = runpy.run_path(str(script), run_name="__main__")
    model = state["model"].eval()
    shutil.rmtree(out / "data")  # hundreds of megabytes
    seconds = track3_seconds(max(Path("logs").glob("*.txt")).read_text("utf-8"), spec["steps"])

    def summed_loss(inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(inputs_BT.int(), targets_BT)  # it was compiled for inputs in int32
        return loss

    bpb = _score(summed_loss, spec, state["device"], max(1, block // spec["row_tokens"]))
    return _result(tokens, spec["steps"], seconds, bpb)


def track3_changes(steps: int, val_tokens: int, vocab_size: int, tiny: bool) -> list[tuple[str, str]]:
    """Return the (old, new) texts of the script. tiny: also for one block and small batches on a CPU."""
    changes = [
        ("train_steps = 3250", f"train_steps = {steps}"),
        ("val_tokens = 20 * 524288", f"val_tokens = {val_tokens}"),
        ("vocab_size=50304", f"vocab_size={vocab_size}"),
    ]
    if tiny:
        changes += [
            ("num_layers=12, model_dim=768", "num_layers=1, model_dim=128"),
            ("batch_size = 8 * 64 * 1024", "batch_size = 2048"),
            ("mbs = 64", "mbs = 1"),
            ('torch.device("cuda", int(os.environ["LOCAL_RANK"]))', 'torch.device("cpu")'),
            ("torch.cuda.set_device(device)\n", "\n"),
            ('backend="nccl", device_id=device', 'backend="gloo"'),
            ("pin_memory=True", "pin_memory=False"),
            ('device="cuda"', 'device="cpu"'),
            (").cuda()", ")"),
            ("torch.cuda.get_device_name(device)", "device"),
        ]
    return changes


def track3_seconds(log: str, steps: int) -> float:
    """Return the seconds of `steps` steps at the speed after the script's first evaluation that follows a step."""
    found = re.findall(r"^step:(\d+)/\d+ val_loss:\S+ train_time:([\d.]+)s", log, re.MULTILINE)
    points = [(int(step), float(seconds)) for step, seconds in found if int(step) > 0]
    if len(points) < 2:
        raise UsageError("the script evaluated less than twice, so its speed is not known: give more steps")
    (first, start), (last, end) = points[0], points[-1]
    return (end - start) / (last - first) * steps


def _script(checkout: str, name: str) -> Path:
    path = Path(checkout) / name
    if not path.is_file():
        raise UsageError(f"{path}: does not exist; give a checkout as benchmarks/README.md describes")
    return path


def _score(loss: SummedLoss, spec: dict[str, Any], device: torch.device, batch_rows: int) -> float:
    return stream_bpb(loss, read_stream(spec["data"]), spec["row_tokens"], batch_rows, device).bpb


def _result(step_tokens: int, steps: int, seconds: float, bpb: float) -> dict[str, Any]:
    return {"seconds": seconds, "steps": steps, "tokens": steps * step_tokens, "bits_per_byte": bpb}


def _replace_nanochat_modules(dataset: PackedDataset, spec: dict[str, Any]) -> None:
    """Put our data, and nothing for what training does not use, in the place of nanochat's modules."""

    class Vocabulary:
        def get_vocab_size(self) -> int:
            return dataset.vocab_size

    def training_rows(tokenizer: Any, rows: int, length: int, **options: Any) -> Iterator[tuple[Any, ...]]:
        step = LoaderOptions(
            spec["seed"], 0, spec["tokens"] // length, rows, device=options["device"], document_mask=False
        )
        with Loader(dataset, step) as loader:
            for batches in loader:
                for batch in batches:
                    targets_BT = batch.targets_BT.masked_fill(batch.targets_BT == IGNORE, NANOCHAT_IGNORE)
                    yield batch.tokens_BT, targets_BT, {"epoch": 0, "pq_idx": 0, "rg_idx": 0}

    def nothing(*arguments: Any, **options: Any) -> None:
        """Replace functions that a training run without evaluation does not use."""

    def token_bytes(device: Any) -> torch.Tensor:
        return torch.from_numpy(dataset.token_bytes.astype(np.int64)).to(device)

    common = import_module("nanochat.common")
    compute_init = common.compute_init

    def seeded(*arguments: Any) -> Any:  # nanochat's own sets the seed 42
        result = compute_init(*arguments)
        torch.manual_seed(spec["seed"])
        return result

    common.compute_init = seeded  # type: ignore[attr-defined]
    loader = "tokenizing_distributed_data_loader"
    replaced: dict[str, dict[str, Any]] = {
        "nanochat.tokenizer": {"get_tokenizer": Vocabulary, "get_token_bytes": token_bytes},
        "nanochat.dataloader": {
            f"{loader}_with_state_bos_bestfit": training_rows,
            f"{loader}_bos_bestfit": nothing,
        },
        "nanochat.checkpoint_manager": {"save_checkpoint": nothing, "load_checkpoint": nothing},
        "nanochat.loss_eval": {"evaluate_bpb": nothing},
        "nanochat.engine": {"Engine": nothing},
        "scripts": {},
        "scripts.base_eval": {"evaluate_core": nothing},
        "wandb": {},
    }
    for name, contents in replaced.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)


def _epochs(dataset: PackedDataset, needed: int, batch: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens of epochs until `needed` tokens are covered, the documents of each in another order.

    The script drops what is left of a file after its last whole batch.
    """
    documents = []
    for shard in dataset.index.splits["train"].shards:
        tokens = shards.open_tokens(dataset.directory, shard, dataset.index.dtype)
        starts = shards.open_table(dataset.directory, shard)["start"]
        documents += np.split(tokens[: shard.tokens - 1], starts[1:])
    order, usable = np.random.default_rng(seed), 0
    while usable <= needed:
        epoch = np.concatenate([documents[i] for i in order.permutation(len(documents))])
        if len(epoch) < 2 * batch:
            epoch = np.tile(epoch, -(-2 * batch // len(epoch)))
        usable += (len(epoch) - 1) // batch * batch
        yield epoch


def _write_shard(path: Path, tokens: NDArray[Any]) -> None:
    """Write a file as the script reads it: a header of 256 int32, then uint16 tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())
