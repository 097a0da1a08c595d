"""The average of weights compared with torch's own (torch.optim.swa_utils), on the device and in host memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from deskside.config.average import AverageConfig
from deskside.optim import offload
from deskside.optim.average import WeightAverage
from deskside.optim.groups import trained_parameters

STEPS, CPU = 20, torch.device("cpu")
HALF_LIFE = 0.25  # five steps


def walk(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def averaged(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, WeightAverage]:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    config = AverageConfig(half_life=HALF_LIFE, start=0.0, **options)
    average = WeightAverage(trained_parameters(model), config, CPU)
    for step in range(STEPS):
        walk(model, step)
        if average.due(step + 1, step / STEPS):
            average.update(step / STEPS)
    average.wait()
    return model, average


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize(
    "name, function",
    [("ema", get_ema_multi_avg_fn(0.5 ** (1 / STEPS / HALF_LIFE))), ("tail", get_swa_multi_avg_fn())],
    ids=["ema", "tail"],
)
def test_like_torch(
    name: str, function: Callable[..., None], offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PIECE", 8)  # several pieces per weight
    torch.manual_seed(0)
    _, average = averaged(name=name, offload=offloaded)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    theirs = AveragedModel(model, multi_avg_fn=function)
    for step in range(STEPS):
        walk(model, step)
        theirs.update_parameters(model)
    for key, parameter in theirs.module.named_parameters():
        torch.testing.assert_close(average.tensors[key], parameter, rtol=1e-6, atol=1e-6)
    assert average.updates == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_device", [False, True])
def test_the_weights_come_back(dtype: torch.dtype, on_device: bool) -> None:
    """They are bitwise restored, also after an error. The average of bfloat16 weights is in float32."""
    model, average = averaged(dtype, name="tail", every=2)
    assert average.updates == STEPS // 2
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError), average.applied(0.25, on_device):
        for name, parameter in model.named_parameters():
            mean, own = average.tensors[name], before[name].double()
            assert mean.dtype == torch.float32 and parameter.dtype == dtype
            expected = (own + 0.25 * (mean.double() - own)).to(dtype)
            torch.testing.assert_close(parameter.detach(), expected)
        raise ZeroDivisionError
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_ema_counts_progress_not_steps() -> None:
    """The half-life is a share of the run, so updating every second step gives nearly the same window."""
    x = nn.Parameter(torch.zeros(1))
    for every in (1, 5):
        average = WeightAverage(
            {"x": x}, AverageConfig(name="ema", half_life=0.1, start=0.5, every=every), CPU
        )
        for step in range(1, 1001):
            x.data.fill_(float(step > 900))  # one half-life before the end
            if average.due(step, (step - 1) / 1000):
                average.update((step - 1) / 1000)
        assert average.updates == 500 // every
        assert average.tensors["x"].item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_new_start_forgets_everything(offloaded: bool) -> None:
    """It forgets weights that were not finite too, as before a rollback."""
    model, average = averaged(name="ema", offload=offloaded)
    for tensor in average.tensors.values():
        tensor.fill_(float("nan"))
    average.clear()
    average.update(0.5)
    average.wait()
    for name, parameter in model.named_parameters():
        assert torch.equal(average.tensors[name], parameter)


def test_an_average_of_another_model_is_refused() -> None:
    _, average = averaged(name="ema")
    with pytest.raises(Exception, match="another model"):
        average.load({"other": torch.zeros(1)}, average.state())
