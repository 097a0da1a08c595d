"""The path from text or conversations to training rows: sources, tokenizer, shards, packing, order, mixtures, loader.

Import the module that you need. Only `loader` imports torch, so that data can be prepared and checked without it.
"""
