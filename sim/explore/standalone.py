"""The page as one file: what it loads from its server is put inside."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

_SHEET = re.compile(r'<link rel="stylesheet" href="/page/([\w./-]+\.css)">')
_IMPORTS = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)


def inlined(html: str, folder: Path) -> str:
    """*html* with the style sheets and the modules of *folder* inside. Its import map says by which prefix modules import each
    other from /page/; in its place is one of the modules themselves, as data: addresses."""

    def sheet(found: re.Match[str]) -> str:
        return f"<style>\n{_text(folder / found[1])}</style>"

    def imports(found: re.Match[str]) -> str:
        (prefix,) = json.loads(found[1])["imports"]
        modules = {
            prefix + path.relative_to(folder).as_posix(): f"data:text/javascript;base64,{_base64(path)}"
            for path in sorted(folder.rglob("*.js"))
        }
        return f'<script type="importmap">{json.dumps({"imports": modules})}</script>'

    return _IMPORTS.sub(imports, _SHEET.sub(sheet, html))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
