"""Membership inference on a trained model and gradient inversion of a message, with their results explained."""

# %% [markdown]
# # Membership inference and gradient inversion
#
# Anyone who trains on private pictures faces two questions. *Was this picture used for training?* concerns a published
# model. *Which pictures did this client have?* concerns a message in federated learning. This notebook answers both
# with attacks on scikit-learn's digits, and explains the results.
#
# ## Membership inference
#
# A model is more confident on its training pictures than on other pictures. To learn how much more, an
# attacker trains *shadow models*: it repeats the training on random halves of the candidate pictures. Here, the
# training pipeline trains a small network on 200 pictures.

# %%
import torch
from torch import nn

from attacks.membership import Pipeline, leave_one_out, model_scorer, run_shadows
from distillkit.data import load
from distillkit.networks import build
from distillkit.rng import derive
from distillkit.training import Protocol, accuracy, train

digits, test = load("digits")
order = torch.randperm(len(digits), generator=derive(0))  # a loader's order is by class: never take its first ones
candidates, population = digits[order[:400]], digits[order[400:800]]
runs, epochs = 32, 60  # quick: 8, 2


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def trained(indices, seed):
    return train(build(network, seed), candidates[indices], Protocol(epochs=epochs, lr=0.05, batch=32), generator=seed)


pipeline = Pipeline(
    lambda indices, seed: {"model": model_scorer(trained(indices, seed))}, *candidates, population=tuple(population)
)
shadows = run_shadows(pipeline, runs, progress=False)
shadows

# %% [markdown]
# Each shadow model is the target once, and the attacks on it can use all other shadow models. The attack `threshold`
# uses only the target. For each picture, LiRA and RMIA compare the target with models that were trained on the
# picture and models that were not.

# %%
fpr = 0.02
found = leave_one_out(shadows, fpr=fpr, progress=False)
for name, attack in found.items():
    print(f"{name:<13}", attack)

# %% [markdown]
# **Interpretation.** TPR is the share of training pictures that the attack finds at the given false-positive rate.
# For random guessing, the TPR equals the false-positive rate. If the interval of the TPR contains the false-positive
# rate, the attack is therefore not shown to work. The AUC averages over all thresholds, and can hide that a few
# pictures are identified with certainty. The next cell computes the probability that a picture found by the attack is
# a member. This probability depends on the prior probability of membership:

# %%
name, best = max(found.items(), key=lambda item: item[1].tpr.value)
one = trained(torch.arange(200), 0)
print(f"test accuracy of such a model: {accuracy(one, test):.1%}")
print(f"{name} finds {best.tpr.value:.1%} of the pictures at {best.fpr.value:.1%} false alarms.")
for prior in (0.5, 0.01):
    print(f"Of 100 that it names, {100 * best.ppv(prior).value:.0f} were trained on, if {prior:.0%} of all were.")

# %% [markdown]
# ## Gradient inversion
#
# In federated averaging, a client trains the model on its pictures, and sends the change of the weights. If the client
# makes a single step, this change is proportional to a gradient. The attacker knows the initial weights and the
# message. The attacker first infers the labels from the message, and then searches for pictures that would have caused
# the message.

# %%
from attacks.inversion import Gradient, invert_message
from attacks.matching import match
from attacks.metrics import psnr
from distillkit.networks import ConvNet

private = candidates[:4]
sender = build(lambda: ConvNet((1, 8, 8), 10, width=16, depth=1, norm="none", activation="tanh"), 0)
message = Gradient.of(sender, private.images, private.labels)
steps = 40  # quick: 1
reconstruction = invert_message(message, (1, 8, 8), 4, method="dlg", steps=steps, normalization=private.normalization)
recovered = reconstruction.images[match(reconstruction.images, private.pixels())]
print("labels:", private.labels.sort().values.tolist(), "inferred from the message:", reconstruction.labels.tolist())
print("PSNR in dB:", [round(float(v), 1) for v in psnr(recovered, private.pixels())])

# %% [markdown]
# Above: the client's pictures. Below: the pictures recovered from the message.

# %%
import matplotlib.pyplot as plt

figure, rows = plt.subplots(2, 4, figsize=(6, 3))
for row, images in zip(rows, (private.pixels(), recovered)):
    for axis, image in zip(row, images):
        axis.imshow(image[0], cmap="gray", vmin=0, vmax=1)
        axis.axis("off")

# %% [markdown]
# **Interpretation.** At 10 dB, hardly anything is recognizable. Above 25 dB, the whole picture is recognizable. The
# next table compares common defences. Its last line shows the PSNR of an attack that learns nothing from the message.

# %%
from attacks.inversion import Clip, DefendedMessage, FedAvgUpdate, Noise, Sparsify, compare_messages

messages = {
    "nothing": message,
    "the largest tenth": DefendedMessage(message, Sparsify(0.1)),
    "a little noise": DefendedMessage(message, Noise(0.001)),
    "clip 1, noise 0.1": DefendedMessage(message, Clip(1.0), Noise(0.1)),
    "two local steps": FedAvgUpdate.of(sender, private.images, private.labels, lr=0.05, epochs=2),
}
compare_messages(messages, *private, method="dlg", steps=steps, normalization=private.normalization)

# %% [markdown]
# A low PSNR only shows that this attack failed within so few steps. Only noise with privacy
# accounting gives a guarantee: use `fl.addons.DPSGD` for federated runs, and `distillkit.privacy` for sets and
# models. `attacks.report` attacks a whole run and writes a report.
