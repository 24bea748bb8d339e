"""Which exceptions a function of the package raises, read from its source."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Function = Callable[..., Any]


def raised(function: Function, owner: type | None = None) -> set[str]:
    """Return the names of the exceptions that leave a function.

    Followed are calls of functions by name and of methods of `self`, as far as they lead to functions of the package or
    of the function's own module; not the making of objects, which mostly is from what was checked before. What `try`
    catches does not leave it.

    Args:
        function: The function.
        owner: The class it is a method of.
    """
    return {kind.__name__ for kind in _leaving(function, owner, frozenset())}


def raised_by_making(kind: type) -> set[str]:
    """Return the names of the exceptions that leave the call of a class."""
    return {name for function in _makers(kind) for name in raised(function, kind)}


def _makers(kind: type) -> list[Function]:
    """Return what runs when a class is called, but for what a dataclass has written by itself."""
    found = [vars(kind).get(name) for name in ("__init__", "__post_init__")]
    return [
        function for function in found if inspect.isfunction(function) and function.__code__.co_filename != "<string>"
    ]


def _leaving(function: Function, owner: type | None, callers: frozenset[Function]) -> set[type[BaseException]]:
    if function in callers:
        return set()
    return _of_body(_tree(function).body, function, owner, callers | {function})


@functools.cache
def _tree(function: Function) -> ast.FunctionDef:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _of_body(
    nodes: Iterable[ast.AST], function: Function, owner: type | None, callers: frozenset[Function]
) -> set[type[BaseException]]:
    found: set[type[BaseException]] = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue  # made here, called elsewhere
        if isinstance(node, ast.Try):
            found |= _of_try(node, function, owner, callers)
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            found |= _kinds(node.exc.func if isinstance(node.exc, ast.Call) else node.exc, function)
        if isinstance(node, ast.Call):
            for called, its_owner in _called(node.func, function, owner):
                found |= _leaving(called, its_owner, callers)
        found |= _of_body(ast.iter_child_nodes(node), function, owner, callers)
    return found


def _of_try(
    node: ast.Try, function: Function, owner: type | None, callers: frozenset[Function]
) -> set[type[BaseException]]:
    left = _of_body(node.body, function, owner, callers)
    found: set[type[BaseException]] = set()
    for handler in node.handlers:
        kinds = tuple(_kinds(handler.type, function)) if handler.type is not None else (BaseException,)
        caught = {kind for kind in left if issubclass(kind, kinds)}
        left -= caught
        if any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(handler)):
            found |= caught
        found |= _of_body(handler.body, function, owner, callers)
    return found | left | _of_body([*node.orelse, *node.finalbody], function, owner, callers)


def _kinds(node: ast.expr, function: Function) -> set[type[BaseException]]:
    """Return the exceptions that an expression names; a variable that holds one names none."""
    names = node.elts if isinstance(node, ast.Tuple) else [node]
    found = [_named(name.id, function) for name in names if isinstance(name, ast.Name)]
    return {kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseException)}


def _called(node: ast.expr, function: Function, owner: type | None) -> Iterator[tuple[Function, type | None]]:
    found: Any = None
    if isinstance(node, ast.Name):
        found, owner = _named(node.id, function), None
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        found = getattr(owner, node.attr, None)
    place = getattr(found, "__module__", None) or ""
    if not (place.startswith("attn_monitor") or place == function.__module__):
        return
    if inspect.isfunction(found):
        yield inspect.unwrap(found), owner


def _named(name: str, function: Function) -> Any:
    return function.__globals__.get(name, getattr(builtins, name, None))
