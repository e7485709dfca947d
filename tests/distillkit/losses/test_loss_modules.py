"""Loss modules equal their functions and use no random numbers; the page's snippets run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distillkit import losses

ROOT = Path(__file__).parents[3]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y, LABELS, MORE = normal(0, 6, 4), normal(1, 5, 4), torch.tensor([0, 1, 0, 2, 1, 3]), torch.tensor([2, 2, 0, 1, 3])


FUNCTIONS = {
    losses.SupervisedContrastive: losses.supervised_contrastive,
    losses.KnowledgeDistillation: losses.knowledge_distillation,
    losses.RBFMMD: losses.rbf_mmd,
}
CONTRASTIVE = {"temperature": 0.5, "detach_other": False, "empty": "zero", "reduction": "sum"}


@pytest.mark.parametrize(
    ("module", "options", "inputs"),
    [
        (losses.SupervisedContrastive, {}, (X, LABELS)),
        (losses.SupervisedContrastive, CONTRASTIVE, (X, LABELS, Y, MORE)),
        (losses.KnowledgeDistillation, {}, (X, X.flip(0))),
        (losses.KnowledgeDistillation, {"temperature": 4.0, "reduction": "none"}, (X, X.flip(0))),
        (losses.RBFMMD, {}, (X, Y)),
        (losses.RBFMMD, {"bandwidth": 2.0, "kernels": 3, "multiplier": 3.0, "unbiased": True}, (X, Y)),
    ],
)
def test_module_is_one_call_of_its_function(module, options, inputs, global_rng_untouched):
    layer = module(**options)
    assert torch.equal(layer(*inputs), FUNCTIONS[module](*inputs, **options))
    assert not layer.state_dict()


def test_detach_is_passed_on():
    other = Y.clone().requires_grad_()
    assert not losses.SupervisedContrastive()(X, LABELS, other, MORE).requires_grad
    assert losses.SupervisedContrastive(detach_other=False)(X, LABELS, other, MORE).requires_grad


def test_page_has_a_section_with_a_running_snippet_for_each_name(global_rng_untouched):
    page = (ROOT / "docs/components/losses.md").read_text(encoding="utf-8")
    for name in losses.__all__:
        assert f"`{name}`" in page
        assert f"{name}(" in page
    test = doctest.DocTestParser().get_doctest(page, {}, "losses.md", "docs/components/losses.md", 0)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted > 20
    assert result.failed == 0
