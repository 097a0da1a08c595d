"""Generation on a GPU: float32 gives the plain loop's tokens, bfloat16 gives
none that is worse; kernels and graphs.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from deskside.engine.counter_rng import DRAW, exponentials, stream_of
from deskside.engine.engine import TOKENS_PER_REPLAY, Draft, Engine
from deskside.engine.fused import FusedBlocks
from deskside.engine.generate import generate
from deskside.engine.requests import Request
from deskside.engine.sampling import ALL, GREEDY, UNRANKED, WIDTHS, Sampling, SamplingTensors, draw
from deskside.kernels import decode, dependent_launch, few_tokens
from deskside.kernels.attention import AttentionContext
from deskside.kernels.attention.reference import decode_attention
from deskside.kernels.decode import gather_pages, paged_attention
from deskside.kernels.fused import QkvLayout
from deskside.kernels.prefill import packed_attention, packed_kernel_supports
from deskside.kernels.stored_weights import linear_from_codes
from deskside.model.block import DEFAULT_BLOCKS
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.precision.frozen import Format, quantize_for_generation
from tests.engine.test_generate import PROMPTS, VARIANTS, make, plain
from tests.gpu.card import DEVICE, NEEDS_CARD

pytestmark = NEEDS_CARD

NEW = 25
SAMPLINGS = {
    "greedy": GREEDY,
    "unranked": Sampling(0.8, min_p=0.01),
    "top-k": Sampling(0.9, top_k=20, top_p=0.95),
    "sorted": Sampling(0.9, top_p=0.9),
    "penalty": Sampling(0.9, repetition_penalty=1.3),
    "penalties and bias": Sampling(0.0, presence_penalty=0.5, frequency_penalty=0.5, logit_bias=((7, 2.0),)),
}


def card_model(name: str = "gqa", **changes: Any) -> Transformer:
    return make(**VARIANTS[name], **changes).to(DEVICE)


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_equals_the_uncached_loop(name: str) -> None:
    model = card_model(name)
    results = generate(model, PROMPTS, max_new_tokens=NEW)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == plain(model, prompt, NEW)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_sampling_on_the_card_equals_the_uncached_loop(kind: str, graphs: bool) -> None:
    """There are more prompts than rows, computed in parts, so lanes and graphs change while rows run."""
    model, sampling = card_model(), SAMPLINGS[kind]
    engine = Engine(model, max_batch=3, max_tokens=256, page_size=16, prefill_tokens=16, graphs=graphs)
    free = engine.free_tokens
    asked = [Request(tuple(p), NEW, sampling, seed=4, first_sample=i) for i, p in enumerate(PROMPTS * 2)]
    for row, (request, (answer,)) in enumerate(zip(asked, engine.run(asked), strict=True)):
        assert answer.tokens == plain(model, list(request.prompt), NEW, sampling, row, seed=4)
    assert engine.free_tokens == free
    assert (engine._graphs is not None and len(engine._graphs._captured) > 0) == graphs


def test_tokens_drawn_on_the_card_equal_the_cpu() -> None:
    """All settings that have a kernel, with a vocabulary of several pieces. Differences are roundings."""
    torch.manual_seed(0)
    samplings = [Sampling(temperature=0)]
    for top_p, min_p in ((None, None), (0.7, None), (None, 0.05), (0.9, 0.02)):
        samplings += [
            Sampling(temperature=t, top_k=k, top_p=top_p, min_p=min_p) for t in (0.6, 1.3) for k in (5, 64)
        ]
    logits = (3 * torch.randn(len(samplings), 50_000)).bfloat16()
    logits[3] = logits[3].round()
    for width in (WIDTHS[0], ALL, UNRANKED):
        if width == UNRANKED:
            samplings = [replace(sampling, top_k=None, top_p=None) for sampling in samplings]
        settings = SamplingTensors.of(samplings, range(len(samplings)), "cpu")
        on_card = SamplingTensors(settings.floats.to(DEVICE), settings.integers.to(DEVICE))
        different = 0
        for step in range(50):
            count = torch.full((len(samplings),), step)
            truth = draw(logits, settings, width, count)
            ours = draw(logits.to(DEVICE), on_card, width, count.to(DEVICE))
            assert ours.sampled_logprob_B is not None and truth.sampled_logprob_B is not None
            same = ours.token_B.cpu() == truth.token_B
            different += int((~same).sum())
            logprobs = ours.sampled_logprob_B.cpu()[same], truth.sampled_logprob_B[same]
            torch.testing.assert_close(*logprobs, rtol=1e-4, atol=1e-4)
        assert different <= 3


@pytest.mark.parametrize("kind", ["greedy", "top-k", "penalty"])
def test_several_tokens_in_a_graph_equal_the_uncached_loop(kind: str) -> None:
    """Rows end at different places among the tokens of a replay, by length and by a token."""
    model, sampling, new = card_model(max_position_embeddings=256), SAMPLINGS[kind], 120
    alone = [plain(model, prompt, new, sampling, n, seed=4) for n, prompt in enumerate(PROMPTS)]
    ends = [frozenset({tokens[70]}) if n % 2 else frozenset() for n, tokens in enumerate(alone)]
    engine = Engine(model, max_batch=4, max_tokens=1024, page_size=16)
    asked = [
        Request(tuple(p), new - n, sampling, seed=4, first_sample=n, eos_tokens=ends[n])
        for n, p in enumerate(PROMPTS)
    ]
    for n, (answer,) in enumerate(engine.run(asked)):
        cut = next((i for i, token in enumerate(alone[n]) if token in ends[n]), new - n)
        assert answer.tokens == alone[n][: min(cut, new - n)]
    assert engine._graphs is not None
    assert {kind[2] for kind in engine._graphs._captured if kind[0] == "decode"} >= {1, TOKENS_PER_REPLAY}  # type: ignore[index]


@pytest.mark.parametrize("window", [None, 30])
def test_prompts_that_go_on_are_attended_some_rows_at_a_time(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queries of a key-value head exceed what the kernel takes. Two rows are
    gathered at once, and none is repeated.
    """
    torch.manual_seed(0)
    rows, new, length, K, C = 5, 40, 200, 2, 64
    k, v = (torch.randn(rows * 7 + 1, K, 32, C) for _ in range(2))
    table = torch.randperm(rows * 7).view(rows, 7)
    q, positions = torch.randn(rows, new, 12, C), (length - new + torch.arange(new)).expand(rows, new)
    options = AttentionContext(window=window)
    expected = paged_attention(q, k, v, table, positions, length, options)
    monkeypatch.setattr(decode, "GATHERED_BYTES", 2 * (2 * length * K * C * 2))
    card = [t.to(DEVICE, torch.bfloat16) for t in (q, k, v)]
    got = paged_attention(*card, table.to(DEVICE), positions.to(DEVICE), length, options)  # type: ignore[call-arg]
    torch.testing.assert_close(got.float().cpu(), expected, atol=0.03, rtol=0.03)


