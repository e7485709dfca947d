"""Condense a folder of your own pictures, and train on the result."""

# %% [markdown]
# # Your own images, condensed
#
# This notebook condenses a folder of pictures to a few pictures per class, on which you can train a network. The
# pictures here are scikit-learn's handwritten digits. To use your own folder with one sub-folder per class, skip the
# next cell and pass the folder's name to `load_folder` in the cell after it.

# %%
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for i, (ink, label) in enumerate(zip(digits.images * 255 / 16, digits.target)):
    Path("digits", str(label)).mkdir(parents=True, exist_ok=True)
    Image.fromarray(ink.astype("uint8")).save(f"digits/{label}/{i:04d}.png")

# %% [markdown]
# `load_folder` reads the folder. The folder has no sub-folder `test`, so a fixed fifth of each class is held out for
# testing. If a set is the last expression of a cell, the notebook shows ten pictures of each class.

# %%
from distillkit.data import load_folder

train, test = load_folder("digits")
train

# %% [markdown]
# ## Condense
#
# Distribution matching optimises a few synthetic pictures per class. In networks with random weights, their mean
# embedding should equal the mean embedding of all real pictures of the class. The function `convnet` may return any
# `nn.Module`. This notebook makes few steps, so that it runs on a laptop. Published results use thousands of steps.

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
# The condensed pictures started from real ones and still resemble them, so they are not private. The notebook
# "Membership inference and gradient inversion" shows attacks, and `condense_private` makes sets with a privacy
# guarantee.
#
# ## Compare with random pictures
#
# Networks are trained from scratch on each set alone and tested on real pictures. The baseline is the same number of
# random real pictures, drawn again for every network. A condensed set is only useful if it beats this baseline.

# %%
from distillkit.evaluate import evaluate
from distillkit.training import Protocol

repeats = 3  # quick: 2
protocol = Protocol(epochs=100)  # quick: Protocol(epochs=2)
for ipc, small in sets.items():
    for row in evaluate(small, test, convnet, real=train, num_networks=repeats, protocol=protocol, progress=False).rows:
        print(f"{ipc:2} a class, {row.data:<11}  {row.mean:.1%} ± {row.std:.1%}")

# %% [markdown]
# Only one set of each size was made, so the standard deviation is over the networks trained on this set.
# `print(evaluate(...))` prints the same numbers as a table. For comparison, train on all pictures:

# %%
from distillkit.networks import build
from distillkit.training import accuracy
from distillkit.training import train as train_network

whole = train_network(build(convnet, 0), train, protocol, generator=0)
print(f"{len(train)} pictures: {accuracy(whole, test):.1%}")

# %% [markdown]
# ## Another network
#
# Before you share a set that was condensed with one architecture, train other architectures on it, and test them.

# %%
from torch import nn


def two_layers():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, train.num_classes))


for row in evaluate(sets[sizes[-1]], test, two_layers, real=train, num_networks=repeats, protocol=protocol).rows:
    print(f"{row.data:<11}  {row.mean:.1%} ± {row.std:.1%}")

# %% [markdown]
# ## Save the set
#
# The set is saved as one safetensors file, which also contains its normalization and the method that made it. You can
# also read the file without distillkit, as step 4 of the tutorial shows.

# %%
from distillkit import LabeledImages

path = sets[sizes[-1]].save("small.safetensors")
again = LabeledImages.load(path)
print(again)
print(f"{path.stat().st_size / 1e3:.0f} kB; {again.info['method']}, {again.info['steps']} steps")
