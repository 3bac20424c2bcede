"""What the written rules choose must compile for Hopper without spills and leave room on the multiprocessor."""

import pytest

SHARED_MEMORY = 232448
"""Bytes of shared memory one program may take on compute capability 9.0."""

REGISTER_FILE = 65536
SPILLED = {
    "key_block_kernel bf16": 128,
    "key_block_kernel grouped bf16": 128,
    "key_block_kernel grouped bf16 D96": 520,
    "key_block_kernel grouped bf16 D128": 512,
    "fused_forward_kernel fp32 D192": 16,
    "flash_decode_kernel bf16 D128 9+3": 8,
    "flash_decode_kernel fp16 D128 9+3": 8,
    "toeplitz_kernel bf16": 64,
    "toeplitz_kernel fp16": 64,
}
"""Bytes of local memory a thread, by start of name; compiler versions differ here.

The key-block kernel holds two sums [keys, channels] beside addresses of every kind of head, in 255 registers; with half
the keys a program it would read every query block once more. Grouped, above 64 channels, eight warps spill a tenth of
that and take 1.9 times as long. The float32 forward at 192 channels has the smallest blocks there are.
"""
WGMMA_ROWS = 64
"""Rows of the smallest tile that Hopper's own matrix instructions take; smaller ones go through the older ones."""
TILE_ROWS = {
    "toeplitz_kernel": "BM", "fused_forward_kernel": "BM", "query_block_kernel": "BM", "key_block_kernel": "BK",
    "flash_decode_kernel": "BM", "mix_kernel": "C", "states_kernel": "P", "fill_kernel": "P", "step_kernel": "P",
}  # fmt: skip
"""The constant with the rows of its products, by kernel."""
PROGRAMS = {"toeplitz_kernel bf16 D64 128x128x64 w4 s3": 2}
"""Programs that must fit on one multiprocessor at a time, by start of name; one otherwise."""


@pytest.fixture
def rows(sm90):
    """Compiled resources by configuration."""
    if "skip" in sm90:
        pytest.skip(sm90["skip"])
    return sm90["rows"]


@pytest.mark.slow
def test_every_kernel_is_compiled(sm90, rows):
    """A kernel that no row compiles has no limits; those of calibration are in tests/calibration."""
    assert {row["kernel"] for row in rows.values()} == set(sm90["kernels"])


@pytest.mark.slow
def test_nothing_spills(rows):
    """No register goes to local memory, but for a few bytes where 255 registers are in use."""
    limits = {name: max((n for start, n in SPILLED.items() if name.startswith(start)), default=0) for name in rows}
    assert {name: row["stack"] for name, row in rows.items() if row["stack"] > limits[name]} == {}


@pytest.mark.slow
def test_programs_fit(rows):
    """Registers and shared memory leave room for the intended number of programs."""
    short = {}
    for name, row in rows.items():
        count = next((count for start, count in PROGRAMS.items() if name.startswith(start)), 1)
        registers = -(-row["registers"] // 8) * 8 * 32 * row["warps"]
        if registers * count > REGISTER_FILE or row["shared"] * count > SHARED_MEMORY:
            short[name] = row
    assert short == {}


@pytest.mark.slow
def test_half_precision_uses_matrix_units(rows):
    """16-bit products go through matrix instructions, Hopper's own in tiles large enough; float32 ones do not."""
    for name, row in rows.items():
        constant = TILE_ROWS.get(row["kernel"]) if row["half"] else None
        expected = constant and ("wgmma" if row["constants"][constant] >= WGMMA_ROWS else "mma.sync")
        assert row["matrix_units"] == expected, name


@pytest.mark.slow
def test_float32_products_are_summed_step_by_step(rows):
    """No float32 product adds to a running sum, which would round once a position; the interpreter cannot tell."""
    assert {name for name, row in rows.items() if row["long_sums"] and not row["matrix_units"]} == set()
    assert any(row["long_sums"] for row in rows.values())
