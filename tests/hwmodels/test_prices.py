import pytest

from hwmodels.device import device_catalogue
from hwmodels.prices import list_prices, read_prices
from sim import Scenario, ScenarioError, simulate

FEW = Scenario.default().with_set("workload.requests=5", "replicas=2")


@pytest.mark.parametrize("device", list_prices().of)
def test_every_price_is_of_a_device_and_says_when_it_was_seen_and_where(device):
    assert device in device_catalogue()
    listed = list_prices().of[device]
    assert len({price.provider for price in listed}) == len(listed)
    for price in listed:
        assert price.seen[:2] == "20"
        assert "https://" in price.source
        assert price.listed
    assert device_catalogue()[device].price_usd_per_hour == listed[0].usd_per_hour


def test_a_device_without_a_price_of_its_own_has_not_that_of_another():
    unlisted = set(device_catalogue()) - set(list_prices().of)
    assert unlisted
    assert all(device_catalogue()[name].price_usd_per_hour is None for name in unlisted)


@pytest.mark.parametrize("given", ["provider=lambda", "prices={file}", "usd_per_device_hour=2.5"])
def test_a_deployment_costs_what_the_scenario_says_of_prices(tmp_path, given):
    file = tmp_path / "mine.toml"
    row = '{ provider = "us", usd_per_hour = 1.25, listed = "a contract", seen = "2026-01-31" }'
    file.write_text(f'[providers]\nus = "our books"\n[devices]\nh100-sxm = [{row}]\n')
    costs = simulate(FEW.with_set(f"costs.{given.format(file=file)}")).summary["costs"]
    lent = list_prices().find("h100-sxm", "lambda")
    assert lent is not None
    usd, basis = {
        "provider": (lent.usd_per_hour, "list price of lambda as seen in 2025"),
        "prices": (1.25, "list price of us as seen in 2026-01-31 (a contract); our books"),
        "usd_per_device_hour": (2.5, "costs.usd_per_device_hour"),
    }[given.partition("=")[0]]
    assert costs["usd_per_hour"] == 2 * usd
    assert costs["usd_per_month"] == 2 * usd * 730
    assert basis in costs["price_basis"]


def test_a_provider_that_does_not_list_the_device_gives_no_cost_and_a_note():
    result = simulate(FEW.with_set("costs.provider=runpod"))
    assert result.summary["costs"]["usd_per_hour"] is None
    assert any("runpod lists no price for h100-sxm" in note for note in result.manifest["notes"])
    with pytest.raises(ScenarioError, match="did you mean lambda"):
        simulate(FEW.with_set("costs.provider=lamda"))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("provider = 'us'", "usd_per_hour is missing"),
        ("usd = 1", "usd is not part"),
        ("provider = 'x', usd_per_hour = 1, listed = '', seen = ''", "x is not among"),
    ],
)
def test_what_is_wrong_with_a_file_of_prices_is_said(tmp_path, row, why):
    file = tmp_path / "p.toml"
    file.write_text(f"[devices]\nl4 = [{{ {row} }}]\n")
    with pytest.raises(ValueError, match=why):
        read_prices(file)
