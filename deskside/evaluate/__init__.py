"""Evaluation: bits per byte, and tasks with multiple-choice, generated or executed answers."""
