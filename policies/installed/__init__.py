"""Schedulers of installed releases of serving engines, which run in an interpreter of their own and decide for themselves.

It owns the processes and the lines between them and the simulator; it must not know who asks. Read `connection` first, then
`lines` and `vllm.worker`, which run beside the release.
"""

from policies.installed.sglang import SglangInstalled
from policies.installed.vllm import VllmInstalled

__all__ = ["SglangInstalled", "VllmInstalled"]
