"""The way in which an engine's server is started, and what stands around it in containers and manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """A field that is left out: the engine has no such thing, or it is not known."""

    example: str
    """The shortest command."""
    programs: tuple[tuple[str, ...], ...]
    """Words that start it, the longest first."""
    modules: tuple[str, ...] = ()
    """Modules that start it by python -m."""
    model_option: str | None = None
    """The option that names the model; otherwise, or besides, it stands alone."""
    file_option: str | None = None
    """The option that takes a YAML file of options."""
    abbreviates: bool = False
    """The parser, Python's argparse, takes the beginning of an option's name for it where no other begins so."""
    respelt: Callable[[str], list[str]] = lambda word: [word]
    """The words that the parser makes of one."""
    image: str | None = None
    """The image of its containers with the release, in which a scenario's own stack is exported."""
    released_as: tuple[str, ...] = ()
    """The ends of the names of its own images, whose tags are its releases."""
    entry: tuple[str, ...] = ()
    """The words that start it in a container."""
    entry_images: tuple[str, ...] = ()
    """The beginnings of the names of images whose entry point these are."""
    listens: tuple[str, ...] = ()
    """Options by which a server in a container is reached from outside."""
    address_variable: str | None = None
    """The variable that says a pod's address to servers that hand KV over."""
    chart_command: str | None = None
    """The name of its command in llm-d's charts; KServe's pairs run it too."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """The quantities that target_tracking measures, by the server's metrics; an adapter adds up running and waiting."""
    total: str | None = None
    """Requests that wait or run at all pods of the service {0}, as Prometheus adds them up."""
    proxy: tuple[str, str, str] | None = None
    """Package, program and option of the proxy in front of servers that prefill and servers that decode."""
    dynamo_module: str | None = None
    """The module of its worker in Dynamo's images."""
    dynamo_model_option: str | None = None
    """The option of that worker for a model that stands alone in the server's own command."""
    dynamo_role_option: str | None = None
    """The option of that worker for a role that the server's own command has not."""
