"""The trainings of the page, and a few tiny ones to see that everything runs."""

from __future__ import annotations

from tests.alarms.recipes import Grid, Setting

GPT = Grid(
    task="gpt",
    setting=Setting(layers=3, heads=2, head_dim=32, tokens=96, batch=4, steps=240),
    rates=(1e-3, 4.6e-3, 2.2e-2, 1e-1),
    seeds=(0, 1, 2),
    fresh_seeds=(3, 4),
)
VIT = Grid(
    task="vit",
    setting=Setting(layers=2, heads=4, head_dim=16, tokens=17, batch=32, steps=200),
    rates=(1e-3, 4.6e-3, 2.2e-2, 1e-1),
    seeds=(0, 1, 2),
    fresh_seeds=(3, 4),
)
FULL = (GPT, VIT)

QUICK = (
    Grid(
        task="gpt",
        setting=Setting(layers=1, heads=2, head_dim=32, tokens=24, batch=4, steps=60, warmup=5),
        rates=(3e-3, 3e-2),
        seeds=(0,),
        variants=("1/sqrt(d_k)", "unscaled", "QK-norm"),
    ),
    Grid(
        task="vit",
        setting=Setting(layers=1, heads=2, head_dim=16, tokens=17, batch=16, steps=60, warmup=5),
        rates=(3e-3, 3e-2),
        seeds=(0,),
        variants=("1/sqrt(d_k)", "unscaled"),
    ),
)
"""They are too short to measure anything by."""
