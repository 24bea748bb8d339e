"""Runs an entry with and without a probe, and compares what was seen with what the model itself reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_monitor import AttentionProbe, AttentionStatistics
from tests.zoo.entry import Entry, float_outputs
from tests.zoo.truth import SEED, reported_attentions

TOLERANCE = 1e-4
"""Of entropies, in nats."""


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
        missed: Numbers of reported attentions without a record.
        extra: Records without an attention of the model's.
        difference: The largest difference of entropies.
    """

    reported: Mapping[int, tuple[str, ...]]
    returned: frozenset[str]
    missed: tuple[int, ...]
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

    def summary(self) -> str:
        shapes = {(s.head_dim, round(float(s.scale.mean()), 4) if s.scale is not None else None, s.alignment is not None) for s in self.records.values()}
        ent = [round(float(s.entropy_normalized.nanmean()), 2) if s.entropy_normalized is not None else None for s in self.records.values()]
        p = self.pairs
        return (f"rep {len(p.reported) + len(p.missed)} rec {len(self.records)} missed {p.missed} ret {len(p.returned)} extra {sorted(p.extra)} diff {p.difference:.1e} "
                f"neutral {self.neutral} shapes {shapes} ent {ent[:4]} skipped {dict(self.skipped)}")


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
    reported, returned = (
        [entry.entropy(tensor) for tensor in tensors]
        for tensors in reported_attentions(entry.model("eager"), entry.inputs())
    )
    return Findings(records, probe.skipped, pair(records, reported, returned), bare.same(watched), bare)


def pair(
    records: Mapping[str, AttentionStatistics], reported: Sequence[Tensor], returned: Sequence[Tensor]
) -> Pairs:
    """Pair records with attentions, one to one: each attention with the nearest record that is left."""
    free = {(name,): (stats.entropy, stats.rows) for name, stats in records.items()}
    largest = 0.0
    found: dict[int, tuple[str, ...]] = {}
    missed: list[int] = []
    for i, entropy in enumerate(reported):
        names, gap = _nearest(free, entropy)
        if gap > TOLERANCE:
            names, gap = _nearest(_sites_together(free), entropy)
        if gap > TOLERANCE:
            missed.append(i)
            continue
        largest = max(largest, gap)
        found[i] = names
        for name in names:
            free.pop((name,))
    others: set[str] = set()
    for entropy in returned:
        names, gap = _nearest(free, entropy)
        if gap <= TOLERANCE:
            largest = max(largest, gap)
            others.update(names)
            free.pop(names)
    extra = frozenset(name for names in free for name in names)
    return Pairs(found, frozenset(others), tuple(missed), extra, largest)


_Entropies = dict[tuple[str, ...], tuple[Tensor | None, Tensor]]


def _sites_together(free: _Entropies) -> _Entropies:
    """Pool the call sites of each module: some compute one attention in several pieces."""
    owners: dict[str, list[str]] = {}
    for (name,) in free:
        owners.setdefault(name.partition("@")[0].partition("#")[0], []).append(name)
    pooled: _Entropies = {}
    for names in owners.values():
        parts = [free[name,] for name in names]
        rows = torch.stack([rows for _, rows in parts])
        means = torch.stack([mean if mean is not None else torch.zeros(rows.shape[1]) for mean, _ in parts])
        pooled[tuple(names)] = (means * rows).sum(0) / rows.sum(0), rows.sum(0)
    return pooled


def _nearest(free: _Entropies, entropy: Tensor) -> tuple[tuple[str, ...], float]:
    gaps = {names: _gap(own, entropy) for names, (own, _) in free.items()}
    best = min(gaps, key=gaps.__getitem__, default=())
    return best, gaps.get(best, math.inf)


def _gap(own: Tensor | None, entropy: Tensor) -> float:
    if own is None or own.shape != entropy.shape:
        return math.inf
    difference = (own.double() - entropy).abs()
    both_empty = own.isnan() & entropy.isnan()
    return float(torch.where(both_empty, 0, difference.nan_to_num(nan=math.inf)).max())
