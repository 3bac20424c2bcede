"""What calibration and the inputs of scores measure on the device is what they measure on the CPU."""

import pytest
import torch

import saf
from saf.calibration import COLLECTIONS, QKGradient, gate_gradients, head_outputs
from saf.models import GPT, GPTConfig

pytestmark = pytest.mark.gpu
LENGTH = 200


def make(device: str) -> GPT:
    model = GPT(GPTConfig(vocab_size=60, num_layers=3, num_heads=4, hidden_size=64, max_length=LENGTH))
    model.reset_parameters(torch.Generator().manual_seed(0))
    for block in model.blocks:
        block.attention.q_proj.weight.data *= 30
        block.attention.o_proj.weight.data *= 10
    return model.to(device, torch.float64)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 60, (6, LENGTH), generator=torch.Generator().manual_seed(seed))


def test_collections_outputs_gates_and_gradients_equal_those_on_the_cpu():
    actual = []
    for device in ("cpu", "cuda"):
        model, ids = make(device), tokens(1)
        statistics = saf.calibrate(model, [ids], collect=list(COLLECTIONS))
        outputs = head_outputs(model, [tokens(2)], statistics)
        gradient = QKGradient(model)
        model(ids[:, :-1].to(device), ids[:, 1:].to(device)).backward()
        gradient.update()
        actual.append(
            dict(statistics.collected) | vars(outputs) | {"gates": gate_gradients(model, [ids]), "q": gradient.scores()}
        )
    for name, expected in actual[0].items():
        if isinstance(expected, torch.Tensor):
            assert actual[1][name].device.type == "cpu"
            # The model's cross-entropy is taken in float32.
            tolerance = 1e-4 if name in ("gates", "q") else 1e-8
            torch.testing.assert_close(
                actual[1][name],
                expected,
                rtol=tolerance,
                atol=tolerance * expected.abs().nan_to_num(0, 0, 0).max().item(),
                msg=name,
            )


def test_updating_the_gradient_average_waits_for_nothing():
    model, ids = make("cuda").float(), tokens(1)
    fixed = saf.CompactPattern.from_parameters(*torch.randn(2, 2, LENGTH, dtype=torch.float64))
    saf.install_(model, saf.HeadSet([(0, 1), (2, 0)]), fixed)
    gradient = QKGradient(model)
    model(ids[:, :-1].cuda(), ids[:, 1:].cuda()).backward()
    gradient.update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradient.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gradient.scores().isnan().sum() == 2
