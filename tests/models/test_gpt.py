"""The decoder: sizes, loss, positions, padding, causality."""

import pytest
import torch
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError
from saf.models import GPT, GPTConfig, preset
from saf.models.gpt import Rotary, rotate
from saf.ops import attention as seam
from saf.ops import loss_and_gelu
from saf.surgery import install_
from tests.ops.hard_patterns import hard_patterns


def small(**overrides) -> GPT:
    shape = {"vocab_size": 50, "num_layers": 2, "num_heads": 2, "hidden_size": 16, "max_length": 32}
    torch.manual_seed(0)
    return GPT(GPTConfig(**(shape | overrides)))


@pytest.mark.parametrize(("name", "count"), [("1b", 983_336_448), ("124m", 123_587_328), ("124m-learned", 126_733_056)])
def test_presets_have_the_papers_parameters_and_operations_count_every_matrix_once(name, count):
    config = preset(name)
    with torch.device("meta"):
        model = GPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters == count
    matrices = sum(one.numel() for name, one in model.named_parameters() if one.dim() == 2 and "position" not in name)
    assert config.flops_per_token(0) == 6 * matrices
    # Two products of 2 * T/2 * C forward, twice that backward.
    attention = 3 * 2 * 2 * 256 * config.hidden_size * config.num_layers
    assert config.flops_per_token(512) - config.flops_per_token(0) == attention


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_loss_and_gradients_equal_plain_cross_entropy(position, monkeypatch):
    monkeypatch.setattr(loss_and_gelu, "chunk_rows", lambda vocab_size: 7)
    model = small(position=position).double()
    tokens = torch.randint(0, 50, (3, 17))
    targets = tokens[:, 1:].clone()
    targets[0, :4] = -100
    loss = model(tokens[:, :-1], targets)
    found = torch.autograd.grad(loss, list(model.parameters()))
    plain = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(plain, list(model.parameters()))
    torch.testing.assert_close(loss, plain)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens[:, :-1], targets), plain)
        log_probs = model.token_log_probs(tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close(log_probs[1:].mean(), -model(tokens[1:, :-1], tokens[1:, 1:]))
    with pytest.raises(UnsupportedError, match="leave create_graph out"):
        torch.autograd.grad(model(tokens[:, :-1], targets), model.norm.weight, create_graph=True)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_later_token_changes_no_earlier_logit(position):
    model = small(position=position)
    tokens = torch.randint(0, 50, (1, 20))
    other = tokens.clone()
    other[0, 12] = (tokens[0, 12] + 1) % 50
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_to_be_filled_is_where_it_is_asked_for_with_its_rotations_and_draws_nothing(device):
    before = torch.get_rng_state()
    config = preset("tiny", vocab_size=8, max_length=16)
    model = GPT.skip_init(config, device)
    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {device}
    assert torch.equal(torch.get_rng_state(), before)
    if device == "cpu":
        drawn = GPT(config).rotary
        assert all(torch.equal(one, other) for one, other in zip(model.rotary.buffers(), drawn.buffers(), strict=True))


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_padding_gives_the_unpadded_logits(position):
    model = small(position=position)
    tokens = torch.randint(0, 50, (2, 12))
    mask = torch.ones(2, 12)
    mask[1, :5] = 0
    padded = model(tokens, attention_mask=mask)
    torch.testing.assert_close(padded[1:, 5:], model(tokens[1:, 5:]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded[:1], model(tokens[:1]), rtol=1e-4, atol=1e-5)
    holed = mask.clone()
    holed[0, 4] = 0
    for wrong in (holed, torch.zeros(2, 12)):
        with pytest.raises(InputError, match="at the ends of each row only"):
            model(tokens, attention_mask=wrong)
    right = mask.flip(1)
    assert torch.equal(model(tokens, attention_mask=right), model(tokens)), "nobody sees it, so nothing is left out"
    ends = mask * right
    torch.testing.assert_close(
        model(tokens, attention_mask=ends)[1, 5:7], model(tokens[1:, 5:7])[0], rtol=1e-4, atol=1e-5
    )


IDS = torch.zeros(2, 12, dtype=torch.long)
REFUSED = {
    "mask of another length": lambda: small()(IDS, attention_mask=torch.ones(2, 11)),
    "mask of fewer rows": lambda: small()(IDS, attention_mask=torch.ones(1, 12)),
    "targets of bools": lambda: small()(IDS, IDS.bool()),
    "one target": lambda: small()(IDS, IDS[:1, :1]),
    "fewer targets": lambda: small()(IDS, IDS[:, 1:]),
    "unknown target": lambda: small()(IDS, IDS + 50),
    "unknown target of log-probabilities": lambda: small().token_log_probs(IDS, IDS + 50),
    "input beyond the positions": lambda: small()(torch.zeros(1, 33, dtype=torch.long)),
    "uneven heads": lambda: small(num_heads=3),
    "no layers": lambda: small(num_layers=0),
    "preset": lambda: preset("7b"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_and_shapes_that_do_not_fit_are_refused(case):
    with pytest.raises(InputError):
        REFUSED[case]()


def test_the_rotation_depends_on_distance_alone_has_its_derivative_and_keeps_its_digits_when_the_model_is_cast():
    rotary, (query, key) = Rotary(8, 64), torch.randn(2, 1, 1, 1, 8)

    def product(at: int, behind: int) -> torch.Tensor:
        positions = [rotary(torch.tensor([[at]])), rotary(torch.tensor([[at - behind]]))]
        return (rotate(query, positions[0]) * rotate(key, positions[1])).sum()

    torch.testing.assert_close(product(40, 9), product(15, 9), rtol=1e-4, atol=1e-5)
    assert abs(product(40, 9) - product(40, 10)) > 1e-4
    cos, sin = rotary(torch.arange(16)[None])
    x = torch.randn(2, 16, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, (cos.double(), sin.double())), x)
    assert rotate(x.bfloat16(), (cos, sin)).dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(small().to(dtype).rotary.cos, small().rotary.cos)


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "down"])
def test_projections_whose_own_forward_would_not_run_are_refused(name):
    model, ids = small(), torch.zeros(1, 4, dtype=torch.long)
    owner = model.blocks[0].mlp if name == "down" else model.blocks[0].attention
    handle = getattr(owner, name).register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="would not run"):
        model(ids)
    handle.remove()
    getattr(owner, name).forward = lambda x: 2 * x  # as accelerate does, which moves the weight there
    with pytest.raises(UnsupportedError, match="would not run"):
        model(ids)
    setattr(owner, name, torch.nn.Sequential(getattr(owner, name)))  # as adapter libraries do
    with pytest.raises(UnsupportedError, match="merge adapters"):
        model(ids)


def test_training_projects_few_tokens_together_and_many_in_two_products(monkeypatch):
    model, outcomes, size = small(num_heads=4, hidden_size=32).double(), [], 2 * 32 * 32
    install_(model, [(0, 1), (0, 3), (1, 0)], hard_patterns(["decay", "ripple", "local"], 32))
    tokens = torch.randint(0, 50, (2, 33), generator=torch.Generator().manual_seed(1))
    for most in (size, size - 1):
        monkeypatch.setattr(seam, "JOINED", most)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        outcomes.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*outcomes, rtol=1e-9, atol=1e-12)
