"""FedDM under differential privacy against a reference computed by hand, and its ledger entries."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from distillkit import LabeledImages, privacy
from distillkit.augment import DSA
from distillkit.networks import NetworkBall
from distillkit.normalization import IDENTITY, ZCA, Normalization
from distillkit.privacy import Account, Ledger, PrivacyError, Secret, class_sums, compose, image_sgd, plan_noise
from distillkit.privacy._public_noise import public_noise
from distillkit.rng import derive
from fl import Classification, Client, FedDM, Message, MultiLabel, NoUsableReply, Run, Server, simulate
from fl.aggregation import AggregatedReplies
from fl.methods import PrivateFedDM, SummedFedDM
from tests.fl.federations import Tiny, images, small, with_label_rows
from tests.fl.test_feddm import train_server
from tests.fl.test_private_runs import empty_client
from tests.refused import refused

IPC, MAPS, STEPS, LR, RHO = 2, 3, 5, 3.0, 0.7
SIGMA, SIGMA_SIZES = 4.0, 0.5
SERVER = {"server_epochs": 4, "server_batch": 999, "server_lr": 0.3, "server_weight_decay": 0.01}


def double(outputs: int) -> nn.Module:
    return small(outputs).double()


def clients() -> list[LabeledImages]:
    """Three clients: one lacks a class, one has no records at all."""
    first, second = (s.to(dtype=torch.float64) for s in (images(12, seed=0), images(40, seed=1)))
    return [first, second[second.labels != 2], empty_client().to(dtype=torch.float64)]


def method(kind: type[PrivateFedDM] = PrivateFedDM, **changes: Any) -> PrivateFedDM:
    noise = {"sigma": SIGMA, "sigma_sizes": SIGMA_SIZES, "num_networks": MAPS, "rho": RHO, "least": 0.0}
    return kind(**{"factory": double, "ipc": IPC, "steps": STEPS, "lr": LR, **noise, **SERVER, **changes})


def play(*, kind: type[PrivateFedDM] = PrivateFedDM, rounds: int = 1, held: Any = None, **changes: Any) -> Run:
    how = {k: changes.pop(k) for k in ("secret", "ledger", "out", "resume", "workers", "participation") if k in changes}
    return simulate(method(kind, **changes), held or clients(), rounds=rounds, progress=False, **how)


def state(run: Run) -> dict[str, Tensor]:
    return run.server.state[FedDM.model]


def same(one: Run, two: Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(state(one).values(), state(two).values(), strict=True))


# The reference: unit vectors (or, with a clip, shortened ones) around a public centre under networks at distance rho,
# sums, noise, SGD on the images.


def vectors(net: Any, x: Tensor, center: Tensor, clip: float | None) -> Tensor:
    gap = torch.cat([net.features(x), net(x)], 1) - center
    norm = gap.norm(dim=1, keepdim=True)
    return gap / norm if clip is None else gap * (clip / norm).clamp_max(1.0)


def drawn(
    model: nn.Module, like: LabeledImages, generator: torch.Generator, around: Tensor | None = None
) -> list[tuple[nn.Module, Tensor]]:
    seed, found = int(torch.randint(2**62, (), generator=generator)), []
    for k in range(MAPS):
        net = copy.deepcopy(model)
        center = parameters_to_vector(net.parameters()).detach()
        noise = torch.empty(len(center), dtype=center.dtype).normal_(generator=derive(seed, "network", k))
        vector_to_parameters(center + RHO * noise / noise.norm(), net.parameters())
        public = public_noise(64, like, derive(seed, "centre")) if around is None else around
        with torch.no_grad():
            found.append((net, vectors(net, public, torch.zeros(()), 1e9).mean(0)))
    return found


def summed(data: LabeledImages, maps: list[tuple[nn.Module, Tensor]], clip: float | None = None) -> Tensor:
    with torch.no_grad():
        rows = [vectors(*m[:1], data.images, m[1], clip) for m in maps]
    return torch.stack([torch.stack([r[data.labels == c].sum(0) for c in range(3)]) for r in rows])


def fitted(start: Tensor, maps: list[tuple[nn.Module, Tensor]], targets: Tensor, clip: float | None = None) -> Tensor:
    x, velocity = start, torch.zeros(())
    for step in range(STEPS):
        net, center = maps[step % MAPS]
        leaf = x.clone().requires_grad_()
        gaps = targets[step % MAPS] - vectors(net, leaf, center, clip).unflatten(0, (3, IPC)).mean(1)
        velocity = 0.5 * velocity + torch.autograd.grad(gaps.square().sum(), leaf)[0]
        x = x - LR * 0.5 * (1 + math.cos(math.pi * step / STEPS)) * velocity
    return x


def noise_of(client: int | str, number: int, secret: int = 5) -> Secret:
    return Secret(int(torch.randint(2**62, (), generator=derive(secret, number, client, "secret"))))


def initial_network() -> nn.Module:
    net = double(3)
    net.load_state_dict(state(play(server_lr=1e-30, project=False, server_weight_decay=0.0)))
    return net


def initial_images(owner: tuple[Any, ...]) -> Tensor:
    return torch.randn(3 * IPC, 1, 4, 4, generator=derive(0, *owner, "start"), dtype=torch.float64)


@pytest.mark.golden(
    "PrivateFedDM",
    source="Xiong et al., CVPR 2023, section 3.3, image SGD; noised class means are a construction of our own",
)
@pytest.mark.parametrize(
    ("weights", "least", "warm", "clip"),
    [
        ("synthetic", 0.0, False, None),
        ("samples", 6.0, False, None),
        ("samples", 0.2, False, 0.4),
        ("synthetic", 6.0, True, None),
    ],
)
def test_rounds_follow_the_reference(weights: Any, least: float, warm: bool, clip: float | None) -> None:
    """The histogram is drawn in round 1 and reused; a class without records gets noise; networks follow the model."""
    held, net = clients(), initial_network()
    found = play(rounds=2, secret=5, weights=weights, least=least, warm=warm, max_samples=4.0, clip=clip)
    counts: dict[int, Tensor] = {}
    last: dict[int, Tensor] = {}
    for number in (1, 2):
        sets, shares = [], []
        for k, data in enumerate(held):
            secret = noise_of(k, number)
            if number == 1:
                counts[k] = secret.add_noise(data.counts(), SIGMA_SIZES)
            kept = counts[k].clamp_min(0.0) >= least
            begin = last[k] if warm and number == 2 else initial_images((number, k))
            around = begin[kept.repeat_interleave(IPC)] if warm and number == 2 and kept.any() else None
            maps = drawn(net, data, derive(0, number, k, "maps"), around)
            sums = secret.add_noise(summed(data, maps, clip), SIGMA * (clip or 1.0))
            targets = sums / counts[k].clamp_min(1.0).view(1, -1, 1)
            moved = fitted(begin, maps, targets, clip)
            last[k] = torch.where(kept.repeat_interleave(IPC).view(-1, 1, 1, 1), moved, begin)
            x = moved.unflatten(0, (3, IPC))
            for c in range(3):
                if kept[c]:
                    sets.append(LabeledImages(x[c], torch.full((IPC,), c), num_classes=3))
                    shares.append(float(counts[k][c].clamp(0.0, 4.0 * IPC)) if weights == "samples" else 1.0)
        assert (len(sets) < 9) == (least > 0)
        train_server(net, sets, shares, RHO, "samples")
    union = found.server.state[FedDM.images]
    assert torch.allclose(union.images, torch.cat([s.images for s in sets]), atol=1e-5)
    for name, value in net.state_dict().items():
        assert torch.allclose(state(found)[name], value, atol=1e-6), name


@pytest.mark.golden(
    "SummedFedDM", source="a construction of our own after Xiong et al., CVPR 2023, section 3.3: its definition"
)
@pytest.mark.parametrize(
    ("noise", "warm", "clip", "spread", "classes"),
    [
        ("full", False, None, SIGMA_SIZES, [0, 1, 2]),
        ("shares", False, None, SIGMA_SIZES, [0, 1, 2]),
        ("shares", True, None, SIGMA_SIZES, [0, 1, 2]),
        ("full", False, None, 1.1, [0, 1]),
        ("full", False, 0.4, 1.1, [0, 1]),
        ("shares", False, 0.4, 0.9, [0, 1, 2]),
        ("shares", True, None, 0.9, [0, 1, 2]),
    ],
)
def test_sums_follow_the_reference(
    noise: Any, warm: bool, clip: float | None, spread: float, classes: list[int]
) -> None:
    """The server fits one set for all: the central release on the pooled records with the clients' noise.

    The class with the fewest records is above three standard deviations of the noise on the sum, or not.
    """
    held, net = clients(), initial_network()
    pooled = LabeledImages.concatenate(held)
    share, total = (3**-0.5, 1.0) if noise == "shares" else (1.0, 3**0.5)
    options = {"noise": noise, "warm": warm, "clip": clip, "sigma_sizes": spread, "least": None, "weights": "samples"}
    found = play(kind=SummedFedDM, rounds=2, secret=5, **options)
    kept: dict[int, Tensor] = {}
    x = torch.empty(0)
    for number in (1, 2):
        begin = x.flatten(0, 1) if warm and number == 2 else initial_images((number, "server"))
        maps = drawn(net, pooled, derive(0, number, "maps"), begin if warm and number == 2 else None)
        sums, counts = torch.zeros(MAPS, 3, 12 + 3, dtype=torch.float64), pooled.counts().double()
        for k, data in enumerate(held):
            secret = noise_of(k, number)
            sums = sums + secret.add_noise(summed(data, maps, clip), SIGMA * (clip or 1.0) * share)
            if noise == "shares" or k not in kept:
                kept[k] = secret.add_noise(torch.zeros(1, 3), spread * share)[0]
            counts = counts + kept[k]
        sent = (counts >= 3 * spread * total).nonzero().flatten().tolist()
        assert sent == classes
        x = fitted(begin, maps, sums / counts.view(1, -1, 1), clip).unflatten(0, (3, IPC))
        sets = [LabeledImages(x[c], torch.full((IPC,), c), num_classes=3) for c in sent]
        train_server(net, sets, counts[sent].tolist(), RHO, "samples")
    assert torch.allclose(found.server.state[SummedFedDM.sums], sums, atol=2**-19 * SIGMA)
    assert torch.allclose(found.server.state[FedDM.images].images, x[sent].flatten(0, 1), atol=1e-5)
    for name, value in net.state_dict().items():
        assert torch.allclose(state(found)[name], value, atol=1e-6), name


@pytest.mark.parametrize("kind", [PrivateFedDM, SummedFedDM])
def test_without_noise_and_clip_it_is_distribution_matching(kind: type[PrivateFedDM]) -> None:
    """Without noise and clip the centre cancels: the step is Eq. 8's on the true class means."""
    held = clients()[:1]
    found = play(kind=kind, held=held, sigma=0.0, sigma_sizes=0.0, clip=math.inf)
    own = (1, 0) if kind is PrivateFedDM else (1, "server")
    keys = (1, 0, "maps") if kind is PrivateFedDM else (1, "maps")
    maps = [(net, torch.zeros(())) for net, _ in drawn(initial_network(), held[0], derive(0, *keys))]
    targets = summed(held[0], maps, clip=1e9) / held[0].counts().view(1, -1, 1)
    expected = fitted(initial_images(own), maps, targets, clip=1e9)
    assert torch.allclose(found.server.state[FedDM.images].images, expected, atol=1e-9)
    assert found.rows[0]["epsilon"] is None


