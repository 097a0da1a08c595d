"""Generation speed with JSON schemas: all rows free, one row constrained, all rows constrained.

    python -m benchmarks.structured [--preset 124m] [--batch 1,16,64] [--new 256] [--vocabulary 50000]
        [--device auto] [--dtype bfloat16] [--runs 3] [--json FILE]

The model has random weights, and the tokenizer is trained on random words. The schema is a list of objects without an
end, so every row generates --new tokens. Each arm runs twice as warm-up, then --runs times; the median is reported.

    tok/s    new tokens of all rows per second, with the prompts of 16 tokens
    step     milliseconds per step
    masks    milliseconds per step in which the host computes which tokens may come next
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.decode import DTYPES
from benchmarks.step_config import configuration
from deskside.data.tokenizer import train
from deskside.engine.device import select_device
from deskside.engine.engine import Engine
from deskside.engine.grammar import Grammars, MaskBuilder
from deskside.engine.requests import Request
from deskside.engine.sampling import Sampling
from deskside.model.init import initialize
from deskside.model.transformer import Transformer

PROMPT = 16  # tokens
WARM_UP_RUNS = 2
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["ship", "boat", "ferry"]},
        "tons": {"type": "number"},
        "ports": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "tons", "ports"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 10_000}


@dataclass(frozen=True)
class Speed:
    """Medians over the runs of one arm."""

    arm: str
    batch: int
    tokens_per_second: float
    step_ms: float
    masks_ms: float


class TimedMasks(MaskBuilder):
    """Adds up the seconds that masks take."""

    seconds = 0.0

    def masks(self, matchers: Sequence) -> Tensor:
        begin = time.perf_counter()
        computed = super().masks(matchers)
        self.seconds += time.perf_counter() - begin
        return computed


def random_tokenizer(vocabulary: int) -> Tokenizer:
    """Return a tokenizer with about this many tokens, of random words."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = [
        "".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(2, 12))) for _ in range(2 * vocabulary)
    ]
    return train((" ".join(words[i : i + 100]) for i in range(0, len(words), 100)), vocabulary)


def measure(engine: Engine, requests: Sequence[Request], arm: str, runs: int) -> Speed:
    """Warm up, run, and return the medians."""
    masks = engine._mask_builder = TimedMasks(engine.vocabulary)
    seconds, steps, mask_seconds = [], [], []
    for _ in range(WARM_UP_RUNS + runs):
        masks.seconds, first_step, begin = 0.0, engine.counts.steps, time.perf_counter()
        answers = engine.run(requests)
        seconds.append(time.perf_counter() - begin)
        assert all(answer.reason == "length" for (answer,) in answers), "a row ended early"
        steps.append(engine.counts.steps - first_step)
        mask_seconds.append(masks.seconds)
    tokens = sum(request.max_new_tokens for request in requests)
    taken = statistics.median(seconds[WARM_UP_RUNS:])
    count = statistics.median(steps[WARM_UP_RUNS:])
    computed = statistics.median(mask_seconds[WARM_UP_RUNS:])
    return Speed(arm, len(requests), tokens / taken, 1e3 * taken / count, 1e3 * computed / count)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description="Measure generation with JSON schemas.")
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(argv)
    device = select_device(options.device)
    tokenizer = random_tokenizer(options.vocabulary)
    config = configuration({"preset": options.preset}).model
    model = Transformer(config)
    initialize(model, seed=0)
    model = model.to(device, DTYPES[options.dtype])
    grammar = Grammars(tokenizer, config.vocab_size, [0]).compile("json", json.dumps(SCHEMA))
    batches = [int(batch) for batch in options.batch.split(",")]
    engine = Engine(
        model,
        max_batch=max(batches),
        max_tokens=max(batches) * (PROMPT + options.new + 32),
        tokenizer=tokenizer,
    )
    speeds = []
    for batch in batches:
        for arm, bound in {"free": 0, "one": 1, "all": batch}.items():
            requests = [
                Request(
                    (1 + row,) * PROMPT,
                    options.new,
                    Sampling(),
                    row,
                    grammar=grammar if row < bound else None,
                )
                for row in range(batch)
            ]
            speeds.append(measure(engine, requests, arm, options.runs))
            last = speeds[-1]
            print(
                f"batch {batch:3}, {arm:>4} constrained: {last.tokens_per_second:8.0f} tok/s, "
                f"step {last.step_ms:6.2f} ms, masks {last.masks_ms:5.2f} ms",
                flush=True,
            )
            if options.json is not None:
                options.json.write_text(
                    json.dumps([asdict(speed) for speed in speeds], indent=1) + "\n", "utf-8"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
