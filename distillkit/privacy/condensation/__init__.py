"""Private condensation: noised class means, noised histograms and DP-SGD on images."""
