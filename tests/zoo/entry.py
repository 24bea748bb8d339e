"""What an entry of the zoo is: a real architecture as data, built from a tiny random config."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.truth import Attentions, entropy_per_head, reported_attentions

Inputs = Callable[[], dict[str, Any]]
Truth = Callable[[nn.Module, Mapping[str, Any]], Attentions]
Shape = tuple[int, float | None]
"""The head dimension, and the scale where it is not the textbook's."""


@dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        name: How it is listed.
        build: Makes the model for an implementation of attention, with the random weights of the current seed.
        inputs: Makes the keyword arguments of its forward.
        implementations: The implementations of attention it has.
        shapes: Head dimension and scale by a glob of the record's name, as the config has them.
        unseen: For each reported attention that is not measured, words of the reason that `skipped` must give.
        told: Whether `skipped` names attention that the model does not report either.
        extra: Globs of records of which the model returns no probabilities, and why that is right.
        pieces: Softmaxes that are a part of an attention, or have their heads elsewhere, so that only what the model
            reports can be compared.
        reported: Turns what the model reports into probabilities; `None` if it reports something else.
        truth: Finds out what there is to be seen.
        training: Whether to run it in training mode.
        repeatable: Whether two runs without a probe give the same: code compiled by torch.jit changes as it gets warm.
        note: What to know about it.
        unfactored: Globs of records whose scores are no longer those of one query and one key.
        library: Where it is from.
        gain: The spread of the weights relative to fan-in scaling, so that no attention is uniform.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: Inputs
    implementations: tuple[str, ...] = ("eager", "sdpa")
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    told: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)
    pieces: int = 0
    reported: Callable[[Tensor], Tensor] | None = lambda tensor: tensor
    truth: Truth = reported_attentions
    training: bool = True
    repeatable: bool = True
    note: str = ""
    unfactored: Sequence[str] = ()
    library: str = "transformers"
    gain: float = 1.4

    def model(self, implementation: str) -> nn.Module:
        """Return the model in training mode without dropout, its weights the same for every implementation."""
        torch.manual_seed(0)
        model = self.build(implementation)
        enliven(model, self.gain)
        without_dropout(model)
        return model.train(self.training)

    def shape(self, record: str) -> tuple[int, float]:
        """Return the head dimension and the scale that the config gives a record; nan for a scale that is learned."""
        for pattern, (width, scale) in self.shapes.items():
            if fnmatchcase(record, pattern):
                return width, 1 / math.sqrt(width) if scale is None else scale
        raise KeyError(f"{self.name} has no shape for {record}")

    def entropies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the entropy per head of each attention that the model reports."""
        make = self.reported
        return [] if make is None else [entropy_per_head(make(tensor)) for tensor in tensors]


def transformers(config: str, model: str, *, settings: Mapping[str, Any]) -> Callable[[str], nn.Module]:
    """Return what builds a model of the transformers library.

    Args:
        config: The name of the config class.
        model: The name of the model class.
        settings: Arguments of the config; those of configs inside it as mappings.
    """

    def build(implementation: str) -> nn.Module:
        library: Any = importlib.import_module("transformers")
        # The library writes into what it is given: also the implementation, into the config of a model built before.
        made = getattr(library, config)(**copy.deepcopy(dict(settings)))
        built: nn.Module = getattr(library, model)._from_config(made, attn_implementation=implementation)
        return built

    return build


def enliven(model: nn.Module, gain: float) -> None:
    """Give the matrices larger weights, and the vectors some life: fresh biases are 0 and fresh norms are 1."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # each once, also where modules share it
        if not parameter.is_floating_point():
            continue
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.data.copy_(values * gain / math.sqrt(math.prod(parameter.shape[1:])))
        elif parameter.dim() == 1:
            parameter.data.add_(0.2 * values)


def without_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: the attentions a model reports are those after dropout."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if isinstance(module, (nn.Dropout, nn.Dropout2d, nn.Dropout3d)):
            module.p = 0.0


# -- inputs ---------------------------------------------------------------------------------------------------------

BATCH, LENGTH, VOCABULARY = 2, 9, 99


def tokens(length: int = LENGTH, *, padding: int = 3, prefix: str = "", **more: Any) -> Inputs:
    """Return token ids whose second item is padded at the end."""

    def make() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(4, VOCABULARY, (BATCH, length), generator=generator)
        mask = torch.ones(BATCH, length, dtype=torch.long)
        if padding:
            mask[1, -padding:] = 0
        inputs = {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}
        return {**inputs, **{name: made(value) for name, value in more.items()}}

    return make


def translation(length: int = 7, **more: Any) -> Inputs:
    """Return token ids for an encoder and a decoder."""
    return both(tokens(**more), tokens(length, padding=2, prefix="decoder_"))


def images(size: int = 32, *, name: str = "pixel_values", lead: tuple[int, ...] = (BATCH, 3), **more: Any) -> Inputs:
    """Return random images, or anything else of square slices."""
    return noise(name, (*lead, size, size), **more)


def noise(name: str, shape: tuple[int, ...], **more: Any) -> Inputs:
    """Return a random tensor."""

    def make() -> dict[str, Any]:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        return {name: values, **{key: made(value) for key, value in more.items()}}

    return make


def both(*inputs: Inputs) -> Inputs:
    """Return the arguments of several together."""
    return lambda: {name: value for make in inputs for name, value in make().items()}


def made(value: Any) -> Any:
    """Return a value, made anew where it is a function."""
    return value() if callable(value) else value


def float_outputs(output: Any) -> list[Tensor]:
    """Return the floating-point tensors that a gradient reaches, in what a model returned."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.requires_grad else []
    if isinstance(output, Mapping):
        return [found for value in output.values() for found in float_outputs(value)]
    if isinstance(output, (list, tuple)):
        return [found for value in output for found in float_outputs(value)]
    return []
