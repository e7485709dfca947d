"""Private synthetic sets: class means, histograms and noisy image gradients."""
