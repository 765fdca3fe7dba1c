"""A small causal language model of transformers: scoring whole sequences, and decoding with a cache.

Sequences are prompts, padded on the left to one width, followed by responses, padded on the right. Scoring and decoding
compute the same distributions by different kernels: over all positions at once, and over one position against cached
keys and values. In floating point they are close, not equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from e2e_registry.recipes.arithmetic import ArithmeticTask


def build_causal_lm(
    task: ArithmeticTask, attention: str | None = None, *, width: int = 64, layers: int = 2
) -> LlamaForCausalLM:
    """Return a Llama with random weights (76,000 by default), drawn from the process's generator.

    Args:
        task: Gives the vocabulary and the length.
        attention: transformers' name of an attention implementation; None for ``sdpa``.
        width: Of the hidden states.
        layers: Decoder layers.
    """
    tokenizer = task.tokenizer
    config = LlamaConfig(
        vocab_size=tokenizer.SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=task.prompt_width + task.response_width,
        pad_token_id=tokenizer.PAD,
        eos_token_id=tokenizer.END,
        bos_token_id=None,
    )
    config._attn_implementation = attention or "sdpa"
    return LlamaForCausalLM(config)


def response_mask(responses: Tensor, end: int) -> Tensor:
    """Return which tokens the policy chose: all up to the first ``end``, itself included; bool, same shape."""
    is_end = responses == end
    return (is_end.cumsum(dim=1) - is_end.long()) == 0


def response_log_probs(model: Any, prompts: Tensor, responses: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens at each position of the responses.

    One forward pass over prompts and responses, as training takes it.

    Args:
        model: A causal language model of transformers.
        prompts: Ids of shape ``(n, p)``, padded on the left.
        responses: Ids of shape ``(n, r)``.

    Returns:
        Float32, shape ``(n, r, vocabulary)``.
    """
    ids = torch.cat([prompts, responses], dim=1)
    mask, positions = _mask_and_positions(model, prompts, responses.shape[1])
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    # Sliced here and not by `logits_to_keep`: over a slice, torch's linear layer takes other kernels with a gradient
    # than without one, and trainer and engine would disagree in the last bits.
    start = prompts.shape[1] - 1
    return torch.log_softmax(logits[:, start : start + responses.shape[1]].float(), dim=-1)


def chosen(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token; shape ``(n, r)``.

    Args:
        log_probs: Of all tokens, shape ``(n, r, vocabulary)``.
        tokens: Ids of shape ``(n, r)``.
    """
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class Decoded(NamedTuple):
    """What a decoding loop chose.

    Attributes:
        tokens: Ids of shape ``(n, r)``; padding after the end of a response.
        log_probs: Of the tokens, float32 of the same shape; of no meaning after the end.
    """

    tokens: Tensor
    log_probs: Tensor


@torch.no_grad()
def decode(model: Any, prompts: Tensor, noise: Tensor) -> Decoded:
    """Sample responses token by token, with cached keys and values.

    Each token is ``argmax(p / e)`` with exponential ``e``, which is distributed as ``p``. The noise is given, so that
    what a sample draws depends neither on its batch nor on where other responses end; and a log-prob that is off in
    its last bits changes a token only where two candidates are as close as that.

    Args:
        model: A causal language model of transformers.
        prompts: Ids of shape ``(n, p)``, padded on the left.
        noise: Standard exponential, shape ``(n, r, vocabulary)``.
    """
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    count, width = prompts.shape
    mask, positions = _mask_and_positions(model, prompts, noise.shape[1])
    cache = DynamicCache(config=model.config)
    has_ended = torch.zeros(count, dtype=torch.bool, device=prompts.device)
    ids, seen = prompts, 0
    tokens, log_probs = [], []
    for step in range(noise.shape[1]):
        until = width + step
        output: Any = model(
            input_ids=ids,
            attention_mask=mask[:, :until],
            position_ids=positions[:, seen:until],
            cache=cache,
            use_cache=True,
        )
        distribution = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
        token = (distribution.exp() / noise[:, step]).argmax(dim=-1).masked_fill(has_ended, pad)
        tokens.append(token)
        log_probs.append(distribution.gather(-1, token.unsqueeze(-1)).squeeze(-1))
        has_ended |= token == end
        ids, seen = token.unsqueeze(-1), until
    return Decoded(torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1))


def _mask_and_positions(model: Any, prompts: Tensor, response_width: int) -> tuple[Tensor, Tensor]:
    """Return what may be attended to, and positions counted from the first token that is no padding."""
    is_prompt = prompts != model.config.pad_token_id
    mask = torch.cat([is_prompt, is_prompt.new_ones(len(prompts), response_width)], dim=1).long()
    return mask, (mask.cumsum(dim=1) - 1).clamp(min=0)
