"""A thin federated layer over distillkit."""
