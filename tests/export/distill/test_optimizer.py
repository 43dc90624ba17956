"""Tests of the optimizer of a student: Muon's steps beside AdamW's, and going on from a saved state."""

import pytest
import torch
from ovspec_export.distill.optimizer import BLOCK_ROWS, MOMENTUM, STEP_SIZE, Optimizer, orthogonalize
from torch import Tensor, nn


def uneven(rows: int, columns: int) -> Tensor:
    """Return a matrix whose directions differ a thousandfold in size."""
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.logspace(0, -3, columns)


@pytest.mark.parametrize(("rows", "blocks"), [(BLOCK_ROWS, 1), (3 * BLOCK_ROWS, 3), (BLOCK_ROWS + 2, 2)])
def test_singular_values_of_each_block_become_about_equal(rows: int, blocks: int) -> None:
    columns = 4 * BLOCK_ROWS
    matrix = uneven(rows, columns)
    values = torch.linalg.svdvals(orthogonalize(matrix).view(blocks, -1, columns)) / columns**0.5
    assert values.min() > 0.6 and values.max() < 1.25
    before = torch.linalg.svdvals(matrix)
    assert before.max() > 1.5 * before.min()
    assert torch.equal(orthogonalize(matrix.T), orthogonalize(matrix).T)


def test_a_step_goes_against_the_gradient_at_the_rate_and_other_weights_get_adamw() -> None:
    gradient = uneven(BLOCK_ROWS, 4 * BLOCK_ROWS)
    matrix, vector, plain = nn.Parameter(torch.zeros(gradient.shape)), nn.Parameter(torch.ones(5)), torch.ones(5)
    optimizer = Optimizer(
        [
            {"params": [matrix], "lr": 0.01, "weight_decay": 0.1, "orthogonal": True},
            {"params": [vector], "lr": 0.01, "weight_decay": 0.1},
        ]
    )
    ((matrix * gradient).sum() + vector.sum()).backward()
    optimizer.step()
    step = orthogonalize((1 - MOMENTUM**2) * gradient)
    torch.testing.assert_close(matrix.detach(), -0.01 * STEP_SIZE * step, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(vector.detach(), plain * (1 - 0.01 * 0.1) - 0.01)


def test_a_saved_state_goes_on_as_if_it_had_not_stopped() -> None:
    def steps(weight: nn.Parameter, optimizer: Optimizer, gradients: list[Tensor]) -> None:
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()

    gradients = [uneven(BLOCK_ROWS, 2 * BLOCK_ROWS) * scale for scale in (1.0, -0.5, 2.0, 1.0)]
    group = {"lr": 0.01, "weight_decay": 0.0, "orthogonal": True}
    whole = nn.Parameter(torch.zeros(gradients[0].shape))
    steps(whole, Optimizer([{"params": [whole]} | group]), gradients)
    stopped = nn.Parameter(torch.zeros(gradients[0].shape))
    first = Optimizer([{"params": [stopped]} | group])
    steps(stopped, first, gradients[:2])
    second = Optimizer([{"params": [stopped]} | group])
    second.state[stopped] = first.state[stopped]
    steps(stopped, second, gradients[2:])
    assert torch.equal(stopped, whole)
