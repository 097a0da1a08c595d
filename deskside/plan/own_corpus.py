"""Regularization of runs that read a small corpus many times: the best checkpoint, and what own-corpus mode adds.

Up to `MAX_EPOCHS` epochs nothing changes. Beyond, every planned run keeps its best checkpoint:

- The checkpoint with the lowest validation loss is kept, and evaluations are frequent enough to find it: 20 over the
  run, because the overfitting warning needs seven. Without it, a run of 12 minutes that read 28,723 tokens 40 times
  ended with 4.896 bits per byte, after 2.854 in the ninth epoch.

Own-corpus mode (`--own-corpus`) adds:

- Weight decay grows with the epochs (`optim.weight_decay_epochs`). Ordinary settings keep the sum of learning rate x
  decay over a whole run constant, 7.7 with the defaults of Muon; so it is 1.9 per epoch in a run of 4 epochs, and less
  in a longer one. The tuned runs of slowrun (github.com/qlabs-eng/slowrun at fd342f0, Muon, 100M tokens) have 1.9 per
  epoch over 11 epochs of 2.7B parameters and 2.2 over 15 epochs of 300M. So the decay per epoch of 4 epochs is kept;
  beyond 15 epochs this is an extrapolation, and beyond 40 (`USEFUL_EPOCHS`) the decay grows no more.
  Kim et al. (arXiv 2509.14786) found 8 to 32 times the usual decay best for AdamW, over 8 or more epochs; AdamW is not
  changed here, because its usual decay differs from theirs.
- Documents are shuffled and cut anew in each epoch (`data.packing` shuffled). In slowrun's records, shuffling in each
  epoch lowered the loss from 3.402 to 3.376 nats and shuffling of documents from 3.211 to 3.204.

With our recipe, neither has lowered the loss yet beyond what the kept checkpoint gains (docs/guides/own-text.md).

slowrun also has a dropout of 0.1 (`dropout`) and averages weights (`average.name`). They belong here when a study has
measured them with ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deskside.budget.loss import MAX_EPOCHS, MAX_WEIGHTS_PER_TOKEN
from deskside.budget.scaling import decay_for_epochs
from deskside.config import merge
from deskside.config.duration import Duration
from deskside.plan.candidates import Candidate
from deskside.utils.errors import UsageError
from deskside.utils.format import count, number

KEEP_BEST: Mapping[str, Any] = {"checkpoint": {"keep_best": True}}
EVALUATIONS = 20
# Maximum for each evaluation: together about a hundredth of five minutes on an H200. A short run evaluates fewer, so
# that all of them, a forward pass each, take about a fiftieth of its time.
EVALUATED_TOKENS, FEWEST_EVALUATED = 262_144, 16_384
EVALUATED_SHARE = 0.003  # of the run's tokens, by each evaluation


def regularisation(
    candidate: Candidate,
    unique_tokens: int,
    length: Duration,
    given: Mapping[str, Any],
    own_corpus: bool,
) -> dict[str, Any]:
    """Return the configuration layer of a run of many epochs, without keys that the user has given; {} for few epochs.

    given: the user's configuration, of files and of the command line; own_corpus: with all of the mode's measures, not
    only the best checkpoint. Raises UsageError if the mode is asked for and the run cannot keep its best checkpoint.
    """
    if candidate.tokens[1] <= MAX_EPOCHS * unique_tokens:
        return {}
    measures = _choices(candidate) if own_corpus else dict(KEEP_BEST)
    if given.get("evaluate", {}).get("every", "not given") is not None:  # None: no evaluations during the run
        every = Duration(max(1, round(length.value / (EVALUATIONS + 1))), length.unit)
        tokens = max(FEWEST_EVALUATED, int(EVALUATED_SHARE * candidate.tokens[1]))
        measures["evaluate"] = {"every": str(every), "tokens": min(EVALUATED_TOKENS, tokens)}
    layer = {
        part: {key: value for key, value in values.items() if key not in given.get(part, {})}
        for part, values in measures.items()
    }
    sharding = {"parallel": {"mode": "shard"}} if candidate.setting.sharded else {}
    if layer["checkpoint"] and (problem := _problem_with_best([*candidate.shape.layers, sharding, layer])):
        if not own_corpus:
            return {}
        raise UsageError(
            f"--own-corpus: sets checkpoint.keep_best: {problem}, or add --checkpoint.keep_best false"
        )
    return {part: values for part, values in layer.items() if values}


def _problem_with_best(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return why the run cannot keep its best checkpoint, or an empty string."""
    try:
        merge.build(layers)
    except UsageError as error:
        key, _, problem = str(error).partition(": ")
        if key != "checkpoint.keep_best":
            raise
        return problem
    return ""


def _choices(candidate: Candidate) -> dict[str, Any]:
    """Return the settings of the mode, without the evaluations."""
    layer: dict[str, Any] = {"data": {"packing": "shuffled"}, **KEEP_BEST}
    optim = candidate.shape.config.optim
    # The growth belongs to the scaling of the decay, and has no effect on a decay of 0.
    decays = optim.weight_decay > 0 or getattr(optim, "table_weight_decay", 0) > 0
    if candidate.setting.optimizer == "muon" and optim.scale and decays:
        layer["optim"] = {"weight_decay_epochs": float(MAX_EPOCHS)}
    return layer


def too_large(weights: int) -> str:
    """Return the warning about a model with more weights than the limit for the text."""
    return (
        f"a token is multiplied with {count(weights)} weights, more than {MAX_WEIGHTS_PER_TOKEN:g} for each token of "
        f"text, so the model is likely to overfit; use a smaller vocabulary or model (--model.vocab_size, "
        "--model.hidden_size)"
    )


def sentence(candidate: Candidate, unique_tokens: int, given: Mapping[str, Any]) -> str:
    """Return what the run has of the mode's choices and of the user's (`given`), and why, in one sentence."""
    epochs = candidate.tokens[1] / unique_tokens
    read = f"your {count(unique_tokens)} tokens will be read {number(epochs)} times"
    size = f"{candidate.weights / unique_tokens:.1f} weights for each token"
    limit = MAX_WEIGHTS_PER_TOKEN * unique_tokens
    if candidate.weights > limit:
        size += f"; {too_large(candidate.weights)}"
    elif 2 * candidate.weights > limit:
        size += f"; larger models than {count(limit)} weights are left out, because "
        size += "they are likely to overfit and were not measured"
    if epochs <= MAX_EPOCHS:
        return f"{read} by a model with {size}; up to {MAX_EPOCHS} times needs no regularization"
    chosen, config = _choices(candidate), candidate.shape.config

    def value(part: str, key: str) -> Any:
        """Return the user's value of a key, which the configuration has validated, or the mode's."""
        is_given = key in given.get(part, {})
        return getattr(getattr(config, part), key) if is_given else chosen.get(part, {}).get(key)

    measures = []
    if (start := value("optim", "weight_decay_epochs")) is not None:
        measures.append(f"weight decay is {decay_for_epochs(epochs, start):.1f} times the usual one")
    if dropout := config.dropout:
        measures.append(f"a share of {number(dropout)} of the values is dropped")
    if value("data", "packing") == "shuffled":
        measures.append("documents are shuffled anew each time")
    if value("checkpoint", "keep_best"):
        measures.append("the best checkpoint is kept")
    return (
        f"{read} by a model with {size}; {', '.join(measures) or 'your options turn off its regularization'}"
    )
