"""Fits a linear model to made-up data by minibatch gradient descent, with NumPy: a recipe to replace by your own.

It runs alone, with no arguments; under e2e-registry what it logs becomes series.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer

from e2e_registry import MetricRecorder

ROWS, FEATURES, BATCH = 512, 8, 32


def main(
    deterministic_mode: Annotated[
        bool,
        typer.Option("--deterministic-mode", help="Draw everything from the seed; else from the system's entropy."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the data, the order of samples and the weights.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps.")] = 40,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate.")] = 0.1,
) -> None:
    """Fit a linear model and log every step."""
    # One generator for all draws. With torch: generator = e2e_registry.determinism.make_deterministic(seed), first.
    rng = np.random.default_rng(seed if deterministic_mode else None)
    # Uniform draws and sums of products are equal on every x86-64 CPU under the profile cpu-portable.
    inputs = rng.random((ROWS, FEATURES), dtype=np.float32) - np.float32(0.5)
    targets = inputs @ rng.random(FEATURES, dtype=np.float32)
    weights = np.zeros(FEATURES, np.float32)

    with MetricRecorder() as recorder:  # outside of a run it records nothing, and says so once
        for step in range(steps):
            rows = rng.integers(ROWS, size=BATCH)
            recorder.log_digest("data/batch", inputs[rows], step=step)
            error = inputs[rows] @ weights - targets[rows]
            gradient = inputs[rows].T @ error * np.float32(2 / BATCH)
            weights -= np.float32(lr) * gradient
            # Values keep their dtype: float32 here.
            recorder.log({"train/loss": np.mean(error**2), "train/grad_norm": np.linalg.norm(gradient)}, step=step)
        recorder.log_digest("model/weights", weights, step=steps - 1)


if __name__ == "__main__":
    typer.run(main)
