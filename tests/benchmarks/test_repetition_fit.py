"""The fit of the law of repeated text: it recovers known constants, and those of the
law from the runs that it was fitted to.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.repetition_fit import RepetitionPoint, fit, main, read_point
from deskside.budget.loss import LAW, R_D, R_N
from deskside.budget.shape import matmul_params
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError
from tests.budget.test_loss import MEASURED, STAGED

UNIQUE = 2e7


def made_up(r_d: float, r_n: float, overfit: float, noise: float = 0.0) -> list[RepetitionPoint]:
    law, rng = replace(LAW, overfit=overfit, offset=0.08), np.random.default_rng(0)
    points = []
    for params in (1e7, 4e7, 1e8, 3e8):
        for epochs in (1, 3, 9, 27):
            bpb = law.at(params, epochs * UNIQUE, UNIQUE, r_d, r_n) * (1 + noise * rng.standard_normal())
            points.append(RepetitionPoint(f"{params:g}-{epochs}", params, epochs * UNIQUE, UNIQUE, bpb))
    return points


@pytest.mark.parametrize(("r_d", "r_n", "overfit"), [(1.3, 40.0, 2e-4), (15.4, 5.3, 1e-3), (4.0, 10.0, 0.0)])
def test_constants_that_are_known(r_d: float, r_n: float, overfit: float) -> None:
    found = fit(made_up(r_d, r_n, overfit))
    assert found.overfit == pytest.approx(overfit, rel=0.05, abs=2e-6)
    assert (found.r_d, found.offset) == pytest.approx((r_d, 0.08), rel=0.05)
    assert found.rms < 3e-4
    noisy = fit(made_up(r_d, r_n, overfit, noise=0.003))
    assert abs(noisy.overfit - overfit) < 4 * noisy.standard_errors[2]


def test_without_overfitting_what_overfits_is_not_predicted() -> None:
    points = made_up(15.4, 5.3, 2e-3)
    assert fit(points, overfitting=False).rms > 5 * fit(points).rms


def test_our_runs_give_the_constants_of_the_law() -> None:
    """An independent optimizer finds R_D and R_N of the grid in tests/budget, and no overfitting up to 6.5 epochs."""
    points = [
        RepetitionPoint(str(number), n, d, u, y + 0.01 * (d in STAGED))
        for number, (n, d, u, y) in enumerate(MEASURED)
    ]
    found = fit(points, overfitting=False)
    assert (found.r_d, found.r_n) == pytest.approx((R_D, R_N), rel=0.05)
    with_overfitting = fit(points)
    assert with_overfitting.overfit < with_overfitting.standard_errors[2]


def run_folder(folder: Path, summary: dict[str, object], plan: dict[str, object], **config: object) -> Path:
    folder.mkdir(parents=True)
    for name, value in (
        ("run", {"schema_version": 1, "config": RunConfig.model_validate(config).model_dump(mode="json")}),
        ("summary", summary),
        ("plan", plan),
    ):
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, point in enumerate(made_up(1.3, 40.0, 2e-4)[:5]):
        summary = {"tokens": point.tokens, "val_bpb": point.bpb, "mixture_epochs": {}}
        run_folder(tmp_path / "study" / f"r{number}", summary, {"train_tokens": UNIQUE})
    (tmp_path / "study" / "r4" / "summary.json").unlink()
    read = read_point(tmp_path / "study" / "r1")
    assert (read.params, read.unique_tokens) == (matmul_params(RunConfig().model), UNIQUE)
    main([str(tmp_path / "study"), "--json", str(tmp_path / "fit.json")])
    result = json.loads((tmp_path / "fit.json").read_text())
    assert len(result["points"]) == 4 and set(result["fits"]) == {"with overfitting", "without"}
    assert "r4: is not finished" in capsys.readouterr().out.replace("\n", " ")


def test_runs_that_the_law_does_not_describe(tmp_path: Path) -> None:
    summary = {"tokens": 1e8, "val_bpb": 1.2}
    constant = run_folder(tmp_path / "a", summary, {"train_tokens": 1e7}, schedule={"name": "constant"})
    mixed = run_folder(tmp_path / "b", {**summary, "mixture_epochs": {"hi": 3.0}}, {"train_tokens": 1e7})
    old = run_folder(tmp_path / "c", summary, {})
    earlier = run_folder(tmp_path / "d", {**summary, "best_step": 7}, {"train_tokens": 1e7})
    reasons = ((constant, "constant"), (mixed, "mixture"), (old, "how much text"), (earlier, "earlier step"))
    for folder, why in reasons:
        with pytest.raises(UsageError, match=why):
            read_point(folder)
    with pytest.raises(UsageError, match="4 finished runs"):
        fit(made_up(1.3, 40.0, 0.0)[:3])
    assert main([str(constant)]) == 2
