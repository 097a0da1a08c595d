"""A small run directory like those of training: data, tokenizer, run.json and a checkpoint. Nothing is trained."""

import json
from dataclasses import dataclass
from pathlib import Path

from deskside.config.run import RunConfig
from deskside.data import tokenizer as bpe
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.weights import checkpoint

TEXT = "the ship went to the sea and the sea was wide, naïve sailors sang 東京 songs 😀 all day long\n"


@dataclass
class MadeRun:
    path: Path
    model: Transformer  # the weights of the newest checkpoint
    config: RunConfig


def make(folder: Path) -> MadeRun:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": TEXT * (i % 3 + 1)}) + "\n" for i in range(30)), "utf-8")
    data = folder / "data"
    prepare([str(source)], data, CorpusOptions(vocab_size=300, val_fraction=0.2, workers=1, quiet=True))
    config = RunConfig.model_validate(
        {
            "model": {
                "vocab_size": 304,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "max_position_embeddings": 4096,
            },
            "data": {"path": str(data)},
            "batch": {"sequence_length": 64, "tokens": 256},
            "optim": {"name": "muon"},
            "schedule": {"name": "wsd"},
        }
    )
    path = folder / "runs" / "small"
    path.mkdir(parents=True)
    (path / "run.json").write_text(
        json.dumps({"schema_version": 1, "name": "small", "config": config.model_dump(mode="json")})
    )
    (path / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    model = Transformer(config.model)
    for step in (10, 20):
        initialize(model, seed=step, options=InitOptions(head_std=0.4, output="fan_in"))
        save(path, step, model)
    # The end-of-text token is never drawn, so that answers have the requested length.
    assert bpe.end_of_text(bpe.load(path))[1] == 0
    return MadeRun(path, model, config)


def save(path: Path, step: int, model: Transformer) -> None:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    checkpoint.save(path / "checkpoints", step, {"model": tensors, "optimizer": {}}, {"step": step})
