"""Evaluation: bits per byte of prepared data and of plain text."""
