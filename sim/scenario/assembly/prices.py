"""The price of an hour of a scenario's devices: its own, that of a provider, or the catalogue's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hwmodels.device import Device
from hwmodels.prices import list_prices, read_prices
from sim.errors import RooftraceError
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from sim.text import unknown


def price_of(scenario: Scenario, device: Device) -> tuple[float | None, str | None]:
    """US dollars an hour of *device*, and where that is from; None where no provider lists a price.

    ScenarioError for a file of prices that cannot be read, and for a provider who is not in it.
    """
    costs = scenario.costs
    if costs is not None and costs.usd_per_device_hour is not None:
        return costs.usd_per_device_hour, "the scenario's costs.usd_per_device_hour"
    if costs is None or (costs.provider is None and costs.prices is None):
        return device.price_usd_per_hour, device.sources.get("price_usd_per_hour")
    with told_by(scenario, "costs"):
        prices = list_prices() if costs.prices is None else read_prices(scenario.find(costs.prices) or costs.prices)
        if costs.provider is not None and costs.provider not in prices.providers:
            what = f"provider {costs.provider} is in no row of {costs.prices or 'the list of prices'}"
            raise RooftraceError(unknown(what, costs.provider, prices.providers))
    found = prices.find(device.name, costs.provider)
    return (None, None) if found is None else (found.usd_per_hour, found.source)


def about_prices(scenario: Scenario, devices: Iterable[Device]) -> Iterator[str]:
    """Notes for devices that the provider or the file that *scenario* names does not list."""
    costs = scenario.costs
    if costs is None:
        return
    for name, device in {device.name: device for device in devices}.items():
        if (costs.provider or costs.prices) and price_of(scenario, device)[0] is None:
            whose = " ".join(filter(None, [costs.provider, costs.prices and f"in {costs.prices}"]))
            yield f"{whose} lists no price for {name}, so that costs are not known; give costs.usd_per_device_hour."
