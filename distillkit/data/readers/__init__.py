"""Readers of datasets and file layouts, with one module for each. `distillkit.data.datasets` lists the named datasets.

A reader of another source gives one of two things. If its pictures stay where they are, it lists them as a
`_picture_list.PictureList`, which `load_pictures` reads into memory and `open_pictures` caches on disk: all datasets of
picture files do so. If it has arrays, it gives them to `assemble_raw` or, with users or other columns, to a
`SplitBuilder`, both of `distillkit.data._assembly`. Normalization and class names are handled there, once for all
readers; `to_pixels` converts sizes and channels.

Modules without a leading underscore have public loading functions. The datasets of modules with an underscore are
available through `distillkit.data.load(name)`.
"""
