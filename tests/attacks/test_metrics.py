from __future__ import annotations

import math
from pathlib import Path

import lpips as lpips_package
import pytest
import torch
import torchvision
from torch import Tensor, nn

from attacks import lpips, psnr, ssim
from attacks.metrics import _network
from distillkit.rng import derive
from tests.refused import refused


def pictures(seed: int, n: int = 3, channels: int = 3, size: int = 16, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(n, channels, size, size, generator=derive(seed), dtype=dtype)


def slow_ssim(a: Tensor, b: Tensor, window: int) -> float:
    """Compute one channel from the definition, at all places of the window."""
    weights = torch.exp(-((torch.arange(window).double() - window // 2) ** 2) / (2 * 1.5**2))
    kernel = weights[:, None] * weights / weights.sum() ** 2
    x, y = (image.unfold(0, window, 1).unfold(1, window, 1) for image in (a, b))
    mx, my = ((kernel * z).sum((2, 3), keepdim=True) for z in (x, y))
    vx, vy, cov = ((kernel * z).sum((2, 3), keepdim=True) for z in ((x - mx) ** 2, (y - my) ** 2, (x - mx) * (y - my)))
    c1, c2 = 0.01**2, 0.03**2
    return float(((2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean())


def test_psnr_is_the_mean_squared_error_in_decibels() -> None:
    a, b = pictures(0), pictures(1)
    expected = [10 * math.log10(1 / float(((x - y) ** 2).mean())) for x, y in zip(a, b)]
    torch.testing.assert_close(psnr(a, b), torch.tensor(expected, dtype=torch.float64))
    assert psnr(a, a).tolist() == [math.inf] * 3


def test_ssim_equals_its_definition() -> None:
    a, b = pictures(0, 2, 2, 13), pictures(1, 2, 2, 13)
    for window in (11, 7):
        expected = [sum(slow_ssim(x, y, window) for x, y in zip(p, q)) / 2 for p, q in zip(a, b)]
        torch.testing.assert_close(ssim(a, b, window=window), torch.tensor(expected, dtype=torch.float64))
    for plain in (torch.zeros(1, 1, 12, 12), torch.ones(1, 1, 12, 12)):
        assert ssim(plain, plain).tolist() == [1.0]


@pytest.mark.parametrize("metric", [psnr, ssim, lpips])
def test_invalid_pairs_of_batches_are_refused(metric) -> None:
    a = pictures(0, size=32)
    for name, batches in (
        ("images", (a - 0.5, a)),
        ("references", (a, a * 2)),
        ("images", (a.mul(1.5).clamp_min(0.25), a)),
    ):
        low, high = (f"{float(x):.4g}" for x in batches[name == "references"].aminmax())
        words = rf"^{name} must be pixels in \[0, 1\], got {low} to {high}: they seem normalized; use set\.pixels\(\)$"
        refused(lambda given=batches: metric(*given), ValueError, words)  # type: ignore[misc]
    refused(lambda: metric(a, a[:2]), ValueError, r"same shape, got torch.Size\(\[3, .* and torch.Size\(\[2, ")
    refused(lambda: metric(a, a.float()), ValueError, "same dtype, got torch.float64 and torch.float32")
    refused(lambda: metric((a * 255).byte(), (a * 255).byte()), TypeError, r"float.*/ 255")
    refused(lambda: metric(a, torch.full_like(a, math.nan)), ValueError, "finite")


def test_ssim_refuses_a_too_large_window() -> None:
    a = pictures(0, size=8)
    refused(lambda: ssim(a, a), ValueError, r"window must fit in the images, \[8, 8\] pixels, got 11")
    wide = torch.cat([a, a], 3)
    refused(lambda: ssim(wide, wide), ValueError, r"window must fit in the images, \[8, 16\] pixels, got 11")
    refused(lambda: ssim(a, a, window=6), ValueError, "window must be odd, got 6")
    refused(lambda: ssim(a, a, window=-1), ValueError, "window must be at least 1")
    assert ssim(wide[..., :7, :], wide[..., :7, :], window=7).tolist() == [1.0] * 3


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty torch.hub folder, and block the network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    _network.cache_clear()
    return tmp_path / "hub" / "checkpoints"


def trunk_file(checkpoints: Path, name: str, file: str) -> nn.Sequential:
    """Write a random trunk where torchvision's is expected; the layers that LPIPS drops are views of a zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(torchvision.models, name)()
    dropped = {key for key in model.state_dict() if key.startswith("classifier")}
    state = {k: torch.zeros(1).expand(v.shape) if k in dropped else v for k, v in model.state_dict().items()}
    checkpoints.mkdir(parents=True)
    torch.save(state, checkpoints / file)
    return model.features


def slow_lpips(features: nn.Sequential, taps: list[int], net: str, a: Tensor, b: Tensor) -> Tensor:
    """Follow the definition: heads over squared differences of unit-normalized features, averaged, summed."""
    heads = torch.load(Path(lpips_package.__file__).parent / "weights/v0.1" / f"{net}.pth", "cpu", weights_only=True)
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    x, y = ((2 * p - 1 - shift.view(1, 3, 1, 1)) / scale.view(1, 3, 1, 1) for p in (a, b))
    total = torch.zeros(len(a))
    level = 0
    with torch.no_grad():
        for index, layer in enumerate(features[: taps[-1] + 1]):
            x, y = layer(x), layer(y)
            if index in taps:
                unit = [z / (z.square().sum(1, keepdim=True).sqrt() + 1e-10) for z in (x, y)]
                weight = heads[f"lin{level}.model.1.weight"]
                total += ((unit[0] - unit[1]).square() * weight).sum(1).mean((1, 2))
                level += 1
    return total


SQUEEZE = ("squeezenet1_1", "squeezenet1_1-b8a52dc0.pth")


def test_lpips_equals_its_definition(checkpoints: Path, global_rng_untouched: None) -> None:
    features = trunk_file(checkpoints, "alexnet", "alexnet-owt-7be5be79.pth")
    a, b = (pictures(seed, size=40, dtype=torch.float32) for seed in (0, 1))
    torch.testing.assert_close(lpips(a, b), slow_lpips(features, [1, 4, 7, 9, 11], "alex", a, b))
    small = [nn.functional.interpolate(x, (32, 32), mode="bilinear", antialias=True) for x in (a, b)]
    torch.testing.assert_close(lpips(a, b, resize=32), slow_lpips(features, [1, 4, 7, 9, 11], "alex", *small))


def test_lpips_invariances(checkpoints: Path, global_rng_untouched: None) -> None:
    trunk_file(checkpoints, *SQUEEZE)
    a, b = pictures(0, 5, size=20), pictures(1, 5, size=20)
    distance = lpips(a, b, net="squeeze")
    assert (distance.shape, distance.dtype) == ((5,), torch.float64)
    assert lpips(a, a, net="squeeze").tolist() == [0.0] * 5
    torch.testing.assert_close(distance, lpips(a, b, net="squeeze", chunk=2), rtol=1e-4, atol=1e-7)
    grey, other = a[:, :1, :17, :17], b[:, :1, :17, :17]
    repeated = lpips(grey.repeat(1, 3, 1, 1), other.repeat(1, 3, 1, 1), net="squeeze")
    assert torch.equal(lpips(grey, other, net="squeeze"), repeated)
    assert not torch.allclose(distance, lpips(a, b, net="squeeze", resize=32), rtol=1e-3)


@pytest.mark.parametrize(
    ("net", "file"), [("alex", "alexnet-owt-7be5be79.pth"), ("vgg", "vgg16-397923af.pth"), ("squeeze", SQUEEZE[1])]
)
def test_missing_weights_are_named_with_the_remedy(checkpoints: Path, net: str, file: str) -> None:
    a = pictures(0, size=32)
    with pytest.raises(FileNotFoundError) as caught:
        lpips(a, a, net=net)
    assert str(caught.value).startswith(
        f"LPIPS ({net}) needs the weights {file} in {checkpoints}, which are missing. Get them with\n    curl "
        f"--create-dirs -o {checkpoints / file} https://download.pytorch.org/models/{file}\nor call lpips(..., "
        "download=True). "
    )
    assert not checkpoints.exists()


def test_weights_are_downloaded_only_on_request(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(url: str, target: str, hash_prefix: str, progress: bool) -> None:
        asked.append((url, hash_prefix))
        checkpoints.rmdir()
        trunk_file(checkpoints, *SQUEEZE)
        assert target == str(checkpoints / SQUEEZE[1])

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    a = pictures(0, size=20)
    for times in (1, 1, 2):
        if times == 2:
            (checkpoints / SQUEEZE[1]).unlink()  # the folder remains
        assert lpips(a, a, net="squeeze", download=True).tolist() == [0.0] * 3
        assert asked == [(f"https://download.pytorch.org/models/{SQUEEZE[1]}", "b8a52dc0")] * times


def test_damaged_weights_file_is_named(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.mkdir(parents=True)
    (checkpoints / SQUEEZE[1]).write_bytes(b"no weights")
    a = pictures(0, size=20)
    refused(lambda: lpips(a, a, net="squeeze"), ValueError, rf"{SQUEEZE[1]} cannot be loaded .*; delete it")
    monkeypatch.setattr(lpips_package, "LPIPS", lambda **_: next(iter([])))
    refused(lambda: lpips(a, a, net="squeeze"), ValueError, rf"{SQUEEZE[1]} cannot be loaded \(StopIteration\); delete")


def test_lpips_refuses_unsupported_images(checkpoints: Path) -> None:
    a = pictures(0, size=28)
    wide = torch.cat([a, a], 3)
    refused(lambda: lpips(wide, wide), ValueError, "at least 31 pixels a side for net='alex', got 28; resize=64")
    for net, least in (("alex", 31), ("vgg", 16), ("squeeze", 17)):
        words = f"at least {least} pixels a side for net='{net}', got {least - 1}"
        refused(lambda n=net, k=least: lpips(a, a, net=n, resize=k - 1), ValueError, words)  # type: ignore[misc]
    refused(lambda: lpips(a[:, :2], a[:, :2], resize=64), ValueError, "1 or 3 channels for LPIPS, got 2")
    refused(lambda: lpips(a, a, net="resnet"), ValueError, "net must be one of 'alex', 'vgg', 'squeeze', got 'resnet'")
    refused(lambda: lpips(a, a, resize=0), ValueError, "resize")
    refused(lambda: lpips(a, a, chunk=0), ValueError, "chunk")
