"""A tokenizer in the form of SentencePiece's, as the models of Llama 2, Mistral and Phi-3 have it."""

from tokenizers import Tokenizer, decoders, models, normalizers

WORDS = ("the", "cat", "sat", "▁▁▁")


def make_sentencepiece() -> Tokenizer:
    """Return a tokenizer of bytes and `WORDS`, each also with a space (U+2581) before it.

    Its normalizer adds a space at the beginning of a text, and its decoder drops it.
    """
    special = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    words = [pair for word in WORDS for pair in ((word, -2.0), (f"▁{word}", -1.0))]
    tokenizer = Tokenizer(models.Unigram([*special, *pieces, *words, ("▁", -3.0)], 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
