"""What is public says what it takes, gives and raises: shapes, units, errors, an example that runs, and sources.

Public is what `docs/reference.md` lists, with the public methods and properties of its classes; what a training loop
calls (`on_train_start`, `state_dict`) is documented by that loop and needs a sentence only.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_monitor
import attn_monitor.functional
from attn_monitor.catalog import STATISTICS
from attn_monitor.integrations.transformers import AttentionMonitorCallback
from tests.raising import raised, raised_by_making

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"^(Args|Attributes|Example|Raises|Returns):$", re.MULTILINE)
ENTRY = re.compile(r"^    \*{0,2}(\w+): ((?:.|\n(?!    \S|\S))*)", re.MULTILINE)
SENTENCE = re.compile(r"^[A-Z*`][^\n]*(?:\n[^\n]+)*?[.:](?:$|\s)")
SHAPE = re.compile(r"\[[^\]\n]*\b[A-Z1]\b[^\]\n]*\]|0-dim|[Bb]roadcastable to|number of axes|of \w+ dimensions")
UNIT = re.compile(r"\bnats\b|\bunits?\b|pure number|\bratio\b|multiplied|number of (?:query )?heads|relative to")
FORMULA = re.compile(r"sqrt\(|\w\^|\bln [A-Zn]\b|tanh\(|<-")
"""What is no plain product: someone has derived it, and who reads it wants to know where."""


@dataclass(frozen=True)
class Public:
    """A public class, function, method or property."""

    name: str
    object: Any
    owner: type | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """What is called, or read."""
        found: Any = self.object.fget if isinstance(self.object, property) else self.object
        return found

    @property
    def parts(self) -> dict[str, str]:
        """The sections of the docstring by their headings; what is before them has none."""
        before, *others = SECTION.split(inspect.cleandoc(self.object.__doc__ or ""))
        return {"": before, **dict(zip(others[::2], others[1::2], strict=True))}

    def entries(self, *sections: str) -> dict[str, str]:
        """The named entries of sections."""
        return {name: text for section in sections for name, text in ENTRY.findall(f"\n{self.parts.get(section, '')}")}


def members(owner: type) -> Iterator[Public]:
    """Yield the public methods and properties of a class that are ours."""
    ours = [base for base in owner.__mro__ if base.__module__.startswith("attn_monitor")]
    names = dict.fromkeys(name for base in ours for name in vars(base) if not name.startswith("_"))
    for name in names:
        found = inspect.getattr_static(owner, name)
        if inspect.isfunction(found) or isinstance(found, (property, staticmethod, classmethod)):
            yield Public(f"{owner.__name__}.{name}", found, owner)


def listed() -> list[Public]:
    """Return what the reference lists."""
    paths = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text("utf-8"), re.MULTILINE)
    parts = [path.rpartition(".") for path in paths]
    return [Public(name, getattr(import_module(module), name)) for module, _, name in parts]


TOP = listed()
MEMBERS = [member for one in TOP if inspect.isclass(one.object) for member in members(one.object)]
LOOPS = re.compile(r"^on_|^(?:start|end)_(?:stage|batch)$|^(?:load_)?state_dict$|^state_key$|^teardown$")
"""What a training loop calls: the filter of mkdocs.yml leaves these out, too."""
OWN = [one for one in MEMBERS if not LOOPS.search(one.name.partition(".")[2])]
DETAILED = [*TOP, *OWN]


def lacks_sentence(one: Public) -> list[str]:
    return [] if SENTENCE.match(one.parts[""].strip()) else ["a first sentence"]


def lacks_arguments(one: Public) -> list[str]:
    """Return the parameters without an entry, tensors without a shape, and entries without a parameter."""
    plain_error = (
        inspect.isclass(one.object) and issubclass(one.object, Exception) and "__init__" not in vars(one.object)
    )
    if isinstance(one.object, property) or plain_error:
        return []
    parameters = dict(inspect.signature(one.object).parameters)
    if one.owner is not None and not isinstance(one.object, staticmethod):
        parameters.pop("self")
    told = one.entries("Args", "Attributes")
    missing = [name for name in parameters if name not in told and name not in STATISTICS]
    shapeless = [
        f"the shape of {name}"
        for name, text in told.items()
        if name in parameters and re.search(r"\bTensor\b", str(parameters[name].annotation)) and not SHAPE.search(text)
    ]
    unknown = [f"a parameter for the entry {name}" for name in one.entries("Args") if name not in parameters]
    return [*missing, *shapeless, *unknown]


def lacks_result(one: Public) -> list[str]:
    """Return whether what comes back is not described, or has no shape or unit."""
    if inspect.isclass(one.object):
        return []
    kind = str(one.function.__annotations__.get("return"))
    if kind == "None":
        return []
    told = one.parts.get("Returns", "")
    if not told and (isinstance(one.object, property) or re.match(r"Return |Tell ", one.parts[""])):
        told = one.parts[""]
    if not told.strip():
        return ["what it returns"]
    tensors = re.search(r"\bTensor\b|AttentionStatistics", kind) is not None
    numbers = tensors or re.search(r"\b(?:float|int)\b", kind) is not None
    lacking = ["the shape"] if tensors and not SHAPE.search(told) else []
    return lacking + (["the unit"] if numbers and not UNIT.search(told) else [])


def lacks_errors(one: Public) -> list[str]:
    """Return the exceptions that it raises itself, or in what it calls by name, and does not mention."""
    if inspect.isclass(one.object):
        found = raised_by_making(one.object)
    else:
        found = raised(inspect.unwrap(one.function), one.owner)
    return sorted(found - one.entries("Raises").keys())


def lacks_example(one: Public) -> list[str]:
    examples = doctest.DocTestParser().get_examples(one.object.__doc__ or "")
    return [] if any(example.want for example in examples) else ["an example with a result"]


def lacks_source(one: Public) -> list[str]:
    text = "".join(part for heading, part in one.parts.items() if heading != "Example")
    return ["Source: ..."] if FORMULA.search(text) and not re.search(r"^Source: \S", text, re.MULTILINE) else []


@pytest.mark.parametrize(
    ("check", "subjects"),
    [
        (lacks_sentence, [*TOP, *MEMBERS]),
        (lacks_arguments, DETAILED),
        (lacks_result, DETAILED),
        (lacks_errors, DETAILED),
        (lacks_example, TOP),
        (lacks_source, DETAILED),
    ],
)
def test_the_docstrings_lack_nothing(check: Callable[[Public], list[str]], subjects: list[Public]) -> None:
    assert {one.name: lacking for one in subjects if (lacking := check(one))} == {}


def test_the_reference_lists_every_public_name() -> None:
    names = [name for name in attn_monitor.__all__ if name != "__version__"]
    public = [getattr(attn_monitor, name) for name in names]
    public += [getattr(attn_monitor.functional, name) for name in attn_monitor.functional.__all__]
    assert len(public) > 15
    assert (len(TOP) > 20, len(OWN) > 20) == (True, True)
    assert [found for found in [*public, AttentionMonitorCallback] if found not in [one.object for one in TOP]] == []


def test_the_filter_of_the_site_and_ours_agree() -> None:
    """What the site leaves out as a matter of the loops is what is not checked in detail here."""
    [line] = re.findall(r"^ +filters: \[(.*)\]", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    hidden = [pattern.removeprefix("!") for pattern in re.findall(r'"([^"]+)"', line)]
    for one in MEMBERS:
        name = one.name.partition(".")[2]
        assert bool(LOOPS.search(name)) == any(re.search(pattern, name) for pattern in hidden), one.name


def sloppy(x: Tensor, factor: float) -> Tensor:
    """multiply by 2^factor, no sentence

    Args:
        x: A tensor.
        other: Is no parameter.

    Returns:
        The product.
    """
    if x.ndim != 3:
        raise ValueError
    return x * factor


class Sloppy:
    """Holds numbers.

    Args:
        numbers: They.

    Example:
        >>> numbers = Sloppy([2.0, 3.0])
    """

    def __init__(self, numbers: list[float]) -> None:
        self._set(numbers)

    def _set(self, numbers: list[float]) -> None:
        try:
            self.numbers = torch.tensor(numbers)
        except RuntimeError as error:
            raise TypeError("numbers") from error

    def first(self) -> float:
        """Take the first one."""
        return float(self.numbers[0])

    @property
    def largest(self) -> Tensor:
        """The largest of them."""
        return self.numbers.max()


def test_the_checks_find_what_is_missing() -> None:
    function, kind = Public("sloppy", sloppy), Public("Sloppy", Sloppy)
    assert lacks_sentence(function) == ["a first sentence"]
    assert lacks_arguments(function) == ["factor", "the shape of x", "a parameter for the entry other"]
    assert lacks_result(function) == ["the shape", "the unit"]
    assert lacks_errors(function) == ["ValueError"]
    assert lacks_example(function) == lacks_example(kind) == ["an example with a result"]
    assert lacks_source(function) == ["Source: ..."]
    assert lacks_errors(kind) == ["TypeError"]
    first, largest = (Public(f"Sloppy.{name}", vars(Sloppy)[name], Sloppy) for name in ("first", "largest"))
    assert lacks_result(first) == ["what it returns"]
    assert lacks_result(largest) == ["the shape", "the unit"]
