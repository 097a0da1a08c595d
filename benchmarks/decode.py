"""Generation speed of deskside's engine and of transformers' generate, with the same weights, prompts and lengths.

    python -m benchmarks.decode [--preset 124m] [--batch 1,2,4,8,16,32,64] [--prompt 512] [--new 256]
        [--peers dynamic,static,static-eager] [--peer-batch 1,16] [--temperature 0] [--top-k 50] [--top-p 1]
        [--device auto] [--dtype bfloat16] [--runs 3] [--kernels] [--adapters 1,8 --rank 16]
        [--no-early-start] [--json FILE]

The model has random weights: speed does not depend on them, and no answer ends early. It is exported like by `deskside
export`, and transformers loads the export. Each arm runs at least once as warm-up (compilation, CUDA graphs), then
--runs times with new prompts; the median is reported. Prompts are random tokens, all of one length.

    first    seconds from the request until every row has its first token (transformers: generate with one new token)
    tok/s    new tokens of all rows per second of decoding, without the time to the first token
    step     milliseconds from one token of a row to its next
    light    share of the bandwidth limit: the time in which a large copy moves the bytes that a step must read (the
             weights it uses, and the keys and values of all rows), divided by the time of the step
    x        deskside's tok/s divided by the best of transformers at this batch size

transformers: `dynamic` is the default of generate; `static` is a static cache, with which it compiles the forward pass
on a GPU; `static-eager` is a static cache without compilation. --adapters adds arms with these numbers of LoRA adapters
on every projection, which the rows use in turn. A failed arm is a line with the reason. --kernels adds the kernels of
one deskside step. --no-early-start launches every kernel after the end of the one before it
(kernels/dependent_launch.py). The JSON file is written after every arm.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.step_config import configuration
from deskside.doctor import check_gemm
from deskside.engine.engine import Engine
from deskside.engine.requests import Request
from deskside.engine.sampling import Sampling
from deskside.kernels import dependent_launch
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.ops.linear import Linear
from deskside.precision.frozen import FrozenLinear, quantize_for_generation, stored_bytes
from deskside.precision.lora import add_adapter
from deskside.precision.row_adapters import RowAdapters, RowChoice
from deskside.utils.errors import UsageError, first_line
from deskside.weights.hf import save_hf

PEERS = ("dynamic", "static", "static-eager")
WARM_UP_RUNS = 4  # a kind of step is captured in its third run, and not every run has all kinds
PROFILED_STEPS = 20
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Prompts = list[list[int]]


@dataclass(frozen=True)
class Speed:
    """Medians over the runs of one arm. of_copy_bandwidth: `light` in the table."""

    arm: str
    batch: int
    first_seconds: float
    step_ms: float
    tokens_per_second: float
    of_copy_bandwidth: float
    runs: int


@dataclass(frozen=True)
class Work:
    """The workload of every arm. prompt, new: tokens per row; vocabulary: number of different prompt tokens."""

    vocabulary: int
    prompt: int
    new: int
    sampling: Sampling
    device: torch.device

    def prompts(self, batch: int, seed: int) -> Prompts:
        """Return random tokens, different for every seed, so that no prompt is already in the cache."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, self.prompt)
        rows: Prompts = torch.randint(0, self.vocabulary, shape, generator=generator).tolist()
        return rows


def random_adapters(model: Transformer, ranks: Sequence[int], dora: bool = False) -> RowChoice:
    """Add random adapters of these ranks to every matrix of a model, in place of earlier ones."""
    choice = RowChoice(len(ranks))
    layout = tuple(number for number, rank in enumerate(ranks, start=1) for _ in range(rank))
    device, dtype = model.embed.weight.device, model.activation_dtype
    torch.manual_seed(3)
    for linear in [m for m in model.modules() if isinstance(m, Linear) and m.role == "matrix"]:
        a_RI = (0.2 * torch.randn(len(layout), linear.in_features)).to(device, dtype)
        b_OR = (0.2 * torch.randn(linear.out_features, len(layout))).to(device, dtype)
        gain_CO = None
        if dora:
            gain_CO = (1 + 0.2 * torch.randn(len(ranks) + 1, linear.out_features)).to(device, dtype)
            gain_CO[0] = 1
        add_adapter(linear, RowAdapters(a_RI, b_OR, layout, gain_CO, choice))
    return choice


def deskside_arm(engine: Engine, work: Work, adapters: int = 0) -> Callable[[Prompts], tuple[float, float]]:
    """Return a function that generates with deskside and returns the seconds to the first tokens and in total.

    adapters: number of adapters that the rows use in turn.
    """

    def once(prompts: Prompts) -> tuple[float, float]:
        _wait(work.device)
        begin = time.perf_counter()
        waiting = {
            engine.submit(
                Request(
                    tuple(prompt),
                    work.new,
                    work.sampling,
                    first_sample=row,
                    adapter=row % adapters + 1 if adapters else 0,
                )
            )
            for row, prompt in enumerate(prompts)
        }
        first, tokens = 0.0, 0
        while not engine.idle:
            events = engine.step()
            tokens += sum(event.token is not None for event in events)
            if waiting:
                waiting -= {event.request for event in events}
                first = time.perf_counter() - begin
        assert tokens == len(prompts) * work.new, "a row ended early"
        return first, time.perf_counter() - begin

    return once


