"""FreezeCallback in a Trainer on a CUDA device: bf16 autocast, compiled or not, resumed from its checkpoint."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import saf
from saf.machine import visible_devices
from saf.models.adapter import adapter_for

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from saf.integrations.transformers import FreezeCallback  # noqa: E402

pytestmark = pytest.mark.gpu
LENGTH, VOCAB, UPDATES = 256, 512, 8
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}


REPOSITORY = Path(__file__).parents[2]
ALONE = "SAF_TEST_ALONE"
"""Set where a test runs in its own process."""


def alone(test: Callable[[Path], None]) -> Callable[..., None]:
    """Run a test in a process of its own, which sees one device.

    A Trainer takes all devices that it sees, by DataParallel, which is refused. And with `torch_compile` it lets the
    float32 products of its whole process round to TF32, which tests of their accuracy must not meet.
    """
    if ALONE in os.environ:
        return test

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{__file__}::{test.__name__}"],
            cwd=REPOSITORY,
            env=os.environ | {ALONE: "1", "CUDA_VISIBLE_DEVICES": visible_devices()[0]},
            capture_output=True,
            text=True,
        )
        assert "1 passed" in done.stdout, (done.stdout + done.stderr)[-4000:]

    run.__name__ = test.__name__
    return run


def train(folder, *, resume=None, **options):
    """Train a small Llama, a quarter of whose heads freezes halfway; return its Trainer."""
    transformers.set_seed(0)
    tokens = torch.randint(0, VOCAB, (40, LENGTH), generator=torch.Generator().manual_seed(1))
    config = transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **SIZES)
    settings = {
        "max_steps": UPDATES,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_steps": 2,
        "logging_steps": 1,
        "bf16": True,
        "report_to": [],
    }
    run = transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        transformers.TrainingArguments(str(folder), **settings | options),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens[8:]],
        callbacks=[FreezeCallback(saf.FreezeConfig(rate=0.25, max_fit_kl=9), [tokens[:8]], saf.OneTime(0.5))],
    )
    run.train(resume_from_checkpoint=resume)
    return run


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@alone
def test_it_freezes_trains_on_and_opens(tmp_path):
    run = train(tmp_path)
    heads = adapter_for(run.model).heads("frozen")
    assert len(heads) == 3
    assert all(weight.is_cuda for weight in run.model.parameters())
    assert losses(run)[-1] < losses(run)[0]
    again = train(tmp_path, resume=str(tmp_path / "checkpoint-6"))
    assert adapter_for(again.model).heads("frozen") == heads
    assert losses(again) == pytest.approx(losses(run), rel=0.01)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{UPDATES}").cuda().eval()
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = run.model.eval()(tokens, use_cache=False).logits
        torch.testing.assert_close(
            opened(tokens, use_cache=False).logits.float(), expected.float(), rtol=0.05, atol=0.05
        )


@alone
def test_compiled_it_loses_what_it_loses_uncompiled(tmp_path):
    plain = train(tmp_path / "plain", save_strategy="no")
    compiled = train(tmp_path / "compiled", save_strategy="no", torch_compile=True)
    assert losses(compiled) == pytest.approx(losses(plain), rel=0.02)
    assert len(adapter_for(compiled.model).heads("frozen")) == 3
