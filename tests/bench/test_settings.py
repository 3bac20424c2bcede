import pytest

from saf.bench.harness.kernels import kernel_seen
from saf.bench.harness.settings import Point
from saf.bench.harness.shape import ModelShape
from saf.bench.harness.work import attention_work
from saf.bench.kinds import SPEED_KINDS
from saf.bench.model.prefill import PrefillSettings
from saf.bench.model.update import UpdateSettings, update_work
from saf.bench.operator.case import OpSettings
from saf.errors import InputError
from saf.machine.peaks import peak_of
from saf.models import preset


def points_of(settings):
    return SPEED_KINDS[settings.kind].points(settings)


def rates_of(settings):
    return SPEED_KINDS[settings.kind].rates(settings)


def test_the_papers_grids():
    assert points_of(UpdateSettings()) == [Point(4096, 8, 15), Point(8192, 4, 15), Point(16384, 2, 15)]
    batches = UpdateSettings(grid="batches")
    assert points_of(batches) == [Point(4096, 2, 60), Point(4096, 4, 30), Point(4096, 8, 15)]
    assert rates_of(batches) == (0.1, 0.25, 0.5, 0.75)
    native = points_of(UpdateSettings(grid="native"))
    assert [point.length * point.batch_size * point.accumulation for point in native] == [491_520] * 3
    assert [point.length for point in points_of(PrefillSettings())] == [512, 1024, 2048, 4096, 8192, 16384]
    assert {point.batch_size for point in points_of(PrefillSettings(grid="batches"))} == {1, 2, 4, 8, 16, 32, 64}
    assert len(points_of(OpSettings(grid="qwen"))) == 6


def test_points_of_ones_own():
    assert points_of(UpdateSettings(points=("64x2x3", "128X1"))) == [Point(64, 2, 3), Point(128, 1, 15)]
    assert rates_of(UpdateSettings(points=("64x2",), rates=(0.0, 0.5, 0.5))) == (0.5,)
    for bad in ("64", "64x", "64x0", "axb", "1x2x3x4"):
        with pytest.raises(InputError, match="a point of update is written"):
            points_of(UpdateSettings(points=(bad,)))
    with pytest.raises(InputError, match="a point of op is written"):
        points_of(OpSettings(points=("1x2x3",)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": -1}, "pairs must be at least 0"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"rates": (1.5,)}, "rates must be shares"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"rates": (0.5,), "per_layer": (1,)}, "per_layer must be left out"),
        ({"per_layer": (0, 0)}, "per_layer must be at least one head"),
        ({"pairs": 0}, "pairs must be at least 1 unless memory is measured"),
    ],
)
def test_settings_that_cannot_be_used(settings, message):
    with pytest.raises(InputError, match=message):
        UpdateSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fresh": True, "precompile": True}, "precompile=True has no effect with fresh.*leave one of them out"),
        ({"compile": "off", "precompile": True}, "precompile=True has no effect with compile='off'"),
        ({"pairs": 0, "memory": True, "precompile": True}, "precompile=True has no effect with pairs=0"),
        ({"pairs": 0, "memory": True, "fresh": True}, "fresh=True has no effect with pairs=0"),
        ({"workers": 4}, "workers=4 has no effect without memory or precompile"),
        ({"workers": 4, "fresh": True}, "workers=4 has no effect without memory or precompile"),
        ({"per_layer": (1, 0), "placement": "even"}, "placement='even' has no effect beside per_layer"),
        ({"points": ("64x1",), "grid": "batches"}, "grid='batches' has no effect beside points"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        UpdateSettings(**settings)


def test_settings_with_an_effect_are_taken():
    UpdateSettings(precompile=True, workers=4)
    UpdateSettings(memory=True, workers=4, pairs=0)
    UpdateSettings(memory=True, workers=4, fresh=True, compile="off")
    PrefillSettings(fresh=True, settle_ms=5.0, points=("64x1",), grid="lengths")
    OpSettings(shape="774m", head_dim=32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": 0}, "pairs must be at least 1"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"parts": ()}, "parts must be at least one"),
        ({"shape": "774m", "num_heads": 4, "head_dim": 8}, "shape='774m' has no effect beside num_heads and head_dim"),
        ({"points": ("64x1",), "grid": "qwen"}, "grid='qwen' has no effect"),
    ],
)
def test_settings_of_operators_that_cannot_be_used(settings, message):
    with pytest.raises(InputError, match=message):
        OpSettings(**settings)


def test_settings_survive_json():
    settings = PrefillSettings(points=("64x1",), rates=(0.5,), precisions=("bf16",), seconds=3.0)
    assert PrefillSettings.from_dict(settings.to_dict()) == settings


def test_peaks_by_name():
    assert peak_of("NVIDIA H200").flops == 790e12
    assert peak_of("NVIDIA GH200 480GB").source == "data sheet"
    assert peak_of("cpu (x86_64)") is None


def test_floors_follow_the_larger_of_arithmetic_and_traffic():
    peak = peak_of("NVIDIA H200")
    work = attention_work(batch=8, length=4096, dim=64, live=12, frozen=0, backward=True)
    assert work.flops == pytest.approx(7 * 12 * 8 * 64 * 4096**2, rel=1e-3)
    assert work.floor_ms(peak) == pytest.approx(1e3 * work.flops / 790e12)
    short = attention_work(batch=1, length=64, dim=64, live=0, frozen=3, backward=False)
    assert short.floor_ms(peak) == pytest.approx(1e3 * short.bytes / 4.3e12)
    shape = ModelShape.of(preset("124m"))
    layers = {"batch": 8, "length": 4096, "accumulation": 1}
    whole = update_work(shape, [shape.layout()] * 12, free=False, **layers)
    frozen, free = (update_work(shape, [shape.layout(range(3))] * 12, free=bound, **layers) for bound in (False, True))
    assert whole.flops > frozen.flops > free.flops
    # Six per weight and token, and attention.
    assert whole.flops == pytest.approx(6 * 123.55e6 * 32768 + 12 * 12 * 7 * 8 * 64 * 4096**2, rel=2e-3)


def test_pinned_kernels_are_recognised():
    import torch

    cuda = torch.device("cuda")
    cudnn = [{"name": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"}]
    flash = [{"name": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>"}]
    assert kernel_seen("cudnn", cudnn, cuda) is True
    assert kernel_seen("flash", cudnn, cuda) is False
    assert kernel_seen("flash", flash, cuda) is True
    assert kernel_seen("cudnn", flash, cuda) is False
    assert kernel_seen("auto", flash, cuda) is None
    assert kernel_seen("cudnn", [], cuda) is None
