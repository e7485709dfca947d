"""Compare three federated methods over three folders, fairly."""

# %% [markdown]
# # Three folders, three clients, three methods
#
# Three sites have a folder of pictures each and send none of them. Which method trains the better model in a few
# rounds? A *study* answers it fairly: as many settings are tried for every method, on pictures that are neither trained
# on nor in the test set, and the best of each runs under several seeds. With your own folders, leave out the next cell.

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
# The sites hold the same digits from different scanners: they differ in how pictures look, not in which classes they
# have. The normalisation is a constant, the same for all: nobody's pictures are measured for it.

# %%
from distillkit import Normalization, plot
from distillkit.data import load_domains

folders = {site: f"pictures/{site}" for site in scanners}
half = Normalization((0.5,), (0.5,))
pictures = load_domains(folders, normalization=half)
some = pictures.train[::31]
plot.grid(some.replace(labels=some.columns["domain"], num_classes=3), classes=pictures.domains)  # a row a site

# %% [markdown]
# ## The task and the ways
#
# A task is data, network, rounds; a value of the column `domain` is a client. A way is a method with the settings that
# are tried. FedAvg and SCAFFOLD send weights, FedDM small sets of pictures that it has learned.

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


ways = {
    "FedAvg": Federated(FedAvg, search=grid(lr=[0.1, 0.3])),
    "SCAFFOLD": Federated(scaffold, search=grid(lr=[0.1, 0.3])),
    "FedDM": Federated(
        FedDM,
        settings={"ipc": 5, "steps": 5, "server_epochs": 20},
        search=grid(server_lr=[0.01, 0.03]),
    ),
}
study = Study("runs/sites", task, ways, seeds=seeds)
records = study.run(trial=False, progress=False)

# %% [markdown]
# `run(trial=True)`, the default, first says how long all of it will take. Interrupted, the same call goes on.
#
# ## What came of it

# %%
study.table(columns=["bytes_up"]).without("best % *", "best of the seeds' mean % *")

# %%
study.curves()

# %% [markdown]
# The same by what the rounds cost: FedDM's messages have another size than weights have.

# %%
study.curves(by="bytes")

# %% [markdown]
# ## May one say so?
#
# Ways under one seed share first weights and split, so they are compared seed by seed. The interval is of the mean
# difference over seeds; where it contains 0, nothing was shown.

# %%
paired_differences(records, base="FedAvg")

# %% [markdown]
# Which settings were chosen. Of three values or more the table says whether the best lies at the edge of those tried;
# of two it always does, so in earnest more would be tried.

# %%
from distillkit.study import tuning_table

tuning_table("runs/sites")

# %% [markdown]
# Every run lies in the folder with all that it takes to repeat it; `fl.study.repeat` does, and comes to the same hash.
# And what FedDM's pictures tell of the sites' own is another question: see the next notebook, and `attacks.report`.

# %%
import fl.study

known = fl.study.load("runs/sites/sites-fedavg-0")
print(known)
print("the same to the last bit:", fl.study.repeat(known.folder, progress=False).hash == known.hash)
