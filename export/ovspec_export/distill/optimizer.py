"""The optimizer of a student's weights: AdamW, and Muon for matrices in a Muon group (Jordan et al., 2024).

Muon makes all singular values of a step equal, so rare directions in the gradient are learned as fast as others. It
works on blocks of rows, each alone: for a small batch on a CPU, the whole matrix costs as much as the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 96  # maximum rows of a block
MOMENTUM = 0.95
# Root mean square of a step at rate 1, as in AdamW, so rates are comparable (Moonlight, arXiv 2502.16982).
STEP_SIZE = 0.2
# Coefficients of Newton-Schulz iterations, for singular values between about 0.7 and 1.2 after five of them.
LINEAR_COEFFICIENT, CUBIC_COEFFICIENT, QUINTIC_COEFFICIENT, NEWTON_SCHULZ_ITERATIONS = 3.4445, -4.7750, 2.0315, 5


class Optimizer(torch.optim.AdamW):
    """AdamW, and Muon for the groups with ``orthogonal``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group.get("orthogonal"):
                for weight in group["params"]:
                    self.step_orthogonal(weight, group["lr"], group["weight_decay"])
        return super().step(closure)

    def step_orthogonal(self, weight: Tensor, learning_rate: float, weight_decay: float) -> None:
        """Step a matrix, and leave it out of AdamW's step."""
        if weight.grad is None:
            return
        optimizer_state = self.state[weight]
        gradient_average = optimizer_state.setdefault("exp_avg", torch.zeros_like(weight)).lerp_(
            weight.grad, 1 - MOMENTUM
        )
        direction = weight.grad.lerp(gradient_average, MOMENTUM)
        weight.grad = None
        weight.mul_(1 - learning_rate * weight_decay).add_(orthogonalize(direction), alpha=-learning_rate * STEP_SIZE)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix with about equal singular values in each block of rows, and a root mean square of about 1."""
    if len(matrix) > matrix.shape[1]:
        return orthogonalize(matrix.T).T
    rows, columns = matrix.shape
    block_count = next(count for count in range(-(-rows // BLOCK_ROWS), rows + 1) if rows % count == 0)
    blocks = matrix.reshape(block_count, -1, columns)
    blocks = blocks / (1.01 * blocks.norm(dim=(1, 2), keepdim=True) + 1e-9)
    # The iteration needs only the rows' products, far smaller than the blocks.
    row_products = blocks @ blocks.mT
    identity = torch.eye(rows // block_count)
    factor = identity.expand_as(row_products)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        update = (
            torch.baddbmm(row_products, row_products, row_products, beta=CUBIC_COEFFICIENT, alpha=QUINTIC_COEFFICIENT)
            + LINEAR_COEFFICIENT * identity
        )
        factor = factor @ update
        row_products = update @ row_products @ update
    return (factor @ blocks).reshape(rows, columns) * columns**0.5
