"""The first sentence of a plan: articles as they are pronounced, and the memory of each GPU."""

import pytest

from deskside.cli.main import main
from deskside.plan.headline import _indefinite


@pytest.mark.parametrize(
    "noun",
    [
        "an 8B", "an 80M", "an 11.2B", "an 18.5M", "an 11,000", "a 110M", "a 118M", "a 1.1B", "a 480M", "an RTX 4090",
        "an H100 SXM", "an L4", "a T4", "a GTX 1080", "a Tesla V100", "an Arc A770",
    ],
)  # fmt: skip
def test_articles_are_those_of_the_spoken_noun(noun: str) -> None:
    assert _indefinite(noun.partition(" ")[2]) == noun


@pytest.mark.parametrize("gpus", [1, 2])
def test_memory_of_several_gpus_is_that_of_each(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "rtx4090", "--preset", "124m", "--tokens", "1B", "--gpus", str(gpus)]) == 0
    sentence = capsys.readouterr().out.split("\n\n")[0]
    assert ("GiB on each" in " ".join(sentence.split())) == (gpus > 1)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (["--preset", "124m", "--tokens", "10B"], "On an RTX 4090"),
        (["--preset", "3b", "--hours", "1"], "Yes, if changed as below"),
        (["--preset", "340m", "--hours", "1"], "Yes, but a smaller model is expected to end lower"),
    ],
)
def test_what_stands_before_a_yes(asked: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "rtx4090", *asked]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(answer)


@pytest.mark.parametrize("budget", [["--tokens", "1e16"], ["--hours", "1e6"], ["--flops", "1e30"]])
@pytest.mark.parametrize("model", [[], ["--depth", "4"]])
def test_a_run_of_years_is_a_no(
    model: list[str], budget: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpu", "rtx4090", *model, *budget]) == 1
    assert capsys.readouterr().out.startswith("No: ")
