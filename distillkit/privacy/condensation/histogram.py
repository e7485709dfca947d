"""Release of noised class counts."""

from __future__ import annotations

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.privacy.capture._captured_function import require_no_own_code
from distillkit.privacy.ledger import Account, Ledger


def private_histogram(labels: Tensor, *, num_classes: int, sigma: float, ledger: Ledger | Account) -> Tensor:
    """Count the records of each class and add Gaussian noise, so that the counts may be published.

    The sensitivity is 1, because a record adds 1 to one class. Release the histogram once per run and reuse the counts.
    Computing weights or denominators from the released counts, or dropping small classes, is post-processing and costs
    no privacy.

    Args:
        labels: class indices int [N]; N may be 0.
        num_classes: public number of classes K. Noise is added to the counts of empty classes too.
        sigma: noise standard deviation, in records; 0 adds no noise, and the ledger then records that no guarantee
            holds.
        ledger: ledger that is charged before the noise is drawn; or an `Account`, which combines a ledger with the
            client, the round and the source of the noise.

    Returns:
        The noised counts, float64 [K] on the device of `labels`, possibly negative. They are multiples of a small
        public unit, not whole numbers; see `Secret.add_noise`.

    Raises:
        BudgetExhausted, NotAccountable: the ledger refuses the charge; see `Ledger.spend`.
        NotCapturable, PrivacyError: the labels are of a subclass of tensors, or a torch mode is active.
        TypeError, ValueError: the labels are not class indices below K, or a number is out of range.
    """
    check.positive_int(num_classes, "num_classes")
    labels = check.class_labels(labels, None, num_classes)
    require_no_own_code([labels], "the labels")
    account = Account.of(ledger)
    account.ledger.assume("private_histogram")
    account.spend("histogram", sigma)
    counts = torch.bincount(labels, minlength=num_classes)
    return account.secret.add_noise(counts, sigma)
