"""The table of named datasets agrees with the data page."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillkit.data import DATASETS, NAMES

PAGE = (Path(__file__).parents[3] / "docs/components/data.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`").replace("-", ""): cells[1:]
    for line in PAGE.split("## `load`")[1].split("\n## ")[0].splitlines()
    if line.startswith("| `") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_page_equal_the_table(name: str) -> None:
    dataset, (counts, shape, files, mean, std) = DATASETS[name], ROWS[name]
    words = counts.replace(",", "").replace("/", " ").replace(";", " ").split()
    numbers = [int(word) for word in words if word.isdigit()]
    assert tuple(numbers) == dataset.counts
    assert shape == "x".join(map(str, dataset.shape))
    assert dataset.files.split("/")[0].lower() in files.lower()
    published = dataset.normalization
    for text, values in ((mean, published and published.mean), (std, published and published.std)):
        assert text == (" ".join(f"{v:.4f}"[1:] for v in values) if values else "measured")


def test_every_dataset_has_classes_or_names_them_in_its_files() -> None:
    assert len(ROWS) == 13
    assert all(len(set(row.classes)) == len(row.classes) for row in DATASETS.values())
    assert all(row.files for name, row in DATASETS.items() if name not in ("digits", "synthdigitslike"))
    assert set(NAMES) == set(DATASETS)
