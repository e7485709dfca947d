"""Selection over a public pool: the single image's algorithm with images in place of crops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillkit import LabeledImages, Normalization
from distillkit.rng import derive
from distillkit.select import select
from fl import Classification, FedAvg, Run, Server, simulate
from fl.addons import FedDF, SharedImage, SharedPool
from fl.methods import ClippedCrossEntropy
from tests.fl.federations import Tiny, federation, images
from tests.fl.test_single_image import CLIENTS, LEVEL, PHOTO, START, Scaled, by_hand, constant
from tests.refused import refused

PICTURES = (255 * torch.rand(14, 1, 4, 4, generator=derive(4))).round().to(torch.uint8)
SMALL: dict[str, Any] = {"keep": 6, "steps": 3, "batch": 4, "selection": {"clusters": 4}}


def play(addon: Any, rounds: int = 3, **options: Any) -> Run:
    held = {"factory": Tiny, "lr": 0.1, "batch": 8, **options}
    simulation = {"clients": federation(), **held.pop("simulation", {})}
    return simulate(FedAvg(addon, **held), rounds=rounds, progress=False, **simulation)


@pytest.mark.golden("SharedPool", source="Soni, Saeed and Asano, 2024, Algorithm 1")
@pytest.mark.parametrize("clip", [None, 2.5])
@pytest.mark.parametrize("as_set", [False, True])
def test_three_rounds_equal_those_computed_by_hand(clip: float | None, as_set: bool) -> None:
    """Algorithm 1 with a pool of identical images; the set has another normalization."""
    pool: Any = torch.full((5, 1, 4, 4), round(255 * LEVEL), dtype=torch.uint8)
    if as_set:
        space = Normalization((0.3,), (0.7,))
        pool = LabeledImages.from_pixels(pool, torch.arange(5), normalization=space)
        pool = pool.replace(images=pool.images - 1e-3)  # less than half a level in pixels
    addon = SharedPool(pool, keep=5, rate=0.5, steps=4, batch=2, lr=0.05, clip=clip)
    assert addon.pixels.unique().tolist() == [51]
    run = simulate(
        FedAvg(
            addon, factory=Scaled, initial={"head.weight": torch.tensor(START).float()[:, None]}, lr=0.1, momentum=0.9,
            epochs=2, batch=512, objective=None if clip is None else ClippedCrossEntropy(clip),
        ),
        [constant(*c) for c in CLIENTS], rounds=3, progress=False,
    )  # fmt: skip
    got = run.server.state[FedAvg.model]["head.weight"][:, 0].double().numpy()
    want = by_hand(3, [True, True, False], clip, 0.0, 4, {"": 1.0}, [""] * 3)[""]
    assert got == pytest.approx(want, abs=2e-5)
    assert [row["initialised"] for row in run.rows] == [1, 1, 0]


@pytest.mark.parametrize("space", [Normalization((0.0,), (1.0,)), Normalization((0.4,), (0.3,))], ids=str)
def test_global_model_selects_images_for_the_next_round(space: Normalization) -> None:
    """Indices refer to the pool, in the clients' space; round 1 selects with the initial weights."""
    clients = [c.replace(normalization=space) for c in federation()]
    seen: list[torch.Tensor] = []

    class Peek(SharedPool):
        key = "SharedPool"

        def after_training(self, local: Any, update: Any, reply: Any) -> None:
            super().after_training(local, update, reply)
            index = local.message[self.index].long()
            own = local.at(local.state())(space.encode(PICTURES[index].float() / 255))
            seen.append((own - reply[self.logits]).abs().max())

    run = play(Peek(PICTURES, **SMALL), simulation={"clients": clients}, rounds=2)
    assert float(torch.stack(seen).max()) < 1e-5
    server, net = run.server, Tiny(3).eval()
    net.load_state_dict(server.state[FedAvg.model])
    x = space.encode(PICTURES.float() / 255)
    with torch.no_grad():
        want = select(net.features(x), net(x), keep=6, clusters=4, generator=server.generator("SharedPool selection"))
    assert server.state[SharedPool.index].tolist() == want.tolist()


