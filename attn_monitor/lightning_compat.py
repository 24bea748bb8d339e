"""Lightning's two package names, and the few private places of it this package must look at.

Each place is read by one small function, tested against the installed Lightning.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from attn_monitor.ranks import RankReduction

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def installed_callbacks() -> tuple[type, ...]:
    """Return the `Callback` class of each installed Lightning package; they are different classes.

    Raises:
        ImportError: If there is none.
    """
    found: dict[type, None] = {}
    for package in PACKAGES:
        with suppress(ImportError):
            found[import_module(package).Callback] = None
    if not found:
        raise ImportError(
            "AttentionMonitor is a Lightning callback, but neither `pytorch_lightning` nor `lightning` can be "
            "imported. Install one (`pip install pytorch-lightning`), or use `attn_monitor.AttentionProbe`, which "
            "works in any torch loop."
        )
    return tuple(found)


if TYPE_CHECKING:

    class LightningCallback(Callback):
        """A callback of every installed Lightning package."""

else:
    # `isinstance(monitor, Callback)` holds whichever package the user imports, now or later.
    LightningCallback = type("LightningCallback", installed_callbacks(), {"__module__": __name__})


def log_interval(trainer: Trainer) -> int:
    """Return the trainer's `log_every_n_steps`; 0 means that Lightning logs no step."""
    return int(getattr(trainer, "log_every_n_steps", 0) or 0)


def logged_step(trainer: Trainer) -> int:
    """Return the x value `self.log` would use now: the optimizer steps finished before, several optimizers as one.

    `trainer.global_step` is ahead by one in `on_train_batch_end` and counts every optimizer.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def accumulating(trainer: Trainer) -> bool:
    """Tell whether the current batch leaves the optimizer step open (`accumulate_grad_batches`)."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def loss_factor(trainer: Trainer, pl_module: LightningModule) -> float:
    """Return by what Lightning multiplied the user's loss before this backward pass.

    That is the scale of a `GradScaler`, and under automatic optimization the division by `accumulate_grad_batches`.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scale = float(scaler.get_scale()) if scaler is not None else 1.0
    return scale / trainer.accumulate_grad_batches if pl_module.automatic_optimization else scale


def still_scaled(trainer: Trainer, optimizer: Any) -> bool:
    """Tell whether gradients still carry the factor of a `GradScaler`: such an optimizer divides by it in its step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def callback_metrics(trainer: Trainer) -> dict[str, Tensor]:
    """Return the live dictionary behind `trainer.callback_metrics`.

    The property itself computes the user's pending epoch metrics on every access.
    """
    metrics: dict[str, Tensor] = trainer._logger_connector._callback_metrics
    return metrics


def stopping_waits(trainer: Trainer) -> str:
    """Name what keeps `trainer.should_stop` from taking effect now, empty if nothing does."""
    if trainer.fit_loop._can_stop_early:
        return ""
    limits: dict[str, Any] = {"min_epochs": trainer.fit_loop.min_epochs, "min_steps": trainer.fit_loop.min_steps}
    return " and ".join(f"{name}={value}" for name, value in limits.items() if value)


def any_rank(trainer: Trainer, flag: bool) -> bool:
    """Tell whether a flag is up on any rank; every rank has to ask."""
    return bool(trainer.strategy.reduce_boolean_decision(flag, all=False)) if trainer.world_size > 1 else flag


def rank_reduction(trainer: Trainer) -> RankReduction | None:
    """Return what pools the records of the trainer's processes; `None` on a single one, or without `torch.distributed`.

    Under tensor parallelism several ranks see the same batches.
    """
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    mesh: DeviceMesh | None = getattr(trainer.strategy, "_device_mesh", None)
    parallel = mesh is not None and "tensor_parallel" in (mesh.mesh_dim_names or ())
    return RankReduction(duplicate=mesh is not None and parallel and mesh["tensor_parallel"].get_local_rank() > 0)


def run_directory(trainer: Trainer) -> str:
    """Return the folder of the run, the same on every rank: that of the first logger, or the trainer's root.

    Every rank has to ask: `trainer.log_dir` is a broadcast.
    """
    return trainer.log_dir or trainer.default_root_dir


def callbacks_of(trainer: Trainer) -> list[Any]:
    """Return the callbacks of a trainer, which its class does not declare."""
    callbacks: list[Any] = vars(trainer)["callbacks"]
    return callbacks
