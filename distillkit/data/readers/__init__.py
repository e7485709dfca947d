"""Readers of datasets and file layouts, one module each; `distillkit.data.datasets` lists the named ones.

A module without underscore has a public loader; the others are read by `load(name)` alone.
"""
