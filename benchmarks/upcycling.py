"""A mixture of experts that begins as a trained dense model, beside going on with it and beside a mixture from scratch.

    python -m benchmarks.upcycling run OUT --data DIR --seeds 1,2,3 [--minutes 5] [--preset 124m] [--only scratch]
    python -m benchmarks.upcycling table OUT

For each seed, a dense model trains for --minutes. From its weights, two runs of --minutes each go on: the dense model
(the baseline), and a mixture of --experts experts of --width channels, which are copies of its MLP or of its halves
(`--upcycle`). The same mixture from random weights trains for twice --minutes, so that all three ends have cost the
same time. `run` leaves out runs that have finished, so it can be stopped and repeated; CUDA_VISIBLE_DEVICES chooses its
GPU, and --only the arms, so that two jobs can share a seed. Other options are configuration keys of all runs.

The loss of the mixture before its first step is that of the dense model: `tests/weights/test_upcycle.py`. The table
has the first loss of both continued runs all the same. Intervals are Student's 95 % intervals of the logarithm of the
ratio, paired by seed, as in studies.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deskside.run.record import read_object, read_run
from deskside.study.stats.statistics import log_ratio, relative_difference

ARMS = ("dense-goes-on", "upcycled", "scratch")  # the first is the baseline


def commands(seed: int, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the arguments of `deskside train` by the name of the run, in the order in which they run.

    The dense model that others start from runs first if one of those is in `options.only`.
    """
    experts = ("--model.num_experts", str(options.experts), "--model.num_experts_per_tok", "2")
    experts += ("--model.moe_intermediate_size", str(options.width))
    experts += ("--model.router_aux_loss_coef", str(options.balance))
    dense = f"dense-{seed}"
    init = ("--init", str(options.out / dense))
    of_arm: dict[str, tuple[list[str], float]] = {
        ARMS[0]: ([*init], 1.0),
        ARMS[1]: ([*init, "--upcycle", *experts], 1.0),
        ARMS[2]: ([options.preset, *experts], 2.0),
    }
    runs = {dense: ([options.preset], 1.0)} if {*ARMS[:2]} & {*options.only} else {}
    runs |= {f"{arm}-{seed}": words for arm, words in of_arm.items() if arm in options.only}
    common = ["--data.path", options.data, "--seed", str(seed), "--runs", str(options.out), *options.others]
    return {
        name: [*words, "--hours", f"{share * options.minutes}m", *common, "--name", name]
        for name, (words, share) in runs.items()
    }


def run(options: argparse.Namespace) -> None:
    """Run everything that has not finished. Raises CalledProcessError if a run fails."""
    for seed in options.seeds:
        for name, words in commands(seed, options).items():
            folder = options.out / name
            if (folder / "summary.json").exists():
                continue
            if (folder / "run.json").exists():
                words = ["--resume", str(folder)]
            print(f"{name}: deskside train {' '.join(words)}", flush=True)
            subprocess.run([sys.executable, "-m", "deskside", "train", *words], check=True)


def table(out: Path) -> list[str]:
    """Return the lines of a Markdown table of the arms. Runs that have not finished are left out."""
    found: dict[str, dict[int, float]] = {}
    first: dict[str, list[float]] = {}
    for arm in (*ARMS, "dense"):
        for folder in sorted(out.glob(f"{arm}-[0-9]*")):
            summary = read_object(folder / "summary.json")[0]
            if summary:
                seed = int(folder.name.rpartition("-")[2])
                found.setdefault(arm, {})[seed] = float(summary["val_bpb"])
                first.setdefault(arm, []).append(float(read_run(folder).metrics[0]["loss"]))
    lines = ["| | seeds | bits per byte | difference | first loss |", "|---|---|---|---|---|"]
    baseline = found.get(ARMS[0], {})
    for arm, by_seed in found.items():
        shared = [seed for seed in by_seed if seed in baseline]
        difference = ""
        if arm != ARMS[0] and shared:
            ratio = log_ratio([by_seed[seed] for seed in shared], [baseline[seed] for seed in shared])
            difference = f"{relative_difference(ratio.mean):+.2%}"
            if ratio.low is not None and ratio.high is not None:
                low, high = (relative_difference(bound) for bound in (ratio.low, ratio.high))
                difference += f" ({low:+.2%} to {high:+.2%})"
        mean = statistics.fmean(by_seed.values())
        cells = (arm, str(len(by_seed)), f"{mean:.4f}", difference, f"{statistics.fmean(first[arm]):.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `others` are configuration keys, as words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the runs")
    parser.add_argument("--data", help="prepared dataset directory, for `run`")
    parser.add_argument(
        "--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 3]
    )
    parser.add_argument("--only", default=",".join(ARMS), metavar="ARM,...", help="run only these arms")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="channels of an expert; half of 124m's MLP")
    # With 0.001, the default of deskside train, the routers collapsed (docs/experts.md).
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    options, others = parser.parse_known_args(argv)
    options.others = others
    options.only = options.only.split(",")
    if unknown := {*options.only} - {*ARMS}:
        parser.error(f"--only: the arms are {', '.join(ARMS)}, not {', '.join(sorted(unknown))}")
    if options.action == "run" and options.data is None:
        parser.error("--data is missing")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = parse(argv)
    if options.action == "run":
        options.out.mkdir(parents=True, exist_ok=True)
        run(options)
    print("\n".join(table(options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
