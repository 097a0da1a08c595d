"""Every family of Hugging Face models against transformers, with random weights: the table of docs/models.md.

    python -m benchmarks.families docs/data/2026-11-23-families/parity.json
    python -m benchmarks.families docs/data/2026-11-23-families/parity.json --table

A model has the options of the family's first published checkpoint and tiny sizes. It is exported, loaded by
transformers, and compared in float32 on a CPU: logits, gradients, three steps of AdamW, greedy text through our engine,
adapters (in PEFT, or merged where PEFT cannot have them separately), and the way back, from what transformers saves.
tests/weights/test_families.py asserts the same numbers for every entry of the table.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.engine.engine import Engine
from deskside.engine.requests import Request
from deskside.engine.sampling import Sampling
from deskside.export.peft import save_peft
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError
from deskside.weights.hf import hf_tensors, load_hf, save_hf
from deskside.weights.hf_config import from_hf_config
from deskside.weights.hf_families import FAMILIES, family_of
from deskside.weights.hf_family import Family
from deskside.weights.merge_adapters import merged
from deskside.weights.published import published_checkpoints
from tests.export.adapted import trained, without_adapters
from tests.export.test_hf_parity import gradient, random_model, their_gradients

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
}
STEPS = 3
PROMPTS = (6, 1, 30, 13)  # tokens
NEW_TOKENS = 20


@dataclass(frozen=True)
class Parity:
    """Largest differences of one family from transformers.

    logits: absolute. gradients: relative to the largest value of the parameter's gradient. losses: relative, in three
    steps. greedy: share of equal tokens. adapters: of the logits with adapters; adapters_in is "PEFT" or "merged".
    back: of the logits of a model that transformers saved.
    """

    model_type: str
    architecture: str
    logits: float
    gradients: float
    losses: float
    greedy: float
    adapters: float
    adapters_in: str
    back: float


def small_config(family: Family) -> ModelConfig:
    """Return a tiny configuration with the options of the family's first published checkpoint, or with its defaults."""
    published = (c.hf_config for c in published_checkpoints() if c.family is family)
    source = {"model_type": family.model_type, **next(published, {})}
    sizes = ModelConfig(**SIZES, qk_norm=False)
    for option, value in SIZES.items():
        if option in family.fields:
            source[family.fields[option].name] = family.fields[option].write(value, sizes)
    if source.get("sliding_window") or family.model_type == "ministral":
        source["sliding_window"] = 5
    # The only family without a published checkpoint whose default is one window.
    if family.model_type == "ministral":
        source["layer_types"] = ["sliding_attention", "full_attention"] * 2
    return from_hf_config(source)


def measure(family: Family, folder: Path) -> Parity:
    """Compare one family. folder: for the files that both sides write."""
    config = small_config(family)
    model = random_model(**config.model_dump())
    inputs = torch.randint(0, config.vocab_size, (2, 18), generator=torch.Generator().manual_seed(2))
    inputs, targets = inputs[:, :-1], inputs[:, 1:]
    save_hf(model, config, None, folder / "ours")
    theirs = _theirs(folder / "ours")
    if type(theirs).__name__ != family.architecture or family_of(config) is not family:
        raise AssertionError(f"{family.model_type} was exported as {type(theirs).__name__}")
    greedy = _greedy_share(model, theirs)
    theirs.save_pretrained(folder / "theirs")
    again, loaded = load_hf(folder / "theirs")
    if family_of(again) is not family:
        raise AssertionError(f"what transformers saves is {family_of(again).model_type}")
    their_logits = theirs(inputs).logits
    with torch.no_grad():
        ours, back = model(inputs), loaded(inputs)
    adapters, adapters_in = _adapter_difference(config, folder, inputs)
    losses = _loss_differences(loaded, _theirs(folder / "ours"), inputs, targets)
    return Parity(
        family.model_type,
        family.architecture,
        _largest(ours - their_logits),
        _gradient_difference(model, theirs, folder / "gradients", (inputs, targets)),
        max(losses),
        greedy,
        adapters,
        adapters_in,
        _largest(back - their_logits),
    )


