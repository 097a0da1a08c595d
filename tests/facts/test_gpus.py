"""The GPU table compared with independent arithmetic, with wrong numbers in
circulation, and with the names that drivers report.
"""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.facts.gpus import IGNORED_WORDS, Gpu, find, find_device, gpus
from deskside.utils.errors import UsageError

GIB = 2**30
CARDS = gpus()


@pytest.mark.parametrize("gpu", [g for g in CARDS if g.geforce], ids=lambda g: g.name)
def test_a_geforce_card_is_its_multiprocessors_times_its_clock(gpu: Gpu) -> None:
    """A multiprocessor does 512 BF16 FLOP per clock with FP32 accumulation, and twice that with FP16 accumulation."""
    assert gpu.flops_per_clock == 512
    assert gpu.multiprocessors * gpu.boost_hz * 512 == pytest.approx(gpu.bf16_flops, rel=0.03)
    assert gpu.fp16_accumulate_flops == pytest.approx(2 * gpu.bf16_flops, rel=0.01)


@pytest.mark.parametrize(
    "gpu", [g for g in CARDS if not g.geforce and g.flops_per_clock], ids=lambda g: g.name
)
def test_the_other_cards_follow_the_rule_of_their_class(gpu: Gpu) -> None:
    """The data sheets of L4 and H100 PCIe assume lower clocks than their boost."""
    rule = {"8.0": 2048, "9.0": 4096}.get(gpu.compute_capability, 1024)
    assert gpu.flops_per_clock == rule
    assert gpu.multiprocessors * gpu.boost_hz * rule == pytest.approx(gpu.bf16_flops, rel=0.09)


def test_the_traps() -> None:
    """Wrong numbers in circulation: FP16 accumulation and sparsity sold as BF16, and a 5090 with 24 GB or 450 W."""
    rtx4090, rtx5090, laptop = find("4090"), find("5090"), find("5090 laptop")
    assert round(rtx4090.bf16_flops / 1e12) == 165
    assert round(rtx4090.fp8_flops / 1e12) == 330
    assert round(rtx5090.bf16_flops / 1e12, 1) == 209.5
    assert (rtx5090.memory_bytes, rtx5090.watts, rtx5090.bandwidth) == (32 * GIB, 575, 1.792e12)
    assert rtx5090.compute_capability == "12.0"
    assert laptop.memory_bytes == 24 * GIB and laptop.bf16_flops < rtx5090.bf16_flops / 3
    assert find("h100 sxm").bf16_flops == 989e12 and find("h100 sxm").fp4_flops is None
    assert find("rtx 3090").fp8_flops is None
    assert (find("mi300x").bandwidth, find("b200").bandwidth, find("l4").bandwidth) == (5.3e12, 8e12, 0.3e12)
    assert find("h200").bf16_flops == find("h100 sxm").bf16_flops


