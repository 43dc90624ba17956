"""Copies of the states in an infer request of the stateful engine."""

from __future__ import annotations

import numpy as np
import openvino as ov

from ovspec.ir.compile import StateVariable


def gather_states(request: ov.InferRequest, states: list[StateVariable], rows: np.ndarray, slots: np.ndarray) -> None:
    """Replace each of ``states`` by its ``slots`` (rows, width) of the batch rows ``rows`` (rows,).

    OpenVINO hands out states dequantised, so the copy is exact only for ``device.EXACT_KV_PRECISIONS``.
    """
    state_axes = {
        state.name: (state.batch_axis, state.sequence_axis) for state in states if state.sequence_axis is not None
    }
    for variable in request.query_state():
        if variable.name in state_axes:
            state_data = np.moveaxis(variable.state.data, state_axes[variable.name], (0, 1))
            gathered_data = np.moveaxis(state_data[rows[:, None], slots], (0, 1), state_axes[variable.name])
            variable.state = ov.Tensor(np.ascontiguousarray(gathered_data))


def read_states(request: ov.InferRequest, states: list[StateVariable]) -> dict[str, np.ndarray]:
    """Return dequantised copies of ``states`` by name."""
    state_names = {state.name for state in states}
    return {
        variable.name: np.array(variable.state.data)
        for variable in request.query_state()
        if variable.name in state_names
    }


def write_states(request: ov.InferRequest, values: dict[str, np.ndarray]) -> None:
    """Set the states named in ``values``, a result of ``read_states``."""
    for variable in request.query_state():
        if variable.name in values:
            variable.state = ov.Tensor(values[variable.name])
