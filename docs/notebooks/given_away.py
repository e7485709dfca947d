"""What a trained model and a message give away: a membership attack and an inversion, with their numbers read."""

# %% [markdown]
# # What a model and a message give away
#
# Two questions that anybody who trains on private pictures is asked. *Was this picture trained on?* is asked of a model
# that is published. *What did this client send?* is asked by whoever reads a message of federated learning. Both are
# answered by attack here, on scikit-learn's digits, and the answers are read.
#
# ## Who was trained on?
#
# A model is surer of pictures that it was trained on. How much surer, an attacker learns from *shadow models*: the same
# training, on random halves of the candidates, again and again. Our pipeline is a small network on 200 pictures.

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
made = run_shadows(pipeline, runs, progress=False)
made

# %% [markdown]
# Each shadow in turn is the target, and the attacks know the others. `threshold` looks at the target alone; LiRA and
# RMIA compare each picture with what models say of it that were, and were not, trained on it.

# %%
fpr = 0.02
found = leave_one_out(made, fpr=fpr, progress=False)
for name, attack in found.items():
    print(f"{name:<13}", attack)

# %% [markdown]
# **How to read it.** TPR is the share of trained-on pictures that are found, at the rate of false alarms that stands
# behind it. Guessing finds as many as it falsely accuses, so the two are compared; an interval that contains the rate
# of false alarms is no finding. The AUC averages over all thresholds and hides that a few pictures are given away for
# certain. What a hit is worth depends on how likely membership was before:

# %%
name, best = max(found.items(), key=lambda item: item[1].tpr.value)
one = trained(torch.arange(200), 0)
print(f"test accuracy of such a model: {accuracy(one, test):.1%}")
print(f"{name} finds {best.tpr.value:.1%} of the pictures at {best.fpr.value:.1%} false alarms.")
for prior in (0.5, 0.01):
    print(f"Of 100 that it names, {100 * best.ppv(prior).value:.0f} were trained on, if {prior:.0%} of all were.")

# %% [markdown]
# ## What was sent?
#
# In federated averaging a client sends how its training changed the weights: at its smallest, one gradient. The
# attacker has the weights and the message, and looks for pictures that would have caused it. He reads their labels off
# the message first.

# %%
from attacks.inversion import Gradient, invert_message
from attacks.matching import match
from attacks.metrics import psnr
from distillkit.networks import ConvNet

private = candidates[:4]
sender = build(lambda: ConvNet((1, 8, 8), 10, width=16, depth=1, norm="none", activation="tanh"), 0)
message = Gradient.of(sender, private.images, private.labels)
steps = 40  # quick: 1
attempt = invert_message(message, (1, 8, 8), 4, method="dlg", steps=steps, normalization=private.normalization)
back = attempt.images[match(attempt.images, private.pixels())]
print("labels:", private.labels.sort().values.tolist(), "read off the message:", attempt.labels.tolist())
print("PSNR in dB:", [round(float(v), 1) for v in psnr(back, private.pixels())])

# %% [markdown]
# Above: the client's pictures. Below: what comes back of the message.

# %%
import matplotlib.pyplot as plt

figure, rows = plt.subplots(2, 4, figsize=(6, 3))
for row, images in zip(rows, (private.pixels(), back)):
    for axis, image in zip(row, images):
        axis.imshow(image[0], cmap="gray", vmin=0, vmax=1)
        axis.axis("off")

# %% [markdown]
# **How to read it.** At 10 dB next to nothing is seen, above 25 dB the picture is. Beside it, what is
# commonly offered as a defence. The last line of the table is what an attack gets that finds nothing.

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
# A row that looks safe is this attack's failure, with these few steps, and promises nothing. What promises something is
# noise that is accounted for: `fl.addons.DPSGD`, and `distillkit.privacy` for sets and models. The whole of a run is
# attacked, and put on one page, by `attacks.report`.
