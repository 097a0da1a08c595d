"""Cached, batched generation, compared with a plain loop that runs the whole
sequence through the model for each token.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.engine.counter_rng import stream_of
from deskside.engine.generate import generate, generate_events
from deskside.engine.requests import Reason, SampleOutput
from deskside.engine.sampling import ALL, GREEDY, Sampling, SamplingTensors, draw
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1, "qk_norm": False},
    "window": {"sliding_window": 5, "window_pattern": "SSL"},
    "learned": {"position_embedding": "learned", "norm": "layernorm", "norm_bias": True, "mlp_bias": True},
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "moe, sigmoid, shared": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "scoring_func": "sigmoid",
        "shared_expert_intermediate_size": 64,
    },
    "sandwich": {
        "norm_position": "sandwich",
        "attn_logit_softcapping": 1.5,
        "attention_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "sliding_window": 5,
        "window_pattern": "SSL",
        "rope_local_base_freq": 100.0,
    },
    "parallel": {
        "parallel_residual": True,
        "norm": "layernorm",
        "partial_rotary_factor": 0.5,
        "qk_norm": False,
    },
    "sinks": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "attention_sinks": True,
        "mlp_bias": True,
        "hidden_act": "clamped_swiglu",
        "qk_norm": False,
    },
    "capped": {"final_logit_softcapping": 3.0, "tie_word_embeddings": True, "norm_position": "post"},
}
PROMPTS = [[5, 17, 3], [1], [88, 4, 4, 61, 30, 2, 9, 11, 12, 13], [7] * 30]


def make(**other: Any) -> Transformer:
    model = Transformer(ModelConfig(**(SHAPE | other)))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():  # large values, so that the output does not repeat one token
        for name, parameter in model.named_parameters():
            spread = 0.25 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            if parameter.ndim == 1 and "bias" not in name:
                parameter.add_(1.0)
    return model


def adjusted(logits_1V: Tensor, sampling: Sampling, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the logits with bias and penalties, computed one token at a time."""
    changed_V = logits_1V[0].float().clone()
    for token, bias in sampling.logit_bias:
        changed_V[token] += bias
    for token in {*prompt, *answer}:
        factor = sampling.repetition_penalty
        changed_V[token] *= 1 / factor if changed_V[token] > 0 else factor
    for token, times in Counter(answer).items():
        changed_V[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
    return changed_V[None]


@torch.no_grad()
def plain(
    model: Transformer,
    prompt: list[int],
    new: int,
    sampling: Sampling = GREEDY,
    row: int = 0,
    seed: int = 0,
) -> list[int]:
    tokens, device = list(prompt), model.embed.weight.device
    settings = SamplingTensors.of([sampling], [stream_of(seed, row)], device)
    for count in range(min(new, model.config.max_position_embeddings - len(prompt))):
        logits_BV = model(torch.tensor([tokens], device=device))[:, -1]
        adjusted_BV = adjusted(logits_BV, sampling, prompt, tokens[len(prompt) :])
        count_B = torch.tensor([count], device=device)
        tokens.append(int(draw(logits_BV, settings, ALL, count_B, adjusted_BV).token_B[0]))
    return tokens[len(prompt) :]


def ended(tokens: list[int], reason: Reason, prompt_tokens: int) -> SampleOutput:
    return SampleOutput(prompt_tokens, tokens, reason=reason)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_batch_equals_the_uncached_loop(name: str) -> None:
    model = make(**VARIANTS[name])
    results = generate(model, PROMPTS, max_new_tokens=25)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == plain(model, prompt, 25)
        assert (result.reason, result.prompt_tokens) == ("length", len(prompt))
    assert len({token for result in results for token in result.tokens}) > 5


def test_sampling_equals_the_uncached_loop_and_follows_the_seed() -> None:
    model, sampling = make(), Sampling(temperature=0.9, top_k=20, top_p=0.95)
    results = generate(model, PROMPTS, max_new_tokens=12, sampling=sampling, seed=4)
    for row, prompt in enumerate(PROMPTS):
        assert results[row].tokens == plain(model, prompt, 12, sampling, row, seed=4)
    again = generate(model, PROMPTS, max_new_tokens=12, sampling=sampling, seed=4)
    other = generate(model, PROMPTS, max_new_tokens=12, sampling=sampling, seed=5)
    assert again == results
    assert other != results


def test_rows_that_end_early_do_not_disturb_the_others() -> None:
    """One row ends by eos, one by a stop token, and one at the last position. The
    fourth must be as if it was alone.
    """
    model = make()
    prompts = [[5, 17, 3], [1, 2], [7] * 60, [50, 51]]
    alone = [plain(model, prompt, 30) for prompt in prompts]
    eos = next(token for token in alone[0] if token not in alone[3] + alone[1] + alone[2])
    stop = next(token for token in alone[1] if token not in alone[3] + alone[0] + alone[2])
    results = generate(model, prompts, max_new_tokens=30, eos_tokens=[eos], stop_tokens=[stop])
    assert results[0] == ended(alone[0][: alone[0].index(eos)], "eos", 3)
    assert results[1] == ended(alone[1][: alone[1].index(stop)], "stop", 2)
    assert results[2] == ended(alone[2], "length", 60)
    assert len(alone[2]) == 4
    assert results[3] == ended(alone[3], "length", 2)


def test_context_limit() -> None:
    model = make()
    full = [3] * SHAPE["max_position_embeddings"]
    assert generate(model, [full, full[:-1]], max_new_tokens=9) == [
        ended([], "length", 64),
        ended(plain(model, full[:-1], 1), "length", 63),
    ]
    with pytest.raises(UsageError, match="65 tokens do not fit the model's 64 positions"):
        generate(model, [[1], [*full, 3]], max_new_tokens=1)
    assert generate(model, [[1]], max_new_tokens=0) == [ended([], "length", 1)]
    assert generate(model, [], max_new_tokens=3) == []


def test_stream_is_the_same_and_lazy() -> None:
    model = make()
    calls = 0
    forward = model.forward_cached

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    model.forward_cached = counted  # type: ignore[method-assign]
    stream = generate_events(model, [PROMPTS[0]], max_new_tokens=20)
    first = [next(stream).token for _ in range(3)]
    assert calls == 3
    rest = list(stream)
    assert [*first, *(event.token for event in rest)] == plain(model, PROMPTS[0], 20)
    assert [event.reason for event in rest] == [None] * 16 + ["length"]


def test_bad_prompts_are_named() -> None:
    model = make()
    with pytest.raises(UsageError, match="prompt 1: is empty"):
        generate(model, [[1], []], max_new_tokens=1)
    with pytest.raises(UsageError, match="token 97 is outside"):
        generate(model, [[97]], max_new_tokens=1)
    with pytest.raises(UsageError, match="max_new_tokens"):
        generate(model, [[1]], max_new_tokens=-1)
