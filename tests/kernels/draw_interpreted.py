"""The kernels that sample tokens in Triton's interpreter, compared with their torch form."""

from unittest import mock

import torch

from deskside.engine import counter_rng, sampling
from deskside.engine.sampling import ALL, UNRANKED, Sampling, SamplingTensors
from deskside.kernels import decode_step_triton, draw_triton

PIECE, WIDTH = 16, 8  # small, because the interpreter sorts slowly
SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0.8, top_k=5),
    Sampling(temperature=1.3, top_k=8, top_p=0.6),
    Sampling(temperature=0.7, top_k=8, min_p=0.3),
    Sampling(top_k=7, top_p=1e-6),
    Sampling(temperature=1e-30, top_k=8),
    Sampling(temperature=2.0, top_k=8),
    Sampling(temperature=2.0, top_k=3),
]


def draws() -> dict[str, float]:
    """Return the number of different tokens and the largest error of a log-probability, by case."""
    torch.manual_seed(0)
    found = {}
    for V, dtype in ((12, torch.float32), (20, torch.float16), (40, torch.bfloat16)):
        logits = (1.5 * torch.randn(len(SAMPLINGS), V + 3)).to(dtype)[:, :V]
        logits[[1, 3]] = torch.randint(3, (2, V)).to(dtype)  # many equal logits
        logits[2, 3:] = float("-inf")  # fewer than top_k
        logits[6, 1], logits[7, V - 1] = float("nan"), float("inf")
        streams = [counter_rng.stream_of(1, sample) for sample in range(len(SAMPLINGS))]
        for width in (WIDTH, ALL, UNRANKED):
            samplings = SAMPLINGS
            if width == ALL:
                samplings = [
                    *SAMPLINGS[:2],
                    Sampling(top_p=0.8),
                    Sampling(2.0, top_p=0.5, min_p=0.1),
                    *SAMPLINGS[4:],
                ]
            if width == UNRANKED:
                samplings = [Sampling(temperature=s.temperature, min_p=s.min_p) for s in SAMPLINGS]
            settings = SamplingTensors.of(samplings, streams, "cpu")
            wrong, error = 0, 0.0
            for step in range(1 if width == WIDTH else 2):
                count = torch.full((len(samplings),), step)
                truth = sampling.draw(logits, settings, width, count)
                with (
                    mock.patch.object(draw_triton, "PIECE", PIECE),
                    mock.patch.object(decode_step_triton, "PIECE", PIECE),
                ):
                    token, logprob = sampling._draw_by_kernels(logits, settings, width, count)
                assert truth.sampled_logprob_B is not None
                assert truth.token_B[-2:].tolist() == [-1, -1]
                wrong += int((token != truth.token_B).sum())
                assert logprob.isnan().tolist() == [False] * 6 + [True] * 2
                error = max(error, float((logprob - truth.sampled_logprob_B)[:6].abs().max()))
            found[f"tokens, {V}, {width}"], found[f"log-probabilities, {V}, {width}"] = float(wrong), error
    return found
