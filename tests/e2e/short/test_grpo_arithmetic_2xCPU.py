"""GRPO on arithmetic: a language model over two FSDP ranks and a rollout engine, bit for bit on any x86-64 CPU."""

from e2e_registry import main, register_e2e_ci

register_e2e_ci(
    est_time=45,
    suite="short-cpu",
    profile="cpu-portable",
    script="scripts/run_grpo_arithmetic.py",
    args=["--num-rollout", "4", "--deterministic-mode"],
    seed=0,
    num_cpus=2,
    # Some hosts set this one for every process, to the core type of their own CPU, and the caller's environment goes
    # before the profile. What a registration sets goes before both.
    env={"OPENBLAS_CORETYPE": "Nehalem"},
    metrics=[
        "data/warm_up",
        "model/parameters",
        "rollout/accuracy",
        "rollout/log_probs",
        "rollout/prompts",
        "rollout/response_length_mean",
        "rollout/responses",
        "rollout/reward/raw_mean",
        "rollout/reward/raw_median",
        "rollout/reward/raw_num_samples",
        "rollout/reward/raw_std",
        "rollout/rewards",
        "rollout/weights",
        "rollout/weights_match",
        "train/advantages",
        "train/clip_fraction",
        "train/entropy",
        "train/grad_norm",
        "train/grad_norm/*",
        "train/kl_loss",
        "train/log_prob_new_idx_0",
        "train/log_prob_old_idx_0",
        "train/loss",
        "train/policy_loss",
        "train/ppo_kl",
        "train/ratio_max",
        "train/ratio_mean",
        "train/ratio_min",
        "train/reference_weights",
        "train/train_rescored_logprob_abs_diff_max",
        "train/train_rollout_logprob_abs_diff",
        "train/train_rollout_logprob_abs_diff_max",
        "train/warm_up_grad_norm",
        "train/warm_up_loss",
        "train/weights",
    ],
    invariants={
        # The engine holds, to the bit, what the trainer exported.
        "rollout/weights_match": {"equals": 1},
        # Under the same weights, in the same precision and shapes, trainer and engine score a response alike.
        "train/train_rescored_logprob_abs_diff_max": {"equals": 0.0},
        # Decoding with a cache rounds otherwise; over 100 rollouts of three seeds it stayed below 1e-5.
        "train/train_rollout_logprob_abs_diff_max": {"min": 0.0, "max": 1e-4},
        "rollout/reward/raw_num_samples": {"equals": 256},
    },
)

if __name__ == "__main__":
    main(__file__)
