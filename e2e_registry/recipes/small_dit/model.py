"""A diffusion transformer (Peebles and Xie, arXiv:2212.09748) over latents of 4 x 4 x 4: about 235,000 weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from e2e_registry.errors import UsageError
from e2e_registry.recipes.digits import CLASSES
from e2e_registry.recipes.small_dit import attention
from e2e_registry.recipes.small_dit.encoder import LATENT_CHANNELS, LATENT_SIDE

TOKENS = LATENT_SIDE**2
_LONGEST_PERIOD = 10_000.0


class SelfAttention(nn.Module):
    """Multi-head self-attention: by the package's own kernel, or by a backend of diffusers' dispatch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        # The name under which the toolkit, and diffusers, look for a module's choice.
        self._attention_backend: str | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same shape, ``(batch, tokens, width)``."""
        batch, count, width = tokens.shape
        query, key, value = self.qkv(tokens).view(batch, count, 3, self.heads, width // self.heads).unbind(2)
        if self._attention_backend is None:
            # Through the module, at each call: that is where the kernel gets patched.
            mixed = attention.tiled_attention(query, key, value)
        else:
            from diffusers.models.attention_dispatch import dispatch_attention_fn

            backend: Any = self._attention_backend
            mixed = dispatch_attention_fn(query, key, value, backend=backend)
        return self.projection(mixed.reshape(batch, count, width))  # type: ignore[no-any-return]


class DiTBlock(nn.Module):
    """Attention and an MLP, each shifted, scaled and gated by the conditioning (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = SelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = zeroed(nn.Linear(width, 6 * width))

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Return tokens of the same shape, given ``condition`` of shape ``(batch, width)``."""
        modulation = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        tokens = tokens + gate * self.attention(self.attention_norm(tokens) * (1.0 + scale) + shift)
        mixed: Tensor = tokens + mlp_gate * self.mlp(self.mlp_norm(tokens) * (1.0 + mlp_scale) + mlp_shift)
        return mixed


class SmallDiT(nn.Module):
    """Predicts the velocity of a noisy latent, given its noise level and its class."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Linear(LATENT_CHANNELS, width)
        self.positions = nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        self.time_mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.class_embedding = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = zeroed(nn.Linear(width, LATENT_CHANNELS))
        self.frequencies: Tensor
        half = width // 2
        frequencies = [_LONGEST_PERIOD ** (-index / half) for index in range(half)]
        self.register_buffer("frequencies", torch.tensor(frequencies), persistent=False)

    def forward(self, latents: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """Return the velocity, float32 of the shape of ``latents``, whatever the dtype of the weights.

        Args:
            latents: Noisy, shape ``(batch, 4, 4, 4)``.
            sigma: Noise level from 0 to 1, shape ``(batch,)``.
            labels: Classes, int64 of shape ``(batch,)``.
        """
        # Noise levels are embedded as they are, and rounded afterwards: bf16 tells few of them apart.
        dtype = self.positions.dtype
        tokens = self.embedding(latents.flatten(2).transpose(1, 2).to(dtype)) + self.positions
        condition = self.time_mlp(self._embed_time(sigma).to(dtype)) + self.class_embedding(labels)
        for block in self.blocks:
            tokens = block(tokens, condition)
        velocity = self.head(self.norm(tokens)).transpose(1, 2).unflatten(2, (LATENT_SIDE, LATENT_SIDE))
        # A copy: FSDP hooks the output, and a view of it would lose the hook at the first operation in place.
        return velocity.float().contiguous()  # type: ignore[no-any-return]

    def set_attention_backend(self, backend: str) -> None:
        """Let all blocks attend through a backend of diffusers' dispatch instead of the package's own kernel.

        Raises:
            UsageError: diffusers knows no such backend.
        """
        from diffusers.models.attention_dispatch import AttentionBackendName

        name = backend.lower()
        if name not in {known.value for known in AttentionBackendName}:
            raise UsageError(f"diffusers has no attention backend {backend!r}")
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module._attention_backend = name

    def _embed_time(self, sigma: Tensor) -> Tensor:
        angles = sigma.unsqueeze(1) * 1000.0 * self.frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=1)


def zeroed(linear: nn.Linear) -> nn.Linear:
    """Return the layer with all its weights 0, so that the model starts as the identity."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
