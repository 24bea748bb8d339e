"""What the monitor could leave on a model or in the process, read before and after."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attn_monitor.capture import eager, observe
from attn_monitor.capture.kernels import relay

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_always_called",
)
LIGHTNING = {"_hparams"}
"""What Lightning itself leaves on a module whose fit was interrupted."""
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


def standing(model: nn.Module) -> dict[str, Any]:
    """Return hooks, attributes, modes and settings by name; equal before and after if nothing was left behind."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return {
        "hooks": {(name, kind): len(getattr(m, kind)) for name, m in model.named_modules() for kind in HOOKS},
        "attributes": {
            (name, key) for name, module in model.named_modules() for key in vars(module).keys() - LIGHTNING
        },
        "hooks of weights": {name: len(weight._backward_hooks or ()) for name, weight in model.named_parameters()},
        "global hooks": [len(getattr(nn.modules.module, kind)) for kind in GLOBAL_HOOKS],
        "function modes": len(_get_current_function_mode_stack()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "torch functions": torch._C._is_torch_function_all_disabled(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "threads of torch": torch.get_num_threads(),
        "held eager": len(eager._holders),
        "stance": dynamo.eval_frame._stance.stance if dynamo else "default",
        "exchanged functions": len(relay._holders) + len(relay._undo),
        "watchers": len(observe._watchers),
    }


def left(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs, by name: as it was and as it is, or what was added to a set and what is missing in it."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, was in before.items():
        if (now := after[name]) != was:
            found[name] = (now - was, was - now) if isinstance(was, set) else (was, now)
    return found
