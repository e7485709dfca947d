"""Privacy accounting: Gaussian, PRV and PLD bounds, composition and planning."""
