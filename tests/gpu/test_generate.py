"""Generation with the cache on the card: the tokens of the plain loop in float32, none that is worse in bfloat16."""

import pytest
import torch

from deskside.engine.generate import generate
from deskside.precision.apply import apply
from tests.engine.test_generate import PROMPTS, VARIANTS, make, plain
from tests.gpu.card import DEVICE, NEEDS_CARD

pytestmark = NEEDS_CARD

NEW = 25


@pytest.mark.parametrize("name", ["gqa", "window"])
def test_float32_equals_the_uncached_loop(name: str) -> None:
    model = make(**VARIANTS[name]).to(DEVICE)
    results = generate(model, PROMPTS, max_new_tokens=NEW)
    with torch.device(DEVICE):
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.tokens == plain(model, prompt, NEW)


@pytest.mark.parametrize("name", ["gqa", "window"])
@torch.no_grad()
def test_bf16_takes_the_best_token_of_the_uncached_model(name: str) -> None:
    """Two tokens can be equal in bfloat16's eight bits. So the choice may differ from the uncached argmax, but where
    it does, the uncached logit must be as good up to rounding; and that must be rare."""
    model = make(**VARIANTS[name]).to(DEVICE)
    apply(model, "bf16")
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
