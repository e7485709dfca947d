"""Per-example gradients: clipping, noise and DP-SGD."""
