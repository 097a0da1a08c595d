"""Extraction of the answer from generated text."""

from hypothesis import given
from hypothesis import strategies as st

from deskside.evaluate.scoring import code_blocks, same_words


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    code_blocks(text)


def test_same_words() -> None:
    assert same_words(" The Onion.\n", ("onion",))
    assert same_words("D-Day", ("d day", "DDay"))
    assert not same_words("onions", ("onion",))


def test_code_blocks() -> None:
    text = "Sure:\n```python\ndef f():\n    return 1\n```\nDone ```x```"
    assert code_blocks(text) == ["def f():\n    return 1\n"]
    assert code_blocks("```\nx = 1") == ["x = 1"]
    shell = "```bash\npip install x\n```\n"
    assert code_blocks(f"{shell}Then:\n```python\nx = 1\n```\n{shell}Done") == ["x = 1\n"]
    assert code_blocks("def f(): pass") == []
