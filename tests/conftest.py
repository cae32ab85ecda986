"""What tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public traces and measurements beside the repository; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the public traces and measurements in {SHARED}, which is not there")
    return SHARED