@pytest.mark.parametrize("seen", [{}, {"match": "embedding", "augment": DSA("flip_scale")}], ids=["default", "given"])
def test_image_sgd_uses_networks_around_the_received_weights(seen: dict[str, Any]) -> None:
    """In round 2 the networks are drawn around the model of round 1, not around the initial weights."""
    options: dict[str, Any] = {"mechanism": "image_sgd", "rate": 0.3, "clip": 0.5, "lr": 0.1, "momentum": 0.3}
    options |= seen
    found = play(rounds=2, secret=5, **options).server.state[FedDM.images]
    net = double(3).eval()
    net.load_state_dict(state(play(rounds=1, secret=5, **options)))
    for k, data in enumerate(clients()):
        counted = noise_of(k, 1).add_noise(data.counts(), SIGMA_SIZES)
        start = LabeledImages(initial_images((2, k)), torch.arange(3).repeat_interleave(IPC), num_classes=3)
        ball = NetworkBall(net, RHO)
        networks = privacy.EmbeddingNetworks(ball, **seen) if seen else ball
        expected = image_sgd(
            data, size=max(1, round(float(counted.sum()))), sigma=SIGMA, ipc=IPC, networks=networks,
            clip=0.5, rate=0.3, steps=STEPS, lr=0.1, momentum=0.3, init=start, generator=derive(0, 2, k, "images"),
            ledger=Account(Ledger(), secret=noise_of(k, 2)),
        )  # fmt: skip
        assert torch.equal(found.images[found.columns["client"] == k], expected.images)