def _theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def _their_loss(theirs: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _gradient_difference(
    model: Transformer, theirs: Any, folder: Path, batch: tuple[Tensor, Tensor]
) -> float:
    """Return the largest difference of a gradient, relative to the largest value of the same parameter's gradient."""
    _their_loss(theirs, *batch).backward()
    model.loss(*batch).backward()
    expected = their_gradients(theirs, folder)
    found = hf_tensors(model, family_of(model.config), gradient)
    names = {name for name in expected if not name.endswith("e_score_correction_bias")}
    # The bias of keys changes all scores of a query alike, so where nothing else depends on it, its gradient is 0.
    largest = {name: max(_largest(expected[name]), 1e-3) for name in names}
    return max(_largest(found[name] - expected[name]) / largest[name] for name in names)


def _loss_differences(model: Transformer, theirs: Any, inputs: Tensor, targets: Tensor) -> list[float]:
    """Return the relative differences of the losses of each step of AdamW."""
    ours = [p for p in model.parameters() if p.dtype.is_floating_point]
    optimizers = [torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0) for p in (ours, theirs.parameters())]
    differences = []
    for _ in range(STEPS):
        losses = (model.loss(inputs, targets), _their_loss(theirs, inputs, targets))
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        differences.append(abs(losses[0].item() - losses[1].item()) / losses[1].item())
    return differences


def _greedy_share(model: Transformer, theirs: Any) -> float:
    """Return the share of greedy tokens of our engine that are those of transformers' generate."""
    generator = torch.Generator().manual_seed(4)
    engine = Engine(model, max_batch=4, max_tokens=256, page_size=8, prefill_tokens=24)
    prompts = [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in PROMPTS]
    requests = [Request(tuple(prompt), NEW_TOKENS, Sampling(0.0)) for prompt in prompts]
    equal = 0
    for request, (answer,) in zip(requests, engine.run(requests), strict=True):
        prompt = torch.tensor([request.prompt])
        text = theirs.generate(
            prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        expected = text[0, len(request.prompt) :].tolist()
        equal += sum(a == b for a, b in zip(answer.tokens, expected, strict=True))
    return equal / (NEW_TOKENS * len(PROMPTS))


def _adapter_difference(config: ModelConfig, folder: Path, inputs: Tensor) -> tuple[float, str]:
    """Return the difference of the logits with adapters, and where they are: in PEFT, or merged into an export."""
    shape = config.model_dump()
    model, options = trained({}, (), **shape)
    ours = model(inputs)
    base = merged(without_adapters(trained({}, (), **shape)[0]))
    save_hf(base, config, None, folder / "base")
    try:
        save_peft(model, options, str(folder / "base"), folder / "adapter")
    except UsageError:
        save_hf(merged(model), config, None, folder / "merged")
        return _largest(ours - _theirs(folder / "merged")(inputs).logits), "merged"
    from peft import PeftModel

    theirs: Any = PeftModel.from_pretrained(_theirs(folder / "base"), str(folder / "adapter"))
    return _largest(ours - theirs(inputs).logits), "PEFT"


def table(results: list[Parity]) -> str:
    """Return the results as the table of docs/models.md."""
    work = "load, train, LoRA, generate, export"
    lines = [f"| family | published checkpoints | {work} | logits | gradients | losses | refused |"]
    lines.append("|---|---|---|---|---|---|---|")
    for result in results:
        family = FAMILIES[result.model_type]
        names = (
            ", ".join(c.name.split("/")[1] for c in published_checkpoints() if c.family is family) or "none"
        )
        lora = "all" if trains_adapters(family) else "all, but no LoRA beside a shared expert"
        cells = (f"{value:.0e}" for value in (result.logits, result.gradients, result.losses))
        refused = "; ".join(refusals(family, result)) or "nothing more"
        lines.append(f"| {family.model_type} | {names} | {lora} | {' | '.join(cells)} | {refused} |")
    return "\n".join(lines)


def trains_adapters(family: Family) -> bool:
    """Return True if `--adapter` trains all models of this family: not those with a shared expert."""
    return "shared_expert_intermediate_size" not in family.fields


def refusals(family: Family, result: Parity) -> list[str]:
    """Return what this family's entry refuses, as texts."""
    texts = [
        f"`{name}` other than {json.dumps(constant.value)}" for name, constant in family.constants.items()
    ]
    texts += [text for text, _ in family.conditions]
    return texts + ["adapters in PEFT's format (they are merged)"] * (result.adapters_in == "merged")


def main() -> None:
    """Measure all families and write the results, or print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the JSON file of the results")
    parser.add_argument("--table", action="store_true", help="print the table of the file's results")
    arguments = parser.parse_args()
    if arguments.table:
        print(table([Parity(**row) for row in json.loads(arguments.file.read_text("utf-8"))]))
        return
    results = []
    for family in FAMILIES.values():
        with tempfile.TemporaryDirectory() as folder:
            results.append(asdict(measure(family, Path(folder))))
        print(results[-1])
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
