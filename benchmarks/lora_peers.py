"""LoRA fine-tuning by deskside and by TRL with PEFT: the same model, conversations and batch, in the same call.

    python -m benchmarks.lora_peers [--shapes qwen2.5-0.5b,llama-3.2-1b] [--arms deskside,trl,trl-liger]
        [--rows 8] [--length 2048] [--steps 30] [--base bf16] [--json FILE]

The models have random weights, the tokenizer is trained on the bundled text, and the conversations are pieces of that
text: speed and memory do not depend on what they say. Each arm runs in its own process:

    deskside   `deskside sft` as from the command line
    trl        TRL's SFTTrainer with a PEFT LoRA, as its documentation shows it
    trl-liger  the same with Liger's kernels

Common to all: frozen weights in bfloat16, LoRA of rank 16 on every projection of the blocks, fused AdamW, no
recomputation, one pass of rows x length tokens per step, conversations packed into rows, loss on the tokens of the
assistant. The time of a step is the median after the first --warmup steps, between the ends of two steps, data loading
included. `GiB` is the peak that torch allocated.

Differences: deskside computes attention within each conversation only. TRL needs the package flash-attn for that; here
it packs with the strategy "wrapped", in which a row is one sequence with causal attention (SDPA). An arm whose packages
are missing is reported in one line.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deskside.utils import child_process

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "tie_word_embeddings": True,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "tiny": {
        "model_type": "qwen2", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "tie_word_embeddings": True, "rope_theta": 1e4,
    },
}  # fmt: skip
ARMS = ("deskside", "trl", "trl-liger")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-4
SECONDS = 280.0
WORDS = (20, 400)  # fewest and most words of a message


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every arm ran whose packages are there, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen2.5-0.5b,llama-3.2-1b")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument(
        "--base", default="bf16", choices=("bf16", "int8", "nf4"), help="deskside's frozen weights"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    print(f"{'shape':<14}{'arm':<12}{'tokens/s':>10}{'ms':>9}{'p90':>9}{'GiB':>7}{'loss':>8}")
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made = child_process.run(
                "benchmarks.lora_peers:prepare",
                {"shape": shape, "folder": name, "rows": 4 * options.rows},
                SECONDS,
            )
            if made.status != "ok":
                raise SystemExit(f"{shape}: {made.error}\n{made.output}")
            for arm in options.arms.split(","):
                spec = {
                    "arm": arm, "folder": str(folder), "rows": options.rows, "length": options.length,
                    "steps": options.steps, "warmup": options.warmup, "base": options.base,
                }  # fmt: skip
                outcome = child_process.run("benchmarks.lora_peers:measure", {"spec": spec}, SECONDS)
                row = {"shape": shape, "arm": arm, "status": outcome.status, "error": outcome.error}
                found.append(row | (outcome.value or {"output": outcome.output}))
                print(line(found[-1]), flush=True)
                if options.json:
                    options.json.write_text(
                        json.dumps({"options": vars(options), "rows": found}, default=str)
                    )
    return int(any(row["status"] != "ok" and "ModuleNotFoundError" not in row["error"] for row in found))


def line(row: dict[str, Any]) -> str:
    """Return a line of the table; for an arm that did not run, it has the reason."""
    head = f"{row['shape']:<14}{row['arm']:<12}"
    if row["status"] != "ok":
        return head + f"{row['status']}: {row['error']}"
    memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    return (
        f"{head}{row['tokens_per_second']:>10,.0f}{row['step_ms']:>9.1f}{row['p90_ms']:>9.1f}{memory:>7}"
        f"{row['loss']:>8.3f}"
    )


def prepare(shape: str, folder: str, rows: int) -> None:
    """Write a model with random weights, a tokenizer and conversations into `folder`."""
    import random

    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    import deskside.data

    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, max_position_embeddings=8192)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    text = (Path(deskside.data.__file__).parent / "bundled" / "tiny_shakespeare.txt").read_text("utf-8")
    trained = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained.train_from_iterator([text], min(4096, config.vocab_size), special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    model.config.eos_token_id = tokenizer.eos_token_id
    out = Path(folder, "model")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    words, draw = text.split(), random.Random(0)

    def piece() -> str:
        start = draw.randrange(len(words) - WORDS[1])
        return " ".join(words[start : start + draw.randint(*WORDS)])

    with Path(folder, "chats.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(200 * rows):
            roles = ("user", "assistant") * draw.randint(1, 2)
            file.write(json.dumps({"messages": [{"role": r, "content": piece()} for r in roles]}) + "\n")


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one arm in this process."""
    import torch

    seconds, losses = (_deskside if spec["arm"] == "deskside" else _trl)(spec)
    timed = seconds[spec["warmup"] :]
    deciles = statistics.quantiles(timed, n=10)
    return {
        "tokens_per_second": spec["rows"] * spec["length"] / statistics.median(timed),
        "step_ms": 1e3 * statistics.median(timed),
        "p90_ms": 1e3 * deciles[-1],
        "seconds": seconds,
        "loss": losses[-1],
        "losses": losses,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _deskside(spec: dict[str, Any]) -> tuple[list[float], list[float]]:
    from deskside.cli.main import main as deskside

    folder, tokens = Path(spec["folder"]), spec["rows"] * spec["length"]
    words = [
        "sft",
        str(folder / "model"),
        "--data",
        str(folder / "chats.jsonl"),
        "--runs",
        str(folder / "runs"),
    ]
    words += ["--name", "lora", "--steps", str(spec["steps"]), "--batch.tokens", str(tokens)]
    words += ["--batch.sequence_length", str(spec["length"]), "--batch.micro_tokens", str(tokens)]
    words += ["--adapter.rank", str(RANK), "--adapter.alpha", str(ALPHA), "--adapter.base", spec["base"]]
    words += [
        "--optim.name",
        "adamw",
        "--optim.lr",
        str(LEARNING_RATE),
        "--compute.activation_checkpointing",
        "none",
    ]
    code = deskside(words)
    if code:
        raise RuntimeError(f"deskside sft ended with exit code {code}")
    rows = [
        json.loads(text) for text in (folder / "runs" / "lora" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "tokens_per_second" in row]
    ends = [0.0, *(row["seconds"] for row in steps)]
    return [after - before for before, after in itertools.pairwise(ends)], [row["loss"] for row in steps]


def _trl(spec: dict[str, Any]) -> tuple[list[float], list[float]]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    folder, on_gpu = Path(spec["folder"]), torch.cuda.is_available()
    ends: list[float] = []

    class Clock(TrainerCallback):
        """Note when each step ends."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Wait for the device."""
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    chats = [json.loads(text) for text in (folder / "chats.jsonl").read_text("utf-8").splitlines()]
    settings = SFTConfig(
        output_dir=str(folder / spec["arm"]),
        per_device_train_batch_size=spec["rows"],
        max_length=spec["length"],
        packing=True,
        packing_strategy="wrapped",
        assistant_only_loss=True,
        max_steps=spec["steps"],
        learning_rate=LEARNING_RATE,
        optim="adamw_torch_fused",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        use_liger_kernel=spec["arm"] == "trl-liger",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    dtype = torch.bfloat16 if on_gpu else torch.float32
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, attn_implementation="sdpa"),
        args=settings,
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )
    began = time.perf_counter()
    trainer.train()
    starts = [began, *ends]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [after - before for before, after in zip(starts, ends, strict=False)], losses


if __name__ == "__main__":
    raise SystemExit(main())
