"""Readers of datasets and files, one module per format."""
