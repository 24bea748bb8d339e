"""One training, and what is recorded of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.alarms.data import batches
from tests.alarms.models import Attention, model
from tests.alarms.recipes import Recipe

Array = npt.NDArray[np.float64]
BETAS = (0.9, 0.95)
SHARP_ROWS = "sharp_rows"


@dataclass(frozen=True)
class Record:
    """What a training left behind.

    Attributes:
        recipe: What was trained.
        loss: Of every step, up to one that is not finite.
        gradient_norm: Of all parameters, of every step.
        steps: Which steps were observed.
        statistics: By name, of each observation, layer and head; `sharp_rows` is the share of rows whose largest
            probability exceeds 0.95.
        keys: The number of keys.
    """

    recipe: Recipe
    loss: Array
    gradient_norm: Array
    steps: npt.NDArray[np.int64]
    statistics: Mapping[str, Array]
    keys: int


def train(recipe: Recipe) -> Record:
    """Train with AdamW, and watch every few steps."""
    network = model(recipe)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.lr, betas=BETAS, weight_decay=0.0, fused=True)
    probe = AttentionProbe(network)
    losses, norms, steps, keys = [], [], [], 0
    observed: defaultdict[str, list[Array]] = defaultdict(list)
    for step, (given, wanted) in enumerate(batches(recipe)):
        watched = step % recipe.setting.every == 0
        for attention in network.attentions:
            attention.looking = watched
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, (step + 1) / recipe.setting.warmup)
        if watched:
            probe.reset()
            probe.attach()
        try:
            loss = F.cross_entropy(network(given), wanted)
            optimizer.zero_grad()
            loss.backward()
        finally:
            probe.detach()
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        losses.append(float(loss.detach()))
        if watched:
            steps.append(step)
            layers = probe.compute()
            keys = max(stats.keys for stats in layers.values())
            for name, values in observation(layers, network.attentions).items():
                observed[name].append(values)
        if not math.isfinite(losses[-1]):
            break
        optimizer.step()
    return Record(
        recipe,
        np.array(losses),
        np.array(norms),
        np.array(steps),
        {name: np.stack(values) for name, values in observed.items()},
        keys,
    )


def observation(layers: Mapping[str, AttentionStatistics], attentions: list[Attention]) -> dict[str, Array]:
    """Return what was seen at one step, [layers, heads] by name."""
    measured = [stats.measured() for stats in layers.values()]
    found = {name: np.stack([values[name].double().numpy() for values in measured]) for name in measured[0]}
    found[SHARP_ROWS] = np.stack([attention.sharp_rows().double().numpy() for attention in attentions])
    return found
