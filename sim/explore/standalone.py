"""The page as one file: what it loads from its server is put inside."""

from __future__ import annotations

import base64
import re
from pathlib import Path

_SHEET = re.compile(r'<link\b[^>]*?\bhref="(?:\./|/)?page/([\w./-]+\.css)"[^>]*>')
_SCRIPT = re.compile(r'<script\b([^>]*?)\s*\bsrc="(?:\./|/)?page/([\w./-]+\.m?js)"([^>]*)></script>')
_IMPORT = re.compile(
    r"""((?:^|[\s;{}])(?:import|export)\b[^;'"()]*?\bfrom\s*|(?:^|[\s;{}])import\s*|\bimport\s*\(\s*)(["'])(\.{1,2}/[\w./-]+|/page/[\w./-]+)\2""",
    re.MULTILINE,
)  # fmt: skip


def inlined(html: str, folder: Path) -> str:
    """*html* with the style sheets and scripts of *folder* inside. Modules become data: addresses under the names that they import
    each other by, in an import map, which must stand before the first of them."""
    modules: dict[str, str] = {}

    def sheet(found: re.Match[str]) -> str:
        return f"<style>{_text(folder, found[1])}</style>"

    def script(found: re.Match[str]) -> str:
        before, name, after = found.groups()
        if "module" in before + after:
            _gather(folder, name, modules)
            return f'<script type="module">import "rooftrace/{name}";</script>'
        return f"<script{before}{after}>{_within_script(_text(folder, name))}</script>"

    html = _SCRIPT.sub(script, _SHEET.sub(sheet, html))
    if not modules:
        return html
    entries = ",".join(
        f'"rooftrace/{name}":"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"'
        for name, text in modules.items()
    )
    return html.replace("<head>", f'<head>\n<script type="importmap">{{"imports":{{{entries}}}}}</script>', 1)


def _text(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


def _within_script(text: str) -> str:
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _gather(folder: Path, name: str, modules: dict[str, str]) -> None:
    """Put the module *name* and all that it imports into *modules*, their imports renamed."""
    if name in modules:
        return
    modules[name] = ""  # modules may import each other in a circle

    def renamed(found: re.Match[str]) -> str:
        target = found[3]
        path = target.removeprefix("/page/") if target.startswith("/page/") else _beside(name, target)
        _gather(folder, path, modules)
        return f"{found[1]}{found[2]}rooftrace/{path}{found[2]}"

    modules[name] = _IMPORT.sub(renamed, _text(folder, name))


def _beside(name: str, target: str) -> str:
    parts = name.split("/")[:-1]
    for part in target.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
