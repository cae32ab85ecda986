"""Files of checkpoints on this machine and on the HuggingFace hub: config.json, and hf_quant_config.json beside it."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from pathlib import Path

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ("config.json", "hf_quant_config.json")


def is_hub_name(name: str) -> bool:
    """Whether *name* has the form of a repository on the hub, PUBLISHER/NAME."""
    return _NAME.fullmatch(name) is not None


def cached_config(name: str) -> Path | None:
    """The config.json of the checkpoint *name* (PUBLISHER/NAME) that was fetched before, or that the HuggingFace libraries keep
    in their cache (`HF_HUB_CACHE`, `HF_HOME`); None without one."""
    if not is_hub_name(name):
        return None
    fetched = fetched_folder(name) / FILES[0]
    if fetched.is_file():
        return fetched
    hub = (
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    )
    folder = Path(hub) / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    snapshots = [folder / "snapshots" / main.read_text().strip()] if main.is_file() else []
    snapshots += sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((each / FILES[0] for each in snapshots if (each / FILES[0]).is_file()), None)


def fetched_folder(name: str) -> Path:
    """The folder in which `fetch_config` keeps the files of the checkpoint *name*."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rooftrace" / "models" / name.replace("/", "--")


def fetch_config(name: str, *, timeout_s: float = 20.0) -> Path:
    """Asks the hub (`HF_ENDPOINT`, else huggingface.co) for config.json of *name*, and for hf_quant_config.json; no weights.

    `HF_TOKEN` is sent where it is set. Returns where config.json lies now. ValueError in a sentence where the hub does not give it.
    """
    if not is_hub_name(name):
        raise ValueError(f"{name!r} is no name on the HuggingFace hub; give PUBLISHER/NAME")
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    found: dict[str, bytes] = {}
    for file in FILES:
        url = f"{host}/{name}/resolve/main/{file}"
        token = os.environ.get("HF_TOKEN")
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                found[file] = answer.read()
        except urllib.error.HTTPError as error:
            if file == FILES[0]:
                way = "; it is gated: set HF_TOKEN" if error.code in (401, 403) else ""
                raise ValueError(f"{url}: the hub answers {error.code} {error.reason}{way}") from None
        except OSError as error:
            raise ValueError(f"{url}: cannot be reached ({error}); give a path to its config.json instead") from None
    folder = fetched_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in found.items():
        part = folder / f"{file}.part"
        part.write_bytes(content)
        part.replace(folder / file)
    return folder / FILES[0]
