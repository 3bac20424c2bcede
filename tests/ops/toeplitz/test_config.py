"""The rule that picks a configuration: one line a regime that was measured."""

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("length", "columns", "heads", "name"),
    [
        (512, 64, 3, "tiles/tile 32x32x128 w4 s3"),
        (512, 256, 6, "tiles/tile 64x128x128 w4 s3"),
        (1024, 64, 32, "tiles/pass/descriptor 64x64x128 w4 s3"),
        (1024, 128, 32, "tiles/pass/descriptor 64x64x128 w4 s3"),
        (512, 1024, 6, "tiles/tile 128x128x64 w4 s3"),
        (512, 4096, 3, "tiles/packed 128x128x64 w4 s3"),
        (1024, 64, 3, "tiles/pass/descriptor 64x64x128 w4 s3"),
        (1024, 256, 3, "tiles/tile 64x128x128 w4 s3"),
        (1024, 2048, 3, "tiles/packed 128x128x64 w4 s3"),
        (4096, 512, 2, "tiles/pass/descriptor 128x128x64 w4 s4"),
        (4096, 512, 4, "tiles/pass/descriptor 128x128x64 w4 s3"),
        (4096, 4096, 3, "tiles/pass/descriptor 128x128x64 w4 s3 g32"),
        (8192, 4096, 6, "tiles/pass/descriptor 128x256x64 w8 s3 g8"),
        (16384, 4096, 3, "tiles/pass/descriptor 128x256x64 w8 s3 g4"),
        (8192, 256, 3, "tiles/pass/descriptor 128x128x64 w4 s4"),
        (8192, 256, 6, "tiles/pass/descriptor 128x256x64 w8 s3"),
        (16384, 128, 3, "tiles/pass/descriptor 128x128x64 w4 s4"),
        (16384, 128, 6, "tiles/pass/descriptor 128x128x64 w4 s4"),
        (8192, 128, 12, "tiles/pass/descriptor 128x128x64 w4 s3"),
        (2048, 64, 3, "tiles/pass/descriptor 64x64x128 w4 s3"),
        (2048, 256, 3, "tiles/pass/descriptor 128x64x64 w4 s5"),
        (2048, 256, 6, "tiles/pass/descriptor 128x128x64 w4 s4"),
        (4096, 64, 3, "tiles/pass/descriptor 64x64x128 w4 s3"),
        (4096, 64, 6, "tiles/pass/descriptor 128x64x64 w4 s5"),
        (4096, 128, 3, "tiles/pass/descriptor 64x64x128 w4 s3"),
        (16384, 64, 3, "tiles/pass/descriptor 128x64x64 w4 s5"),
        (32768, 64, 3, "tiles/pass/descriptor 128x64x64 w4 s5"),
        (65536, 64, 3, "tiles/pass/descriptor 128x128x64 w8 s4 f2 g2"),
        (65536, 60, 3, "tiles/pass 128x64x64 w4 s5"),
        (8192, 192, 4, "tiles/pass 128x256x64 w8 s3"),
    ],
)
def test_the_fastest_measured_configuration_is_picked(length, columns, heads, name):
    from saf.ops.toeplitz.config import choose_config

    shape = {"length": length, "columns": columns, "heads": heads}
    assert choose_config(**shape, dtype=torch.bfloat16, descriptors=True).name == name
    assert choose_config(**shape, dtype=torch.bfloat16).loads == "pointer"
    assert choose_config(**shape, dtype=torch.float32, descriptors=True).loads == "pointer"


@pytest.mark.parametrize(("length", "columns", "heads"), [(4096, 512, 2), (8192, 4096, 6), (16384, 64, 3)])
def test_little_shared_memory_shortens_the_pipeline(length, columns, heads):
    from saf.ops.toeplitz.config import choose_config

    kilobytes = 99
    config = choose_config(
        length=length, columns=columns, heads=heads, dtype=torch.bfloat16, shared_memory=kilobytes << 10
    )
    taken = (config.block_m + config.block_n) * config.block_k * 2 * config.num_stages
    assert taken <= kilobytes << 10
    assert config.num_stages >= 2


def test_there_is_a_configuration_for_no_positions_columns_or_heads():
    from saf.ops.toeplitz.config import choose_config

    for shape in ((0, 512, 3), (4096, 0, 3), (4096, 512, 0)):
        config = choose_config(**dict(zip(("length", "columns", "heads"), shape, strict=True)), dtype=torch.bfloat16)
        assert config.slabs == 0
