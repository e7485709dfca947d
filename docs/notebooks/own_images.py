"""Condense a folder of your own pictures, and train on what comes of it."""

# %% [markdown]
# # Your own images, condensed
#
# A folder of pictures becomes a few pictures a class that a network can be trained on. With your own folder (one
# sub-folder a class), leave out the next cell and write its name in the one after it; here the pictures are
# scikit-learn's handwritten digits.

# %%
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for i, (ink, label) in enumerate(zip(digits.images * 255 / 16, digits.target)):
    Path("digits", str(label)).mkdir(parents=True, exist_ok=True)
    Image.fromarray(ink.astype("uint8")).save(f"digits/{label}/{i:04d}.png")

# %% [markdown]
# `load_folder` reads it. There is no folder `test`, so a fixed fifth of each class is held back. A set at the end of a
# cell shows itself, ten pictures of each class.

# %%
from distillkit.data import load_folder

train, test = load_folder("digits")
train

# %% [markdown]
# ## Condense
#
# Distribution matching moves a few pictures until networks with random weights see in them what they see in the whole
# class. Nothing of it is tied to our networks: `convnet` may make any `nn.Module`. The budgets here are for a laptop;
# published ones are in the thousands of steps.

# %%
from distillkit.condense import distribution_matching
from distillkit.networks import ConvNet, RandomNetworks

steps = 300  # quick: 2
sizes = (1, 5, 10)  # quick: (1,)


def convnet():
    return ConvNet(train.shape, train.num_classes, width=32, depth=2)


sets = {
    ipc: distribution_matching(train, networks=RandomNetworks(convnet), ipc=ipc, steps=steps, batch_real=64)
    for ipc in sizes
}

# %%
from distillkit import plot

plot.grid(sets[sizes[-1]])

# %% [markdown]
# They started from real pictures and still look like some. Is that private? No: the third notebook looks at what is
# given away, and `condense_private` makes sets with a guarantee.
#
# ## Is it worth it?
#
# Networks are trained from scratch on each set alone and tested on real pictures. Beside each set: as many random real
# pictures, drawn anew for every network. What does not beat these has not paid for itself.

# %%
from distillkit.evaluate import evaluate
from distillkit.training import Protocol

draws = 3  # quick: 2
protocol = Protocol(epochs=100)  # quick: Protocol(epochs=2)
for ipc, small in sets.items():
    for row in evaluate(small, test, convnet, real=train, num_networks=draws, protocol=protocol, progress=False).rows:
        print(f"{ipc:2} a class, {row.data:<11}  {row.mean:.1%} ± {row.std:.1%}")

# %% [markdown]
# The spread is over networks, not over sets: one set was made of each size. `print(evaluate(...))` gives the same as a
# table. And all pictures, for comparison:

# %%
from distillkit.networks import build
from distillkit.training import accuracy
from distillkit.training import train as train_network

whole = train_network(build(convnet, 0), train, protocol, generator=0)
print(f"{len(train)} pictures: {accuracy(whole, test):.1%}")

# %% [markdown]
# ## Another network
#
# A set that was matched at one architecture is tried at others before it is passed on.

# %%
from torch import nn


def two_layers():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, train.num_classes))


for row in evaluate(sets[sizes[-1]], test, two_layers, real=train, num_networks=draws, protocol=protocol).rows:
    print(f"{row.data:<11}  {row.mean:.1%} ± {row.std:.1%}")

# %% [markdown]
# ## Keep it
#
# One file without pickle; the normalisation and how the set was made travel with it. Whoever has no `distillkit` reads
# it with `safetensors` alone (the tutorial's step 4).

# %%
from distillkit import LabeledImages

path = sets[sizes[-1]].save("small.safetensors")
again = LabeledImages.load(path)
print(again)
print(f"{path.stat().st_size / 1e3:.0f} kB; {again.info['method']}, {again.info['steps']} steps")