def peer_arm(model: Any, kind: str, work: Work) -> Callable[[Prompts], tuple[float, float]]:
    """Return the same function for transformers' generate, which calls it with one new token and with all."""
    options: dict[str, Any] = {
        "do_sample": work.sampling.temperature > 0,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    if work.sampling.temperature > 0:
        options |= {"temperature": work.sampling.temperature, "top_k": work.sampling.top_k or 0}
        options["top_p"] = work.sampling.top_p or 1.0
    if kind != "dynamic":
        options |= {"cache_implementation": "static", "disable_compile": kind == "static-eager"}

    def once(prompts: Prompts) -> tuple[float, float]:
        tokens_BT = torch.tensor(prompts, device=work.device)
        mask_BT = torch.ones_like(tokens_BT)
        seconds = []
        for new in (1, work.new):
            _wait(work.device)
            begin = time.perf_counter()
            output = model.generate(
                tokens_BT, attention_mask=mask_BT, max_new_tokens=new, min_new_tokens=new, **options
            )
            _wait(work.device)
            seconds.append(time.perf_counter() - begin)
            assert output.shape[1] == work.prompt + new, "a row ended early"
        return seconds[0], seconds[1]

    return once


def measure(
    arm: str,
    once: Callable[[Prompts], tuple[float, float]],
    work: Work,
    batch: int,
    runs: int,
    floor_seconds: float,
) -> Speed:
    """Warm up, run, and return the medians. floor_seconds: time of a step at the bandwidth of a large copy."""
    runs_seconds = [once(work.prompts(batch, seed)) for seed in range(WARM_UP_RUNS + runs)][WARM_UP_RUNS:]
    first = statistics.median(seconds for seconds, _ in runs_seconds)
    steps = work.new - 1
    step = statistics.median((total - begin) / steps for begin, total in runs_seconds)
    return Speed(arm, batch, first, 1e3 * step, batch / step, floor_seconds / step, runs)


def step_bytes(model: Transformer, work: Work, batch: int) -> float:
    """Return the bytes that a decoding step must read, when half of the answer has been generated."""
    item = model.activation_dtype.itemsize
    length = work.prompt + work.new / 2
    cache_bytes = batch * length * model.kv_bytes_per_token(model.activation_dtype)
    if any(isinstance(module, FrozenLinear) for module in model.modules()):
        looked_up = 0 if model.config.tie_word_embeddings else model.embed.weight.nbytes
        return stored_bytes(model) - looked_up + cache_bytes
    groups = model.num_params()
    weights = sum(groups.values()) - groups["position"]
    if not model.config.tie_word_embeddings:
        weights -= groups["embedding"]  # a step reads one row of each
    used = weights
    if (experts := model.config.num_experts) > 0:
        # Each token reads its experts; many tokens together read nearly all of them.
        share = 1 - (1 - model.config.num_experts_per_tok / experts) ** batch
        used = weights - groups["mlp"] * (1 - share)
    return used * item + cache_bytes


def kernels(engine: Engine, work: Work, batch: int) -> list[dict[str, Any]]:
    """Return the device time of one step by kernel, longest first: milliseconds and calls per step."""
    for row, prompt in enumerate(work.prompts(batch, 1000)):
        engine.submit(Request(tuple(prompt), work.new, work.sampling, first_sample=row))
    started: set[int] = set()
    while len(started) < batch:  # until all prompts are in the cache
        started |= {event.request for event in engine.step()}
    for _ in range(3):
        engine.step()
    _wait(work.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if work.device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    steps = max(1, min(PROFILED_STEPS, work.new - 10))
    before, generated = engine.counts.generated_tokens, 0
    with torch.profiler.profile(activities=activities) as profile:
        # A call of step() may generate several tokens for each row.
        while generated < steps * batch and not engine.idle:
            engine.step()
            generated = engine.counts.generated_tokens - before
        _wait(work.device)
    steps = max(1, generated // batch)
    for _ in engine.events():
        pass
    on_gpu = work.device.type == "cuda"
    rows = [
        {
            "kernel": event.key,
            "ms": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / steps,
            "calls": event.count / steps,
        }
        for event in profile.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every arm ran, 1 if an arm failed, 2 for wrong usage."""
    try:
        options = _options(argv)
        dependent_launch.ENABLED = not options.no_early_start
        work, model = _prepare(options)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "options": {k: str(v) for k, v in vars(options).items()},
        "results": [],
        "failed": [],
    }
    report |= {"device": _name(work.device), "torch": torch.__version__}
    report["copy_bandwidth"] = float(check_gemm.copy(work.device.type)["speed"]["value"])

    def save(result: Speed | dict[str, str]) -> None:
        report["results" if isinstance(result, Speed) else "failed"].append(
            asdict(result) if isinstance(result, Speed) else result
        )
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))

    def floor(batch: int) -> float:
        return step_bytes(model, work, batch) / report["copy_bandwidth"]

    def attempt(
        name: str, batch: int, prepare: Callable[[], Callable[[Prompts], tuple[float, float]]]
    ) -> None:
        try:
            save(measure(name, prepare(), work, batch, options.runs, floor(batch)))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            save({"arm": name, "batch": str(batch), "why": first_line(error)[:200]})

    longest = work.prompt + work.new
    for batch in options.batch:
        engine = Engine(model, max_batch=batch, max_tokens=batch * (longest + 32))
        attempt("deskside", batch, lambda engine=engine: deskside_arm(engine, work))  # type: ignore[misc]
        if options.kernels:
            report.setdefault("kernels", {})[batch] = kernels(engine, work, batch)
        del engine
    if options.peers:
        theirs = _peer(model, work.device)
        for batch in options.peer_batch:
            for kind in options.peers:
                name = f"transformers {kind}"
                attempt(name, batch, lambda kind=kind: peer_arm(theirs, kind, work))  # type: ignore[misc]
    for number in options.adapters:
        choice = random_adapters(model, [options.rank] * number)
        for batch in options.batch:
            engine = Engine(model, max_batch=batch, max_tokens=batch * (longest + 32), adapters=choice)
            attempt(f"{number} adapters", batch, lambda e=engine, n=number: deskside_arm(e, work, n))  # type: ignore[misc]
            del engine
    _print(report)
    return 1 if report["failed"] else 0


def _prepare(options: argparse.Namespace) -> tuple[Work, Transformer]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(default if options.device == "auto" else options.device)
    config = configuration({"preset": options.preset}).model
    longest = options.prompt + options.new
    if longest > config.max_position_embeddings:
        config = config.model_copy(update={"max_position_embeddings": longest})
    model = Transformer(config)
    initialize(model, 0)
    model = model.to(device).requires_grad_(False).eval()
    for parameter in model.parameters():  # as in `deskside chat`, norms stay in float32
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(DTYPES[options.dtype])
    if options.quantize != "none":
        quantize_for_generation(model, options.quantize, device)
    filters = (options.top_k or None, options.top_p if options.top_p < 1 else None)
    sampling = Sampling(options.temperature, *(filters if options.temperature > 0 else ()))
    return Work(config.vocab_size, options.prompt, options.new, sampling, device), model


def _peer(model: Transformer, device: torch.device) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        path = save_hf(model, model.config, None, Path(folder) / "model", model.activation_dtype)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=model.activation_dtype)
    return theirs.to(device).eval()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def _print(report: dict[str, Any]) -> None:
    console = Console()
    best: dict[int, float] = {}
    for row in report["results"]:
        if row["arm"] != "deskside":
            best[row["batch"]] = max(best.get(row["batch"], 0.0), row["tokens_per_second"])
    table = Table(
        title=f"Generation on {report['device']}; a copy runs at {report['copy_bandwidth'] / 1e9:,.0f} GB/s (measured)"
    )
    for name in ("arm", "batch", "first ms", "step ms", "tok/s", "light", "x"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for row in sorted(report["results"], key=lambda r: (r["batch"], r["arm"])):
        ratio = best.get(row["batch"])
        ours = row["arm"] == "deskside" and ratio is not None
        table.add_row(
            row["arm"],
            str(row["batch"]),
            f"{1e3 * row['first_seconds']:.1f}",
            f"{row['step_ms']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['of_copy_bandwidth']:.0%}",
            f"{row['tokens_per_second'] / ratio:.1f}" if ours and ratio else "",
        )
    console.print(table)
    for row in report["failed"]:
        console.print(f"{row['arm']}, batch {row['batch']}: failed: {row['why']}")
    for batch, rows in report.get("kernels", {}).items():
        console.print(f"One step of batch {batch}: {sum(row['ms'] for row in rows):.3f} ms in kernels")
        for row in rows[:14]:
            console.print(
                f"  {row['ms']:8.4f} ms {row['calls']:7.1f} x  {row['kernel'][:54]}", highlight=False
            )


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give numbers of 1 and above, such as 1,16")
    return numbers


def _peers(text: str) -> list[str]:
    names = [part for part in text.split(",") if part]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name}: there is no such peer; use {', '.join(PEERS)}")
    return names


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--batch", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--peers", type=_peers, default=list(PEERS))
    parser.add_argument("--peer-batch", type=_numbers, default=[1, 16])
    parser.add_argument("--quantize", choices=("none", "int8", "fp8", "nf4"), default="none")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=50, help="0: no limit")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--adapters", type=_numbers, default=[])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--no-early-start", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.quantize != "none" and options.peers:
        raise UsageError("--quantize: transformers does not have these weights; give --peers ''")
    if options.prompt < 1 or options.new < 2 or options.runs < 1:
        raise UsageError("--prompt and --runs must be at least 1, --new at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
