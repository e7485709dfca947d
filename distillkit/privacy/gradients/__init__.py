"""DP-SGD for networks: per-example gradients, clipping and noise."""
