"""Readers of datasets and file layouts, one module each; `distillkit.data.datasets` lists the named ones.

A module without a leading underscore has a public loader. Datasets of the other modules are only available through
`load(name)`.
"""
