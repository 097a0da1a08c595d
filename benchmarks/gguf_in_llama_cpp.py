"""Difference between an exported GGUF file, as computed by llama.cpp, and the model that it was exported from.

    python -m benchmarks.gguf_in_llama_cpp RUN|HF_DIR TEXT_FILE [--tokens 250] [--prompts 4]

The benchmark exports the model in each type, runs llama.cpp on prompts from TEXT_FILE and compares the logits of every
position with those of deskside in float32. It reports the relative error (of the logit vector of a position; mean and
maximum), the divergence KL(deskside | llama.cpp) in nats, how often the most likely token is the same, and how many of
the first tokens of a greedy continuation of 60 agree. Keys and values are float32 in llama.cpp too; its default of
float16 has a separate line. llama-cpp-python is not a dependency of deskside; `pip install llama-cpp-python` builds it
with cmake.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from deskside.export.gguf import GgufType, save_gguf
from deskside.export.gguf_tokenizer import gguf_tokenizer
from deskside.weights.load import Loaded, load_model

CONTINUED = 60


class InLlamaCpp:
    """A GGUF file in llama.cpp on one thread. cache: ggml's type number of keys and values, 0 float32, 1 float16."""

    def __init__(self, file: Path, vocab_only: bool = False, context: int = 256, cache: int = 0):
        import llama_cpp

        self.whole: Any = llama_cpp.Llama(
            str(file),
            vocab_only=vocab_only,
            n_ctx=context,
            n_batch=context,
            n_threads=1,
            n_threads_batch=1,
            n_gpu_layers=0,
            logits_all=not vocab_only,
            type_k=cache,
            type_v=cache,
            flash_attn=False,
            verbose=False,
        )
        self._is_end = llama_cpp.llama_vocab_is_eog

    def ids(self, text: str, special: bool = False, start: bool = False) -> list[int]:
        """special: whether text can contain special tokens. start: whether to add the file's first token."""
        return list(self.whole.tokenize(text.encode(), add_bos=start, special=special))

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Return the logits of every position, [tokens, vocabulary]."""
        self.whole.reset()
        self.whole.eval(ids)
        scores: NDArray[np.float32] = self.whole.scores[: len(ids)].copy()
        return scores

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Return the most likely tokens after these, ignoring end tokens."""
        self.whole.reset()
        generated = self.whole.generate(ids, temp=0.0, repeat_penalty=1.0)
        return [token for token, _ in zip(generated, range(count), strict=False)]

    @property
    def ends(self) -> set[int]:
        """Return every token at which generation stops."""
        vocab = self.whole._model.vocab
        return {number for number in range(self.whole.n_vocab()) if self._is_end(vocab, number)}


def relative_errors(ours_TV: torch.Tensor, theirs_TV: NDArray[np.float32]) -> torch.Tensor:
    """Return |theirs - ours| / |ours| for each position, [T]."""
    difference_TV = torch.from_numpy(theirs_TV) - ours_TV
    return difference_TV.norm(dim=-1) / ours_TV.norm(dim=-1)


@torch.no_grad()
def continued(loaded: Loaded, ids: list[int], count: int) -> list[int]:
    """Return the most likely tokens after these, computed by deskside."""
    all_ids = list(ids)
    for _ in range(count):
        all_ids.append(int(loaded.model(torch.tensor([all_ids]))[0, -1].argmax()))
    return all_ids[len(ids) :]


@torch.no_grad()
def row(loaded: Loaded, prompts: list[list[int]], told: list[list[int]], theirs: InLlamaCpp) -> str:
    """Return the table row of one file."""
    errors, divergences, same, kept = [], [], 0, 0
    for ids, answer in zip(prompts, told, strict=True):
        ours_TV = loaded.model(torch.tensor([ids]))[0].float()
        theirs_TV = theirs.logits(ids)
        errors.append(relative_errors(ours_TV, theirs_TV))
        log_p, log_q = ours_TV.double().log_softmax(-1), torch.from_numpy(theirs_TV).double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        same += int((ours_TV.argmax(-1) == torch.from_numpy(theirs_TV).argmax(-1)).sum())
        found = theirs.greedy(ids, CONTINUED)
        kept += next((n for n, (a, b) in enumerate(zip(answer, found, strict=True)) if a != b), CONTINUED)
    error, positions = torch.cat(errors), sum(map(len, prompts))
    return (
        f"{error.mean():.1e} | {error.max():.1e} | {torch.cat(divergences).mean():.1e} | {same} of {positions} | "
        f"{kept} of {CONTINUED * len(prompts)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument(
        "--tokens", type=int, default=250, help="tokens per prompt, including the first token"
    )
    parser.add_argument("--prompts", type=int, default=4)
    options = parser.parse_args()
    import llama_cpp

    loaded = load_model(options.model)
    tokenizer = gguf_tokenizer(loaded.tokenizer_dir, loaded.config.vocab_size, loaded.start_token)
    ids = loaded.tokenizer.encode(options.text.read_text("utf-8"), add_special_tokens=False).ids
    length = options.tokens - 1
    starts = [n * (len(ids) - length) // options.prompts for n in range(options.prompts)]
    prompts = [[loaded.start_token, *ids[start : start + length]] for start in starts]
    context = options.tokens + CONTINUED
    if context > loaded.config.max_position_embeddings:
        parser.error(f"--tokens: {loaded.config.max_position_embeddings - CONTINUED} at most with this model")
    told = [continued(loaded, prompt, CONTINUED) for prompt in prompts]
    print(f"llama-cpp-python {llama_cpp.__version__}, {len(prompts)} prompts of {options.tokens} tokens\n")
    print("| file | error, mean | error, largest | KL | same most likely token | same continuation |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for dtype in get_args(GgufType):
            saved = save_gguf(loaded.model, tokenizer, Path(folder) / dtype, dtype)
            print(f"| {dtype} | {row(loaded, prompts, told, InLlamaCpp(saved.file, context=context))} |")
            if dtype == "float32":
                halves = InLlamaCpp(saved.file, context=context, cache=1)
                print(f"| float32, cache float16 | {row(loaded, prompts, told, halves)} |")


if __name__ == "__main__":
    main()
