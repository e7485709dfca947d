"""Messages of clients that send the mean embedding of each class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distillkit._utils import check

__all__ = ["ClassMeans"]


class ClassMeans:
    """The mean embedding of each class, as methods that match distributions send it, with noise or without. A `ObservedMessage`.

    A class of one record sends that record's embedding: an inversion of the embedding alone. Classes of more send less,
    and more embeddings of the same records (FedDM-like methods draw many networks) more.

    Args:
        embeddings: functions of images, float [N, C, H, W], to float [N, F], such as `network.features` or a public
            map; what the client did to its records one by one, clipping of vectors included.
        means: for each of them float [K, F], a row a class; rows of zeros or NaN alone stand for classes without
            records. Sums become means through the numbers of records, where these are known.
        counts: how many records each class has, int [K], where the attacker knows it: then labels follow. By default
            one for each class that has a row, if as many images are searched for.

    Raises:
        TypeError, ValueError: embeddings or means of other kinds, shapes or numbers, or no class with a row.

    Sources: the messages of Zhao and Bilen, "Dataset Condensation with Distribution Matching" (WACV 2023) and Xiong et
    al., FedDM (CVPR 2023); inverting an embedding as Mahendran and Vedaldi (CVPR 2015).
    """

    ordered = False

    def __init__(
        self,
        embeddings: Sequence[Callable[[Tensor], Tensor]],
        means: Sequence[Tensor],
        *,
        counts: Tensor | None = None,
    ) -> None:
        self.embeddings = check.sequence(embeddings, "embeddings", "functions of images")
        for one in self.embeddings:
            check.callable_with(one, "embeddings", ["images"], "network.features")
        given = check.sequence(means, "means", "tensors [K, F], one an embedding", len(self.embeddings))
        if not given:
            raise ValueError("means must hold at least one tensor [K, F], got none")
        for i, rows in enumerate(given):
            check.float_tensor(rows, f"means[{i}]", "[K, F]")
            if rows.ndim != 2 or len(rows) != len(given[0]) or 0 in rows.shape:
                raise ValueError(f"means must be [K, F] of the same classes, got {list(rows.shape)}")
        empty = torch.stack([((m == 0) | m.isnan()).all(1) for m in given]).all(0)
        self.present = ~empty
        self.counts = None if counts is None else _counts(counts, self.present)
        self.observed = tuple(m.detach()[self.present] for m in given)
        if not self.observed[0].numel() or not all(bool(m.isfinite().all()) for m in self.observed):
            raise ValueError("means must have a row for at least one class, and be finite but for classes without rows")

    @staticmethod
    def of(
        embeddings: Sequence[Callable[[Tensor], Tensor]], images: Tensor, labels: Tensor, num_classes: int
    ) -> ClassMeans:
        """What a client with these images sends, without noise: to try an attack or a defence.

        Args:
            embeddings: as for the class.
            images: float [N, C, H, W].
            labels: class indices int [N].
            num_classes: K.
        """
        with torch.no_grad():
            rows = [_class_means(embed(images), labels, num_classes) for embed in embeddings]
        return ClassMeans(embeddings, rows)

    def replay(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The means [present, F] of `images` [N, C, H, W] by `labels` [N], with a graph to the images."""
        present = self.present.to(images.device)
        return tuple(_class_means(embed(images), labels, len(present))[present] for embed in self.embeddings)

    def count_classes(self, images: Tensor) -> int:
        """K; an embedding that cannot take `images` [N, C, H, W], or gives other vectors, is refused."""
        for embed, rows in zip(self.embeddings, self.observed):
            try:
                with torch.no_grad():
                    found = embed(images)
            except Exception as error:
                first = str(error).split("\n")[0]
                raise ValueError(
                    f"embeddings must take images of the shape given, {list(images.shape)}: {first}"
                ) from error
            if not isinstance(found, Tensor) or found.shape != (len(images), rows.shape[1]):
                raise ValueError(
                    f"embeddings must give [N, {rows.shape[1]}] as the means have it, got {list(found.shape)}"
                )
        return len(self.present)

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Labels [count] by the numbers of records, or one of each class with a row; the `noise` is not needed."""
        counts = self.present.long() if self.counts is None else self.counts
        if int(counts.sum()) != count:
            raise ValueError(
                f"labels must be given: means do not say how many records each class has, and {count} images are not "
                f"{int(counts.sum())}, as the classes with a row have; or give counts"
            )
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def _class_means(vectors: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    sums = vectors.new_zeros(num_classes, vectors.shape[1]).index_add(0, labels, vectors)
    return sums / labels.bincount(minlength=num_classes).clamp(min=1).unsqueeze(1)


def _counts(counts: Tensor, present: Tensor) -> Tensor:
    counts = check.class_labels(counts, len(present), None, "counts").to(present.device)
    if not torch.equal(counts > 0, present):
        raise ValueError("counts must be 0 exactly for the classes whose means are empty")
    return counts
