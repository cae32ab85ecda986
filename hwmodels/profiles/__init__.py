"""Calibrated profiles: fitted kernel parameters of a device, where each came from, and its datasheet numbers apart."""

from hwmodels.profiles.comparison import Difference, compare_profiles
from hwmodels.profiles.files import calibrated_devices, profile_text, read_profile, write_profile
from hwmodels.profiles.lending import borrow, borrow_for, complete, load_profile, loan_ends
from hwmodels.profiles.profile import Calibration, Kernel, Profile, Provenance, datasheet_of, device_of

__all__ = [
    "Calibration",
    "Difference",
    "Kernel",
    "Profile",
    "Provenance",
    "borrow",
    "borrow_for",
    "calibrated_devices",
    "compare_profiles",
    "complete",
    "datasheet_of",
    "device_of",
    "load_profile",
    "loan_ends",
    "profile_text",
    "read_profile",
    "write_profile",
]
