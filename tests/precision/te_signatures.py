"""transformer-engine's public functions as their sources declare them, where the compiled parts are not installed.

`transformer_engine.pytorch` can only be imported with its compiled library. Its sources are in the plain package, so
a call can be checked against the real signature, and the real recipes (one file of plain Python) can be built.
"""

import ast
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.oracles import oracle


def folder() -> Path:
    """Return the folder of the sources. Skips or fails the test if they are not installed, see `oracle`."""
    return oracle("transformer_engine", may_be_package=True)


def signature(file: str, *path: str) -> inspect.Signature:
    """Return the signature of a function or of a class's method in a file of the package, without `self`."""
    body: list[ast.stmt] = ast.parse((folder() / file).read_text("utf-8")).body
    for name in path:
        (node,) = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name]
        body = node.body
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    assert given.vararg is None and given.kwarg is None and not given.kwonlyargs
    names = [argument.arg for argument in given.args]
    required = len(names) - len(given.defaults)
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if index < required else None,
        )
        for index, name in enumerate(names)
        if name != "self"
    ]
    return inspect.Signature(parameters)


def exported() -> set[str]:
    """Return the names that `transformer_engine.pytorch` exports."""
    tree = ast.parse((folder() / "pytorch/__init__.py").read_text("utf-8"))
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in froms for alias in node.names}


@cache
def recipes() -> ModuleType:
    """Return the real module `transformer_engine.common.recipe`."""
    name = "te_recipes_by_path"
    spec = importlib.util.spec_from_file_location(name, folder() / "common/recipe/__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look up their annotations there
    spec.loader.exec_module(module)
    return module
