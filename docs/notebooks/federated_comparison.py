"""Compare three federated methods over three folders of images."""

# %% [markdown]
# # A federated comparison
#
# Each of three sites has a folder of images, which it does not send to anyone. Which federated method trains the
# better model in a few rounds? A *study* compares methods fairly. For every method, it tries the same number of
# configurations on held-out images, and runs the best configuration with several seeds. Skip the next cell if you use
# your own folders.

# %%
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

scanners = {"north": lambda ink: ink, "south": lambda ink: 255 - ink, "west": lambda ink: 64 + ink // 2}
digits = load_digits()
for i, (ink, label) in enumerate(zip(digits.images * 255 / 16, digits.target)):
    site = list(scanners)[i % 3]
    Path("pictures", site, str(label)).mkdir(parents=True, exist_ok=True)
    Image.fromarray(scanners[site](ink.astype("uint8"))).save(f"pictures/{site}/{label}/{i:04d}.png")

# %% [markdown]
# The sites have handwritten digits from different scanners. The images look different, but the classes are the same.
# All sites use the same constant normalization, so that no statistics of their images are needed.

# %%
from distillkit import Normalization, plot
from distillkit.data import load_domains

folders = {site: f"pictures/{site}" for site in scanners}
half = Normalization((0.5,), (0.5,))
images = load_domains(folders, normalization=half)
some = images.train[::31]
plot.grid(some.replace(labels=some.columns["domain"], num_classes=3), classes=images.domains)  # one row per site

# %% [markdown]
# ## Task and candidates
#
# A task defines the data, the network and the number of rounds. Here, each value of the column `domain` is a client.
# A candidate is a method with the configurations to search. In FedAvg and SCAFFOLD, clients send weights. In FedDM,
# they send small sets of learned images.

# %%
from functools import partial

from distillkit.study import Study, Task, grid, paired_differences
from fl import FedAvg, FedDM
from fl.addons import SCAFFOLD
from fl.study import Federated

rounds = 4  # quick: 1
seeds = (0, 1, 2)  # quick: (0,)

task = Task(
    "sites",
    partial(load_domains, folders, normalization=half),
    factory="convnet",
    factory_options={"width": 16, "depth": 2},
    rounds=rounds,
)


def scaffold(factory, lr):
    return FedAvg(SCAFFOLD(), factory=factory, lr=lr)


candidates = {
    "FedAvg": Federated(FedAvg, search=grid(lr=[0.1, 0.3])),
    "SCAFFOLD": Federated(scaffold, search=grid(lr=[0.1, 0.3])),
    "FedDM": Federated(
        FedDM,
        settings={"ipc": 5, "steps": 5, "server_epochs": 20},
        search=grid(server_lr=[0.01, 0.03]),
    ),
}
study = Study("runs/sites", task, candidates, seeds=seeds)
records = study.run(trial=False, progress=False)

# %% [markdown]
# By default (`trial=True`), `run` first estimates the total time. If `run` is interrupted, call it again to continue.
#
# ## Results

# %%
study.table(columns=["bytes_up"]).without("best % *", "best of the seeds' mean % *")

# %%
study.curves()

# %% [markdown]
# FedDM's messages differ in size from a model's weights, so the next cell plots accuracy against the bytes sent.

# %%
study.curves(by="bytes")

# %% [markdown]
# ## Differences between candidates
#
# Runs with the same seed have the same initial weights and partition, so the table compares runs with equal seeds.
# The interval is the confidence interval of the mean difference. If it contains 0, the runs do not show a difference.

# %%
paired_differences(records, base="FedAvg")

# %% [markdown]
# The next table shows the chosen configurations. If a grid has three or more values, the table also shows whether the
# best value is at the edge of the grid. One of two values is always at the edge, so search more in a real study.

# %%
from distillkit.study import tuning_table

tuning_table("runs/sites")

# %% [markdown]
# `fl.study.repeat` repeats a run from its folder, and its result has the same hash as the original run. The
# notebook "Membership inference and gradient inversion" and `attacks.report` show what FedDM's images reveal about
# the sites' own images.

# %%
import fl.study

run = fl.study.load("runs/sites/sites-fedavg-0")
print(run)
print("bit-identical:", fl.study.repeat(run.folder, progress=False).hash == run.hash)
