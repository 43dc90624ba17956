"""Mamba's convolution and scan for any number of new tokens after any past, in place of optimum's.

optimum's work only for a whole prompt or a single token, and its scan divides by a product of decays; in a longer text,
this product underflows to zero.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import torch
from openvino import opset14 as ops

if TYPE_CHECKING:
    from openvino.frontend import NodeContext


class SelectiveScan(torch.nn.Module):
    """state[t] = state[t - 1] * decay[t] + drive[t]; output[t] = sum over N of state[t] * readout[t].

    decay, drive: (B, T, D, N). readout: (B, T, N). state: (B, D, N). Returns all outputs (B, T, D) and the last state,
    flattened and concatenated: a module converted by OpenVINO as an operation can return only a single tensor.
    """

    def forward(
        self, decay: torch.Tensor, drive: torch.Tensor, readout: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        outputs = []
        for t in range(decay.shape[1]):
            state = state * decay[:, t] + drive[:, t]
            outputs.append((state * readout[:, t, None]).sum(-1))
        return torch.cat([torch.stack(outputs, 1).flatten(), state.flatten()])


def convert_scan(context: NodeContext) -> list[ov.Output]:
    """Convert ``SelectiveScan`` to a loop over the tokens."""
    decay, drive, readout, state = (context.get_input(i) for i in range(4))
    zero, one, last_axis = (ops.constant(i, dtype=np.int32) for i in (0, 1, -1))
    decay_t, drive_t = (ops.parameter([-1, 1, -1, -1], np.float32) for _ in range(2))
    readout_t = ops.parameter([-1, 1, -1], np.float32)
    state_t = ops.parameter([-1, -1, -1], np.float32)
    new_state = ops.add(ops.multiply(state_t, ops.squeeze(decay_t, one)), ops.squeeze(drive_t, one))
    output_t = ops.unsqueeze(ops.reduce_sum(ops.multiply(new_state, readout_t), last_axis, False), one)
    keep_looping = ops.constant([True], dtype=bool)
    parameters = [decay_t, drive_t, readout_t, state_t]
    loop_body = ov.Model([keep_looping, new_state, output_t], parameters, "scan")  # type: ignore[list-item]
    token_count = ops.convert(ops.gather(ops.shape_of(decay), one, zero), "i32")
    loop: Any = ops.loop(token_count, ops.constant(True, dtype=bool))
    loop.set_function(loop_body)
    for parameter, sequence in ((decay_t, decay), (drive_t, drive), (readout_t, readout)):
        loop.set_sliced_input(parameter, sequence, 0, 1, 1, -1, 1)
    loop.set_merged_input(state_t, state, new_state.output(0))
    loop.set_special_body_ports([-1, 0])
    outputs = loop.get_concatenated_slices(output_t.output(0), 0, 1, 1, -1, 1)
    last_state = loop.get_iter_value(new_state.output(0), -1)
    flat_outputs = [ops.reshape(tensor, ops.constant([-1], dtype=np.int32), False) for tensor in (outputs, last_state)]
    return [ops.concat(flat_outputs, 0).output(0)]


def run_mixer(self: Any, hidden_states: torch.Tensor, cache_params: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Compute a mixer of Mamba or Falcon Mamba with its states in ``cache_params``; rows have no padding.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv:2312.00752.
    """
    layer_index = self.layer_idx
    kernel_size = self.conv_kernel_size
    convolution_inputs, gate = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
    # The past consists of the last ``kernel_size`` inputs.
    window = torch.cat([cache_params.conv_states[layer_index], convolution_inputs], dim=-1)
    cache_params.conv_states[layer_index] = window[..., -kernel_size:]
    convolved = torch.nn.functional.conv1d(
        window[..., 1:], self.conv1d.weight, self.conv1d.bias, groups=convolution_inputs.shape[1]
    )
    activated = self.act(convolved).transpose(1, 2)  # (B, T, D)
    sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    projections = torch.split(self.x_proj(activated), sizes, dim=-1)
    if self.ssm_rms_normalization:
        projections = [self.ssm_rms_normalization(tensor, variance_epsilon=self.rms_eps) for tensor in projections]
    time_step, write_projection, readout = projections
    time_step = torch.nn.functional.softplus(self.dt_proj(time_step)).float()
    decay = torch.exp(time_step.unsqueeze(-1) * -torch.exp(self.A_log.float()))
    drive = (time_step * activated.float()).unsqueeze(-1) * write_projection.float().unsqueeze(2)
    state = cache_params.ssm_states[layer_index]
    flat_result = self.scan(decay, drive, readout.float(), state)
    output, last_state = torch.split(flat_result, [activated.numel(), state.numel()])
    cache_params.ssm_states[layer_index] = last_state.reshape(state.shape)
    output = (output.reshape(activated.shape) + activated * self.D).transpose(1, 2) * self.act(gate)
    return self.out_proj(output.transpose(1, 2).to(hidden_states.dtype))


def replace_optimum_mixer() -> None:
    """Replace optimum's mixer of Mamba and Falcon Mamba by ours."""
    from openvino.frontend.pytorch import ConversionExtension, ModuleExtension
    from optimum.exporters.openvino.model_patcher import MambaPatcher as Patcher

    original_initialize = Patcher.__init__
    original_enter = Patcher.__enter__

    @functools.wraps(original_initialize)
    def initialize_with_scan_conversion(self: Any, *args: Any, **kwargs: Any) -> None:
        original_initialize(self, *args, **kwargs)
        self.module_extensions = {SelectiveScan: ModuleExtension(SelectiveScan, "ovspec_scan")}
        self.conversion_extensions = [ConversionExtension("ovspec_scan", convert_scan)]

    @functools.wraps(original_enter)
    def enter_and_replace_mixer(self: Any) -> Any:
        entered_patcher = original_enter(self)
        for layer in self._model.backbone.layers:
            layer.mixer.scan = SelectiveScan()
            layer.mixer.forward = types.MethodType(run_mixer, layer.mixer)
        return entered_patcher

    Patcher.__init__ = initialize_with_scan_conversion
    Patcher.__enter__ = enter_and_replace_mixer
