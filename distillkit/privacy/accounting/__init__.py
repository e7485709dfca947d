"""Privacy accounting: the Gaussian mechanism, composition by RDP, PRV or PLD, and planning."""
