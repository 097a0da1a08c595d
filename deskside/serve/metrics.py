"""Counters of the engine in Prometheus' text format, for /metrics."""

from deskside.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(engine: Engine) -> str:
    """Return the metrics. Reading them does not wait for the engine's thread."""
    counts = engine.counts
    rows = [
        ("prompt_tokens_total", "counter", "tokens of prompts of admitted answers", counts.prompt_tokens),
        (
            "cached_prompt_tokens_total",
            "counter",
            "tokens of these prompts that were found in the prefix cache",
            counts.cached_tokens,
        ),
        ("generated_tokens_total", "counter", "tokens of answers", counts.generated_tokens),
        ("evicted_pages_total", "counter", "cached pages that gave way to new ones", engine.evicted_pages),
        ("steps_total", "counter", "steps of the engine", counts.steps),
        ("running_answers", "gauge", "answers with a place in the batch", engine.num_running),
        ("waiting_answers", "gauge", "answers that wait for a place or for memory", engine.num_waiting),
        ("free_cache_tokens", "gauge", "tokens that the key-value cache has room for", engine.free_tokens),
    ]
    return "".join(
        f"# HELP deskside_{name} {text}\n# TYPE deskside_{name} {kind}\ndeskside_{name} {value}\n"
        for name, kind, text, value in rows
    )
