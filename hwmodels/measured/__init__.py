"""Measured latencies by their columns, and what a profile predicts of kernel-level rows.

The columns say what a file measured. Its name is a hint, for what they lack: device, arithmetic, software
(`gemm_h200_fp8_vllm0.24.csv`), and which of two kinds with the same columns. Files and rows that are not understood are
refused, or left out with the reason and counted; rows without a model are NaN with the reason, never dropped.
"""

from hwmodels.measured.files import Measurement, Survey, is_kernel_level, read, read_folder, survey
from hwmodels.measured.kinds import CALIBRATING, KINDS
from hwmodels.measured.names import catalogue_model, catalogue_name
from hwmodels.measured.part import Part
from hwmodels.measured.parts import parts
from hwmodels.measured.predict import Prediction, predict

__all__ = [
    "CALIBRATING",
    "KINDS",
    "Measurement",
    "Part",
    "Prediction",
    "Survey",
    "catalogue_model",
    "catalogue_name",
    "is_kernel_level",
    "parts",
    "predict",
    "read",
    "read_folder",
    "survey",
]