@pytest.mark.parametrize(("noise", "sigma"), [("shares", 0.0), ("full", 0.0), ("shares", 3.0)])
def test_sum_equals_the_central_release(noise: Any, sigma: float) -> None:
    """With shares, the total has noise sigma on the pooled sums for any distribution of the records."""
    held = clients()
    pooled = [LabeledImages.concatenate(held)]
    one, many = (
        play(kind=SummedFedDM, held=h, noise=noise, sigma=0.0, sigma_sizes=0.0).server.state[SummedFedDM.sums]
        for h in (pooled, held)
    )
    assert torch.allclose(one, many, atol=1e-12)
    if sigma:
        noised = [
            play(kind=SummedFedDM, noise=noise, sigma=sigma).server.state[SummedFedDM.sums] - one for _ in range(3)
        ]
        observed = float(torch.stack(noised).std())
        assert abs(observed - sigma) < 5 * sigma / math.sqrt(2 * 3 * one.numel())


def test_embedders_have_the_options_and_public_images() -> None:
    seen: dict[str, Any] = {"clip": 0.3, "match": "embedding", "augment": DSA("flip_scale")}
    net, data, ones = small(3).double().eval(), clients()[0], torch.ones(2, 1, 4, 4, dtype=torch.float64)
    seed = int(torch.randint(2**62, (), generator=derive(1)))
    for centers in (None, ones[:0], ones):
        around = {"centers": ones} if centers is ones else {}
        wanted = privacy.PublicEmbedders(NetworkBall(net, RHO), MAPS, like=data, seed=seed, **seen, **around)
        found = method(**seen).embedders(net, data, derive(1), centers)
        sums = [class_sums(data.images, data.labels, one, num_classes=3) for one in (found, wanted)]
        assert (torch.equal(*sums), len(sums[0])) == (True, MAPS)


