"""Measured latencies by their columns, and what a profile predicts of kernel-level rows.

The columns say what a file measured. Its name is a hint, for what they lack: device, arithmetic, software
(`gemm_h200_fp8_vllm0.24.csv`), and which of two kinds with the same columns. Tables of one's own, whose columns have other
names and units in them, are recognised as well (`own`). Files and rows that are not understood are refused, or left out
with the reason and counted; rows without a model are NaN with the reason, never dropped.
"""

from hwmodels.measured.files import Measurement, is_kernel_level, read
from hwmodels.measured.folder import read_folder, survey
from hwmodels.measured.kinds import KINDS
from hwmodels.measured.names import catalogue_model, catalogue_name
from hwmodels.measured.own import Said, format_of, read_own
from hwmodels.measured.part import Part
from hwmodels.measured.parts import parts
from hwmodels.measured.predict import predict

__all__ = [
    "KINDS",
    "Measurement",
    "Part",
    "Said",
    "catalogue_model",
    "catalogue_name",
    "format_of",
    "is_kernel_level",
    "parts",
    "predict",
    "read",
    "read_folder",
    "read_own",
    "survey",
]
