"""A synthetic study with known effects and known noise, for tests of comparisons, reports and the dashboard."""

import math
import random

from deskside.study.results import Arm, Factor, Group, Results, Trial

SIZES = {"small": 25.0, "medium": 85.0}


def trial(seed: int, metrics: dict[str, float], status: str = "finished", reason: str = "") -> Trial:
    """Return a trial whose validation curve falls towards its val_bpb."""
    if status != "finished":
        return Trial(seed, status, reason, run=f"runs/x-s{seed}", attempts=1)
    total, end = metrics["tokens"], metrics["val_bpb"]
    curve: list[dict[str, float | None]] = [
        {
            "tokens": total * share,
            "seconds": metrics["seconds"] * share,
            "loss": 3.2 * end * (1 + 0.6 * (1 - share)),
            "val_bpb": end * (1 + 0.5 * (1 - share) ** 2) if step % 2 == 0 else None,
        }
        for step, share in enumerate((0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0), 1)
    ]
    return Trial(seed, "finished", "", f"runs/x-s{seed}", "cuda:0", 1, "", "", metrics, curve)


def results(seeds: int = 3, noise: float = 0.004, gpu: bool = True) -> Results:
    """Return a study of two sizes x GQA x FP4. GQA: 10 % faster, 0.5 % worse. FP4: 20 % slower (emulated), 1 % worse.

    noise: standard deviation of the logarithm of each seed's loss, in addition to a seed effect that all arms share.
    One trial is out of memory, one diverged.
    """
    draw = random.Random(7)
    common = {seed: draw.gauss(0.0, 2 * noise) for seed in range(1, seeds + 1)}
    arms: list[Arm] = []
    for size, millions in SIZES.items():
        for gqa in ("off", "on"):
            for fp4 in ("off", "on"):
                name = f"{size}-gqa_{gqa}-fp4_{fp4}"
                trials = []
                for seed in range(1, seeds + 1):
                    if (size, gqa, fp4) == ("medium", "off", "on") and seed == seeds:
                        trials.append(
                            trial(seed, {}, "oom", "one row of 2048 tokens does not fit in 5.1 GiB")
                        )
                        continue
                    if (size, gqa, fp4) == ("medium", "on", "on") and seed == 1:
                        trials.append(trial(seed, {}, "diverged", "gradient norm not finite at step 40"))
                        continue
                    loss = 1.3 - 0.1 * math.log10(millions / 25)
                    loss *= (1.005 if gqa == "on" else 1.0) * (1.01 if fp4 == "on" else 1.0)
                    loss *= math.exp(common[seed] + draw.gauss(0.0, noise))
                    speed = 4e7 / millions * (1.1 if gqa == "on" else 1.0) * (0.8 if fp4 == "on" else 1.0)
                    speed *= math.exp(draw.gauss(0.0, 0.003))
                    metrics = {
                        "val_bpb": loss,
                        "val_loss": loss * 3.1,
                        "perplexity": math.exp(loss * 3.1),
                        "train_loss": loss * 3.15,
                        "val_bpb_equal_tokens": loss * 1.01,
                        "tokens_per_second": speed,
                        "mfu": 0.45,
                        "peak_memory_gib": millions / 10 * (0.9 if gqa == "on" else 1.0),
                        "parameters": millions * 1e6,
                        "parameters_quantized": 0.8 * millions * 1e6 if fp4 == "on" else 0.0,
                        "micro_tokens": 16384,
                        "tokens": speed * 240,
                        "steps": speed * 240 // 65536,
                        "seconds": 240.0,
                        "total_seconds": 270.0,
                    }
                    if gpu:
                        metrics |= {"peak_reserved_gib": metrics["peak_memory_gib"] * 1.1, "watts": 640.0}
                        metrics["joules_per_token"] = 640.0 / speed
                    trials.append(trial(seed, metrics))
                arms.append(
                    Arm(
                        id=name,
                        label=f"{size}, GQA {gqa}, FP4 {fp4}",
                        group="main",
                        levels={"size": size, "gqa": gqa, "fp4": fp4},
                        baseline=f"{size}-gqa_off-fp4_off",
                        emulated=fp4 == "on",
                        trials=trials,
                    )
                )
    factors = [
        Factor("size", "size", list(SIZES)),
        Factor("gqa", "grouped-query attention", ["off", "on"]),
        Factor("fp4", "NVFP4 products", ["off", "on"]),
    ]
    return Results(
        name="made",
        question="What do GQA and FP4 gain and cost?",
        created="2026-11-21T00:00:00+00:00",
        updated="2026-11-21T01:00:00+00:00",
        seeds=list(range(1, seeds + 1)),
        memory_fraction=0.85,
        machine={
            "device": "cuda",
            "gpu": {"name": "a card that was made up", "memory_gib": 32.0},
            "torch": "2.13.0",
        },
        groups=[Group("main", "", "124m", "full", "4 minutes of training", factors, ["size"])],
        arms=arms,
        complete=True,
    )
