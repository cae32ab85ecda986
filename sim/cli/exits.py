"""Exit codes of the command line, beside 0 and those of a single command."""

from __future__ import annotations

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
TERMINATED = 143  # 128 + SIGTERM