@pytest.mark.parametrize(
    ("noise", "sigma", "share"), [("shares", 4.0, 3**-0.5 / 16), ("full", 4.0, 0), ("shares", 0, 0)]
)
def test_sums_may_be_rounded_to_a_sixteenth_of_a_share_of_the_noise(noise: Any, sigma: float, share: float) -> None:
    summing, sums = (
        method(SummedFedDM, noise=noise, sigma=sigma, sigma_sizes=sigma / 8, clip=0.3),
        torch.zeros(1, 3, 15),
    )
    server = Server(Classification(3), (1, 4, 4), IDENTITY, 3, 0, state=Message({SummedFedDM.sums: sums}))
    schema = summing.expect(server, 0)
    wanted = [0.3 * 4.0 * share, 0.5 * share] if share else [math.inf] * 2
    assert [schema[e.key].max_unit for e in (SummedFedDM.sums, SummedFedDM.total)] == pytest.approx(wanted)
    assert [list(spec.value.shape) for spec in schema.values()] == [[1, 3, 15], [3]]


# Labels and counts.


def test_sent_classes_depend_only_on_the_noised_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = torch.tensor([0.4, 20.0, 7.0], dtype=torch.float64)
    monkeypatch.setattr("distillkit.privacy.private_histogram", lambda *_, **__: said)
    first, second, empty = clients()
    for held in ([first], [second], [empty], [first[first.labels == 0]]):
        run = play(held=held, least=7.0)
        assert run.server.state[FedDM.images].counts().tolist() == [0, IPC, IPC]
        with pytest.raises(NoUsableReply, match="no class of any client has enough"):
            play(held=held, least=20.1)
    empty_set = play(held=[empty], least=0.4).server.state[FedDM.images]
    assert empty_set.counts().tolist() == [IPC] * 3


