"""Readers of datasets and file layouts, one module each; `distillkit.data.datasets` lists the named ones."""
