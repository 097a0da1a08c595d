"""A model that always says the same, whatever it is asked."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from deskside.config.run import RunConfig
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.weights.load import Loaded, load_model
from tests.serve.made_run import make, save


def make_scripted(folder: Path, template: str, pieces: Sequence[str], special: Sequence[str] = ()) -> Loaded:
    """Return a model with this chat template that says these pieces and then ends.

    Each piece becomes a token, and those in `special` become special tokens. Every block adds nothing, so the hidden
    state is the embedding of the last token: one direction for each piece, and one for all other tokens.
    """
    made = make(folder)
    path = made.path
    (path / "chat_template.jinja").write_text(template, "utf-8")
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    plain = [AddedToken(piece, normalized=False, special=False) for piece in pieces if piece not in special]
    tokenizer.add_tokens(plain)
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    tokenizer.save(str(path / "tokenizer.json"))

    config = made.config.model_dump(mode="json")
    config["model"]["vocab_size"] = 320
    (path / "run.json").write_text(json.dumps({"schema_version": 1, "name": "small", "config": config}))
    model = Transformer(RunConfig.model_validate(config).model)
    initialize(model, seed=0)
    said = [tokenizer.token_to_id(piece) for piece in pieces]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn.output" in name or "mlp.output" in name:
                parameter.zero_()
        model.embed.weight.zero_()
        model.embed.weight[:, 0] = 1.0
        model.head.weight.zero_()
        for direction, following in enumerate([*said, tokenizer.token_to_id("<|endoftext|>")]):
            model.head.weight[following, direction] = 50.0
        for direction, token in enumerate(said, start=1):
            model.embed.weight[token] = 0.0
            model.embed.weight[token, direction] = 1.0
    save(path, 30, model)
    return load_model(path)
