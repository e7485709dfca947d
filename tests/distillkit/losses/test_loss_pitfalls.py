"""One test for each way in which public implementations of these losses are wrong or ambiguous."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from distillkit import networks
from distillkit.losses import (
    BatchNormPrior,
    clamped_disagreement,
    clip_logit_norm,
    deepinversion_variation,
    feature_decorrelation,
    gradient_distance,
    image_l2,
    jensen_shannon,
    knowledge_distillation,
    mean_embedding_distance,
    proximal,
    rbf_mmd,
    supervised_contrastive,
    total_variation,
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_gradient_distance_adds_eps_to_the_product_of_the_norms():
    g = torch.full((1, 1), 1e-3)
    assert float(gradient_distance([g], [g])) == pytest.approx(0.5)  # 1 - 1e-6 / (1e-6 + 1e-6)
    assert float(gradient_distance([g], [g], eps=0)) == pytest.approx(0)


def test_gradient_distance_sums_over_rows_and_counts_the_last_linear_layer():
    conv, linear = torch.ones(5, 2, 3, 3), torch.ones(7, 4)
    assert float(gradient_distance([conv, linear], [-conv, -linear], eps=0)) == pytest.approx(2 * (5 + 7))


def test_row_form_skips_biases_and_norms():
    weight, bias = torch.ones(2, 2), torch.ones(2)
    assert float(gradient_distance([weight, bias], [weight, -bias], eps=0)) == pytest.approx(0, abs=1e-6)
    assert float(gradient_distance([weight, bias], [weight, -bias], metric="mse")) == 8
    assert float(gradient_distance([weight, bias], [weight, -bias], metric="cos", eps=0)) == pytest.approx(2 / 3)


def test_gradient_distance_with_only_dead_units_is_finite():
    model = networks.build(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 0).double()
    nn.init.constant_(model[0].bias, -100)
    images = normal(0, 5, 3).requires_grad_()
    loss = nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 0, 1, 1]))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    distance = gradient_distance(gradients, [torch.ones_like(g) for g in gradients])
    (pixels,) = torch.autograd.grad(distance, images)
    assert float(distance.detach()) == 4 + 2
    assert torch.equal(pixels, torch.zeros_like(pixels))


def test_dm_compares_class_means_and_the_rbf_kernel_also_the_spread():
    narrow = torch.tensor([[-1.0], [1.0]])
    assert float(mean_embedding_distance(narrow, 5 * narrow)) == 0
    assert float(rbf_mmd(narrow, 5 * narrow)) > 0.1


def test_dm_sums_over_features_and_classes():
    labels = torch.tensor([0, 1, 2])
    assert float(mean_embedding_distance(torch.zeros(3, 4), torch.ones(3, 4), labels, labels)) == 12


def test_dm_is_finite_for_a_class_missing_on_one_side():
    synthetic = torch.ones(2, 3, requires_grad=True)
    loss = mean_embedding_distance(torch.zeros(2, 3), synthetic, torch.tensor([0, 0]), torch.tensor([0, 1]))
    (gradient,) = torch.autograd.grad(loss, synthetic)
    assert float(loss.detach()) == 3
    assert gradient.tolist() == [[2, 2, 2], [0, 0, 0]]


def test_class_means_of_half_precision_use_float32():
    rows = torch.full((4096, 1), 1.0).bfloat16()
    loss = mean_embedding_distance(rows, rows + 2**-7)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(2**-14)


def test_rbf_mmd_stores_no_difference_for_each_pair():
    n, d, kept = 20, 300, []
    x, y = normal(0, n, d).requires_grad_(), normal(1, n, d)

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        rbf_mmd(x, y)
    assert max(kept) == max((2 * n) ** 2, 2 * n * d)


def test_rbf_mmd_is_accurate_far_from_the_origin():
    x, y = normal(0, 8, 4), normal(1, 8, 4) + 1
    far = rbf_mmd((x + 1000).float(), (y + 1000).float())
    assert float(far) == pytest.approx(float(rbf_mmd(x, y)), rel=2e-3)


def test_rbf_mmd_of_half_precision_uses_float32():
    x, y = (300 * normal(seed, 6, 4).half() for seed in (0, 1))  # squares overflow half precision
    value = rbf_mmd(x, y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, rbf_mmd(x.float(), y.float()))


def test_rbf_mmd_is_the_biased_statistic_by_default():
    x = normal(0, 4, 2)
    assert float(rbf_mmd(x, x)) == pytest.approx(0, abs=1e-9)
    assert float(rbf_mmd(x, x, unbiased=True)) < -0.1


def test_supcon_is_finite_and_drops_anchors_without_a_positive():
    embeddings, labels = normal(0, 5, 3).requires_grad_(), torch.tensor([0, 0, 1, 2, 3])
    dropped = supervised_contrastive(embeddings, labels)
    diluted = supervised_contrastive(embeddings, labels, empty="zero")
    (gradient,) = torch.autograd.grad(dropped, embeddings, retain_graph=True)
    assert gradient.isfinite().all()
    torch.testing.assert_close(diluted, dropped * 2 / 5)


def test_supervised_contrastive_has_no_ratio_of_temperatures():
    embeddings = torch.eye(3)[[0, 0, 1]]
    loss = supervised_contrastive(embeddings, torch.tensor([0, 0, 1]), temperature=0.5)
    assert float(loss) == pytest.approx(math.log1p(math.exp(-1 / 0.5)))


def test_detached_virtual_features_are_anchors_for_real_ones():
    real = torch.tensor([[1.0, 0.0]], requires_grad=True)
    virtual = torch.tensor([[0.0, 1.0], [-1.0, 0.2]], requires_grad=True)
    labels = torch.tensor([0]), torch.tensor([0, 1])
    loss = supervised_contrastive(real, labels[0], virtual, labels[1], reduction="sum", temperature=1.0)
    z = nn.functional.normalize(torch.cat([real, virtual])).detach()
    s = z @ z.T
    as_anchor = torch.logsumexp(torch.stack([s[0, 1], s[0, 2]]), 0) - s[0, 1]
    of_virtual = torch.logsumexp(torch.stack([s[1, 0], s[1, 2]]), 0) - s[1, 0]
    torch.testing.assert_close(loss.detach(), as_anchor + of_virtual)
    gradients = torch.autograd.grad(loss, [real, virtual], allow_unused=True)
    assert gradients[1] is None
    assert float(gradients[0][0, 1]) < 0  # a step against it turns the real feature to its virtual class mate


def test_distillation_has_squared_temperature_and_batch_mean():
    student, teacher = normal(0, 6, 3), normal(1, 6, 3)
    at = {t: float(knowledge_distillation(student, teacher, temperature=t)) for t in (1e3, 1e4)}
    assert at[1e3] == pytest.approx(at[1e4], rel=1e-2)  # without T^2 it would fall a hundredfold
    twice = knowledge_distillation(student.repeat(2, 1), teacher.repeat(2, 1))
    torch.testing.assert_close(twice, knowledge_distillation(student, teacher))


def test_knowledge_distillation_is_kl_from_the_teacher_to_the_student():
    teacher, student = logits_of(0.9, 0.1), logits_of(0.5, 0.5)
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert float(knowledge_distillation(student, teacher)) == pytest.approx(forward)
    assert float(knowledge_distillation(teacher, student)) != pytest.approx(forward, rel=0.1)


def test_clamped_disagreement_is_not_the_jensen_shannon_divergence():
    p = 99 * torch.eye(10, dtype=torch.float64)[[0]]
    q = 99 * torch.eye(10, dtype=torch.float64)[[1]]
    assert float(jensen_shannon(p, q)) == pytest.approx(math.log(2))
    assert float(clamped_disagreement(p, q, clamp_result=False)) == pytest.approx(1.61, abs=0.01)
    assert float(clamped_disagreement(p, q)) == 1


def test_clamping_the_result_would_remove_the_gradient():
    p, q = logits_of(0.985, 0.015).requires_grad_(), logits_of(0.015, 0.985)
    dead = torch.autograd.grad(clamped_disagreement(p, q), p)[0]
    alive = torch.autograd.grad(clamped_disagreement(p, q, clamp_result=False), p)[0]
    true = torch.autograd.grad(jensen_shannon(p, q), p)[0]
    assert torch.equal(dead, torch.zeros_like(dead))
    assert float(alive[0, 0]) > 0
    assert float(true[0, 0]) > 0


def test_clamped_disagreement_clamps_the_mean_and_not_each_sample():
    p, q = torch.cat([logits_of(0.985, 0.015), logits_of(0.5, 0.5)]), logits_of(0.015, 0.985).repeat(2, 1)
    each = clamped_disagreement(p, q, clamp_result=False, reduction="none")
    assert float(each[0]) > 1
    torch.testing.assert_close(clamped_disagreement(p, q), each.mean())
    assert float(clamped_disagreement(p, q, reduction="none").mean()) < float(each.mean())


def test_batch_norm_prior_uses_input_norms_with_biased_variance():
    layer = nn.BatchNorm1d(2)
    layer.running_mean.copy_(torch.tensor([3.0, -4.0]))
    layer.running_var.fill_(1)
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])  # mean 0, biased variance 1, unbiased 2
    with BatchNormPrior(layer.eval()) as prior:
        layer(x)
        assert float(prior.value()) == 5  # |(3, -4)|, neither 25 nor 7, and nothing from the variance


def test_total_variation_is_per_image_and_deepinversions_per_batch():
    x = normal(0, 1, 3, 5, 5)
    four = x.repeat(4, 1, 1, 1)
    torch.testing.assert_close(total_variation(four), total_variation(x))
    torch.testing.assert_close(deepinversion_variation(four), 2 * deepinversion_variation(x))
    torch.testing.assert_close(deepinversion_variation(four, order=1), deepinversion_variation(x, order=1))


def test_total_variation_uses_differences_of_signed_pixels():
    x = torch.tensor([[[[-1.0, 1.0]]]])
    assert float(total_variation(x)) == 2
    assert float(total_variation(x, order=2)) == 4


def test_image_l2_scales_as_documented():
    x = normal(0, 1, 3, 5, 5)
    four = x.repeat(4, 1, 1, 1)
    torch.testing.assert_close(image_l2(four), image_l2(x))
    torch.testing.assert_close(image_l2(four, reduction="batch"), 2 * image_l2(x))


def test_proximal_sums_squares_and_does_not_square_the_sum():
    assert float(proximal([torch.tensor([1.0, -1.0])], [torch.zeros(2)], mu=1.0)) == 1


def test_released_feature_decorrelation_is_n_times_the_papers():
    x = normal(0, 64, 8)
    off_diagonal = feature_decorrelation(x) - 1 / 8
    ratio = float(feature_decorrelation(x, variant="released") / off_diagonal)
    assert ratio == pytest.approx(63**2 / 64 * 8 / 7, rel=1e-4)


def test_released_clipping_stretches_short_logits():
    below, above = torch.tensor([[0.399, 0.0]]), torch.tensor([[0.401, 0.0]])
    assert torch.equal(clip_logit_norm(below), below)
    assert float(clip_logit_norm(above)[0, 0]) == pytest.approx(2.5)
    assert torch.equal(clip_logit_norm(above, continuous=True), above)
    assert clip_logit_norm(torch.tensor([[3.0, 4.0]]), continuous=True).tolist() == [[1.5, 2.0]]
