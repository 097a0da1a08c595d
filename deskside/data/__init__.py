"""Text to training rows: sources, tokenizer, token shards, packing, order, mixtures and the loader.

Import the module that you need. Only `loader` imports torch, so that preparing and checking data needs none.
"""
