"""Privacy accounting: the Gaussian mechanism, composition by privacy loss distributions or RDP, and planning."""
