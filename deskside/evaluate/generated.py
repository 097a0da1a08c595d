"""Generate answers with the batched engine, greedily up to a stop string, and score them."""

from collections.abc import Callable, Collection, Sequence

from tokenizers import Tokenizer

from deskside.engine.device import cache_tokens
from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.requests import Request, SampleOutput
from deskside.evaluate.items import Item
from deskside.evaluate.likelihood import CACHE_BYTES
from deskside.evaluate.sandbox import SandboxResult, check_many
from deskside.evaluate.scoring import code_in, number_in, same_words
from deskside.evaluate.tasks import CodeTask, Generated, Match, Number
from deskside.model.transformer import Transformer

ROWS = 64
CHAT_TOKENS = 512  # of an answer, at least


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    task: Generated,
    *,
    eos_tokens: Collection[int],
    chat: bool = False,
    tick: Callable[[int], object] | None = None,
) -> list[str]:
    """Generate a completion of each prompt, without the stop string.

    chat: the end of the turn ends an answer, not the task's stop strings, and there is room to explain. An answer gets
    at most half of the model's positions; a prompt that leaves less room than that loses its beginning, as in lm-eval.
    `tick` is called with 1 for each answer.
    """
    limit = model.config.max_position_embeddings
    wanted = max(task.max_new_tokens, CHAT_TOKENS) if chat else task.max_new_tokens
    new = min(wanted, limit // 2)
    requests = [
        Request(
            tuple(prompt[-(limit - new) :]),
            new,
            eos_tokens=frozenset(eos_tokens),
            stop_strings=() if chat else task.stop,
        )
        for prompt in prompts
    ]
    needs = sorted(-(-(len(request.prompt) + new) // PAGE_SIZE) * PAGE_SIZE for request in requests)
    room = int(CACHE_BYTES / model.kv_bytes_per_token(model.activation_dtype))
    engine = Engine(
        model,
        max_batch=min(ROWS, len(requests)),
        max_tokens=cache_tokens(model, min(sum(needs[-ROWS:]), room), needs[-1]),
        tokenizer=tokenizer,
    )
    answers = {engine.submit(request): SampleOutput(len(request.prompt)) for request in requests}
    for event in engine.events():
        answers[event.request].add(event)
        if tick is not None and event.reason is not None:
            tick(1)
    return [answer.text for answer in answers.values()]


def judge(task: Generated, items: Sequence[Item], texts: Sequence[str], chat: bool) -> list[SandboxResult]:
    """Return for each text whether it is correct, and the parsed answer. Raises RunError without a sandbox."""
    if isinstance(task, CodeTask):
        return check_many(
            [(program(item, text, chat), *item.check) for item, text in zip(items, texts, strict=True)]
        )
    verdicts = []
    for item, text in zip(items, texts, strict=True):
        if isinstance(task, Number):
            found, wanted = number_in(text), number_in(item.answers[0])
            verdicts.append(SandboxResult(found is not None and found == wanted, f"{found}"))
        else:
            assert isinstance(task, Match)
            verdicts.append(SandboxResult(same_words(text, item.answers), text.strip()[:80]))
    return verdicts


def program(item: Item, text: str, chat: bool) -> str:
    """Return the code to run: the prompt and its continuation, or in a chat the prompt and the answer's code block.

    The prompt ends with the function's description, so that it is whole without a body; a block defines it again.
    """
    block = code_in(text) if chat else None
    return item.answers[0] + (text if block is None else "\n" + block)
