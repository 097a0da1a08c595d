"""The claims that this project's research found to be wrong must be caught, and what others really measured not."""

import pytest

from deskside.facts.gpus import find, gpus
from deskside.facts.measurements import Measurement, published
from deskside.facts.plausible import bound, energy_cost, rate, scaling
from deskside.utils.errors import UsageError

ROWS = published()


def judge(row: Measurement):
    card, flops, speed = row.data_sheet(), row.flops_per_token, row.tokens_per_second_per_gpu
    if card is None or flops is None or speed is None or row.precision not in ("bf16", "fp8"):
        return None
    return rate(card, flops, speed, row.precision)


def dense_flops(
    layers: int, hidden: int, kv_share: float, ffn: int, mats: int, vocab: int, seq: int
) -> float:
    weights = layers * (2 * hidden**2 * (1 + kv_share) + mats * hidden * ffn) + hidden * vocab
    return 6 * weights + 6 * layers * hidden * seq


def test_no_real_measurement_is_called_impossible() -> None:
    verdicts = [judge(row) for row in ROWS if not row.rejected]
    known = [verdict for verdict in verdicts if verdict is not None]
    assert len(known) > 200
    assert all(verdict.verdict != "impossible" for verdict in known)


def test_complete_bf16_measurements_are_not_even_doubted() -> None:
    for row in ROWS:
        verdict = judge(row)
        if row.complete_for_speed and row.precision == "bf16" and verdict is not None:
            assert verdict.verdict == "plausible", (row, verdict)


@pytest.mark.parametrize("row", [r for r in ROWS if r.rejected], ids=lambda r: f"{r.gpu} {r.framework}")
def test_the_rejected_rows_of_the_table_are_impossible(row: Measurement) -> None:
    verdict = judge(row)
    assert verdict is not None and verdict.verdict == "impossible" and verdict.share and verdict.share > 1


def test_pythia_1b_on_a_3090_at_130_per_cent_of_the_peak() -> None:
    """academic-pretraining's other row: only its utilisation is known."""
    card = find("3090")
    assert rate(card, 1.0, 1.30 * card.bf16_flops).verdict == "impossible"
    assert (
        rate(card, 1.0, 1.08 * card.bf16_flops).verdict == "plausible"
    )  # GeForce cards do boost above the sheet


def test_594_tokens_per_second_of_nanochat_on_a_4090() -> None:
    """A bug of a log; the run made 38,000."""
    flops = dense_flops(20, 1280, 1.0, 5120, 2, 65536, 2048)
    assert rate(find("4090"), flops, 594).verdict == "doubtful"
    assert rate(find("4090"), flops, 38_056).verdict == "plausible"


def test_58_thousand_tokens_per_second_of_112m_on_a_4090() -> None:
    """The text compared a 5090 with it; public runs of 124M make 130 to 163 thousand."""
    flops = dense_flops(12, 768, 0.25, 2048, 3, 49152, 2048)
    verdict = rate(find("4090"), flops, 58_000)
    assert verdict.verdict == "doubtful" and "slowest published" in verdict.why
    assert rate(find("4090"), flops, 146_000).verdict == "plausible"


def test_64_tflops_on_a_4070_laptop() -> None:
    assert rate(find("4070 laptop"), 1.0, 64e12).verdict == "impossible"
    assert rate(find("4070 laptop"), 1.0, 46e12).verdict == "plausible"


def test_50_to_100_tokens_per_second_of_a_3b_on_a_5090() -> None:
    flops = dense_flops(36, 2048, 0.25, 11008, 3, 151936, 16384)
    for speed in (50, 100):
        assert rate(find("5090"), flops, speed).verdict == "doubtful"
    # the same text's other claim: 32 x 16K tokens in one second
    assert rate(find("5090"), flops, 32 * 16384, "fp8").verdict == "impossible"


def test_a_billion_tokens_for_less_than_their_electricity() -> None:
    """ "$0.00074 per billion tokens" on an owned 5090, in a text that counts 0.10 per kWh and 185,000 tokens/s."""
    verdict = energy_cost(0.00074, 185_000, 575, 0.10)
    assert verdict.verdict == "impossible" and "times too low" in verdict.why
    assert energy_cost(0.09, 185_000, 575, 0.10).verdict == "plausible"


def test_scaling_that_contradicts_itself() -> None:
    """1.36M tokens/s on 8 GPUs of 185,000 "at 85 %", which would be 1.26M."""
    verdict = scaling(185_000, 8, 1_360_000, 0.85)
    assert verdict.verdict == "doubtful" and "1,258,000" in verdict.why
    assert scaling(185_000, 8, 1_258_000, 0.85).verdict == "plausible"
    assert scaling(185_000, 8, 1_360_000).verdict == "plausible"
    assert scaling(185_000, 8, 1_700_000).verdict == "impossible"


def test_marketing_peaks_are_above_the_bound() -> None:
    """FP16 accumulation and sparsity sold as what a training run could reach."""
    for name, claimed in (
        ("4090", 330e12),
        ("5090", 419e12),
        ("h100 sxm", 1979e12),
        ("a100 80gb sxm", 624e12),
    ):
        assert claimed > bound(find(name)).flops


@pytest.mark.parametrize("gpu", gpus(), ids=lambda g: g.name)
def test_the_bound_is_the_measurement_or_the_sheet(gpu) -> None:
    best = max(gpu.bf16_flops, gpu.measured_bf16_flops or 0)
    assert 0.5 * gpu.bf16_flops < bound(gpu).flops <= 1.1 * best + 1
    assert bound(gpu).flops >= (gpu.measured_bf16_flops or 0)
    if gpu.fp8_flops is not None:
        assert bound(gpu, "fp8").flops == 2 * bound(gpu).flops


def test_what_cannot_be_asked() -> None:
    with pytest.raises(UsageError, match="no units"):
        bound(find("3090"), "fp8")
    for flops, speed in ((0, 1), (1, 0), (-1, 1), (float("nan"), 1), (1, float("inf"))):
        with pytest.raises(UsageError):
            rate(find("4090"), flops, speed)
    with pytest.raises(UsageError):
        scaling(0, 8, 1)
    with pytest.raises(UsageError):
        energy_cost(1, 0, 1, 1)
