"""Mamba's convolution and scan for any number of new tokens after any past, in place of optimum's.

optimum's work for a whole prompt or a single token only, and its scan divides by a product of decays that becomes
zero in a text of some length.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset14 as ops


class SelectiveScan(torch.nn.Module):
    """state[t] = state[t - 1] * decay[t] + drive[t]; out[t] = sum over N of state[t] * read[t].

    decay, drive: (B, T, D, N). read: (B, T, N). state: (B, D, N). Returns all of out (B, T, D) and the last state,
    flat and in a row, since a module that OpenVINO converts as one operation can only return one tensor.
    """

    def forward(
        self, decay: torch.Tensor, drive: torch.Tensor, read: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        out = []
        for t in range(decay.shape[1]):
            state = state * decay[:, t] + drive[:, t]
            out.append((state * read[:, t, None]).sum(-1))
        return torch.cat([torch.stack(out, 1).flatten(), state.flatten()])


def convert_scan(context: Any) -> list[Any]:
    """Convert ``Scan`` to a loop over the tokens."""
    decay, drive, read, state = (context.get_input(i) for i in range(4))
    zero, one, last = (ops.constant(i, dtype=np.int32) for i in (0, 1, -1))
    decay_t, drive_t = (ops.parameter([-1, 1, -1, -1], np.float32) for _ in range(2))
    read_t, state_t = ops.parameter([-1, 1, -1], np.float32), ops.parameter([-1, -1, -1], np.float32)
    new = ops.add(ops.multiply(state_t, ops.squeeze(decay_t, one)), ops.squeeze(drive_t, one))
    out = ops.unsqueeze(ops.reduce_sum(ops.multiply(new, read_t), last, False), one)
    body = ov.Model([ops.constant([True], dtype=bool), new, out], [decay_t, drive_t, read_t, state_t], "scan")  # type: ignore[list-item]
    length = ops.convert(ops.gather(ops.shape_of(decay), one, zero), "i32")
    loop: Any = ops.loop(length, ops.constant(True, dtype=bool))
    loop.set_function(body)
    for parameter, whole in ((decay_t, decay), (drive_t, drive), (read_t, read)):
        loop.set_sliced_input(parameter, whole, 0, 1, 1, -1, 1)
    loop.set_merged_input(state_t, state, new.output(0))
    loop.set_special_body_ports([-1, 0])
    outs, end = loop.get_concatenated_slices(out.output(0), 0, 1, 1, -1, 1), loop.get_iter_value(new.output(0), -1)
    flat = [ops.reshape(value, ops.constant([-1], dtype=np.int32), False) for value in (outs, end)]
    return [ops.concat(flat, 0).output(0)]


def run_mixer(self: Any, input_states: torch.Tensor, cache_params: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Compute a mixer of Mamba or Falcon Mamba with its states in ``cache_params``; rows have no padding.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv:2312.00752.
    """
    index, kernel = self.layer_idx, self.conv_kernel_size
    new, gate = self.in_proj(input_states).transpose(1, 2).chunk(2, dim=1)
    seen = torch.cat([cache_params.conv_states[index], new], dim=-1)  # the past holds the last ``kernel`` inputs
    cache_params.conv_states[index] = seen[..., -kernel:]
    convolved = torch.nn.functional.conv1d(seen[..., 1:], self.conv1d.weight, self.conv1d.bias, groups=new.shape[1])
    x = self.act(convolved).transpose(1, 2)  # (B, T, D)
    sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    step, write, read = torch.split(self.x_proj(x), sizes, dim=-1)
    if self.ssm_rms_normalization:
        step, write, read = (self.ssm_rms_normalization(t, variance_epsilon=self.rms_eps) for t in (step, write, read))
    step = torch.nn.functional.softplus(self.dt_proj(step)).float()
    decay = torch.exp(step.unsqueeze(-1) * -torch.exp(self.A_log.float()))
    drive = (step * x.float()).unsqueeze(-1) * write.float().unsqueeze(2)
    state = cache_params.ssm_states[index]
    flat = self.scan(decay, drive, read.float(), state)
    out, end = torch.split(flat, [x.numel(), state.numel()])
    cache_params.ssm_states[index] = end.reshape(state.shape)
    out = (out.reshape(x.shape) + x * self.D).transpose(1, 2) * self.act(gate)
    return self.out_proj(out.transpose(1, 2).to(input_states.dtype))


def replace_mixer() -> None:
    """Replace optimum's mixer of Mamba and Falcon Mamba by ours."""
    from openvino.frontend.pytorch import ConversionExtension, ModuleExtension
    from optimum.exporters.openvino.model_patcher import MambaPatcher as Patcher

    begin, enter = Patcher.__init__, Patcher.__enter__

    @functools.wraps(begin)
    def begin_with_scan(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.module_extensions = {SelectiveScan: ModuleExtension(SelectiveScan, "ovspec_scan")}
        self.conversion_extensions = [ConversionExtension("ovspec_scan", convert_scan)]

    @functools.wraps(enter)
    def enter_with_mixer(self: Any) -> Any:
        entered = enter(self)
        for layer in self._model.backbone.layers:
            layer.mixer.scan = SelectiveScan()
            layer.mixer.forward = types.MethodType(run_mixer, layer.mixer)
        return entered

    Patcher.__init__, Patcher.__enter__ = begin_with_scan, enter_with_mixer
