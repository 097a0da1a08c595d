"""Each request field, tested by its effect on the answer, through the official client."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from deskside.engine.sampling import Sampling
from deskside.weights.load import Loaded, load_model
from tests.engine.sentencepiece import make_sentencepiece
from tests.engine.test_generate import plain
from tests.serve.chatty import TEMPLATE, make_chatty, rendered
from tests.serve.in_process import with_client

PROMPT = [40, 41, 42, 43, 44]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(make_chatty(tmp_path_factory.mktemp("fields"))[1])


def complete(loaded: Loaded, *requests: dict[str, Any]) -> list[Any]:
    """Return the first choices of completions of PROMPT, greedy unless a request says otherwise."""

    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        found = []
        for body in requests:
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, **body}
            found.append(await client.completions.create(model="tiny", prompt=None, extra_body=body))
        return found

    return with_client(loaded, ask)


def text_of(loaded: Loaded, tokens: list[int]) -> str:
    return loaded.tokenizer.decode(tokens)


def test_penalties_and_bias_change_the_answer_as_the_engine_does(loaded: Loaded) -> None:
    free = plain(loaded.model, PROMPT, 24)
    banned, wanted = free[0], 70
    cases: list[tuple[dict[str, Any], Sampling]] = [
        ({"presence_penalty": 2.0}, Sampling(0.0, presence_penalty=2.0)),
        ({"frequency_penalty": 1.5}, Sampling(0.0, frequency_penalty=1.5)),
        ({"repetition_penalty": 3.0}, Sampling(0.0, repetition_penalty=3.0)),
        (
            {"logit_bias": {str(banned): -100, str(wanted): 2.5}},
            Sampling(0.0, logit_bias=((banned, -100.0), (wanted, 2.5))),
        ),
    ]
    answers = complete(loaded, *(body for body, _ in cases))
    texts = []
    for answer, (_, sampling) in zip(answers, cases, strict=True):
        texts.append(answer.choices[0].text)
        assert texts[-1] == text_of(loaded, plain(loaded.model, PROMPT, 24, sampling))
    assert len({*texts, text_of(loaded, free)}) == len(cases) + 1


def test_the_end_of_an_answer(loaded: Loaded) -> None:
    free = plain(loaded.model, PROMPT, 24)
    stop = next(token for token in free[3:] if token not in free[:3])
    at = free.index(stop)
    loaded = replace(loaded, eos_tokens=frozenset({stop}))
    ended, ignored, longer, stopped = complete(
        loaded,
        {},
        {"ignore_eos": True},
        {"min_tokens": at + 3},
        {"ignore_eos": True, "stop_token_ids": [free[1]]},
    )
    assert (ended.choices[0].finish_reason, ended.choices[0].text) == ("stop", text_of(loaded, free[:at]))
    assert ignored.choices[0].text == text_of(loaded, free) and ignored.usage.completion_tokens == 24
    assert longer.usage.completion_tokens >= at + 3
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == (
        "stop",
        free.index(free[1]),
    )


def test_the_logprobs_of_a_text_have_the_token_that_ended_it(loaded: Loaded) -> None:
    free = plain(loaded.model, PROMPT, 24)
    stop = next(token for token in free[3:] if token not in free[:3])
    at = free.index(stop)
    (stopped,) = complete(loaded, {"stop_token_ids": [stop], "logprobs": 2})
    given = stopped.choices[0].logprobs
    assert given.tokens == [loaded.tokenizer.decode([token]) for token in free[: at + 1]]
    assert given.text_offset[-1] == sum(map(len, given.tokens[:at]))
    assert given.token_logprobs[at] == max(given.top_logprobs[at].values())  # it is greedy
    assert stopped.usage.completion_tokens == at


@pytest.mark.parametrize("as_text", [False, True])
def test_echo_has_the_models_log_probabilities(loaded: Loaded, as_text: bool) -> None:
    text = "the wide sea"
    tokens = [loaded.start_token, *loaded.tokenizer.encode(text, add_special_tokens=False).ids]
    prompt = text if as_text else tokens
    scored, only = complete(
        loaded,
        {"prompt": [prompt, prompt], "echo": True, "logprobs": 4, "max_tokens": 3, "n": 2},
        {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0},
    )
    answer = plain(loaded.model, tokens, 3)
    with torch.no_grad():
        log_p = loaded.model(torch.tensor([[*tokens, *answer]]))[0].double().log_softmax(-1)
    expected = [float(log_p[i, token]) for i, token in enumerate([*tokens, *answer][1:])]
    shown = text if as_text else loaded.tokenizer.decode(tokens, skip_special_tokens=False)
    assert len(scored.choices) == 4 and scored.usage.prompt_tokens == 2 * len(tokens)
    for choice in scored.choices:
        assert choice.text == shown + text_of(loaded, answer)
        given = choice.logprobs
        assert given.token_logprobs[0] is None and given.top_logprobs[0] is None
        assert given.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert given.tokens[1:] == [loaded.tokenizer.decode([t]) for t in [*tokens, *answer][1:]]
        for place, top in enumerate(given.top_logprobs[1:]):
            best = log_p[place].topk(4).values
            assert max(top.values()) == pytest.approx(float(best[0]), abs=1e-4)
            assert given.tokens[place + 1] in top and len(top) <= 5
        assert all(
            choice.text[o:].startswith(t)
            for o, t in zip(given.text_offset[1:], given.tokens[1:], strict=True)
        )
    assert (only.choices[0].text, only.choices[0].finish_reason) == (shown, "length")
    assert only.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected[: len(tokens) - 1], abs=1e-4)
    assert only.choices[0].logprobs.top_logprobs is None and only.usage.completion_tokens == 0


def test_a_stream_begins_with_the_echo(loaded: Loaded) -> None:
    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.completions.create(
            model="tiny", prompt="a ship", echo=True, stream=True, temperature=0, max_tokens=4, n=2
        )
        return [chunk async for chunk in stream]

    chunks = with_client(loaded, ask)
    (whole,) = complete(loaded, {"prompt": "a ship", "echo": True, "max_tokens": 4})
    for index in range(2):
        assert (
            "".join(c.choices[0].text for c in chunks if c.choices[0].index == index) == whole.choices[0].text
        )


def test_best_of_returns_the_most_probable_samples(loaded: Loaded) -> None:
    body = {"temperature": 1.0, "seed": 3, "logprobs": 0}
    best, every = complete(loaded, {**body, "n": 2, "best_of": 8}, {**body, "n": 8})
    means = {
        choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens)
        for choice in every.choices
    }
    assert [choice.text for choice in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert best.usage.completion_tokens == every.usage.completion_tokens == 8 * 24
    (plainly,) = complete(loaded, {"temperature": 1.0, "best_of": 2})
    assert plainly.choices[0].logprobs is None


def test_top_logprobs_of_a_chat(loaded: Loaded) -> None:
    async def ask(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        options: Any = {
            "model": "tiny",
            "messages": HELLO,
            "max_tokens": 5,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 3,
        }
        whole = await client.chat.completions.create(**options)
        return whole, [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]

    whole, chunks = with_client(loaded, ask)
    content = whole.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 5
    for entry in content:
        first = entry.top_logprobs[0]
        assert (entry.token, entry.logprob, entry.bytes) == (first.token, first.logprob, first.bytes)
    streamed = itertools.chain(*(c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs))
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in content]


THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "body", "ending"),
    [
        (THINKING, {}, ""),
        (THINKING, {"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>"),
        (THINKING, {"chat_template_kwargs": {"enable_thinking": True}}, ""),
        (THINKING, {"reasoning_effort": "none"}, "<think></think>"),
        (THINKING, {"reasoning_effort": "high"}, ""),
        (THINKING, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, ""),
        (TEMPLATE + "{{ reasoning_effort }}", {"reasoning_effort": "low"}, "low"),
        (TEMPLATE, {"reasoning_effort": "low"}, ""),
    ],
)
def test_variables_of_the_template(template: str, body: dict[str, Any], ending: str, tmp_path: Path) -> None:
    folder = make_chatty(tmp_path)[1]
    (folder / "chat_template.jinja").write_text(template)
    loaded = load_model(folder)

    async def ask(client: openai.AsyncOpenAI) -> Any:
        messages: Any = HELLO
        return await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body=body
        )

    loaded.tokenizer.encode_special_tokens = False
    prompt = loaded.tokenizer.encode(rendered(HELLO) + ending, add_special_tokens=False).ids
    answer = with_client(loaded, ask)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == text_of(loaded, plain(loaded.model, prompt, 8))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"unheard_of": None}, "unheard_of"),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_name(loaded: Loaded, body: dict[str, Any], param: str) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        messages: Any = HELLO
        await client.chat.completions.create(model="tiny", messages=messages, extra_body=body)

    with pytest.raises(openai.BadRequestError) as caught:
        with_client(loaded, ask)
    assert caught.value.param == param and param in caught.value.message


def test_words_of_sentencepiece_keep_their_spaces(loaded: Loaded) -> None:
    pieces = make_sentencepiece()
    loaded = replace(loaded, tokenizer=pieces, eos_tokens=frozenset(), start_token=1)
    sat = pieces.token_to_id("▁sat")
    forced = {"logit_bias": {str(sat): 100}, "max_tokens": 2, "logprobs": 1}
    prompt = [1, *pieces.encode("the cat", add_special_tokens=False).ids]
    plain, as_text, echoed = complete(
        loaded,
        {**forced, "prompt": prompt},
        {**forced, "prompt": "the cat"},
        {**forced, "prompt": "the cat", "echo": True},
    )
    for answer in (plain, as_text):
        (choice,) = answer.choices
        assert choice.text == " sat sat" and choice.logprobs.tokens == [" sat", " sat"]
        assert choice.logprobs.text_offset == [0, 4]
        assert all(" sat" in top for top in choice.logprobs.top_logprobs)
    (choice,) = echoed.choices
    assert choice.text == "the cat sat sat"
    assert choice.logprobs.tokens == ["<s>", "the", " cat", " sat", " sat"]
    assert choice.logprobs.text_offset == [0, 0, 3, 7, 11]


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_a_chat_add_up_to_its_text(loaded: Loaded, stream: bool) -> None:
    pieces = make_sentencepiece()
    loaded = replace(loaded, tokenizer=pieces, eos_tokens=frozenset(), start_token=1)
    sat = str(pieces.token_to_id("▁sat"))
    body: Any = {
        "max_tokens": 3,
        "logit_bias": {sat: 100},
        "logprobs": True,
        "top_logprobs": 1,
        "temperature": 0,
    }

    async def ask(client: openai.AsyncOpenAI) -> tuple[str, list[Any]]:
        if not stream:
            choice = (await client.chat.completions.create(model="tiny", messages=HELLO, **body)).choices[0]
            return choice.message.content, choice.logprobs.content
        text, scored = "", []
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, **body
        ):
            text += chunk.choices[0].delta.content or ""
            scored += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
        return text, scored

    text, scored = with_client(loaded, ask)
    assert text == "sat sat sat" == "".join(token.token for token in scored)
    assert [bytes(token.bytes).decode() for token in scored] == ["sat", " sat", " sat"]
