"""Files of checkpoints on this machine and on the HuggingFace hub: config.json, and hf_quant_config.json beside it."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
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
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    snapshots = [folder / "snapshots" / main.read_text().strip()] if main.is_file() else []
    snapshots += sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((each / FILES[0] for each in snapshots if (each / FILES[0]).is_file()), None)


def hub_cache() -> Path:
    """The folder in which the HuggingFace libraries keep checkpoints (`HF_HUB_CACHE`, `HF_HOME`)."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


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
        content = _answer(f"{host}/{name}/resolve/main/{file}", timeout_s, may_lack=file != FILES[0])
        if content is not None:
            found[file] = content
    folder = fetched_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in found.items():
        part = folder / f"{file}.part"
        part.write_bytes(content)
        part.replace(folder / file)
    return folder / FILES[0]


def _answer(url: str, timeout_s: float, *, may_lack: bool) -> bytes | None:
    """The JSON object at *url*; None where the hub says that there is no such file, if it *may_lack*."""
    way = "give a path to its config.json instead"
    try:
        request = urllib.request.Request(url)
        if token := os.environ.get("HF_TOKEN"):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            content: bytes = answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404 and may_lack:
            return None
        if error.code in (401, 403):
            way = "it is private or gated, or there is none of that name: set HF_TOKEN, or check the name"
        raise ValueError(f"{url}: the hub answers {error.code} {error.reason}; {way}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise ValueError(f"{url}: cannot be read ({why}); {way}") from None
    try:
        whole = isinstance(json.loads(content), dict)
    except ValueError:
        whole = False
    if not whole:
        raise ValueError(f"{url}: what answers is no JSON object; {way}")
    return content
