"""Loss functions on tensors, and `nn.Module` versions of the most common ones."""

from distillkit.losses.contrastive import SupervisedContrastive, model_contrastive, supervised_contrastive
from distillkit.losses.distillation import (
    KnowledgeDistillation,
    binary_distillation,
    clamped_disagreement,
    jensen_shannon,
    knowledge_distillation,
)
from distillkit.losses.matching import RBFMMD, class_means, gradient_distance, mean_embedding_distance, rbf_mmd
from distillkit.losses.priors import BatchNormPrior, deepinversion_variation, image_l2, total_variation
from distillkit.losses.regularizers import clip_logit_norm, feature_decorrelation, prototype_distance, proximal

__all__ = [
    "RBFMMD",
    "BatchNormPrior",
    "KnowledgeDistillation",
    "SupervisedContrastive",
    "binary_distillation",
    "clamped_disagreement",
    "class_means",
    "clip_logit_norm",
    "deepinversion_variation",
    "feature_decorrelation",
    "gradient_distance",
    "image_l2",
    "jensen_shannon",
    "knowledge_distillation",
    "mean_embedding_distance",
    "model_contrastive",
    "prototype_distance",
    "proximal",
    "rbf_mmd",
    "supervised_contrastive",
    "total_variation",
]
__dir__ = __all__.copy
