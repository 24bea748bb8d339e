"""Runs an entry with and without a probe, and compares what was seen with what the model itself reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.zoo.entry import Entry, float_outputs
from tests.zoo.truth import SEED

TOLERANCE = 1e-4
"""Of entropies, in nats."""
_Entropies: TypeAlias = dict[tuple[str, ...], tuple[Tensor, Tensor]]
"""The entropy per head and the rows per head of one or several records."""


@dataclass(frozen=True)
class Run:
    """What one forward and backward pass gave."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    random: Tensor

    def same(self, other: Run) -> bool:
        """Tell whether both are equal to the bit."""
        return (
            len(self.outputs) == len(other.outputs)
            and all(_identical(a, b) for a, b in zip(self.outputs, other.outputs, strict=True))
            and self.gradients.keys() == other.gradients.keys()
            and all(_identical(grad, other.gradients[name]) for name, grad in self.gradients.items())
            and torch.equal(self.random, other.random)
        )


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@dataclass(frozen=True)
class Pairs:
    """What belongs together.

    Attributes:
        reported: Records by the number of the attention that the model reports.
        returned: Records of attentions that the model does not report, but a module of it returns.
        further: Records of attentions about which the model says nothing at all, though there is such a softmax.
        missed: Numbers of reported attentions without a record.
        unclaimed: How many other softmaxes of four dimensions have no record.
        extra: Records with nothing like them in the model.
        difference: The largest difference of entropies.
    """

    reported: Mapping[int, tuple[str, ...]]
    returned: frozenset[str]
    further: frozenset[str]
    missed: tuple[int, ...]
    unclaimed: int
    extra: frozenset[str]
    difference: float


@dataclass(frozen=True)
class Findings:
    """What was found in one model under one implementation.

    Attributes:
        records: What the probe measured, one record per call.
        skipped: What it named as not measured.
        pairs: What of it the model reports too.
        neutral: Whether the probe changed nothing.
        run: The run without a probe.
    """

    records: Mapping[str, AttentionStatistics]
    skipped: Mapping[str, str]
    pairs: Pairs
    neutral: bool
    run: Run


def run(model: nn.Module, inputs: Mapping[str, Any], probe: AttentionProbe | None = None) -> Run:
    """Run forward and backward from the same random state, perhaps under a probe."""
    torch.manual_seed(SEED)
    model.zero_grad(set_to_none=True)
    if probe is not None:
        with probe:
            outputs = _backward(model(**inputs))
    else:
        outputs = _backward(model(**inputs))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Run(outputs, gradients, torch.get_rng_state())


def _backward(output: Any) -> list[Tensor]:
    outputs = float_outputs(output)
    loss = sum((out.float().square().mean() for out in outputs), torch.zeros(()))
    loss.backward()
    return [out.detach() for out in outputs]


def examine(entry: Entry, implementation: str) -> Findings:
    """Find out what a probe sees of an entry."""
    bare = run(entry.model(implementation), entry.inputs())
    model = entry.model(implementation)
    probe = AttentionProbe(model, per_call=True)
    watched = run(model, entry.inputs(), probe)
    records = probe.compute()
    attentions = map(entry.entropies, entry.truth(entry.model(entry.implementations[0]), entry.inputs()))
    return Findings(records, probe.skipped, pair(records, *attentions), bare.same(watched), bare)


def pair(
    records: Mapping[str, AttentionStatistics],
    reported: Sequence[Tensor],
    returned: Sequence[Tensor],
    softmaxes: Sequence[Tensor],
) -> Pairs:
    """Pair records with attentions, one to one: each attention with the nearest record that is left."""
    # A layer whose rows have one key each has no entropy at all.
    every: _Entropies = {
        (name,): (stats.entropy if stats.entropy is not None else torch.full_like(stats.rows, math.nan), stats.rows)
        for name, stats in records.items()
    }
    free = dict(every)
    found: dict[int, tuple[str, ...]] = {}
    gaps: list[float] = []
    for i, entropy in enumerate(reported):
        names = _claim(free, entropy, gaps) or _claim(_sites_together(free), entropy, gaps)
        for name in names:
            free.pop((name,))
        if names:
            found[i] = names
    others: list[frozenset[str]] = []
    for attentions in (returned, softmaxes):
        claimed: set[str] = set()
        for entropy in attentions:
            if names := _claim(free, entropy, gaps):
                claimed.update(names)
                free.pop(names)
        others.append(frozenset(claimed))
    whole = every | _sites_together(every)
    return Pairs(
        reported=found,
        returned=others[0],
        further=others[1],
        missed=tuple(i for i in range(len(reported)) if i not in found),
        unclaimed=sum(1 for entropy in softmaxes if not _claim(whole, entropy, [])),
        extra=frozenset(name for names in free for name in names),
        difference=max(gaps, default=0.0),
    )


def _claim(free: _Entropies, entropy: Tensor, gaps: list[float]) -> tuple[str, ...]:
    """Return the names of the record with this entropy, none if there is none."""
    distances = {names: _gap(own, entropy) for names, (own, _) in free.items()}
    best = min(distances, key=distances.__getitem__, default=())
    if not best or distances[best] > TOLERANCE:
        return ()
    gaps.append(distances[best])
    return best


def _sites_together(free: _Entropies) -> _Entropies:
    """Pool the call sites of each module: some compute one attention in several pieces."""
    owners: dict[str, list[str]] = {}
    for (name,) in free:
        owners.setdefault(name.partition("@")[0].partition("#")[0], []).append(name)
    pooled: _Entropies = {}
    for names in owners.values():
        parts = [free[name,] for name in names]
        if len({len(rows) for _, rows in parts}) == 1:
            rows = torch.stack([rows for _, rows in parts])
            means = torch.stack([mean for mean, _ in parts])
            pooled[tuple(names)] = (means * rows).sum(0) / rows.sum(0), rows.sum(0)
    return pooled


def _gap(own: Tensor, entropy: Tensor) -> float:
    if own.shape != entropy.shape:
        return math.inf
    difference = (own.double() - entropy).abs()
    both_empty = own.isnan() & entropy.isnan()
    return float(torch.where(both_empty, 0, difference.nan_to_num(nan=math.inf)).max())
