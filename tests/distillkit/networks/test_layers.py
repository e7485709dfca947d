"""CPU layers that are faster than PyTorch's: equal values in every layout and mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit.networks._dropout import seeded_dropout, undraw_dropout
from distillkit.networks._layers import AveragePool, InstanceNorm, MaxPool
from distillkit.privacy import per_example_gradients
from distillkit.rng import derive

LAYOUTS = {
    "contiguous": lambda maps: maps,
    "channels_last": lambda maps: maps.contiguous(memory_format=torch.channels_last),
    "a view": lambda maps: torch.stack([maps, maps], -1)[..., 0],
}
layouts = st.sampled_from(sorted(LAYOUTS))
sides = st.integers(2, 35)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype).normal_(generator=torch.Generator().manual_seed(seed))


def norm_of(channels: int, dtype: torch.dtype = torch.float32) -> InstanceNorm:
    layer = InstanceNorm(channels).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(drawn(channels, seed=1))
        layer.bias.copy_(drawn(channels, seed=2))
    return layer


class TestInstanceNorm:
    @given(st.integers(1, 3), st.integers(2, 9), st.integers(2, 31), st.integers(2, 31), st.floats(-30, 30))
    def test_fast_path_is_exact(self, n: int, channels: int, height: int, width: int, offset: float) -> None:
        maps = LAYOUTS["channels_last"](drawn(n, channels, height, width) + offset)
        layer, before = norm_of(channels), maps.clone()
        exact = F.instance_norm(maps.double(), weight=layer.weight.double(), bias=layer.bias.double(), eps=layer.eps)
        with torch.no_grad():
            error = (layer(maps).double() - exact).abs() / (1 + exact.abs())
        assert error.max() <= 2e-6 * (1 + abs(offset))
        assert torch.equal(maps, before)

    @given(layouts, st.booleans())
    def test_uses_torch_with_a_graph_or_another_layout(self, layout: str, graph: bool) -> None:
        maps, layer = LAYOUTS[layout](drawn(2, 3, 8, 9)), norm_of(3)
        with torch.set_grad_enabled(graph):
            found, torchs = layer(maps), F.group_norm(maps, 3, layer.weight, layer.bias, layer.eps)
        assert found.requires_grad == graph
        assert torch.equal(found, torchs) or (layout == "channels_last" and not graph)

    def test_uses_the_fast_path_for_small_channels_last_maps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> Tensor:
            raise AssertionError("torch's own was taken")

        layer, maps = norm_of(4), LAYOUTS["channels_last"](drawn(2, 4, 8, 8))
        monkeypatch.setattr(nn.GroupNorm, "forward", refused)
        with torch.no_grad():
            layer(maps)
            for torchs in (maps.contiguous(), LAYOUTS["channels_last"](drawn(2, 4, 32, 32))):
                with pytest.raises(AssertionError, match="torch's own"):
                    layer(torchs)

    def test_runs_under_vmap_and_in_inference_mode(self) -> None:
        layer, maps = norm_of(4), LAYOUTS["channels_last"](drawn(6, 4, 8, 8))
        with torch.inference_mode():
            expected = layer(maps)
        with torch.no_grad():
            torch.testing.assert_close(torch.vmap(layer)(maps.unflatten(0, (3, 2))).flatten(0, 1), expected)
            half = F.group_norm(maps.bfloat16(), 4, layer.weight.bfloat16(), layer.bias.bfloat16())
            torch.testing.assert_close(norm_of(4, torch.bfloat16)(maps.bfloat16()), half, atol=0.1, rtol=0)

    def test_state_and_private_gradients_equal_group_norm(self) -> None:
        group = nn.GroupNorm(4, 4)
        assert group.state_dict().keys() == norm_of(4).state_dict().keys()
        net = nn.Sequential(nn.Conv2d(1, 4, 3), norm_of(4), nn.Flatten(), nn.Linear(4 * 36, 2))

        def losses(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(net(images), labels, reduction="none")

        public = (drawn(3, 1, 8, 8), torch.tensor([0, 1, 1]))
        rows = per_example_gradients(net, losses, public)(*public)
        for row, parameter in zip(rows, net.parameters(), strict=True):
            assert row.shape == (3, *parameter.shape)


class TestAveragePool:
    @given(st.integers(0, 3), st.integers(1, 4), sides, sides, layouts, st.sampled_from([torch.float32, torch.float64]))
    def test_equals_torch_forward_and_backward(
        self, n: int, channels: int, height: int, width: int, layout: str, dtype: torch.dtype
    ) -> None:
        maps = LAYOUTS[layout](drawn(n, channels, height, width, dtype=dtype)).requires_grad_()
        ours, torchs = AveragePool()(maps), F.avg_pool2d(maps, 2)
        torch.testing.assert_close(ours, torchs)
        upstream = drawn(*torchs.shape, seed=3, dtype=dtype)
        there, here = (torch.autograd.grad(out, maps, upstream)[0] for out in (torchs, ours))
        torch.testing.assert_close(here, there)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_uses_torch_for_other_dtypes(self, dtype: torch.dtype) -> None:
        maps = drawn(2, 3, 8, 8).to(dtype)
        assert torch.equal(AveragePool()(maps), F.avg_pool2d(maps, 2))

    def test_supports_unbatched_and_wide_maps_and_vmap(self) -> None:
        layer, maps = AveragePool(), drawn(4, 3, 8, 66)
        assert torch.equal(layer(maps), F.avg_pool2d(maps, 2))
        narrow = maps[..., :8].contiguous()
        torch.testing.assert_close(layer(narrow[0]), F.avg_pool2d(narrow[0], 2))
        torch.testing.assert_close(torch.vmap(layer)(narrow), F.avg_pool2d(narrow, 2))

    def test_is_not_rounded_by_autocast(self) -> None:
        maps = drawn(2, 3, 8, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(AveragePool()(maps), F.avg_pool2d(maps, 2))

    def test_infinite_value_affects_only_its_two_rows(self) -> None:
        maps = drawn(1, 2, 4, 4)
        maps[0, 0, 1, 2] = torch.inf
        found = AveragePool()(maps)
        assert found[0, 0, 0].tolist()[1] == torch.inf or found[0, 0, 0].isnan()[1]
        assert found[0, 0, 0].isnan()[0]
        assert torch.equal(found.isfinite(), torch.tensor([[[[False] * 2, [True] * 2], [[True] * 2] * 2]]))


class TestMaxPool:
    @given(
        st.integers(1, 3), st.integers(1, 4), sides, sides, layouts, st.sampled_from([torch.float32, torch.bfloat16])
    )
    def test_equals_torch_bitwise_with_equal_strides(
        self, n: int, channels: int, height: int, width: int, layout: str, dtype: torch.dtype
    ) -> None:
        maps = LAYOUTS[layout](drawn(n, channels, height, width).relu().to(dtype))
        before, torchs = maps.clone(), F.max_pool2d(maps, 2)
        with torch.no_grad():
            ours = MaxPool()(maps)
            assert torch.equal(MaxPool()(maps[0]), torchs[0])
        assert torch.equal(ours, torchs)
        assert torch.equal(maps, before)
        if layout != "a view" and 1 not in torchs.shape:  # the next layer's kernel follows from it
            assert ours.stride() == torchs.stride()

    def test_gradient_of_ties_goes_to_the_first_maximum(self) -> None:
        maps = torch.ones(1, 1, 4, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(MaxPool()(maps).sum(), maps)
        assert torch.equal(gradient, torch.tensor([[1.0, 0.0], [0.0, 0.0]]).repeat(2, 2)[None, None])

    def test_nan_is_kept_and_infinity_is_the_maximum(self) -> None:
        maps = torch.zeros(4, 1, 2, 2)
        maps.view(4, 4)[range(4), range(4)] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
        with torch.no_grad():
            found = MaxPool()(maps)
        torch.testing.assert_close(found, F.max_pool2d(maps, 2), equal_nan=True, rtol=0, atol=0)

    def test_supports_vmap_and_refuses_invalid_maps(self) -> None:
        maps = drawn(4, 3, 8, 6)
        with torch.no_grad():
            assert torch.equal(torch.vmap(MaxPool())(maps), F.max_pool2d(maps, 2))
            assert MaxPool()(maps[:0]).shape == (0, 3, 4, 3)
            with pytest.raises(RuntimeError, match="too small"):
                MaxPool()(maps[..., :1])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Dropout, (400, 6, 2, 2)), (nn.Dropout1d, (400, 6, 3)), (nn.Dropout2d, (400, 6, 2, 2)),
    (nn.Dropout3d, (400, 6, 2, 1, 2)), (type("Own", (nn.Dropout2d,), {}), (400, 6, 2, 2)),
])  # fmt: skip
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_seeded_dropout_has_the_law_of_the_layer(
    layer: Callable[[float], nn.Module], shape: tuple[int, ...], p: float, nested: bool, global_rng_untouched: None
) -> None:
    inner = nn.Sequential(layer(p))
    net = (nn.Sequential(inner) if nested else inner).train()
    x = torch.ones(shape)
    with seeded_dropout(net, derive(3)):
        seen = net(x)
        other = net(x)
        assert torch.equal(net.eval()(x), x)
    with seeded_dropout(net.train(), derive(3)):
        with undraw_dropout(net):
            assert "forward" not in vars(inner[0])
        assert torch.equal(net(x), seen)
    for _ in range(2):  # the layer is as before, also if the block began in eval mode
        assert "forward" not in vars(inner[0])
        with seeded_dropout(net.eval(), derive(3)):
            assert "forward" in vars(inner[0])
    assert set(seen.unique().tolist()) <= {0.0, float(torch.tensor(1.0) / (1 - p)) if p < 1 else 0.0}
    if layer is not nn.Dropout:
        assert torch.equal(seen, seen.flatten(2)[:, :, :1].view(*shape[:2], *[1] * (len(shape) - 2)).expand(shape))
    units = (seen > 0) if layer is nn.Dropout else (seen > 0).flatten(2)[:, :, 0]
    spread = (p * (1 - p) / units.numel()) ** 0.5
    assert float(units.double().mean()) == pytest.approx(1 - p, abs=5 * spread)
    assert torch.equal(seen, other) == (p in (0.0, 1.0))
    assert torch.equal(seen[0], seen[1]) == (p in (0.0, 1.0)) or layer is not nn.Dropout