def test_default_threshold_is_three_standard_deviations_of_the_noise() -> None:
    counts = torch.tensor([2.9, 3.1, 8.9, 9.1])
    one = method(sigma_sizes=1.0, least=None)
    assert one.kept(counts).tolist() == [False, True, True, True]
    assert one.kept(counts, clients=9).tolist() == [False, False, False, True]
    assert method(sigma_sizes=None, sizes=[5.0] * 3, least=None).kept(counts).all()


@pytest.mark.parametrize(("noise", "histograms"), [("full", 3), ("shares", 1)])
def test_threshold_of_a_sum_uses_the_noise_of_the_sum(
    noise: Any, histograms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def kept(self: Any, counts: Tensor, clients: int = 1) -> Tensor:
        asked.append(clients)
        return counts > 0

    monkeypatch.setattr(PrivateFedDM, "kept", kept)
    play(kind=SummedFedDM, noise=noise)
    assert asked == [histograms]


def test_class_with_a_negative_noised_count_has_weight_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `least=0` its images are sent; a negative weight would train the model against them."""
    counts, weights = [], []
    receive, train = SummedFedDM.receive, FedDM.train

    def receiving(self: SummedFedDM, server: Any, replies: Any) -> None:
        counts.append(replies[SummedFedDM.total])
        receive(self, server, replies)

    def training(self: FedDM, server: Any, union: LabeledImages, weight: Tensor) -> None:
        weights.append(weight)
        train(self, server, union, weight)

    monkeypatch.setattr(SummedFedDM, "receive", receiving)
    monkeypatch.setattr(FedDM, "train", training)
    play(kind=SummedFedDM, secret=8, sigma_sizes=30.0, weights="samples")
    (found,), (weight,) = counts, weights
    assert float(found.min()) < 0 < float(found.max())
    wanted = found.clamp_min(0.0).repeat_interleave(IPC)
    assert torch.allclose(weight.double(), wanted / wanted.mean())


def test_weights_of_given_noised_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[Any] = []
    monkeypatch.setattr(FedDM, "train", lambda self, server, union, weight: weights.append(weight.tolist()))
    server, summing = play(kind=SummedFedDM).server, method(SummedFedDM, weights="samples")
    for counts, wanted in ([-3.0, 5.0, 4.0], [0.0, 5 / 3, 4 / 3]), ([-1.0] * 3, [0.0] * 3):
        values = {SummedFedDM.sums: server.state[SummedFedDM.sums], SummedFedDM.total: torch.tensor(counts).double()}
        summing.receive(server, AggregatedReplies(Message(values), {}, {}, [0, 1, 2]))
        assert weights[-1] == pytest.approx([weight for weight in wanted for _ in range(IPC)])


@pytest.mark.parametrize(("kind", "own"), [(PrivateFedDM, [1, 0]), (SummedFedDM, [1, "server"])])
def test_denominators_are_public_or_noised(kind: type[PrivateFedDM], own: list[Any]) -> None:
    """Doubling every record doubles the fitted sums: nothing is divided by a true count."""
    data = clients()[0]
    twice = LabeledImages.concatenate([data, data]).replace(info={})
    kept: dict[str, Any] = {"sigma": 0.0, "sizes": [4.0, 5.0, 6.0], "sigma_sizes": None, "clip": math.inf}
    maps = drawn(initial_network(), data, derive(0, *(n for n in own if n != "server"), "maps"))
    for held in (data, twice):
        found = play(kind=kind, held=[held], **kept).server.state[FedDM.images].images
        targets = summed(held, maps, clip=1e9) / torch.tensor([4.0, 5.0, 6.0]).view(1, -1, 1)
        assert torch.allclose(found, fitted(initial_images((*own,)), maps, targets, clip=1e9), atol=1e-9)


@pytest.mark.parametrize("kind", [PrivateFedDM, SummedFedDM])
def test_message_sizes_are_independent_of_the_records(kind: type[PrivateFedDM]) -> None:
    up = [play(kind=kind, held=[h], weights="samples").rows[0]["up"] for h in clients()]
    assert up[0] == up[1] == up[2]
    if kind is PrivateFedDM:
        shown = 3 * IPC
        assert up[0] == {"FedDM.images": shown * 16 * 8, "FedDM.images:labels": shown * 8, "FedDM.samples": shown * 4}
    else:
        assert up[0] == {"SummedFedDM.sums": MAPS * 3 * (12 + 3) * 8, "SummedFedDM.total": 3 * 8}


# The ledger.


@pytest.mark.parametrize("kind", [PrivateFedDM, SummedFedDM])
@pytest.mark.parametrize("noise", ["full", "shares"])
def test_epsilon_is_the_closed_form_and_every_draw_is_an_event(
    kind: type[PrivateFedDM], noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: list[float] = []
    add_noise = Secret.add_noise

    def counted(self: Secret, values: Tensor, std: float) -> Tensor:
        draws.append(std)
        return add_noise(self, values, std)

    monkeypatch.setattr(Secret, "add_noise", counted)
    options = {"noise": noise} if kind is SummedFedDM else {}
    ledger = Ledger()
    run = play(kind=kind, rounds=3, ledger=ledger, **options)
    every_round = kind is SummedFedDM and noise == "shares"
    for number, row in enumerate(run.rows, 1):
        total = MAPS * number / SIGMA**2 + (number if every_round else 1) / SIGMA_SIZES**2
        assert row["epsilon"] == pytest.approx(privacy.gaussian_epsilon(total**-0.5, 1e-5), rel=1e-9)
    assert len(draws) == len(ledger.events) == 3 * (6 if every_round else 4)
    assert ("secure sum" in str(ledger.guarantee())) == every_round


def test_planned_noise_costs_the_planned_epsilon() -> None:
    """Image SGD is charged for its steps at the sampling rate of the records."""
    sigma = plan_noise(3.0, 1e-5, count=2 * MAPS, spent=[(9.0, 1.0, 1)]).sigma
    assert play(rounds=2, sigma=sigma, sigma_sizes=9.0).rows[-1]["epsilon"] == pytest.approx(3.0)
    run = play(rounds=2, mechanism="image_sgd", rate=0.2, sigma_sizes=9.0)
    expected = compose([(SIGMA, 0.2, 2 * STEPS), (9.0, 1.0, 1)], 1e-5).epsilon
    assert run.rows[-1]["epsilon"] == pytest.approx(expected)


@pytest.mark.parametrize("kind", [PrivateFedDM, SummedFedDM])
def test_repeated_round_is_charged_again(
    kind: type[PrivateFedDM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The histogram of round 1 is kept, unless its round was not committed."""

    def torn(self: Any, server: Any, *_: Any) -> None:
        raise RuntimeError("power cut")

    for rounds in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(FedDM, "train", torn)
            with pytest.raises(RuntimeError, match="power cut"):
                play(kind=kind, rounds=rounds, out=tmp_path, resume=True)
        play(kind=kind, rounds=rounds, out=tmp_path, resume=True)
    events = Ledger(tmp_path / "ledger.jsonl").events
    assert sorted((e.round, e.mechanism) for e in events if e.client == "1") == [
        *[(1, "class_means")] * 2, *[(1, "histogram")] * 2, *[(2, "class_means")] * 2
    ]  # fmt: skip


def test_seeded_run_repeats_with_any_workers_and_resumed(tmp_path: Path) -> None:
    """The last fit, from which the next round starts, is kept with the client."""
    one, other = (play(rounds=2, secret=secret, warm=True) for secret in (5, 6))
    play(rounds=1, secret=5, out=tmp_path, workers=3, warm=True)
    assert same(one, play(rounds=2, secret=5, out=tmp_path, resume=True, warm=True))
    assert not same(one, other)


def test_missing_share_makes_the_round_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    local = SummedFedDM.local

    def lost(self: SummedFedDM, client: Client, message: Any) -> Any:
        if client.id == 1 and client.round == 2:
            raise OSError("gone")
        return local(self, client, message)

    monkeypatch.setattr(SummedFedDM, "local", lost)
    with pytest.raises(NoUsableReply, match=r"lacks the shares of clients \[1\]"):
        play(kind=SummedFedDM, rounds=2, noise="shares")
    assert len(play(kind=SummedFedDM, rounds=2, noise="full").rows) == 2


# Refusals.


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"init": "real"}, privacy.PrivateInitialization, "release would contain real images"),
        ({"batch_real": 8}, ValueError, "batch_real is not an option"),
        ({"sizes": [1.0, 2.0, 3.0]}, PrivacyError, "either sizes"),
        ({"sigma_sizes": None}, PrivacyError, "true class sizes are private"),
        ({"sigma_sizes": None, "sizes": [0.0, 1.0, 1.0]}, ValueError, "sizes"),
        ({"clip": math.inf}, PrivacyError, "clip must be finite"),
        ({"kind": SummedFedDM, "mechanism": "image_sgd"}, ValueError, "only class means can"),
    ],
)
def test_invalid_options_are_refused_when_built(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    refused(lambda: method(changes.pop("kind", PrivateFedDM), **changes), error, said)


class Mixing(nn.Module):
    """Network that subtracts the batch's mean."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(16, outputs)

    def features(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def test_unsupported_networks_and_data_are_refused_at_the_start() -> None:
    white = Normalization((0.0,), (1.0,), zca=ZCA.fit(torch.randn(40, 1, 4, 4, generator=derive(0))))
    held = [images(20, seed=3).replace(normalization=white)]
    for sigma in (0.0, SIGMA):
        refused(
            lambda s=sigma: play(held=held, factory=Tiny, sigma=s),
            privacy.PrivateStatistics,
            "whitening was fitted on im",
        )
    assert play(held=held, factory=Tiny, public_statistics=True).rows[0]["failed"] == {}
    refused(lambda: play(factory=lambda n: Mixing(n).double()), privacy.BatchStatistics, "among other images")
    refused(lambda: play(sizes=[1.0, 2.0], sigma_sizes=None), ValueError, "sizes must be 3 numbers")
    several, shares = Ledger(disjoint=False), {"kind": SummedFedDM, "noise": "shares"}  # k contributions, one noise
    refused(lambda: play(ledger=several, **shares), PrivacyError, "adds the noise for one contribution of a record")
    with pytest.raises(ValueError, match="needs exactly one class per image"):
        simulate(method(), [with_label_rows(c) for c in clients()], rounds=1, task=MultiLabel(3), progress=False)


@pytest.mark.parametrize("kind", [PrivateFedDM, SummedFedDM])
def test_number_of_records_never_makes_a_client_fail(kind: type[PrivateFedDM]) -> None:
    """With delta = 1/60, failing at 60 records but not at 59 would reveal the number of records."""
    held = [images(count, seed=count) for count in (59, 60, 61)]
    assert play(kind=kind, held=held, factory=Tiny, ledger=Ledger(delta=1 / 60)).rows[0]["failed"] == {}
    with pytest.raises(privacy.NotAccountable, match="1/60"):
        play(kind=kind, held=held, factory=Tiny, ledger=Ledger(delta=1 / 60), sizes=[20.0] * 3, sigma_sizes=None)


def test_release_without_a_ledger_is_refused() -> None:
    client = Client(0, clients()[0], None, Classification(3), 1, 0)
    refused(lambda: method().synthesize(client, double(3).eval()), PrivacyError, "no ledger")
    with pytest.raises(PrivacyError, match="no ledger"):
        SummedFedDM.noised(client, "class_means", torch.zeros(1, 1), 1.0, 1.0, 1.0)
