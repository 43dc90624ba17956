"""An infer request, driven with as little Python overhead as possible."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import openvino as ov

from ovspec.base.errors import InferenceError
from ovspec.ir import large_pages
from ovspec.ir.compile import CompiledIR


class InferenceRequest:
    """Runs forward passes of a model, counts and times them. Inputs missing in the model are skipped."""

    def __init__(self, ir: CompiledIR, inputs: Sequence[str]) -> None:
        self.seconds = 0.0
        self.inferences = 0
        self._ir = ir
        self._picks_logits = ir.picks_logits
        self._large_pages = ir.large_page_mover
        self._outputs = ir.outputs
        self._logits_output = ir.outputs["logits"]
        self._inputs = [ir.inputs.get(name) for name in inputs]
        self.replace_openvino_request()

    def replace_openvino_request(self) -> None:
        """Replace the OpenVINO request with a new one."""
        self.openvino_request = self._ir.compiled_model.create_infer_request()
        self.has_run, self._must_reset = False, False
        self._bound_arrays: dict[int, np.ndarray] = {}  # input index -> bound array

    def reset_states(self) -> None:
        """Empty the states just before the next forward pass.

        Not immediately: resetting a GPU request long before it runs disturbs other requests in the meantime.
        """
        self.has_run, self._must_reset = False, True

    def apply_pending_reset(self) -> None:
        """Empty the states if ``reset_states`` was called."""
        if self._must_reset:
            self.openvino_request.reset_state()
            self._must_reset = False

    def infer(self, input_arrays: Sequence[np.ndarray], logits_idx: np.ndarray) -> np.ndarray:
        """Run a forward pass; return the logits of the tokens ``logits_idx``, (len(logits_idx), vocab) float32.

        They are valid until the next call. ``input_arrays`` are in the order of the names in ``inputs``. An array bound
        by the last call isn't bound again: binding costs more than writing into a bound array.

        Raises:
            InferenceError: the logits are not numbers, or the model was closed.
        """
        request = self.openvino_request
        bound_arrays = self._bound_arrays
        if self._ir.open_model is None:
            _ = self._ir.compiled_model  # raises
        self.apply_pending_reset()
        for input_index, array in zip(self._inputs, input_arrays, strict=True):
            if input_index is not None and bound_arrays.get(input_index) is not array:
                request.set_input_tensor(input_index, ov.Tensor(array, shared_memory=True))
                bound_arrays[input_index] = array
        pages = self._large_pages
        pages.busy_requests.add(id(self))
        start_time = time.perf_counter()
        try:
            request.start_async()
            request.wait()
        finally:
            seconds = time.perf_counter() - start_time
            pages.busy_requests.discard(id(self))
            pages.last_inference_end = time.monotonic()
        self.seconds += seconds
        if pages.inference_seconds < large_pages.INFERENCE_SECONDS_BEFORE_MOVE:
            pages.inference_seconds += seconds
            if pages.inference_seconds >= large_pages.INFERENCE_SECONDS_BEFORE_MOVE:
                pages.start_mover_thread()
        self.inferences += 1
        self.has_run = True
        logits = request.get_output_tensor(self._logits_output).data
        logits = logits[0] if self._picks_logits else logits.reshape(-1, logits.shape[-1])[logits_idx]
        if not np.isfinite(logits.max()):  # a single NaN makes the maximum NaN
            computes_in_f32 = self._ir.properties.get("INFERENCE_PRECISION_HINT") == "f32"
            advice = (
                "export the model again, or choose another `device`" if computes_in_f32 else "try `precision='f32'`"
            )
            raise InferenceError(f"{self._ir.folder}: the model computed NaN or infinite logits; {advice}.")
        return logits

    def read_output(self, name: str) -> np.ndarray:
        """Return another output of the last forward pass, (tokens, width) float32, valid until the next call."""
        values = self.openvino_request.get_output_tensor(self._outputs[name]).data
        return values.reshape(-1, values.shape[-1])
