"""Generate answers greedily with the inference engine, and judge them."""

from collections.abc import Callable, Collection, Sequence

from tokenizers import Tokenizer

from deskside.engine.device import cache_tokens
from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.requests import Request, SampleOutput
from deskside.evaluate.final_number import final_number
from deskside.evaluate.items import Item
from deskside.evaluate.likelihood import MAX_CACHE_BYTES
from deskside.evaluate.sandbox import SandboxResult, check_many
from deskside.evaluate.scoring import code_blocks, same_words
from deskside.evaluate.tasks import CodeTask, Generated, Match, Number
from deskside.model.transformer import Transformer

MAX_BATCH = 64
MIN_CHAT_TOKENS = 512  # maximum length of a chat answer, unless the task allows more


def generate_answers(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    task: Generated,
    *,
    eos_tokens: Collection[int],
    chat: bool = False,
    tick: Callable[[int], object] | None = None,
) -> list[str]:
    """Generate an answer to each prompt, up to a stop string.

    An answer gets at most half of the model's context length. A prompt that does not fit in the rest is truncated from
    the left, as in lm-eval.

    Args:
        chat: Only the end of the turn ends an answer, not the task's stop strings, and answers may be longer, because
            chat models explain them.
        tick: Called with 1 after each answer.
    """
    limit = model.config.max_position_embeddings
    max_new_tokens = max(task.max_new_tokens, MIN_CHAT_TOKENS) if chat else task.max_new_tokens
    max_new_tokens = min(max_new_tokens, limit // 2)
    requests = [
        Request(
            tuple(prompt[-(limit - max_new_tokens) :]),
            max_new_tokens,
            eos_tokens=frozenset(eos_tokens),
            stop_strings=() if chat else task.stop,
            continues_text=not chat,
        )
        for prompt in prompts
    ]
    return generate_texts(model, tokenizer, requests, tick)


def generate_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    tick: Callable[[int], object] | None = None,
) -> list[str]:
    """Return the text of the answer to each request, of one sample each. tick: called with 1 after each answer."""
    # KV-cache tokens of each request, in whole pages. The cache should fit the largest batch.
    sizes = sorted(-(-(len(r.prompt) + r.max_new_tokens) // PAGE_SIZE) * PAGE_SIZE for r in requests)
    max_tokens = int(MAX_CACHE_BYTES / model.kv_bytes_per_token(model.activation_dtype))
    engine = Engine(
        model,
        max_batch=min(MAX_BATCH, len(requests)),
        max_tokens=cache_tokens(model, min(sum(sizes[-MAX_BATCH:]), max_tokens), minimum=sizes[-1]),
        tokenizer=tokenizer,
    )
    answers = {engine.submit(request): SampleOutput(len(request.prompt)) for request in requests}
    for event in engine.events():
        answers[event.request].add(event)
        if tick is not None and event.reason is not None:
            tick(1)
    return [answer.text for answer in answers.values()]


def judge_answers(
    task: Generated, items: Sequence[Item], texts: Sequence[str], chat: bool
) -> list[SandboxResult]:
    """Return the verdict on each text; `reason` is the parsed answer or, for code, why it failed.

    task: not a translation, which is scored instead. Raises RunError if code cannot be sandboxed.
    """
    if isinstance(task, CodeTask):
        return check_many(
            [(runnable_code(item, text, chat), *item.check) for item, text in zip(items, texts, strict=True)]
        )
    verdicts = []
    for item, text in zip(items, texts, strict=True):
        if isinstance(task, Number):
            number, reference = final_number(text), final_number(item.answers[0])
            verdicts.append(SandboxResult(number is not None and number == reference, f"{number}"))
        else:
            assert isinstance(task, Match)
            verdicts.append(SandboxResult(same_words(text, item.answers), text.strip()[:80]))
    return verdicts


def runnable_code(item: Item, text: str, chat: bool) -> str:
    """Return the code to test: the prompt and its continuation or, in a chat, the prompt and the first code block.

    Without a code block, a chat answer is a continuation. The prompt ends with the docstring of a function, so it is
    valid code by itself. A code block defines the function again.
    """
    blocks = code_blocks(text) if chat else []
    return item.answers[0] + ("\n" + blocks[0] if blocks else text)
