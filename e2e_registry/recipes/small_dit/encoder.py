"""The latent encoder: one level of the Haar transform, scaled as the autoencoders of diffusion models scale theirs.

It stands in for a frozen autoencoder. All its numbers are multiples of powers of two, and digits have few grey levels,
so that encoding is exact: the same bits on every device, and decoding gives the image back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from e2e_registry.recipes.digits import SIDE

LATENT_CHANNELS = 4
LATENT_SIDE = SIDE // 2

# Mean, and horizontal, vertical and diagonal detail of 2 x 2 pixels; the matrix is its own inverse.
_HAAR = (
    (0.5, 0.5, 0.5, 0.5),
    (0.5, -0.5, 0.5, -0.5),
    (0.5, 0.5, -0.5, -0.5),
    (0.5, -0.5, -0.5, 0.5),
)
# Brings the channels' means near 0 and their deviations, over the digits, between 0.8 and 1.4.
_SHIFT = (-0.78125, 0.0, 0.0, 0.0)
_SCALE = (1.0, 2.0, 2.0, 2.0)


def encode(images: Tensor) -> Tensor:
    """Return the latents of images.

    Args:
        images: Float32 from -1 to 1, shape ``(n, 1, 8, 8)``.

    Returns:
        Float32, shape ``(n, 4, 4, 4)``.
    """
    pixels = functional.pixel_unshuffle(images, 2)
    return (_transform(pixels) - _per_channel(_SHIFT, pixels)) * _per_channel(_SCALE, pixels)


def decode(latents: Tensor) -> Tensor:
    """Return the images of latents: the inverse of :func:`encode`."""
    bands = latents / _per_channel(_SCALE, latents) + _per_channel(_SHIFT, latents)
    return functional.pixel_shuffle(_transform(bands), 2)


def _transform(channels: Tensor) -> Tensor:
    return torch.einsum("oc,nchw->nohw", torch.tensor(_HAAR, device=channels.device), channels)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device).view(1, -1, 1, 1)
