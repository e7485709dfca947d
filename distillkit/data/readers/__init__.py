"""Readers of datasets and file layouts, with one module for each. `distillkit.data.datasets` lists the named datasets.

Modules without a leading underscore have public loading functions. The datasets of modules with an underscore are
available through `distillkit.data.load(name)`.
"""
