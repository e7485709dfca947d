"""Compare three federated methods over three folders of images."""

# %% [markdown]
# # A federated comparison
#
# Three sites each have a folder of images and send none of them. Which method trains the better model in a few
# rounds? A *study* compares them fairly. It searches the same number of configurations for every method, on images
# outside the training and test sets, and runs the best of each with several seeds. Skip the
# next cell if you use your own folders.

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
# The sites hold the same digits from different scanners: the images look different, but the classes are the same. The
# normalization is the same constant for all sites, so nothing is measured on their images.

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
# A task states the data, the network and the number of rounds; here each value of the column `domain` is a client. A
# candidate is a method with the configurations to search. FedAvg and SCAFFOLD send weights; FedDM sends small sets of
# learned images.

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
# `run(trial=True)`, the default, first estimates the total time. After an interruption, the same call continues.
#
# ## Results

# %%
study.table(columns=["bytes_up"]).without("best % *", "best of the seeds' mean % *")

# %%
study.curves()

# %% [markdown]
# FedDM's messages differ in size from weights, so draw the same curves by bytes as well.

# %%
study.curves(by="bytes")

# %% [markdown]
# ## Differences between candidates
#
# Runs with the same seed share initial weights and partition, so candidates are compared seed by seed. The interval is
# that of the mean difference over seeds. An interval that contains 0 shows no difference.

# %%
paired_differences(records, base="FedAvg")

# %% [markdown]
# The next table shows the chosen configurations. With three or more values, it also shows whether the best value is at
# the edge of the grid. With two values the best always is, so search more values in a real study.

# %%
from distillkit.study import tuning_table

tuning_table("runs/sites")

# %% [markdown]
# Each run's folder holds everything needed to repeat it. `fl.study.repeat` repeats a run and gets the same hash. The
# next notebook and `attacks.report` show what FedDM's images reveal about the sites' own images.

# %%
import fl.study

run = fl.study.load("runs/sites/sites-fedavg-0")
print(run)
print("bit-identical:", fl.study.repeat(run.folder, progress=False).hash == run.hash)
