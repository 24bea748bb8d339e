"""The causes of docs/events.md, with what the events say helps, from the code that says it."""

from __future__ import annotations

from attn_monitor import diagnosis
from tests.docs_pages.blocks import DOCS, filled, row_of, table_of

PAGE = DOCS / "events.md"
ARXIV = "[arXiv:{0}](https://arxiv.org/abs/{0})"
DEFINITION = "the definition above"
_WORTSMAN, _HENRY, _DEHGHANI, _KIMI = map(ARXIV.format, ("2309.14322", "2010.04245", "2302.05442", "2507.20534"))
CAUSES = [
    (
        "the scale is missing, doubled, inverted",
        diagnosis.SCALE,
        f"Vaswani et al. 2017, {ARXIV.format('1706.03762')}, section 3.2.1",
    ),
    (
        "`q_rms` or `k_rms` grew",
        diagnosis.NORMS,
        f"Wortsman et al. 2023, {_WORTSMAN} (logits grow with the learning rate, warm-up and QK-norm widen what is "
        f"stable); Henry et al. 2020, {_HENRY}, and Dehghani et al. 2023, {_DEHGHANI} (QK-norm); Kimi K2 2025, {_KIMI} "
        "([QK-clip](qk_clip.md))",
    ),
    (
        "`alignment` grew: queries and keys turned towards the same few directions",
        diagnosis.DIRECTIONS,
        f"Zhai et al. 2023, {ARXIV.format('2303.06296')} (a few directions carry the collapse of entropy); "
        f"Gemma 2 2024, {ARXIV.format('2408.00118')} (softcap 50)",
    ),
    ("the rest grew, which is what is added to the products", diagnosis.ADDED, DEFINITION),
    (
        "`q_rms`, `k_rms` or `alignment` is large at the first observation already",
        f"{diagnosis.INITIAL}: nothing has grown yet",
        DEFINITION,
    ),
    (
        "logits that were shown without query and key (`observe_logits`) grew; no more can be known",
        diagnosis.TEMPERATURE,
        "Radford et al. 2021, below",
    ),
    ("such logits are wide from their first observation on", diagnosis.INITIAL_TEMPERATURE, DEFINITION),
    (
        "a learned scale grew",
        diagnosis.LEARNED_SCALE,
        f"Radford et al. 2021, {ARXIV.format('2103.00020')}, which clips its learned temperature",
    ),
    (
        "the head rests on a sink",
        diagnosis.RESTING,
        f"Gu et al. 2024, {ARXIV.format('2410.10781')}",
    ),
    (
        "logits near the end of float16: the cause is one of those above",
        f"what helps against that, or {diagnosis.PRECISION}",
        f"Micikevicius et al. 2017, {ARXIV.format('1710.03740')} (softmax stays in float32)",
    ),
    (
        "logits are nan or inf by an overflow: `q_rms` or `k_rms` is inf, or the finite logits of the head are beyond "
        "half of 65504",
        diagnosis.PRECISION,
        "as above",
    ),
    (
        "logits are nan or inf, and so is every query or every key of the head",
        diagnosis.BROKEN,
        "such a vector has passed through the weights",
    ),
    (
        "logits are nan or inf, and other queries and keys of the head are finite",
        diagnosis.SINGLE,
        "weights that are nan would spare none",
    ),
    (
        "the same, and the largest finite logit before the scale, `logit_max / scale`, is beyond half of 65504",
        diagnosis.SCALE_FIRST,
        "as for float16",
    ),
    ("logits are nan or inf, and nothing tells why", diagnosis.UNKNOWN, "none"),
]
"""What happened, what helps in the words of the events, and who found that."""


def causes() -> str:
    """Return the table of causes."""
    return table_of(("cause", "what helps", "source"), [row_of(*row) for row in CAUSES])


def written() -> str:
    """Return the page with its table as the code has it."""
    return filled(PAGE.read_text(encoding="utf-8"), {"causes": causes()})
