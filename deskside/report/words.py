"""Numbers in words: every figure that a person reads carries its unit and where it came from."""

from typing import Any

from deskside.run.record import mapping, number, text

ORIGINS = ("measured", "modelled", "published")


def count(value: float | None) -> str:
    """12,345 below a hundred thousand, then 123.5 K, 1.23 M, 4.56 B, 7.89 T."""
    if value is None:
        return "not known"
    for letter, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if abs(value) >= 0.9995 * scale:
            return (
                f"{value / scale:.3g} {letter}"
                if abs(value) < 999.5 * scale
                else f"{value / scale:,.0f} {letter}"
            )
    return f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """3.2 s, 4 min 05 s, 2 h 07 min, 3 d 04 h."""
    if value is None:
        return "not known"
    if value < 99.95:
        return f"{value:.3g} s" if value < 9.995 else f"{value:.1f} s"
    whole = round(value)
    for (big, size), (small, part) in (
        (("min", 60), ("s", 1)),
        (("h", 3600), ("min", 60)),
        (("d", 86400), ("h", 3600)),
    ):
        if whole < size * 100 or big == "d":
            major, rest = divmod(round(whole / part) * part, size)
            return f"{major} {big} {rest // part:02d} {small}"
    raise AssertionError("days take everything")


def plain(value: object) -> str:
    """Any JSON value, short: true, none, 0.0003, [1, 2], key: value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 10_000 else f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(plain(item) for item in value) or "(empty)"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {plain(item)}" for key, item in value.items()) or "(empty)"
    return str(value)


def label(key: str) -> str:
    """gpu_memory_gib -> gpu memory gib: a JSON key as words."""
    return key.replace("_", " ").replace(".", ": ")


def origin(value: object) -> str:
    """The word of provenance inside a JSON object, or the empty text."""
    fields = mapping(value)
    for key in ("provenance", "origin", "source"):
        if text(fields.get(key)) in ORIGINS:
            return text(fields[key])
    return ""


def facts(values: dict[str, Any], otherwise: str, prefix: str = "") -> list[tuple[str, str, str]]:
    """(name, value, provenance) of every leaf of a JSON object.

    An object {"value": 812, "unit": "TFLOP/s", "provenance": "measured"} is one leaf. A number without a provenance
    of its own takes that of the object around it, and `otherwise` outside of any. Texts carry none.
    """
    word = origin(values) or otherwise
    rows = []
    for key, value in values.items():
        name = f"{prefix}{label(key)}"
        if key in ("provenance", "origin", "source") and value in ORIGINS:
            continue
        if isinstance(value, dict) and "value" in value:
            unit = text(value.get("unit"))
            rows.append((name, f"{plain(value['value'])} {unit}".strip(), origin(value) or word))
        elif isinstance(value, dict) and value:
            rows += facts(value, word, f"{name}: ")
        else:
            rows.append((name, plain(value), word if number(value) is not None else ""))
    return rows
