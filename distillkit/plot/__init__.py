"""Figures of sets, embeddings, partitions and runs. Each function returns a matplotlib figure and needs no display."""

from distillkit.plot.embeddings import mmd_table, pairwise_mmd, tsne
from distillkit.plot.federation import curves, partition
from distillkit.plot.images import grid, pixel_histogram, real_and_synthetic, selection

__all__ = [
    "curves",
    "grid",
    "mmd_table",
    "pairwise_mmd",
    "partition",
    "pixel_histogram",
    "real_and_synthetic",
    "selection",
    "tsne",
]
__dir__ = __all__.copy
