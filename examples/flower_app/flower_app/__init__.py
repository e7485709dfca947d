"""FedDM, FedAvg with VHL, and private FedDM on Flower; see README.md."""
