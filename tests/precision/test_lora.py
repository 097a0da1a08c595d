"""Adapters on logical slices and trained rows, compared with the same arithmetic written out in float64."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.kernels.cross_entropy import LossOptions, linear_cross_entropy, token_losses
from deskside.ops.linear import Embedding, Linear
from deskside.ops.moe import Experts
from deskside.precision.lora import Adapter, add_adapter, add_expert_adapters, add_trained_rows, is_adapted

IN, RANK, SCALE = 24, 3, 1.7
QKV = [("q_proj", 16), ("k_proj", 8), ("v_proj", 8)]


def adapted(targets: Sequence[str], outputs: Sequence[tuple[str, int]] = QKV, bias: bool = False) -> Linear:
    torch.manual_seed(0)
    layer = Linear(IN, outputs, bias)
    nn.init.normal_(layer.weight)
    slices = [s for s in layer.slices if s.name in targets]
    add_adapter(layer, Adapter((layer.out_features, IN), slices, RANK, SCALE))
    layer.adapter.reset(torch.Generator().manual_seed(1))
    for b in layer.adapter.b.values():
        nn.init.normal_(b)
    return layer


def written_out(layer: Linear, x: Tensor) -> Tensor:
    """Compute each projection separately, in float64."""
    parts = []
    for s in layer.slices:
        y = x @ layer.weight.detach().double()[s.start : s.stop].T
        if layer.adapter is not None and s.name in layer.adapter.a:
            y = y + SCALE * (x @ layer.adapter.a[s.name].double().T) @ layer.adapter.b[s.name].double().T
        parts.append(y)
    return torch.cat(parts, dim=-1) + (0 if layer.bias is None else layer.bias.detach().double())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "targets", [["q_proj", "k_proj", "v_proj"], ["q_proj"], ["k_proj"], ["v_proj"], ["q_proj", "v_proj"]], ids="-".join
)  # fmt: skip
def test_every_set_of_slices_gives_output_and_gradients_of_its_own(targets: list[str], bias: bool) -> None:
    layer = adapted(targets, bias=bias)
    assert layer.adapter is not None
    x, grad = torch.randn(2, 5, IN, requires_grad=True), torch.randn(2, 5, 32)
    trained = [x, *layer.adapter.parameters()]
    y = layer(x)
    ours = torch.autograd.grad(y, trained, grad)
    expected = written_out(layer, x.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    truth = torch.autograd.grad(expected, trained, grad.double())
    assert len(ours) == 1 + 2 * len(targets)
    for got, wanted in zip(ours, truth, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "targets", [("gate_proj", "up_proj", "down_proj"), ("up_proj",), ("down_proj",)], ids="-".join
)
def test_every_expert_has_adapters_of_its_own(targets: tuple[str, ...]) -> None:
    """Compared with each expert computed separately in float64. The third expert has no rows."""
    torch.manual_seed(0)
    counts, width = torch.tensor([3, 4, 0, 2]), 10
    experts = Experts(4, IN, width, "silu", gated=True)
    adapters = {}
    for name, slices in experts.slices.items():
        nn.init.normal_(getattr(experts, name), std=0.3)
        chosen = [s for s in slices if s.name in targets]
        if chosen:
            adapters[name] = Adapter(experts.shapes[name], chosen, RANK, SCALE)
            adapters[name].reset(torch.Generator().manual_seed(1))
            for b in adapters[name].b.values():
                nn.init.normal_(b, std=0.3)
    add_expert_adapters(experts, adapters)

    def of_expert(e: int, name: str, x: Tensor) -> Tensor:
        parts = []
        for s in experts.slices[name]:
            y = x @ getattr(experts, name).double()[e, s.start : s.stop].T
            if s.name in targets:
                a, b = adapters[name].a[s.name].double(), adapters[name].b[s.name].double()
                y = y + SCALE * (x @ a[e].T) @ b[e].T
            parts.append(y)
        return torch.cat(parts, dim=-1)

    x, grad = torch.randn(9, IN, requires_grad=True), torch.randn(9, IN)
    expected = []
    for e, rows in enumerate(x.double().split(counts.tolist())):
        gate, up = of_expert(e, "gate_up_weight", rows).chunk(2, dim=-1)
        expected.append(of_expert(e, "down_weight", F.silu(gate) * up))
    y, truth = experts(x, counts), torch.cat(expected)
    torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=1e-4)
    trained = [x, *(p for adapter in adapters.values() for p in adapter.parameters())]
    ours = torch.autograd.grad(y, trained, grad)
    for got, wanted in zip(ours, torch.autograd.grad(truth, trained, grad.double()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert all(not gradient[2].any() for gradient in ours[1:])


def test_fused_and_separate_weights_learn_the_same_adapters() -> None:
    fused = adapted(["q_proj", "v_proj"])
    assert fused.adapter is not None
    x = torch.randn(7, IN)
    parts = []
    for s in fused.slices:
        own = Linear(IN, [(s.name, s.stop - s.start)])
        own.weight.data = fused.weight.data[s.start : s.stop]
        if s.name in fused.adapter.a:
            add_adapter(own, Adapter((s.stop - s.start, IN), own.slices, RANK, SCALE))
            own.adapter.a[s.name].data = fused.adapter.a[s.name].data
            own.adapter.b[s.name].data = fused.adapter.b[s.name].data
        parts.append(own(x))
    torch.testing.assert_close(fused(x), torch.cat(parts, dim=-1), rtol=1e-6, atol=1e-5)


def test_delta_is_what_the_adapter_adds() -> None:
    layer = adapted(["k_proj"])
    assert layer.adapter is not None
    x = torch.randn(4, IN)
    change = torch.zeros(layer.weight.shape)
    layer.adapter.merge(change)
    added = layer(x) - F.linear(x, layer.weight)
    torch.testing.assert_close(added[:, 16:24], x @ change[16:24].T, rtol=1e-5, atol=1e-5)
    assert not added[:, :16].any() and not added[:, 24:].any()


def test_a_fresh_adapter_changes_nothing_and_can_learn() -> None:
    layer = adapted(["q_proj", "k_proj", "v_proj"])
    assert layer.adapter is not None
    layer.adapter.reset(torch.Generator().manual_seed(2))
    x = torch.randn(4, IN)
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    layer(x).square().sum().backward()
    for name in layer.adapter.a:
        gradient = layer.adapter.b[name].grad
        assert gradient is not None and float(gradient.norm()) > 0
    a = torch.cat([p.flatten() for p in layer.adapter.a.values()])
    assert float(a.detach().abs().max()) <= IN**-0.5 and float(a.detach().std()) > 0.5 * IN**-0.5


def test_dropout_is_of_the_adapter_alone_and_of_training_alone() -> None:
    layer = adapted(["q_proj"])
    assert layer.adapter is not None
    layer.adapter.dropout = 0.5
    x = torch.randn(64, IN)
    torch.manual_seed(0)
    one = layer(x)
    torch.manual_seed(0)
    assert torch.equal(one, layer(x)) and not torch.equal(one, layer(x))
    assert torch.equal(one[:, 16:], F.linear(x, layer.weight)[:, 16:])
    with torch.no_grad():
        torch.testing.assert_close(layer(x).double(), written_out(layer, x.double()), rtol=1e-5, atol=1e-5)
    many = torch.stack([layer(x[:1]) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(many.double(), written_out(layer, x[:1].double()), rtol=0.2, atol=0.4)


def test_a_model_with_an_adapter_is_adapted() -> None:
    assert is_adapted(nn.Sequential(adapted(["q_proj"])))
    assert not is_adapted(nn.Sequential(Linear(4, [("q", 4)])))


def trained_rows(ids: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[Embedding, Tensor]:
    """Return an embedding with trained rows, and the table that it represents."""
    torch.manual_seed(0)
    embed = Embedding(11, 6)
    nn.init.normal_(embed.weight)
    embed.weight.data = embed.weight.data.to(dtype)
    embed.weight.requires_grad_(False)
    add_trained_rows(embed, ids)
    assert torch.equal(embed.trained.rows, embed.weight[list(ids)].float())
    embed.trained.rows.data += torch.randn(len(ids), 6)
    table = embed.weight.detach().float().clone()
    table[list(ids)] = embed.trained.rows.detach()
    return embed, table


def test_rows_of_an_embedding() -> None:
    embed, table = trained_rows([2, 7])
    assert embed.trained is not None
    tokens = torch.tensor([[2, 0, 7, 2], [1, 10, 7, 7]])
    table.requires_grad_()
    grad = torch.randn(2, 4, 6)
    y, expected = embed(tokens), F.embedding(tokens, table)
    assert torch.equal(y, expected)
    (ours,) = torch.autograd.grad(y, embed.trained.rows, grad)
    (theirs,) = torch.autograd.grad(expected, table, grad)
    torch.testing.assert_close(ours, theirs[[2, 7]])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("table_trains", [False, True])
def test_loss_of_a_head_with_rows(softcap: float | None, z_loss: float, table_trains: bool) -> None:
    """Loss and gradients of hidden and rows equal those of the full table with the rows
    inserted, and those of the table itself.
    """
    embed, table = trained_rows([1, 4, 9])
    weight, rows = embed.weight.requires_grad_(table_trains), embed.trained
    assert rows is not None and rows.pair is not None
    hidden = torch.randn(13, 6, requires_grad=True)
    targets = torch.randint(0, 11, (13,))
    targets[3], targets[:3] = -100, torch.tensor([1, 4, 9])
    wanted = [hidden, rows.rows, *([weight] if table_trains else [])]
    ours = linear_cross_entropy(hidden, weight, targets, LossOptions(softcap, z_loss, 5), rows.pair)
    with torch.no_grad():
        losses = token_losses(hidden, weight, targets, LossOptions(softcap, z_loss), rows.pair)
    torch.testing.assert_close(losses.sum(), ours)
    whole = weight.double().index_copy(0, rows.ids, rows.rows.double())
    logits = hidden.double() @ whole.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid = targets != -100
    truth = F.cross_entropy(logits[valid], targets[valid], reduction="sum")
    truth = truth + z_loss * logits.logsumexp(-1)[valid].square().sum()
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    for got, expected in zip(
        torch.autograd.grad(2 * ours, wanted), torch.autograd.grad(2 * truth, wanted), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(
        rows.logits(hidden, F.linear(hidden, weight)),
        F.linear(hidden, rows.into(weight)),
        rtol=1e-6,
        atol=1e-6,
    )
    assert torch.equal(rows.into(weight), table)


def test_no_gradient_of_the_whole_table_is_made() -> None:
    embed, _ = trained_rows([1, 4])
    assert embed.trained is not None
    hidden, targets = torch.randn(5, 6, requires_grad=True), torch.tensor([1, 2, 3, 4, 5])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear_cross_entropy(hidden, embed.weight, targets, rows=embed.trained.pair)
    assert sorted(tuple(t.shape) for t in kept) == [(2, 6), (5, 6)]
