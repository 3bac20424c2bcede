"""Which attention kernel ran is told from the names that profilers show."""

import pytest
import torch

from saf.bench.harness.kernels import MARKS, kernel_seen
from saf.ops.live import FLASH_PACKAGES

NAMES = {
    "cudnn": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
    "flash": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>",
    "flex": "triton_tem_fused_0",
    "fa3": "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Collective>>>",
    "fa4": "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0000o111_0",
    "split": "split_kernel",
}


@pytest.mark.parametrize("kernel", NAMES)
def test_each_kernel_is_told_from_all_others(kernel):
    cuda, matmul = torch.device("cuda"), {"name": "nvjet_tst_192x176_64x4_1x2_h_bz_coopB_T"}
    for ran, name in NAMES.items():
        assert kernel_seen(kernel, [matmul, {"name": name}], cuda) is (kernel == ran), ran


def test_every_kernel_of_a_package_can_be_told():
    assert MARKS.keys() == NAMES.keys()
    assert FLASH_PACKAGES.keys() <= {*MARKS, "flash"}


def test_nothing_is_told_without_a_profile_or_a_pinned_kernel():
    cuda, one = torch.device("cuda"), [{"name": NAMES["flash"]}]
    assert kernel_seen("flash", [], cuda) is None
    assert kernel_seen("auto", one, cuda) is None
    assert kernel_seen("flash", one, torch.device("cpu")) is None