def test_graphs_are_chosen_where_a_step_can_be_captured() -> None:
    assert Engine(card_model())._graphs is not None
    assert Engine(card_model("moe"))._graphs is not None
    # In float32, the products of many rows are a loop, which asks the device for each expert's number of rows.
    assert Engine(card_model("moe"), max_batch=256)._graphs is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_graphs(dtype: torch.dtype) -> None:
    """Rows end at different steps, so a captured routing differs from the replay's."""
    model = card_model("moe")
    if dtype is torch.bfloat16:
        convert(model, "bf16")
    asked = [Request(tuple(prompt), NEW - 3 * i) for i, prompt in enumerate(PROMPTS)]
    engines = [Engine(model, max_batch=4, max_tokens=256, graphs=graphs) for graphs in (True, False)]
    captured, eager = (engine.run(asked) for engine in engines)
    assert engines[0]._graphs is not None and len(engines[0]._graphs._captured) > 0
    assert [a.tokens for (a,) in captured] == [a.tokens for (a,) in eager]
    if dtype is torch.float32:
        for request, (answer,) in zip(asked, captured, strict=True):
            assert answer.tokens == plain(model, list(request.prompt), request.max_new_tokens)


def test_rows_that_end_by_a_token_the_host_sees_late() -> None:
    model = card_model()
    alone = [plain(model, prompt, NEW) for prompt in PROMPTS]
    asked = [
        Request(tuple(prompt), NEW, eos_tokens=frozenset({tokens[6]}))
        for prompt, tokens in zip(PROMPTS, alone, strict=True)
    ]
    engine = Engine(model, max_batch=2, max_tokens=256, page_size=16)
    for tokens, (answer,) in zip(alone, engine.run(asked), strict=True):
        assert answer.tokens == tokens[: tokens.index(tokens[6])]
        assert answer.reason == "eos"


