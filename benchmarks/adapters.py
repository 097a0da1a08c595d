"""Memory and speed of adapters over frozen weights, compared with full fine-tuning of the same model, on this GPU.

    python -m benchmarks.adapters --out adapters.json                 # 1.5B: full, bf16, int8, nf4, DoRA on bf16
    python -m benchmarks.adapters --shape qwen3-0.6b --rows 8
    python -m benchmarks.adapters --shape indicmoe-3b                 # adapters on attention and on every expert

Every arm runs in its own process with the same tokens, AdamW with float32 states, compiled blocks and one pass per
step. The peak is what torch allocated; `modelled` is the prediction of `budget/memory.py` for the same step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskside.budget.memory import training_memory
from deskside.budget.scaling import Scaling
from deskside.budget.step_spec import AdapterSpec, StepSpec
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig
from deskside.config.sections import PROJECTIONS, AdapterConfig
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.optim.build import build
from deskside.precision.convert import convert
from deskside.precision.lora import num_trained_parameters
from deskside.train.prepare.setup import recompute
from deskside.weights import frozen_base

SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {
        "vocab_size": 151936, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 8960, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "indicmoe-3b": {
        "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 2176,
    },
}  # fmt: skip
DEVICE = "cuda"
ARMS = ("full", "bf16", "int8", "nf4", "dora")


class RandomWeights(Mapping[str, Tensor]):
    """Random weights by name, generated on access, so that no arm has a second copy of the model in memory."""

    def __init__(self, config: ModelConfig):
        with torch.device("meta"):
            self.shapes = {name: p.shape for name, p in Transformer(config).named_parameters()}

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return torch.ones(shape) if len(shape) < 2 else torch.randn(shape, device=DEVICE) * shape[-1] ** -0.5

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one arm in this process. The first two steps are warm-up."""
    config = ModelConfig(**SHAPES[options.shape], max_position_embeddings=options.length)
    base = "bf16" if arm == "dora" else arm
    torch.manual_seed(0)
    if arm == "full":
        with torch.device("meta"):
            model = Transformer(config)
        model.to_empty(device=DEVICE)
        weights = RandomWeights(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    else:
        adapter = AdapterConfig.model_validate({"rank": options.rank, "base": base, "dora": arm == "dora"})
        model = frozen_base.build(config, adapter, 0, RandomWeights(config), DEVICE)
    fused = arm == "full" and not options.as_written
    precision = convert(model, "bf16", fused=fused)
    precision.set_checkpointing(options.recompute)
    recompute(model.layers, options.recompute, precision.is_fused)
    if not fused:
        for block in model.layers:
            block.compile(dynamic=False)
    optimizer = build(model, AdamWConfig(), Scaling(1.0, 1.0, 1.0))
    optimizer.set_progress(1e-3, 0.0, 1)
    tokens = torch.randint(0, config.vocab_size, (options.rows, options.length), device=DEVICE)
    context = AttentionContext(backend="sdpa")
    seconds = []
    for step in range(options.steps):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        precision.begin_step(step + 1)
        model.loss(tokens, tokens.roll(-1, 1), context).backward()
        optimizer.clip_and_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        precision.end_step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    work = StepSpec(
        options.length,
        tokens.numel(),
        tokens.numel(),
        optimizer="adamw",
        copies="step" if fused else "pass",
        activation_checkpointing=options.recompute,
        adapter=None if arm == "full" else AdapterSpec(options.rank, PROJECTIONS, base, dora=arm == "dora"),  # type: ignore[arg-type]
    )
    return {
        "arm": arm,
        "trained": num_trained_parameters(model),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "modelled_gib": training_memory(config, work).allocated / 2**30,
        "tokens_per_second": tokens.numel() / statistics.median(seconds[2:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recompute", choices=("none", "attention", "mlp", "block"), default="none")
    parser.add_argument("--as-written", action="store_true", help="full fine-tuning without fused sublayers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=ARMS, help="run only this arm, in this process")
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options.arm, options)))
        return
    rows = []
    for arm in ARMS:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.adapters", *sys.argv[1:], "--arm", arm],
            capture_output=True,
            text=True,
        )
        if child.returncode:
            reason = child.stderr.strip().splitlines()[-1]
            print(f"{arm:5} failed: {reason}")
            rows.append({"arm": arm, "failed": reason})
            continue
        row = json.loads(child.stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"{arm:5} {row['trained'] / 1e6:8.1f}M trained  {row['peak_gib']:6.2f} GiB peak "
            f"({row['modelled_gib']:.2f} modelled)  {row['tokens_per_second']:9,.0f} tokens/s",
            flush=True,
        )
    if options.out:
        conditions = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "options": vars(options),
        }
        options.out.write_text(json.dumps({**conditions, "arms": rows}, default=str, indent=1) + "\n")


if __name__ == "__main__":
    main()
