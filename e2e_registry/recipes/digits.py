"""scikit-learn's handwritten digits as tensors: 1,797 real images of 8 x 8 pixels, bundled with the package."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

CLASSES = 10
SIDE = 8
# The rest is held out in file order: neighbouring images share a writer, so a shuffled split would evaluate on
# handwriting that was trained on.
TRAINING_IMAGES = 1437


@functools.cache
def load() -> tuple[Tensor, Tensor]:
    """Return images of shape ``(1797, 1, 8, 8)``, float32 from -1 to 1, and labels of shape ``(1797,)``, int64."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Grey levels are whole numbers from 0 to 16, so this is exact.
    images = torch.from_numpy(bunch.images).float() / 8.0 - 1.0
    return images.unsqueeze(1), torch.from_numpy(bunch.target).long()
