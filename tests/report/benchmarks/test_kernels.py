"""What pages and documents say of the kernels that ran."""

import pytest
import torch

from saf.bench.harness.kernels import attention_kernels, attention_table, kernel_seen, kernel_words
from saf.bench.model.update import UpdateSettings
from saf.report.benchmarks.page import render
from saf.report.record_parts import body_of
from tests.report.benchmark_records import record
from tests.report.test_results import tables

CUDNN = {"name": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "calls": 24, "ms": 9.5}
TOEPLITZ = {"name": "void saf_toeplitz<int, float>(int)", "calls": 12, "ms": 1.25}
MATRIX = {"name": "nvjet_hsh_128x256", "calls": 96, "ms": 20.0}
FLASH = {"name": "void pytorch_flash::flash_fwd_kernel<Traits>()", "calls": 24, "ms": 12.0}


def profiled(by_arm: dict[str, list[dict]]) -> dict:
    """Return a record whose arms ran these kernels, judged by the code that records them."""
    measured = record()
    entries = []
    for arm, kernels in by_arm.items():
        seen = kernel_seen(arm.split()[-1], kernels, torch.device("cuda"))
        entry = {"arm": arm, "kernel_seen": seen, "attention": attention_kernels(kernels), "kernels": kernels}
        entries.append({"model": "124m", "point": measured["rows"][0]["point"], **entry})
    return measured | {"kernels": entries}


EVERY_ARM = {
    "ordinary cudnn": [MATRIX, CUDNN],
    "25% toeplitz cudnn": [MATRIX, CUDNN, TOEPLITZ],
    "25% free cudnn": [MATRIX, CUDNN],
    "50% toeplitz cudnn": [MATRIX, CUDNN, TOEPLITZ],
    "50% free cudnn": [MATRIX, CUDNN],
}


def test_a_record_without_kernels_says_so_in_page_and_document():
    plain = record(settings=UpdateSettings(pairs=4, device="cpu", profile=False))
    assert plain["kernels"] == []
    assert kernel_words(plain) == "Kernels not recorded (--no-profile)."
    page = render([plain], ["x.json"])
    assert "<h2" in page
    assert "<p>Kernels not recorded (--no-profile).</p>" in page
    assert "Attention kernels" not in page
    assert "Kernels not recorded (--no-profile)." in "\n".join(body_of(plain))
    lost = record() | {"kernels": []}
    assert kernel_words(lost) == "Kernels not recorded."
    assert "Kernels not recorded" not in render([lost | {"rows": []}], ["memory.json"])


def test_the_attention_kernels_of_every_arm_are_told():
    measured = profiled(EVERY_ARM)
    text = "\n\n".join(body_of(measured)) + "\n"
    (rows,) = [rows for rows in tables(text) if "attention kernel" in rows[0]]
    assert [row["arm"] for row in rows if "toeplitz" in row["attention kernel"]] == [
        "25% toeplitz cudnn",
        "50% toeplitz cudnn",
    ]
    assert {row["named kernel seen"] for row in rows} == {"yes"}
    assert rows[0] == {
        "where": "4096x8x4",
        "arm": "ordinary cudnn",
        "named kernel seen": "yes",
        "attention kernel": f"`{CUDNN['name']}`",
        "calls": "24",
        "ms": "9.5",
    }
    assert "nvjet" not in text
    assert "The profile of every arm that names an attention kernel shows it." in text
    page = render([measured], ["x"])
    assert page.count("<code>saf_toeplitz&lt;int, float&gt;(int)</code>") == 2
    assert "Kernels not recorded" not in page


def test_a_wrong_kernel_and_arms_without_a_profile_are_told():
    ran = EVERY_ARM | {"25% toeplitz cudnn": [MATRIX, FLASH]}
    del ran["50% free cudnn"]
    measured = profiled(ran)
    seen = {row[1]: row[2] for row in attention_table(measured).rows}
    assert (seen["25% toeplitz cudnn"], seen["50% toeplitz cudnn"]) == ("no", "yes")
    assert kernel_words(measured) == "Kernels not recorded of 4096x8x4: 50% free cudnn."
    assert "25% toeplitz cudnn did not run the attention kernel it was told to" in render([measured], ["x"])


def test_an_arm_without_attention_kernels_has_a_row_that_says_so():
    measured = profiled(EVERY_ARM | {"50% toeplitz cudnn": [MATRIX]})
    (row,) = [row for row in attention_table(measured).rows if row[1] == "50% toeplitz cudnn"]
    assert row[3:] == ("none found by name", "–", "–")


@pytest.mark.parametrize(("part", "alone", "words"), [("layer", None, "whole layer"), ("frozen", 3, "3 heads alone")])
def test_the_parts_of_a_layer_are_told_apart(part, alone, words):
    measured = record(fields={"part": part, "alone": alone, "layer": {"num_heads": 4}})
    assert attention_table(measured).rows[0][0] == f"{words}, 4096x8x4"


def test_files_shown_together_are_told_apart():
    plain = record(settings=UpdateSettings(pairs=4, device="cpu", profile=False))
    page = render([plain, profiled(EVERY_ARM)], ["plain.json", "profiled.json"])
    assert "<p>plain.json: Kernels not recorded (--no-profile).</p>" in page
    assert "<p>profiled.json: The profile of every arm" in page
