"""Models of transformers whose layers lie on two CUDA devices: frozen there, and opened there from a folder."""

from pathlib import Path

import pytest
import torch

import saf
from saf.heads import HeadSet
from tests.transformers_models import HEADS, VOCAB, make

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("accelerate.big_modeling")

import saf.integrations.transformers  # noqa: E402  (opens folders with frozen heads)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="layers go onto two CUDA devices; this machine has fewer"),
]
LENGTH = 32
FAMILIES = ("llama", "qwen3", "gpt2")
WHOLE_LAYER = HeadSet([(1, head) for head in range(4)])


def places(family: str) -> dict[str, int]:
    """Return devices by module: the first layer on the first one, the others and the head on the second."""
    if family == "gpt2":
        parts = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.drop": 0, "transformer.ln_f": 1}
        layers = "transformer.h"
    else:
        parts = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1}
        layers = "model.layers"
    # GPT-2 ties its head to the embedding, which is on the first device.
    head = 0 if family == "gpt2" else 1
    return parts | {f"{layers}.{layer}": min(layer, 1) for layer in range(3)} | {"lm_head": head}


def tokens(device: str = "cuda:0") -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(), use_cache=False).logits.float().cpu()


def frozen(model: torch.nn.Module, heads: HeadSet) -> torch.nn.Module:
    saf.freeze_(model, [tokens()], saf.FreezeConfig(heads=tuple(heads), max_fit_kl=99))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [HEADS, WHOLE_LAYER], ids=["heads", "a-layer"])
def test_two_devices_freeze_save_open_and_generate_as_one_does(family: str, heads: HeadSet, tmp_path: Path):
    one = frozen(make(family).to("cuda:0"), heads)
    two = modeling.dispatch_model(make(family), places(family))
    assert len({parameter.device for parameter in two.parameters()}) == 2
    frozen(two, heads)
    torch.testing.assert_close(logits(two), logits(one), rtol=1e-4, atol=1e-4)
    two.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places(family))
    assert len({parameter.device for parameter in again.parameters()}) == 2
    assert torch.equal(logits(again), logits(two))
    prompt = tokens()[:, : LENGTH // 2]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(again.generate(prompt, **options), one.generate(prompt, **options))
    saf.uninstall_(again)
    torch.testing.assert_close(logits(again), logits(make(family).to("cuda:0")), rtol=1e-4, atol=1e-4)
