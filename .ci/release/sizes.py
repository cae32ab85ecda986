"""The megabytes of a wheel and of what is installed: PYTHONPATH=.ci python -m release.sizes WHEEL

Of the wheel the largest folders are shown, as they are in it; of the installation this environment's packages.
"""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from collections import Counter
from pathlib import Path


def main(wheel: str) -> None:
    folders: Counter[str] = Counter()
    with zipfile.ZipFile(wheel) as files:
        for file in files.infolist():
            parts = file.filename.split("/")
            folders["compiled modules" if file.filename.endswith(".so") else "/".join(parts[:-1][:2]) or parts[0]] += (
                file.file_size
            )
    print(f"{Path(wheel).stat().st_size / 1e6:6.2f} MB  {wheel}, {sum(folders.values()) / 1e6:.2f} MB of files:")
    for name, size in folders.most_common(12):
        print(f"{size / 1e6:6.2f} MB  {name}")
    here = Path(sysconfig.get_path("purelib"))
    whole = sum(path.stat().st_size for path in here.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    print(f"{whole / 1e6:6.0f} MB  {here}, without what Python compiles at the first import")


if __name__ == "__main__":
    main(sys.argv[1])
