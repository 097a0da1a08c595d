"""`deskside serve` with prepared answers instead of an engine's. Everything else is the real server.

    python -m tests.serve.prepared RUN [options of deskside serve]

The last question of a prompt selects the answer, and each repetition selects its next version. A question without a
prepared answer is repeated. Each word of an answer counts as a token.
"""

import asyncio
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from deskside.cli.main import main
from deskside.engine.engine import Engine
from deskside.engine.requests import Event, Request
from deskside.serve import server
from deskside.serve.worker import EngineMessage, RequestHandle, Worker
from deskside.weights.load import Loaded

SERVE = server.serve

PAUSE_SECONDS = 0.004  # between two words
SLOW_SECONDS = 0.05  # if the question says "slowly"

RICH = r"""## How a prime sieve works

The sieve of Eratosthenes crosses out the multiples of each prime up to $\sqrt{n}$. What is left is **prime**.

```python
def primes(n: int) -> list[int]:
    # Return the primes below n.
    sieve = bytearray([1]) * n
    sieve[:2] = b"\x00\x00"
    for p in range(2, int(n**0.5) + 1):
        if sieve[p]:
            sieve[p * p :: p] = bytes(len(range(p * p, n, p)))
    return [i for i, is_prime in enumerate(sieve) if is_prime]
```

Its work is the sum over primes, which grows hardly faster than $n$:

$$
\sum_{p \le n} \frac{n}{p} = n \log \log n + O(n)
$$

| Method | Time | Memory |
|:--|--:|--:|
| Trial division | $O(n \sqrt{n})$ | $O(1)$ |
| Sieve | $O(n \log \log n)$ | $O(n)$ |
| Segmented sieve | $O(n \log \log n)$ | $O(\sqrt{n})$ |

- For one number, a test such as `pow(a, n - 1, n)` is faster.
- See [the article](https://en.wikipedia.org/wiki/Sieve_of_Eratosthenes) for more.
"""
HOSTILE = (
    r"""<script>window.hit = 1</script><img src=x onerror="window.hit = 2">

[click](javascript:window.hit=3) [data](data:text/html,<script>window.hit=4</script>) ![seen](https://example.invalid/a.png)

<svg/onload=window.hit=5><iframe src="javascript:window.hit=6"></iframe>
<a href="https://e.invalid" onclick="window.hit=7">x</a>

```html"onmouseover="window.hit=8
<script>window.hit = 9</script>
```

$\href{javascript:window.hit=10}{x}$ $\htmlData{a=b}{x}$ $\includegraphics{https://example.invalid/b.png}$ $\frac{1$

$\boxed{1} \pmb{2} \fcolorbox{red}{blue}{3}$

<style>body { display: none }</style> <form action="https://example.invalid"><input name=q></form>

| <img src=x onerror=window.hit=11> | b |
|---|---|
| [a](vbscript:window.hit=12) | `<b>` |
"""
    + "$"
    + "{" * 3000
    + "x"
    + "}" * 3000
    + "$\n\n"
    + ">" * 500
    + " deep\n\n"
    + "[" * 2000
    + "\n\nend of it\n"
)
CELLS = "".join(f"|value{i}" for i in range(40)) + "|\n"
HUGE = CELLS + "|---" * 40 + "|\n" + CELLS * 120
ANSWERS = {
    "rich": [RICH],
    "Write a Python function that finds prime numbers.": [RICH],
    "hostile": [HOSTILE],
    "huge": [HUGE],
    "versions": ["The first answer.", "The second answer.", "The third answer."],
    "think": ["<think>\nWhy, indeed?\n</think>\n\nBecause **of it**."],
    "weather": ['<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'],
    "count slowly": [" ".join(str(i) for i in range(1, 301))],
    "count": [" ".join(str(i) for i in range(1, 301))],
}


def prepared_answer(text: str, asked: "Counter[str]") -> str:
    """Return the rest of the answer to a prompt, which may contain the beginning of it."""
    questions = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)
    question = questions[-1] if questions else text
    if "<tool_response>" in question:
        return "It is sunny."
    begun = (
        text.rpartition("<|im_start|>assistant\n")[2].rpartition("</think>")[2].lstrip() if questions else ""
    )
    found = ANSWERS.get(question.strip(), [question])
    whole = found[asked[question] % len(found)]
    if begun and whole.startswith(begun):
        return whole[len(begun) :]
    asked[question] += 1
    return whole


class PreparedWorker(Worker):
    """Delivers prepared answers on the event loop. Its thread and engine do nothing."""

    tokenizer: Tokenizer

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._tasks: dict[RequestHandle, asyncio.Task[None]] = {}
        self._asked: Counter[str] = Counter()

    def submit(self, request: Request, on_message: Callable[[EngineMessage], None]) -> RequestHandle:
        handle = RequestHandle(request, on_message, request.samples)
        self._tasks[handle] = asyncio.get_running_loop().create_task(self._write(handle))
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        self._tasks[handle].cancel()

    async def _write(self, handle: RequestHandle) -> None:
        request = handle.request
        text = self.tokenizer.decode(request.prompt, skip_special_tokens=False)
        slow = "slowly" in text
        words = re.findall(r"\S+\s*|\s+", prepared_answer(text, self._asked))
        for number, word in enumerate(words[: request.max_new_tokens]):
            await asyncio.sleep(SLOW_SECONDS if slow else PAUSE_SECONDS)
            is_last = number == min(len(words), request.max_new_tokens) - 1
            reason = ("eos" if len(words) <= request.max_new_tokens else "length") if is_last else None
            handle.on_message(Event(0, 0, 1, reason, word))


def serve_prepared(
    loaded: Loaded, engine: Engine, options: server.ServerOptions, listening: socket.socket
) -> None:
    """Serve like server.serve, with an adapter named "poet"."""
    PreparedWorker.tokenizer = loaded.tokenizer
    SERVE(loaded, engine, replace(options, adapters=("poet",)), listening)


if __name__ == "__main__":
    server.Worker, server.serve = PreparedWorker, serve_prepared
    sys.exit(main(["serve", *sys.argv[1:]]))
