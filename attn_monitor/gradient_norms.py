"""Norms of the gradients that the optimizers step with: of everything, and of the attention of each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from attn_monitor.capture.naming import canonical_names
from attn_monitor.unseen import unseen

_OF_A_CALL = re.compile(r"([#@]\d+)+$")
"""What the name of a record has behind that of the module, where a module has several."""


class GradientNorms:
    """The norm of each parameter's gradient at one optimizer step, on its device until it is read.

    Attributes:
        unmeasured: Why gradients could not be measured, in words.
    """

    def __init__(self) -> None:
        self.unmeasured: set[str] = set()
        self._missing: set[int] = set()
        self._norms: list[tuple[list[int], Tensor]] = []

    def take(self, optimizer: torch.optim.Optimizer, *, scaled: bool = False) -> None:
        """Measure the gradients of an optimizer, without waiting for the device.

        Args:
            optimizer: The optimizer, just before its step.
            scaled: Whether the gradients still carry the factor of a `GradScaler`; they are not measured then.
        """
        groups: dict[tuple[torch.device, bool], tuple[list[int], list[Tensor]]] = {}
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            gradient = parameter.grad
            if gradient is None:
                continue
            if reason := "still scaled for float16" if scaled else _unmeasurable(parameter, gradient):
                self.unmeasured.add(reason)
                self._missing.add(id(parameter))
                continue
            key = gradient.device, gradient.dtype in (torch.float64, torch.complex128)
            keys, gradients = groups.setdefault(key, ([], []))
            keys.append(id(parameter))
            gradients.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
        with torch.no_grad(), unseen():
            for (_, double), (keys, gradients) in groups.items():
                dtype = torch.float64 if double else torch.float32  # a norm in float16 would overflow
                self._norms.append((keys, torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype))))

    def read(self, model: nn.Module, layers: Iterable[str]) -> tuple[float | None, dict[str, float | None]]:
        """Return the norm of everything and that of each layer; `None` is not measured.

        Args:
            model: The model whose modules the layers are named after.
            layers: The layers of a record.
        """
        squares = {
            key: norm * norm for keys, norms in self._norms for key, norm in zip(keys, norms.tolist(), strict=True)
        }
        found = {
            layer: self._together(squares, map(id, parameters))
            for layer, parameters in attention_parameters(model, layers).items()
        }
        return self._together(squares, [*squares, *self._missing]), found

    def clear(self) -> None:
        """Forget the step."""
        self.unmeasured.clear()
        self._missing.clear()
        self._norms.clear()

    def _together(self, squares: Mapping[int, float], parameters: Iterable[int]) -> float | None:
        keys = set(parameters)
        known = [squares[key] for key in keys if key in squares]
        return math.sqrt(sum(known)) if known and not keys & self._missing else None


def attention_parameters(model: nn.Module, layers: Iterable[str]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of the module in which each layer's attention runs.

    Where that module has none, they are those of the nearest one around it that has some; the model itself only
    counts if the attention runs in it. What was shown under a name of the user's has none.
    """
    modules: dict[str, nn.Module] = {}
    for module, name in canonical_names(model).items():
        modules.setdefault(name, module)
    root = type(getattr(model, "_orig_mod", model)).__name__
    found: dict[str, list[nn.Parameter]] = {}
    for layer in layers:
        name = layer if layer in modules else _OF_A_CALL.sub("", layer)
        if name not in modules:
            found[layer] = list(model.parameters()) if name == root else []
            continue
        own = list(modules[name].parameters())
        while not own and "." in name:
            name = name.rpartition(".")[0]
            own = list(modules[name].parameters()) if name in modules else []  # a name may have dots in it
        found[layer] = own
    return found


def _unmeasurable(parameter: Tensor, gradient: Tensor) -> str:
    """Return why the norm of a gradient cannot be told here, empty if it can."""
    if hasattr(gradient, "to_local") or getattr(
        parameter, "_fsdp_flattened", getattr(parameter, "_is_flat_param", False)
    ):
        return "sharded over processes"
    return "" if gradient.layout == torch.strided else "sparse"
