import torch

from saf.fit import fit_compact


def test_steps_are_adams_on_the_dense_loss(make_target):
    """Ten steps of torch.optim.Adam on Eq. (4) written with T x T logits and automatic gradients."""
    target = make_target(2, length=30)
    position = torch.arange(30)
    distance = position[:, None] - position
    count = torch.arange(30, 0, -1)
    alpha = torch.zeros(2, 30, dtype=torch.float64, requires_grad=True)
    rho = (target.eta_rel / count).clamp(min=1e-9).log().requires_grad_()
    optimizer = torch.optim.Adam([alpha, rho], lr=0.05)
    for _ in range(10):
        logits = alpha[:, None] + rho[:, distance.clamp(min=0)].masked_fill(distance < 0, -torch.inf)
        linear = (target.eta_abs * alpha).sum(-1) + (target.eta_rel * rho).sum(-1)
        loss = (logits.logsumexp(-1).sum(-1) - linear) / 30
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    expected = (alpha[:, None] + rho[:, distance.clamp(min=0)]).masked_fill(distance < 0, -torch.inf).softmax(-1)
    pattern = fit_compact(target.eta_abs, target.eta_rel, fitter="adam", steps=10)
    torch.testing.assert_close(pattern.dense(), expected.detach(), rtol=0, atol=1e-9)
