"""How clients ask of a server, and which of their requests a published figure is over."""

from sim.protocols.client import Figures, Protocol
from sim.protocols.families import protocol, protocols

__all__ = ["Figures", "Protocol", "protocol", "protocols"]
