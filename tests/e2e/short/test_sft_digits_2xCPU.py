"""Supervised fine-tuning of a native model package: encode, cache, train over two FSDP ranks, on any x86-64 CPU."""

from e2e_registry import main, register_e2e_ci

register_e2e_ci(
    est_time=45,
    suite="short-cpu",
    profile="cpu-portable",
    script="scripts/run_sft_digits.py",
    args=["--deterministic-mode", "--epochs", "4"],
    seed=0,
    # Some hosts set this one for every process, to the core type of their own CPU, and the caller's environment goes
    # before the profile. What a registration sets goes before both.
    env={"OPENBLAS_CORETYPE": "Nehalem"},
    metrics=[
        "data/cache",
        "data/sample_ids",
        "train/loss",
        "train/grad_norm",
        "train/grad_norm/*",
        "eval/loss",
        "model/parameters",
    ],
    num_cpus=2,
    timeout=300,
)

if __name__ == "__main__":
    main(__file__)
