"""From a scenario to the objects that the engine runs."""

from sim.scenario.build.deployment import deployment_of
from sim.scenario.build.experiment import Built, build, resolve

__all__ = ["Built", "build", "deployment_of", "resolve"]
