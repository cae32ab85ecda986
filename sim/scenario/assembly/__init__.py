"""From a scenario to the objects that the engine runs, with the source of each setting.

`experiment` is the whole, `replica` a model on a machine, put together of `deployment`, `memory`, `prefix_cache`, `tiers`,
`scheduler` and `decoding`; `media` puts images and speech into prompts, `encoding` has the machines that encode them, `adapters`
the LoRA adapters; `pools`, `fleet` and `handover` are about several machines; `refusals` says what cannot be combined,
`notes` and `manifest` what a result says of its settings. Read `experiment` first.
"""

from sim.scenario.assembly.deployment import deployment_of
from sim.scenario.assembly.experiment import Built, build, resolve

__all__ = ["Built", "build", "deployment_of", "resolve"]
