"""Objectives of post-training (SFT, DPO, GRPO) for the training loop, and their data."""
