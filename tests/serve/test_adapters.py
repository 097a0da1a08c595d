"""A server with one model and several adapters: requests select them by name, and
rows with different names share batches.
"""

import asyncio
from pathlib import Path

import openai
import pytest

from deskside.cli.serve import run as run_serve
from deskside.engine.engine import Engine
from deskside.engine.requests import Request
from deskside.utils.errors import UsageError
from deskside.weights.load import load_model
from deskside.weights.peft_adapters import read_peft
from deskside.weights.served_adapters import attach_by_row
from tests.engine.test_row_adapters import ADAPTERS, BIAS
from tests.serve.in_process import with_client
from tests.weights.test_peft_adapters import LLAMA, adapted

PROMPT = [5, 17, 3, 9, 44]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    for name, options in ADAPTERS.items():
        adapted(root, LLAMA, BIAS, options)
        (root / "adapter").rename(root / name)
    return {name: root / name for name in ("base", *ADAPTERS)}


def test_requests_choose_an_adapter_by_name(folders: dict[str, Path]) -> None:
    loaded = load_model(folders["base"])
    choice = attach_by_row(loaded.model, [read_peft(folders[name]) for name in ADAPTERS])
    names = ["tiny", *ADAPTERS]

    async def ask(client: openai.AsyncOpenAI) -> None:
        served = (await client.models.list()).data
        assert [model.id for model in served] == names
        assert [model.model_dump()["parent"] for model in served] == [None, "tiny", "tiny", "tiny"]
        assert (await client.models.retrieve("dora")).id == "dora"
        asked = [
            client.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=0)
            for name in names
        ]
        answers = await asyncio.gather(*asked)
        assert [answer.model for answer in answers] == names
        for folder, answer in zip(folders.values(), answers, strict=True):
            merged = load_model(folder)
            engine = Engine(merged.model, tokenizer=merged.tokenizer)
            request = Request(
                tuple(PROMPT), 12, eos_tokens=loaded.eos_tokens, logprobs=True, continues_text=True
            )
            ((wanted,),) = engine.run([request])
            assert answer.choices[0].text == wanted.text
            assert answer.choices[0].logprobs is not None
            found = answer.choices[
                0
            ].logprobs.token_logprobs  # may also have that of the token that ended the text
            assert (found or [])[: len(wanted.logprobs)] == pytest.approx(wanted.logprobs, abs=1e-4)
        assert len({answer.choices[0].text for answer in answers}) == 4
        with pytest.raises(openai.NotFoundError, match=r"lora, rslora, dora"):
            await client.completions.create(model="other", prompt=PROMPT)

    with_client(loaded, ask, adapter_names=tuple(ADAPTERS), adapters=choice)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["lora"], r"--adapter lora: write NAME=DIR"),
        (["=lora"], r"write NAME=DIR"),
        (["a={lora}", "a={dora}"], r"two adapters with this name"),
        (["base={lora}"], r"--adapter base: is the name of the model"),
        (["a={base}"], r"^--adapter a=.*adapter_config.json"),
        (["a=nothere"], "^--adapter a=nothere: nothere: no such folder"),
    ],
)
def test_the_command_refuses(given: list[str], message: str, folders: dict[str, Path]) -> None:
    words = [word.format(**folders) for word in given]
    with pytest.raises(UsageError, match=message):
        run_serve([str(folders["base"]), "--port", "0", "--device", "cpu", "--adapter", *words])
