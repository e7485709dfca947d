"""Messages that `invert_message` can attack: the mean embedding of each class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distillkit._utils import check


class ClassMeans:
    """Message with the mean embedding of each class, as distribution matching methods send it.

    Implements `ObservedMessage`. The mean of a class with one record is the embedding of that record, which is easiest
    to invert. Classes with more records reveal less. Embeddings of the same records by several networks, as in FedDM,
    reveal more. The means may contain noise.

    Args:
        embeddings: functions that map images, float [N, C, H, W], to embeddings, float [N, F], such as
            `network.features` or a public function. If the client changed each embedding, for example by clipping, the
            functions must do the same.
        means: mean embeddings, float [K, F] for each embedding function, with one row per class. A row of zeros or NaN
            means that the class has no records. If the client sent sums, divide them by the number of records per
            class.
        counts: number of records per class, int [K], if the attacker knows these numbers; they determine the labels. By
            default, one record is assumed for each class with a mean, so the attack can search for only one image of
            each class.

    Raises:
        TypeError, ValueError: embeddings or means have the wrong type or shape or differ in number, or no class has
            records.

    Sources: the messages of Zhao and Bilen, "Dataset Condensation with Distribution Matching" (WACV 2023) and Xiong et
    al., FedDM (CVPR 2023); the inversion of an embedding is from Mahendran and Vedaldi (CVPR 2015).
    """

    ordered = False

    def __init__(
        self, embeddings: Sequence[Callable[[Tensor], Tensor]], means: Sequence[Tensor], *, counts: Tensor | None = None
    ) -> None:
        self.embeddings = check.sequence(embeddings, "embeddings", "functions of images")
        for one in self.embeddings:
            check.callable_with(one, "embeddings", ["images"], "network.features")
        given = check.sequence(means, "means", "tensors [K, F], one per embedding", len(self.embeddings))
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
            raise ValueError("means must have a row for at least one class, and finite rows for all present classes")

    @staticmethod
    def of(
        embeddings: Sequence[Callable[[Tensor], Tensor]], images: Tensor, labels: Tensor, num_classes: int
    ) -> ClassMeans:
        """Return the message of a client with these images: the mean embedding of each class, without noise.

        Use it to test an attack or a defence.

        Args:
            embeddings: functions that map images to embeddings, as in the constructor.
            images: images of the client, float [N, C, H, W].
            labels: class indices of the images, int [N].
            num_classes: number of classes, K.
        """
        labels = check.class_labels(labels, len(check.batch_of_images(images)), num_classes)
        with torch.no_grad():
            rows = [_class_means(embed(images), labels, num_classes) for embed in embeddings]
        return ClassMeans(embeddings, rows)

    def replay(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return the mean embeddings of images by class, differentiable in the images.

        Args:
            images: candidate images, float [N, C, H, W].
            labels: class indices of the images, int64 [N].

        Returns:
            One tensor [P, F] for each embedding function, with one row for each of the P classes that have a mean in
            the observed message.
        """
        present = self.present.to(images.device)
        return tuple(_class_means(embed(images), labels, len(present))[present] for embed in self.embeddings)

    def count_classes(self, images: Tensor) -> int:
        """Return the number of classes K, after checking that the embedding functions accept `images` [N, C, H, W].

        Each function must return vectors of the same width F as the mean embeddings in the observed message.
        """
        for embed, rows in zip(self.embeddings, self.observed):
            try:
                with torch.no_grad():
                    found = embed(images)
            except Exception as error:
                first = str(error).split("\n")[0]
                raise ValueError(f"embeddings must take images of shape {list(images.shape)}: {first}") from error
            if not isinstance(found, Tensor) or found.shape != (len(images), rows.shape[1]):
                form = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(f"embeddings must give [N, {rows.shape[1]}], the width of the means, got {form}")
        return len(self.present)

    def read_labels(self, count: int, noise: Tensor) -> Tensor:
        """Return the labels of the records, int64 [count], from the known counts per class.

        If the counts are unknown, one record is assumed for each class that has a mean in the message.

        Args:
            count: number of records.
            noise: not used.

        Raises:
            ValueError: the counts per class do not sum to `count`.
        """
        counts = self.present.long() if self.counts is None else self.counts
        if int(counts.sum()) != count:
            raise ValueError(
                f"labels must be given: means do not reveal the number of records per class, and {count} images differ "
                f"from {int(counts.sum())}, one per class with a row; or give counts"
            )
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def _class_means(vectors: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    sums = vectors.new_zeros(num_classes, vectors.shape[1]).index_add(0, labels, vectors)
    return sums / labels.bincount(minlength=num_classes).clamp(min=1).unsqueeze(1)


def _counts(counts: Tensor, present: Tensor) -> Tensor:
    counts = check.class_labels(counts, None, None, "counts").to(present.device)
    if not torch.equal(counts > 0, present):
        raise ValueError(f"counts must be one per class, {len(present)}, and 0 exactly for those whose means are empty")
    return counts
