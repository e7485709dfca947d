"""Measurement of how much the condensed sets of a study reveal."""

from __future__ import annotations

import json
from pathlib import Path

from attacks import leaks
from distillkit import LabeledImages
from distillkit.data import Split
from distillkit.study import Records, Table, mean_std
from shared.files import write_file

__all__ = ["measure_leaks"]

_COLUMNS = {"copies": "copies %", "within_25_db": "within 25 dB %", "within_25_db_of_held_out": "of held-out records %"}


def measure_leaks(records: Records, images: Split) -> Table:
    """Return a table of how much the sets of a study reveal about their training records, by `attacks.leaks`.

    Args:
        records: records of runs that made sets. Results are cached in each run's folder (`leaks.json`).
        images: images of the study's task. All training images count as used, and the test images as held out.
    """
    found = dict[str, list[dict[str, float]]]()
    for record in (r for r in records if r.folder is not None):
        path = Path(str(record.folder)) / "leaks.json"
        if not path.exists():
            small = LabeledImages.load(path.with_name("set.safetensors"))
            write_file(path, json.dumps(leaks(small, images.train, images.test).record()) + "\n")
        found.setdefault(record.method, []).append(json.loads(path.read_text(encoding="utf-8")))
    rows = [{"method": name, **{k: sum(s[k] for s in own) / len(own) for k in _COLUMNS}} for name, own in found.items()]
    cells = [(name, *(mean_std([one[key] for one in own], 100.0) for key in _COLUMNS)) for name, own in found.items()]
    note = "Share of a set's images that equal a training record, or are close to one (PSNR of at least 25 dB)."
    return Table(("method", *_COLUMNS.values()), tuple(cells), rows, (note,), left=1)