def test_every_row_is_whole() -> None:
    assert len({gpu.name for gpu in CARDS}) == len(CARDS) == 50
    for gpu in CARDS:
        assert gpu.certainty in ("high", "medium", "low") and gpu.source and gpu.architecture
        assert 4 * GIB <= gpu.memory_bytes <= 192 * GIB
        assert 60 <= gpu.watts <= 1000 and 0.2e12 <= gpu.bandwidth <= 8e12
        assert bool(gpu.measured_bf16_flops) == bool(gpu.measured_source), gpu.name
        # Laptops run above the lowest power limit, which their data sheet assumes.
        if gpu.measured_bf16_flops:
            top = 1.7 if gpu.laptop else 1.15
            assert 0.5 < gpu.measured_bf16_flops / gpu.bf16_flops < top, gpu.name
        for faster in (gpu.fp8_flops, gpu.fp4_flops):
            assert faster is None or faster >= 1.9 * gpu.bf16_flops


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("RTX 4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("4090 24gb", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090D", "RTX 4090 D"),
        ("rtx4070tisuper", "RTX 4070 Ti SUPER"),
        ("4070 super", "RTX 4070 SUPER"),
        ("4070 ti", "RTX 4070 Ti"),
        ("3060 12gb", "RTX 3060 12GB"),
        ("4060 ti 16GB", "RTX 4060 Ti 16GB"),
        ("5090 laptop", "RTX 5090 Laptop"),
        ("5090 mobile", "RTX 5090 Laptop"),
        ("laptop 5090", "RTX 5090 Laptop"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "RTX 5090 Laptop"),
        ("h200", "H200 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("h100-sxm", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("a100-80gb-sxm", "A100 80GB SXM"),
        ("a100-40gb", "A100 40GB SXM"),
        ("A100-SXM4-80GB", "A100 80GB SXM"),
        ("L40S", "L40S"),
        ("l4", "L4"),
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell Workstation"),
        ("pro 6000 server", "RTX PRO 6000 Blackwell Server"),
        ("pro 6000 max-q", "RTX PRO 6000 Blackwell Max-Q"),
        ("rtx 6000 ada", "RTX 6000 Ada"),
        ("A6000", "RTX A6000"),
        ("gb10", "DGX Spark GB10"),
        ("dgx spark", "DGX Spark GB10"),
        ("AMD Instinct MI300X", "MI300X"),
        ("B200", "B200"),
    ],
)
def test_a_card_is_found_by_what_people_write(written: str, name: str) -> None:
    assert find(written).name == name


@pytest.mark.parametrize("gpu", CARDS, ids=lambda g: g.name)
def test_every_card_is_found_by_its_own_name(gpu: Gpu) -> None:
    assert find(gpu.name) is gpu
    assert find(gpu.name.lower().replace(" ", "-")) is gpu


@given(st.data())
def test_the_order_of_the_words_does_not_matter(data: st.DataObject) -> None:
    gpu = data.draw(st.sampled_from(CARDS))
    words = data.draw(st.permutations([*gpu.name.split(), data.draw(st.sampled_from(["", "nvidia", "GPU"]))]))
    assert find(data.draw(st.sampled_from([" ", "-", "_"])).join(words)) is gpu


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("h100", ("H100 PCIe", "H100 SXM")),
        ("h100 80gb", ("H100 PCIe", "H100 SXM")),
        ("a100-80gb", ("A100 80GB SXM", "A100 80GB PCIe")),
        ("4060 ti", ("RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB")),
        ("rtx 3080", ("RTX 3080 10GB", "RTX 3080 12GB")),
    ],
)
def test_an_ambiguous_name_is_refused_and_names_all(written: str, named: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        find(written)
    assert all(name in str(error.value) for name in named) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("RTX 5090 24GB", "RTX 5090"),  # the desktop card has 32
        ("H100 NVL", "H100 SXM"),
        ("rtx 4095", "RTX 4090"),
        ("RTX 3060 Laptop GPU", "RTX 4060 Laptop"),
        ("l40", "L40S"),
        ("2x4090", "RTX 4090"),
    ],
)
def test_an_unknown_card_names_the_nearest(written: str, near: str) -> None:
    with pytest.raises(UsageError) as error:
        find(written)
    assert near in str(error.value) and "no such card" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("written", ["RTX 9999", "gtx1080", "Radeon VII"])
def test_no_card_is_named_for_one_that_is_unlike_all(written: str) -> None:
    with pytest.raises(UsageError, match="no such card in the table; `deskside plan --gpu list` shows all"):
        find(written)


@pytest.mark.parametrize("written", ["cpu", "CPU", "here", "cuda"])
def test_this_machine_is_no_card_of_the_table(written: str) -> None:
    with pytest.raises(UsageError, match="for this machine, with or without a GPU, give --here"):
        find(written)


@pytest.mark.parametrize("written", ["", "  ", "-", *IGNORED_WORDS, "nvidia geforce rtx", "80gb"])
def test_a_name_that_says_nothing_is_no_card(written: str) -> None:
    with pytest.raises(UsageError):
        find(written)


