"""Finds the compiled engine of an editable installation, as long as its sources are those that were compiled.

An installation puts this file beside the other packages as `rooftrace_compiled`, and a `.pth` file there calls `find_in`. Where a
source has changed since, all of them are imported as plain Python: compiled modules know each other's insides.
"""

import hashlib
import json
import os
import sys
from importlib.util import spec_from_file_location
from sysconfig import get_config_var


def find_in(folder):
    """Let imports find the compiled modules in *folder* from now on."""
    sys.meta_path.insert(0, _Finder(folder))


def changed_sources():
    """The files that have changed since they were compiled, of the first installation that is found so."""
    return next((finder.changed for finder in sys.meta_path if isinstance(finder, _Finder)), [])


class _Finder:
    def __init__(self, folder):
        self._folder = folder
        self._sources = None

    @property
    def changed(self):
        """The sources that are not what was compiled; looked at once, when a compiled module is first asked for."""
        if self._sources is None:
            self._read()
        return self._changed

    def _read(self):
        try:
            with open(os.path.join(self._folder, "sources.json"), encoding="utf-8") as file:
                self._sources = json.load(file)
        except OSError:
            self._sources = {"root": "", "digests": {}, "compiled": []}
        self._root = self._sources["root"]
        self._names = {name[:-3].replace("/", ".") for name in self._sources["compiled"]}
        self._changed = [name for name, digest in self._sources["digests"].items() if self._digest(name) != digest]

    def _digest(self, name):
        try:
            with open(os.path.join(self._root, name), "rb") as file:
                return hashlib.sha256(file.read()).hexdigest()
        except OSError:
            return ""

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        shared = name.endswith("__mypyc")
        if not shared and top not in ("hwmodels", "policies", "sim", "workloads"):
            return None
        changed = self.changed
        if changed or not (shared or name in self._names):
            return None
        place = name.split(".")
        if not shared and os.path.abspath(next(iter(path or ()), "")) != os.path.join(self._root, *place[:-1]):
            return None  # another tree, which comes first on the path
        file = os.path.join(self._folder, *place) + "." + get_config_var("SOABI") + ".so"
        return spec_from_file_location(name, file) if os.path.isfile(file) else None
