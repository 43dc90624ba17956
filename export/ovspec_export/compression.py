"""The storage of weights: options for optimum-cli and nncf."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.json_types import JsonObject

# Approximate bits per weight, with its share of scales and zero points.
WEIGHT_FORMATS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.1, "int4": 5.0}
KEEP = "keep"  # the source's own integers, if its weights are quantised
DEFAULT_GROUP_SIZE = 128  # nncf's, if an option for int4 is set
BACKUP_PRECISIONS = ("none", "int8_sym", "int8_asym")


@dataclass(frozen=True)
class Compression:
    """A weight format and, for int4, nncf's options; None leaves a choice to optimum.

    weight_format: one of ``WEIGHT_FORMATS``, or ``KEEP``.
    group_size: number of weights with a shared scale. ratio: share of the layers in int4.
    sym: quantise without zero points. backup_precision: format of the layers not in int4.
    awq, scale_estimation, gptq, lora_correction: data-aware methods of nncf, calibrated on the model's activations for
        ``calibration``, a text file; awq also works without one.
    samples: number of pieces of the calibration text to use.
    """

    weight_format: str = "int8"
    group_size: int | None = None
    ratio: float | None = None
    sym: bool = False
    backup_precision: str | None = None
    awq: bool = False
    scale_estimation: bool = False
    gptq: bool = False
    lora_correction: bool = False
    calibration: Path | None = None
    samples: int | None = None

    def check_weight_options(self) -> None:
        """Raise OvspecError if the options are incompatible."""
        if self.weight_format not in (*WEIGHT_FORMATS, KEEP):
            formats = ", ".join((*WEIGHT_FORMATS, KEEP))
            raise OvspecError(f"`weight_format` is {self.weight_format!r}; it must be one of {formats}.")
        int4_options = [name for name in self.requested_options() if name != "sym"]
        if self.weight_format != "int4" and int4_options:
            raise OvspecError(f"`{int4_options[0]}` works only with `weight_format='int4'`.")
        if self.weight_format not in ("int4", "int8") and self.sym:
            raise OvspecError("`sym` works only with `weight_format='int8'` or `weight_format='int4'`.")
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise OvspecError(
                f"`ratio` is {self.ratio}; it must be above 0 (with 0, all weights would be int8) and at most 1."
            )
        if self.group_size is not None and self.group_size != -1 and self.group_size < 1:
            raise OvspecError(f"`group_size` is {self.group_size}; it must be positive, or -1 for a scale per channel.")
        if self.backup_precision not in (None, *BACKUP_PRECISIONS):
            raise OvspecError(
                f"`backup_precision` is {self.backup_precision!r}; it must be one of {', '.join(BACKUP_PRECISIONS)}."
            )
        if self.gptq and self.lora_correction:
            raise OvspecError("`gptq` and `lora_correction` can't be combined; leave one out.")
        data_aware = [n for n in ("scale_estimation", "gptq", "lora_correction", "samples") if getattr(self, n)]
        if data_aware and not self.calibration:
            raise OvspecError(f"`{data_aware[0]}` needs a text for calibration; set `calibration` to a text file.")
        if self.samples is not None and self.samples < 1:
            raise OvspecError(f"`samples` is {self.samples}; it must be at least 1.")
        if self.calibration:
            read_text(self.calibration)

    def optimum_arguments(self) -> list[str]:
        """Return optimum-cli's arguments. For calibration and bf16 they export fp32, compressed in a later step.

        Kept weights go into a graph in fp32.
        """
        if self.calibration or self.weight_format in ("bf16", KEEP):
            return ["--weight-format", "fp32"]
        options = {"--group-size": self.group_size, "--ratio": self.ratio, "--backup-precision": self.backup_precision}
        arguments = [part for name, option in options.items() if option is not None for part in (name, str(option))]
        return ["--weight-format", self.weight_format, *arguments, *["--sym"] * self.sym, *["--awq"] * self.awq]

    def quantization_config(self) -> JsonObject:
        """Return the arguments of optimum-intel's OVWeightQuantizationConfig, except the texts and the tokenizer."""
        if self.weight_format == "int8":
            return {"bits": 8, "sym": self.sym}
        config = {"bits": 4, "sym": self.sym, "ratio": 1.0, "quant_method": "awq" if self.awq else "default"}
        excluded_options = ("awq", "calibration", "samples")
        return config | {
            name: option for name, option in self.requested_options().items() if name not in excluded_options
        }

    def without_calibration(self) -> Compression:
        """Return the same without the methods calibrated on a text."""
        data_aware = {"scale_estimation": False, "gptq": False, "lora_correction": False}
        return replace(self, **data_aware, calibration=None, samples=None)

    def requested_options(self) -> JsonObject:
        """Return the requested options for the manifest, without paths of this machine."""
        options = asdict(self)
        del options["weight_format"]
        if self.calibration:
            options["calibration"] = self.calibration.name
        return {name: option for name, option in options.items() if option not in (None, False)}


INT8 = Compression()
KEPT = Compression(KEEP)
