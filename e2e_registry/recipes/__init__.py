"""Parts of the deterministic short recipes: small, genuine instances of post-training on Ray.

``actor_group`` starts actors; ``actor`` is what runs first in each of them; ``train_actor`` and ``rollout_engine`` are
the two kinds that recipes build on, in the dtypes of ``dtype_policy``; ``algorithms``, ``token_objective``,
``nft_objective``, ``flow_matching`` and ``rewards`` are the mathematics. The driver's half (``actor_group``,
``command_line``, ``rollout_arguments``) imports no torch, and Ray only when actors are launched.
"""
