"""From a scenario to the objects that the engine runs."""

from sim.scenario.assembly.deployment import deployment_of
from sim.scenario.assembly.experiment import Built, build, resolve

__all__ = ["Built", "build", "deployment_of", "resolve"]
