"""Relative errors of predictions, their quantiles, and Markdown tables."""

import statistics
import textwrap
from collections.abc import Iterable, Sequence

from deskside.budget.shape import Shape, flops_per_token
from deskside.facts.gpus import Gpu
from deskside.plan.published import matmul_rate

LIMITS = (0.05, 0.10, 0.15, 0.30)


class Errors:
    """Relative errors, predicted / measured - 1."""

    def __init__(self, pairs: Iterable[tuple[float, float]]):
        """pairs: (predicted, measured)."""
        self.signed = [predicted / measured - 1 for predicted, measured in pairs]
        self.sizes = sorted(abs(error) for error in self.signed)

    def __len__(self) -> int:
        return len(self.sizes)

    def within(self, limit: float) -> int:
        """Return the number of errors within the limit."""
        return sum(size <= limit for size in self.sizes)

    @property
    def nine_in_ten(self) -> float:
        """The smallest bound that contains at least nine in ten errors."""
        return self.sizes[-(-9 * len(self.sizes) // 10) - 1]

    @property
    def median(self) -> float:
        return statistics.median(self.sizes)

    @property
    def bias(self) -> float:
        """The median of the signed errors."""
        return statistics.median(self.signed)

    @property
    def worst(self) -> float:
        return self.sizes[-1]

    def meets(self, limit: float) -> bool:
        """Return True if at least nine in ten errors are within the limit."""
        return bool(self.sizes) and self.nine_in_ten <= limit


HEADINGS = (
    "", "Rows", "Median", "Nine in ten within", "Worst", *(f"Within {limit:.0%}" for limit in LIMITS), "Bias",
)  # fmt: skip


def summary(name: str, errors: Errors) -> list[str]:
    """Return a table row under `HEADINGS`."""
    if not len(errors):
        return [name, "0", *["-"] * (len(HEADINGS) - 2)]
    shares = [f"{errors.within(limit) / len(errors):.0%}" for limit in LIMITS]
    figures = [f"{value:.1%}" for value in (errors.median, errors.nine_in_ten, errors.worst)]
    return [name, str(len(errors)), *figures, *shares, f"{errors.bias:+.1%}"]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return a Markdown table as lines. All columns but the first `left` are right-aligned."""
    rule = ["---" if column < left else "--:" for column in range(len(headings))]
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)]


def signed_error(predicted: float, measured: float, limit: float | None = None) -> str:
    """Return a signed error, in bold if it is beyond the limit."""
    error = predicted / measured - 1
    text = f"{error:+.1%}"
    return f"**{text}**" if limit is not None and abs(error) > limit else text


def prose(*sentences: str, bullet: bool = False) -> list[str]:
    """Return sentences as wrapped lines of Markdown."""
    text = " ".join(sentences)
    first, rest = ("- ", "  ") if bullet else ("", "")
    return textwrap.wrap(
        text,
        110,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def formula(shape: Shape, sequence_length: int, gpu: Gpu) -> float:
    """Return the tokens per second of one GPU by the published formula, which has two constants.

    The formula does not model deskside. The time is the FLOPs of a token at the rate of large matrix products, plus 2
    bytes for each activation at the bandwidth of the data sheet. Activations per token and layer: queries and outputs,
    keys and values, the intermediate size of the MLP once for each of its matrices, and six times the hidden size.
    """
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    inside = shape.intermediate_size * (3 if shape.gated_mlp else 2)
    elements = shape.num_hidden_layers * (2 * q + 2 * kv + inside + 6 * shape.hidden_size)
    flops = flops_per_token(shape, sequence_length)
    return 1 / (1.007 * flops / matmul_rate(gpu) + 8.39 * 2 * elements / gpu.bandwidth)