@pytest.mark.parametrize("name", ["gqa", "window"])
def test_speculative_greedy_equals_plain(name: str) -> None:
    model, draft = card_model(name), card_model(name, num_hidden_layers=1)
    for proposer in (draft, model):
        engine = Engine(model, max_batch=3, max_tokens=256, page_size=16, draft=Draft(proposer, 3))
        assert engine._graphs is not None
        asked = [Request(tuple(prompt), NEW, logprobs=True) for prompt in PROMPTS]
        for request, (answer,) in zip(asked, engine.run(asked), strict=True):
            assert answer.tokens == plain(model, list(request.prompt), NEW)
            assert len(answer.logprobs) == NEW and max(answer.logprobs) <= 0


@pytest.mark.parametrize("name", ["gqa", "window"])
@torch.no_grad()
def test_bf16_takes_the_best_token_of_the_uncached_model(name: str) -> None:
    """Two tokens can be equal in bfloat16's eight bits, so the choice may differ from the uncached argmax. Where it
    does, the uncached logit must be as good up to rounding, and it must be rare.
    """
    model = card_model(name)
    convert(model, "bf16")
    results = generate(model, PROMPTS, max_new_tokens=NEW)
    same, all_of_them = 0, 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert len(result.tokens) == NEW
        tokens_BT = torch.tensor([prompt + result.tokens], device=DEVICE)
        logits_TV = model(tokens_BT)[0, len(prompt) - 1 : -1].float()
        taken_T = logits_TV.gather(1, tokens_BT[0, len(prompt) :, None])[:, 0]
        short_T = (logits_TV.amax(1) - taken_T) / logits_TV.std(1)
        assert float(short_T.max()) < 0.1
        same += int((short_T == 0).sum())
        all_of_them += NEW
    assert same >= 0.9 * all_of_them


