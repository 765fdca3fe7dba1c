"""Supervised fine-tuning in fp16 with a loss scale that is too large at first: the first steps overflow, and say so."""

from e2e_registry import main, register_e2e_ci

register_e2e_ci(
    est_time=60,
    suite="short-cpu",
    profile="cpu-portable",
    script="scripts/run_sft_digits.py",
    args=[
        "--forward-dtype",
        "fp16",
        "--initial-loss-scale",
        "16777216",
        "--loss-scale-growth-interval",
        "3",
        "--epochs",
        "2",
        "--train-images",
        "512",
        "--deterministic-mode",
    ],
    seed=0,
    num_cpus=2,
    # Some hosts set this one for every process, to the core type of their own CPU, and the caller's environment goes
    # before the profile. What a registration sets goes before both.
    env={"OPENBLAS_CORETYPE": "Nehalem"},
    metrics=[
        "data/cache",
        "data/sample_ids",
        "train/loss",
        "train/grad_norm",
        "train/grad_norm/*",
        "train/loss_scale",
        "train/step_skipped",
        "eval/loss",
        "model/parameters",
    ],
    invariants={
        # Gradients that overflow have no norm: NaN at first, then infinite, then finite. That is the record.
        "train/grad_norm": {"finite": False},
        "train/grad_norm/*": {"finite": False},
        "train/loss_scale": {"min": 1.0, "max": 16777216.0},
        "train/step_skipped": {"min": 0, "max": 1},
    },
)

if __name__ == "__main__":
    main(__file__)