@given(st.text(max_size=40))
def test_any_text_is_a_card_or_one_clear_line(text: str) -> None:
    try:
        assert find(text) in CARDS
    except UsageError as error:
        assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA GeForce RTX 4090", 23.51, "RTX 4090"),
        ("GeForce RTX 3090", 23.69, "RTX 3090"),
        ("NVIDIA GeForce RTX 5090", 31.36, "RTX 5090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 23.43, "RTX 5090 Laptop"),
        ("NVIDIA GeForce RTX 3060", 11.66, "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 3060", 7.65, "RTX 3060 8GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.58, "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 7.62, "RTX 4060 Ti 8GB"),
        ("NVIDIA H200", 139.81, "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", 79.11, "H100 SXM"),
        ("NVIDIA H100 PCIe", 79.11, "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", 79.15, "A100 80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", 39.39, "A100 40GB SXM"),
        ("NVIDIA A100 80GB PCIe", 79.14, "A100 80GB PCIe"),
        ("NVIDIA L40S", 44.39, "L40S"),
        ("NVIDIA L4", 22.03, "L4"),
        ("NVIDIA RTX A6000", 47.43, "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.37, "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.97, "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97, "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 94.97, "RTX PRO 6000 Blackwell Max-Q"),
        ("NVIDIA GB10", 119.64, "DGX Spark GB10"),
        ("NVIDIA B200", 178.36, "B200"),
    ],
)
def test_a_device_is_known_by_its_name_and_memory(device: str, gib: float, name: str) -> None:
    gpu = find_device(device, int(gib * GIB))
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize(
    ("device", "gib"),
    [
        ("NVIDIA GeForce RTX 5090", 23.4),  # not the memory size of this GPU
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 31.4),
        ("NVIDIA GeForce RTX 4090", 47.4),  # rebuilt cards with 48 GB exist
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5),
        ("NVIDIA H100 80GB HBM3", 9.5),
        ("NVIDIA H100 NVL", 93.1),
        ("NVIDIA H200 NVL", 139.8),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 5.8),
        ("NVIDIA A100-PCIE-40GB", 39.4),
        ("4090", 23.5),
        ("", 0.0),
    ],
)
def test_a_device_that_is_not_surely_in_the_table_is_none(device: str, gib: float) -> None:
    assert find_device(device, int(gib * GIB)) is None


def test_importing_and_looking_up_takes_no_torch() -> None:
    """The libraries take seconds to import; the tables take milliseconds."""
    code = (
        "import sys;"
        "import deskside.facts.measurements, deskside.facts.power_and_prices;"
        "from deskside.facts.gpus import find;"
        "find('4090'); deskside.facts.measurements.published();"
        "assert not {'torch', 'numpy', 'pandas', 'pydantic'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_links_follow_the_data_sheet() -> None:
    """PCIe 4.0 x16 has 31.5 GB/s each way (16 GT/s, 128b/130b), and 5.0 twice
    that. A data sheet adds both directions.
    """
    by_link = {gpu.pcie: gpu.pcie_bandwidth for gpu in CARDS}
    assert by_link["4.0 x16"] == pytest.approx(31.5e9, rel=0.001)
    assert 2 * by_link["4.0 x16"] == by_link["5.0 x16"]
    for gpu in CARDS:
        assert gpu.pcie in ("4.0 x8", "4.0 x16", "5.0 x8", "5.0 x16") and gpu.link_source
        generation = (
            "5.0" if "Blackwell" in gpu.architecture or gpu.architecture in ("Hopper", "CDNA3") else "4.0"
        )
        assert gpu.pcie.startswith(generation), gpu.name
        if gpu.fabric_bandwidth is not None:
            assert gpu.fabric_bandwidth > 2 * gpu.pcie_bandwidth
    both_ways = {"a100 80gb sxm": 600, "h200": 900, "b200": 1800, "mi300x": 896}
    for name, total in both_ways.items():
        assert 2 * find(name).fabric_bandwidth == total * 1e9  # type: ignore[operator]
    assert find("rtx4090").fabric_bandwidth is None and find("mi300x").rocm and not find("b200").rocm