@pytest.mark.parametrize("name", [*VARIANTS, "heads of 16"])
@torch.no_grad()
def test_fused_blocks_equal_the_models(name: str) -> None:
    model = card_model(name) if name in VARIANTS else make(head_dim=16).to(DEVICE)
    prompt = torch.arange(2 * 9, device=DEVICE).view(2, 9) * 5 % 97
    new = torch.tensor([[3, 4], [60, 1]], device=DEVICE)
    caches = [model.new_cache(2, 32) for _ in range(2)]
    counts, blocks = torch.tensor([9, 6], device=DEVICE), FusedBlocks(model)
    firsts = [
        model.forward_cached(prompt, cache, counts, "last", how)
        for cache, how in zip(caches, (DEFAULT_BLOCKS, blocks), strict=True)
    ]
    torch.testing.assert_close(firsts[1], firsts[0], atol=1e-3, rtol=1e-3)
    expected = model.forward_cached(new, caches[0])
    got = model.forward_cached(new, caches[1], blocks=blocks)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(caches[1].k, caches[0].k, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(caches[1].v, caches[0].v, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("H", "K", "C"), [(12, 3, 64), (32, 8, 128), (16, 1, 128), (6, 6, 80)])
@pytest.mark.parametrize(
    ("T", "window", "softcap"), [(1, None, None), (1, 300, 0.7), (4, None, 0.7), (4, 40, None)]
)
def test_the_kernel_equals_float64(
    H: int, K: int, C: int, T: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    last = torch.tensor([T - 1, 31, 255, 256, 1000, 2047], device=DEVICE)
    B, width = len(last), 64
    table = torch.randperm(B * width, generator=generator, device=DEVICE).view(B, width)
    k, v, q = normal(B * width, K, 32, C), normal(B * width, K, 32, C), normal(B, T, H, C)
    positions = last[:, None] - T + 1 + torch.arange(T, device=DEVICE)
    options = AttentionContext(window=window, softcap=softcap)
    if softcap is not None:
        options = replace(options, sinks_H=torch.linspace(-1.0, 2.0, H, device=DEVICE))
    got = paged_attention(q, k, v, table, positions, 2048, options)
    keys, values = (gather_pages(pool, table, 2048).double() for pool in (k, v))
    truth = decode_attention(q.double(), keys, values, positions, options)
    error = float((got.double() - truth).norm() / truth.norm())
    assert error < {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("H", "K", "C"), [(12, 3, 64), (32, 8, 128), (32, 1, 128)])
@pytest.mark.parametrize(("rows", "window"), [(1, None), (6, None), (6, 300), (64, None)])
def test_attention_from_new_equals_its_two_steps(
    H: int,
    K: int,
    C: int,
    rows: int,
    window: int | None,
    dtype: torch.dtype,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare with QK-norm, RoPE and cache write in torch, and then attention in float64."""
    monkeypatch.setattr(dependent_launch, "ENABLED", early)
    torch.manual_seed(0)
    width, layout = 64, QkvLayout(H, K, C, 1e-6)
    last = torch.randint(0, 2048, (rows,))
    last[0] = 2047
    table = torch.randperm(rows * width).view(rows, width)
    pools = [torch.randn(rows * width, K, 32, C) for _ in range(2)]
    qkv, angle = torch.randn(rows, layout.width), torch.randn(2048, C // 2)
    norms, angles = (torch.rand(C) + 0.5, torch.rand(C) + 0.5), (angle.cos(), angle.sin())
    options = AttentionContext(window=window)
    card_pools = [pool.to(DEVICE, dtype) for pool in pools]
    card_norms, card_angles = (tuple(x.to(DEVICE) for x in pair) for pair in (norms, angles))
    got = decode.attend_from_new(
        qkv.to(DEVICE, dtype),
        card_norms,  # type: ignore[arg-type]
        card_angles,  # type: ignore[arg-type]
        layout,
        (card_pools[0], card_pools[1]),
        table.to(DEVICE),
        last.to(DEVICE),
        2048,
        options,
    )
    rounded = [x.to(dtype).double() for x in (qkv, *pools)]
    truth = decode.attend_from_new(
        rounded[0], norms, angles, layout, (rounded[1], rounded[2]), table, last, 2048, options
    )
    limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for ours, theirs in ((got, truth), *zip(card_pools, rounded[1:], strict=True)):
        assert float((ours.double().cpu() - theirs).norm() / theirs.norm()) < limit


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize(("K", "F", "gated"), [(768, 2048, True), (2048, 768, False), (100, 60, True)])
def test_layers_of_few_tokens_equal_float64(
    K: int, F: int, gated: bool, rows: int, dtype: torch.dtype, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is the input of the next one, so that a kernel that did not wait would read old values."""
    monkeypatch.setattr(dependent_launch, "ENABLED", early)
    torch.manual_seed(0)
    x, delta = torch.randn(2, rows, K).to(dtype)
    weights = (torch.randn(6, F * (2 if gated else 1), K) / K**0.5).to(dtype)
    back = (torch.randn(6, K, F) / F**0.5).to(dtype)
    norm_weight = torch.rand(K) + 0.5

    def chain(*tensors: torch.Tensor) -> torch.Tensor:
        x, delta, weights, back, norm_weight = tensors
        for layer in range(6):
            norm = few_tokens.AddNorm(delta, norm_weight, 1e-6)
            x, hidden = few_tokens.add_norm_linear(
                x, norm, weights[layer], None, "silu" if gated else None, gated
            )
            delta = few_tokens.linear(hidden, back[layer])
        return x + delta

    tensors = (x, delta, weights, back, norm_weight)
    got = chain(*(tensor.to(DEVICE) for tensor in tensors))
    truth = chain(*(tensor.double() for tensor in tensors))
    error = float((got.double().cpu() - truth).norm() / truth.norm())
    assert error < {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("H", "K", "C"), [(12, 3, 64), (32, 8, 128), (16, 1, 128), (6, 6, 80), (4, 4, 256)])
@pytest.mark.parametrize("window", [None, 300])
def test_the_prefill_kernel_equals_float64(
    H: int, K: int, C: int, window: int | None, dtype: torch.dtype
) -> None:
    """Covers whole prompts, parts after cached tokens, a row without tokens, and padding."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    lengths, counts = (torch.tensor(x, device=DEVICE) for x in ([0, 0, 512, 31, 1000], [700, 0, 65, 1, 300]))
    cu_seqlens = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    table = torch.randperm(5 * 48, generator=generator, device=DEVICE).view(5, 48)
    k, v, q = normal(5 * 48, K, 32, C), normal(5 * 48, K, 32, C), normal(1066 + 214, H, C)
    if dtype is torch.float32 and C == 256:
        assert not packed_kernel_supports(H, k)
        return
    options = AttentionContext(window=window, softcap=None if window is None else 0.7)
    got = packed_attention(q, k, v, table, lengths, cu_seqlens, options)
    assert not got[1066:].any()
    doubles = (x.double().cpu() for x in (q, k, v))
    truth = packed_attention(*doubles, table.cpu(), lengths.cpu(), cu_seqlens.cpu(), options)  # type: ignore[call-arg]
    error = float((got.double().cpu() - truth).norm() / truth.norm())
    assert error < {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_in_graphs_equal_prompts_without(dtype: torch.dtype) -> None:
    """All passes have one size, but their rows differ from replay to replay. Some continue a cached prefix."""
    model = make(max_position_embeddings=1024, num_hidden_layers=2, head_dim=64).to(DEVICE)
    if dtype is torch.bfloat16:
        convert(model, "bf16")
    generator = torch.Generator().manual_seed(6)
    system = torch.randint(0, 97, (100,), generator=generator).tolist()
    rounds = [
        [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]
        for lengths in ((200,), (30, 170), (60, 60, 70), (1, 190), (129,))
    ]
    rounds += [[system + prompt for prompt in prompts] for prompts in rounds]
    answers = {}
    for graphs in (True, False):
        engine = Engine(model, max_batch=3, max_tokens=4096, graphs=graphs)
        answers[graphs] = [
            [a.tokens for (a,) in engine.run([Request(tuple(p), 6) for p in prompts])] for prompts in rounds
        ]
        kinds = [] if engine._graphs is None else [kind[0] for kind in engine._graphs._captured]  # type: ignore[index]
        assert ("prefill" in kinds) == graphs
    assert answers[True] == answers[False]


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 5, 64, 65])
def test_products_of_codes_equal_float64(codes: torch.dtype, rows: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    stored = (torch.randn(1000, 700, generator=generator, device=DEVICE) * 40).clamp(-127, 127).to(codes)
    scale = torch.rand(1000, generator=generator, device=DEVICE)
    x = torch.randn(rows, 700, generator=generator, device=DEVICE).bfloat16()
    truth = x.double() @ (stored.double() * scale.double()[:, None]).T
    error = (linear_from_codes(x, stored, scale).double() - truth).norm() / truth.norm()
    assert float(error) < 4e-3


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_quantized_weights_in_graphs(format: Format) -> None:
    model = make(num_hidden_layers=2, head_dim=64)
    convert(model, "bf16")
    quantize_for_generation(model, format, torch.device(DEVICE))
    engines = [Engine(model, max_batch=4, max_tokens=256, graphs=graphs) for graphs in (True, False)]
    asked = [Request(tuple(prompt), NEW) for prompt in PROMPTS]
    captured, eager = ([a.tokens for (a,) in engine.run(asked)] for engine in engines)
    assert captured == eager
    assert engines[0]._graphs is not None and engines[0]._graphs._captured


def test_noise_on_the_card_is_that_of_the_cpu() -> None:
    stream, count = torch.tensor([stream_of(seed) for seed in range(5)]), torch.arange(5) * 3
    tokens = torch.arange(50_000).expand(5, -1)
    there = exponentials(stream.to(DEVICE), count.to(DEVICE), DRAW, tokens.to(DEVICE)).cpu()
    torch.testing.assert_close(there, exponentials(stream, count, DRAW, tokens), rtol=2e-6, atol=0)


def test_long_prompts_over_the_cache_equal_one_pass() -> None:
    """There are more queries than the kernel takes: parts of prompts after cached tokens."""
    model = make(max_position_embeddings=1024, num_hidden_layers=2).to(DEVICE)
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (700, 90, 333)]
    engine = Engine(model, max_batch=3, max_tokens=2048, prefill_tokens=128)
    for prompt, (answer,) in zip(prompts, engine.run([Request(tuple(p), 8) for p in prompts]), strict=True):
        assert answer.tokens == plain(model, prompt, 8)
