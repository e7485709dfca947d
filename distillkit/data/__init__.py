"""Datasets in memory or in files, their partition among clients, and the resulting client sets."""

from distillkit.data import partition
from distillkit.data.client_sets import clients
from distillkit.data.datasets import DATASETS, NAMES, load, open_dataset
from distillkit.data.domains import as_domains, load_domains
from distillkit.data.lookalike_digits import mnist_m_like, synth_digits_like
from distillkit.data.readers.cifar10c import CORRUPTIONS, load_cifar10c
from distillkit.data.readers.folder import load_folder, open_folder
from distillkit.data.readers.npz import load_npz, open_npz
from distillkit.data.readers.table import load_table, open_table
from distillkit.data.set_files import load_set, set_cards
from distillkit.data.split import Split, StoredSplit, split_by
from distillkit.data.store_dataset import store_dataset

__all__ = [
    "CORRUPTIONS",
    "DATASETS",
    "NAMES",
    "Split",
    "StoredSplit",
    "as_domains",
    "clients",
    "load",
    "load_cifar10c",
    "load_domains",
    "load_folder",
    "load_npz",
    "load_set",
    "load_table",
    "mnist_m_like",
    "open_dataset",
    "open_folder",
    "open_npz",
    "open_table",
    "partition",
    "set_cards",
    "split_by",
    "store_dataset",
    "synth_digits_like",
]
__dir__ = __all__.copy
