"""The example that `e2e-registry init` wrote: edit it, or copy it beside your own recipe."""

from e2e_registry import main, register_e2e_ci

register_e2e_ci(
    est_time=5,
    suite="short",
    profile="cpu-portable",
    script="scripts/run_linear_model.py",
    args=["--deterministic-mode"],
    seed=0,
    # Some machines set this one for every process, and the caller's environment goes before the profile; what a
    # registration sets goes before both.
    env={"OPENBLAS_CORETYPE": "Nehalem"},
    metrics=["data/batch", "train/loss", "train/grad_norm", "model/weights"],
    invariants={"train/loss": {"min": 0.0}},
)

if __name__ == "__main__":
    main(__file__)
