"""Whether the logits of a rescaled head became what they were to become, told by the observations after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_monitor.head_weights import HeadWeights
from attn_monitor.records import AttentionStatistics

_CLEAR = 0.9
"""A factor from here on is too near 1 for the next logits to tell whether it had an effect."""
_FAILURES = 3
"""After this many clear clips of a head in a row without lasting effect the user is told."""
_LOOKS = 2
"""How many observations are to show the effect: a copy of the weights may come back with the optimizer's next step."""
_DOUBT = 0.5
"""By what clips in a row may have multiplied a head's weights without an effect, until it is left alone."""
_NO_LASTING_EFFECT = (
    "rescaled several times, and each time its logits were soon as large again: an optimizer with a copy of its own "
    "may put the weights back, or they grow faster than they are looked at (every_n_steps=1 observes every step)"
)
NOT_FOLLOWED = (
    "it was rescaled, and its largest logit did not go down as it should have: something between the weights and the "
    "softmax makes up for it (a normalisation), or most of the logit is a bias"
)

Gains = tuple[float, float]


@dataclass(slots=True)
class _Effect:
    """The last clear clip of a head, and what came of it.

    Attributes:
        logit_max: The largest logit before.
        lengths: The mean length of its queries times that of its keys then.
        gains: By what queries and keys were longer than what the weights put out.
        factors: By what W_q and W_k were multiplied.
        looks: How many observations followed.
        failures: How many clips in a row had no lasting effect.
        doubt: By what clips in a row multiplied the weights without any effect.
    """

    logit_max: float
    lengths: float
    gains: Gains
    factors: tuple[float, float]
    looks: int = 0
    failures: int = 0
    doubt: float = 1.0

    @property
    def small(self) -> float:
        """Half of the way from no effect to the whole of it."""
        return math.sqrt(self.factors[0] * self.factors[1])

    def is_undone(self, gains: Gains) -> bool:
        """Tell whether queries or keys are now longer, for what the weights put out, by what these became shorter."""
        return any(
            factor < 1 and now > before / math.sqrt(factor)
            for now, before, factor in zip(gains, self.gains, self.factors, strict=True)
        )


class Effects:
    """Remembers the clips of every head.

    Attributes:
        refused: Heads that must not be rescaled again, with the reason.
    """

    def __init__(self) -> None:
        self.refused: dict[tuple[str, int], str] = {}
        self._effects: dict[tuple[str, int], _Effect] = {}

    def expect(
        self, layer: str, head: int, logit_max: float, lengths: float, gains: Gains, factors: tuple[float, float]
    ) -> None:
        """Take note of a clip, if it is clear enough to be judged."""
        if factors[0] * factors[1] < _CLEAR:
            before = self._effects.get((layer, head))
            carried = (0, before.failures, before.doubt) if before else ()
            self._effects[layer, head] = _Effect(logit_max, lengths, gains, factors, *carried)

    def judge(
        self,
        largest: Mapping[str, Sequence[float]],
        lengths: Mapping[str, Sequence[float]],
        found: Mapping[str, Sequence[HeadWeights | str]],
    ) -> dict[str, str]:
        """Compare an observation with the last clips.

        A head whose logits are as large as before though its queries and keys became shorter is left alone from now
        on. One whose queries and keys are as long as before, several times in a row, is only told: where the training
        is so fast that they grow again at once, to stop would let them run away, and where something puts the weights
        back it does no harm.

        Args:
            largest: The largest logit of each head by layer.
            lengths: The mean length of its queries times that of its keys.
            found: The weights that were found in this step, of layers with a head above tau.

        Returns:
            What to say, by layer.
        """
        notes = {}
        for (layer, head), effect in self._effects.items():
            if effect.looks >= _LOOKS or head >= len(largest.get(layer, ())):
                continue
            effect.looks += 1
            large = largest[layer][head] > effect.logit_max * effect.small
            if effect.looks == 1:
                entry = found[layer][head] if layer in found else ""
                undone = isinstance(entry, HeadWeights) and effect.is_undone(entry.gains)
                if large and (undone or lengths[layer][head] <= effect.lengths * effect.small):
                    effect.doubt *= effect.factors[0] * effect.factors[1]
                else:
                    effect.doubt = 1.0
                if effect.doubt <= _DOUBT:
                    self.refused[layer, head] = NOT_FOLLOWED
            if large:
                effect.looks = _LOOKS
                effect.failures += 1
            elif effect.looks == _LOOKS:
                effect.failures = 0
            if effect.failures >= _FAILURES and (layer, head) not in self.refused:
                notes[layer] = f"head {head} was {_NO_LASTING_EFFECT}"
        return notes


def largest_logits(statistics: Mapping[str, AttentionStatistics]) -> dict[str, list[float]]:
    """Return the largest logit of each head by layer, over all calls of a module; an empty list if it is not known."""
    found: dict[str, list[float]] = {}
    for record, stats in statistics.items():
        layer = record.partition("@")[0]
        values = [] if stats.logit_max is None else stats.logit_max.tolist()
        before = found.setdefault(layer, values)
        found[layer] = [max(pair) for pair in zip(before, values, strict=False)]
    return found


def head_lengths(statistics: Mapping[str, AttentionStatistics]) -> dict[str, list[float]]:
    """Return the length of each head's queries times that of its keys by layer, in the call with the largest logit.

    It is nan where the lengths are not measured.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for record, stats in statistics.items():
        if stats.logit_max is None:
            continue
        lengths = [math.nan] * stats.heads
        if stats.q_rms is not None and stats.k_rms is not None:
            lengths = (stats.q_rms * stats.k_rms).tolist()
        layer = record.partition("@")[0]
        pairs = list(zip(stats.logit_max.tolist(), lengths, strict=True))
        before = found.setdefault(layer, pairs)
        found[layer] = [max(pair) for pair in zip(before, pairs, strict=False)]
    return {layer: [length for _, length in pairs] for layer, pairs in found.items()}