@pytest.mark.parametrize(
    ("rate", "returns", "clip"), [(1.0, "last", 2.5), (0.5, "last", 2.5), (1.0, "last", 2.0), (0.5, "best", 2.0)]
)
def test_without_selection_it_equals_feddf_with_logits_sent(rate: float, returns: str, clip: float) -> None:
    """Row 1 of Table 6. Clients of one size and batches of the whole pool, so only the traffic differs."""
    clients = [images(12, seed) for seed in range(4)]
    proxy = LabeledImages.from_pixels(PICTURES, torch.zeros(14, dtype=torch.int64), num_classes=3)
    how: dict[str, Any] = {"steps": 3, "batch": 14, "rate": rate, "clip": clip, "lr": 0.02, "returns": returns}
    feddf = FedDF(**how, schedule="constant", gradient_norm=None)
    data = {"clients": clients, "server_data": {"proxy": proxy, "validation": images(40, 9)}}
    one, other = play(SharedPool(PICTURES, keep=14, **how), simulation=data), play(feddf, simulation=data)
    for name, value in other.server.state[FedAvg.model].items():
        assert torch.allclose(one.server.state[FedAvg.model][name], value, atol=1e-5), name
    assert ["FedAvg.update" in row["up"] for row in one.rows] == [True, True, rate == 1.0]


@pytest.mark.parametrize(
    ("addon", "size"),
    [(SharedPool(PICTURES, **SMALL, rate=0.5), 14 * 16), (SharedImage(PHOTO, count=14, **SMALL, rate=0.5), 24 * 30)],
    ids=["pool", "image"],
)
def test_picture_is_sent_once_and_then_indices_and_logits(addon: SharedPool, size: int) -> None:
    """Up: 8 + 4 keep K a client, and the weights in rounds 1, 2 and 4; down: weights, 4 keep, the picture once."""
    weights, name = 4 * (3 * 9 + 3 + 48 * 3 + 3), addon.name
    for number, row in enumerate(play(addon, rounds=4).rows, start=1):
        up = {"FedAvg.samples": 5 * 8, f"{name}.logits": 5 * 4 * 6 * 3}
        if number != 3:
            up["FedAvg.update"] = 5 * weights
        down = {"FedAvg.model": 5 * weights, f"{name}.index": 5 * 4 * 6, f"{name}.picture:digest": 5 * 16}
        if number == 1:
            down[f"{name}.picture"] = 5 * size
        assert (row["up"], row["down"], row["failed"]) == (up, down, {})


def test_outputs_of_a_set_in_chunks_are_the_networks() -> None:
    """Values outside [0, 1] are clipped as pixels."""
    held, net = images(1003, 5), Tiny(3).eval()
    pixels = (255 * held.images.clamp(0, 1)).round().to(torch.uint8)
    pool = SharedPool(held, keep=1)
    assert torch.equal(pool.pixels, pixels)
    server = Server(Classification(3), (1, 4, 4), held.normalization, 1, 0)
    found = pool.source.outputs(net, pixels, torch.arange(1003), server, 3)
    for got, want in zip(found, (net.features(pixels / 255), net(pixels / 255)), strict=True):
        torch.testing.assert_close(got, want)


def test_refusals() -> None:
    for bad in (PICTURES.float(), PICTURES[0], PICTURES[:0], None):
        with pytest.raises(TypeError, match="pool must be a LabeledImages, or images uint8"):
            SharedPool(bad)  # type: ignore[arg-type]
    refused(lambda: SharedPool(PICTURES, **{**SMALL, "keep": 15}), ValueError, "keep")
    with pytest.raises(ValueError, match=r"the pool has images \(1, 4, 3\), the clients have \(1, 4, 4\)"):
        play(SharedPool(PICTURES[..., :3], keep=14))
    pools = (PICTURES, 255 - PICTURES, PICTURES.view(-1, 2, 4, 2))
    assert len({repr(SharedPool(pool, **SMALL)) for pool in pools}) == 3
