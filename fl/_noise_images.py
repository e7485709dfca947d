"""Noise images with the shape and normalization of a run's images.

Checks before round 1 use these images, because the checks must not depend on any client's data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distillkit.privacy._public_noise import public_test_images
from distillkit.rng import derive
from distillkit.sets import LabeledImages
from fl.participants import Server
from fl.task import LabelTask


def two_noise_images(server: Server) -> Tensor:
    """Return two noise images, [2, C, H, W], with the normalization, shape and dtype of the clients' images."""
    pixels = torch.rand(2, *server.shape, generator=derive(0, "trial"), dtype=server.dtype)
    return server.normalization.encode(pixels)


def pixel_limit(server: Server) -> float:
    """Return the largest absolute value of a normalized pixel that the server accepts.

    The limit is 300 times the largest absolute value in a black, a white and two noise images.
    """
    shape = (1, *server.shape)
    pixels = torch.cat([torch.zeros(shape, dtype=server.dtype), torch.ones(shape, dtype=server.dtype)])
    return 300 * max(
        float(images.abs().max()) for images in (server.normalization.encode(pixels), two_noise_images(server))
    )


def empty_set(server: Server) -> LabeledImages:
    """Return a set without images, with the normalization, shape and dtype of the clients' images.

    Args:
        server: server of the run, on whose device the set is.
    """
    images = torch.zeros(0, *server.shape, device=server.device, dtype=server.dtype)
    nothing = images, torch.zeros(0, device=server.device, dtype=torch.int64)
    return LabeledImages(*nothing, num_classes=server.task.num_classes, normalization=server.normalization)


def noise_set(task: LabelTask, like: LabeledImages, generator: torch.Generator) -> LabeledImages:
    """Return six labelled noise images for checks before round 1. They do not depend on any client's data."""
    classes = task.num_classes
    labels = torch.tensor([0, 0, 0, 1, 1, classes - 1]).to(like.images.device) % classes
    if not task.single_label:
        labels = F.one_hot(labels, classes).float()
    return LabeledImages(
        public_test_images(len(labels), like, generator), labels, num_classes=classes, normalization=like.normalization
    )
