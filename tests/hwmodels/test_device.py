"""The device catalogue against independent arithmetic: sparse-as-dense and factor-of-two slips fail here."""

import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import Interconnect, device_catalogue, load_device, read_devices

# Dense FLOPs of one SM (or CU) in one clock in bf16 (fp16 on V100), and the tensor-core boost clock in Hz, from the
# architecture whitepapers; TPUs: MXUs x 128 x 128 (256 x 256 on v6e) x 2 x clock.
TENSOR_RATE = {
    "v100-32": (1024, 1.530e9),
    "a100-80gb-sxm": (2048, 1.410e9),
    "a6000": (1024, 1.800e9),
    "a40": (1024, 1.740e9),
    "a10": (1024, 1.695e9),
    "l4": (1024, 2.040e9),
    "l40s": (1024, 2.520e9),
    "h100-sxm": (4096, 1.830e9),
    "h100-pcie": (4096, 1.620e9),
    "rtx-4090": (512, 2.520e9),
    "mi300x": (2048, 2.100e9),
    "mi325x": (2048, 2.100e9),
    "mi350x": (4096, 2.200e9),
    "mi355x": (4096, 2.400e9),
    "mi210": (1024, 1.700e9),
    "b60": (2048, 2.400e9),
    "tpu-v3": (2 * 128 * 128 * 2, 0.940e9),
    "tpu-v4": (4 * 128 * 128 * 2, 1.050e9),
    "tpu-v5e": (4 * 128 * 128 * 2, 1.500e9),
    "tpu-v5p": (4 * 128 * 128 * 2, 1.750e9),
}
# FLOPs per byte of memory traffic at the ridge, as published or computed by hand from public figures.
RIDGE = {
    "v100-32": 139,
    "a100-80gb-sxm": 153,
    "a6000": 202,
    "l4": 403,
    "l40s": 419,
    "h100-sxm": 295,
    "h200": 206,
    "h20": 37,
    "b200": 292,
    "rtx-pro-6000": 301,
    "mi300x": 247,
    "mi355x": 315,
    "gaudi3": 496,
    "trainium2": 230,
    "trainium3": 137,
    "tpu-v4": 229,
    "tpu-v5e": 241,
    "tpu-v5p": 166,
    "tpu-v6e": 560,
}


# Links from the physical layer: lanes or links, each at its rate in one direction (bytes/s).
LINKS = {
    "v100-32": 6 * 25e9,
    "a100-80gb-sxm": 12 * 25e9,
    "a100-80gb-pcie": 16 * 16e9 / 8 * 128 / 130,
    "l40s": 16 * 16e9 / 8 * 128 / 130,
    "h100-sxm": 18 * 25e9,
    "h100-pcie": 16 * 32e9 / 8 * 128 / 130,
    "h200": 18 * 25e9,
    "b200": 18 * 50e9,
    "gb200": 18 * 50e9,
    "mi300x": 7 * 64e9,
    "mi355x": 7 * 76.8e9,
    "gaudi3": 21 * 25e9,
    "b60": 8 * 32e9 / 8 * 128 / 130,
    "tpu-v5e": 4 * 50e9,
    "tpu-v5p": 6 * 100e9,
}
# Memory bandwidth from the physical layer: bus width in bits times the rate of a pin in bit/s.
MEMORY = {
    "v100-32": (4096, 1.75e9),
    "a100-40gb-sxm": (5120, 2.43e9),
    "a100-80gb-sxm": (5120, 3.186e9),
    "a6000": (384, 16e9),
    "a40": (384, 14.5e9),
    "a10": (384, 12.5e9),
    "l4": (192, 12.5e9),
    "l40s": (384, 18e9),
    "h100-sxm": (5120, 5.23e9),
    "h200": (6144, 6.25e9),
    "b200": (8192, 7.52e9),
    "rtx-pro-6000": (512, 25e9),
    "rtx-4090": (384, 21e9),
    "mi300x": (8192, 5.2e9),
    "mi210": (4096, 3.2e9),
    "b60": (192, 19e9),
}


@pytest.mark.parametrize("name", LINKS)
def test_link_bandwidth_is_one_direction(name):
    assert load_device(name).link.bytes_per_s == pytest.approx(LINKS[name], rel=0.01)


@pytest.mark.parametrize("name", MEMORY)
def test_memory_bandwidth_is_width_times_pin_rate(name):
    width, rate = MEMORY[name]
    assert load_device(name).hbm_bytes_per_s == pytest.approx(width * rate / 8, rel=0.01)


def half_precision(name):
    device = load_device(name)
    return device, device.first_peak(("bf16", "fp16"), "the test")


@pytest.mark.parametrize("name", TENSOR_RATE)
def test_half_precision_peak_is_cores_times_rate_times_clock(name):
    device, peak = half_precision(name)
    rate, clock_hz = TENSOR_RATE[name]
    assert peak == pytest.approx(device.n_cores * rate * clock_hz, rel=0.02)


@pytest.mark.parametrize("name", RIDGE)
def test_ridge_point(name):
    device, peak = half_precision(name)
    assert peak / device.hbm_bytes_per_s == pytest.approx(RIDGE[name], rel=0.01)


@pytest.mark.parametrize("device", device_catalogue().values(), ids=lambda d: d.name)
def test_narrower_formats_double_the_dense_rate(device):
    peaks = device.peak_flops_per_s
    if "fp16" in peaks and "bf16" in peaks:
        assert peaks["fp16"] == peaks["bf16"]
    ultra = device.name in ("b300", "gb300")
    if device.name in ("gaudi3", "trainium2", "trainium3"):
        return
    for wide, narrow in (("tf32", "bf16"), ("bf16", "fp8"), *(() if ultra else [("fp8", "fp4")])):
        if wide in peaks and narrow in peaks:
            assert peaks[narrow] / peaks[wide] == pytest.approx(2.0, rel=0.025)
    if (
        "bf16" in peaks
        and "int8" in peaks
        and device.name not in ("tpu-v4", "rtx-3090", "rtx-4090", "mi210")
        and not ultra
    ):
        assert peaks["int8"] / peaks["bf16"] == pytest.approx(2.0, rel=0.025)


def test_exceptions_to_the_doubling_are_the_documented_ones():
    # Blackwell Ultra trades units for int8 against half as many more for fp4.
    for name in ("b300", "gb300"):
        assert load_device(name).peak("fp4") == 3 * load_device(name).peak("fp8")
        assert load_device(name).peak("int8") < 0.1 * load_device(name).peak("bf16")
    assert load_device("rtx-3090").peak("int8") == 4 * load_device("rtx-3090").peak("bf16")
    assert load_device("mi210").peak("int8") == load_device("mi210").peak("bf16")
    # Gaudi 3's matrix engines and Trainium's arrays have rates of their own in 8 bits.
    assert load_device("gaudi3").peak("fp8") == load_device("gaudi3").peak("bf16")
    assert load_device("trainium2").peak("fp8") / load_device("trainium2").peak("bf16") == pytest.approx(1.95, rel=0.01)
    assert load_device("trainium3").peak("fp8") / load_device("trainium3").peak("bf16") == pytest.approx(3.75, rel=0.01)
    tpu, rtx = load_device("tpu-v4"), load_device("rtx-4090")
    assert tpu.peak("int8") == tpu.peak("bf16")
    # fp16 with fp32 accumulation runs at half rate on GeForce, int8 does not.
    assert rtx.peak("int8") / rtx.peak("bf16") == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("device", device_catalogue().values(), ids=lambda d: d.name)
def test_every_number_has_a_source(device):
    fields = {f"peak.{a}" for a in device.peak_flops_per_s}
    fields |= {"memory_bytes", "hbm_bytes_per_s", "n_cores", "devices_per_node", "tdp_w"}
    fields |= {"link.bytes_per_s", "link.latency_s", "network.bytes_per_s", "network.latency_s"}
    if device.host is not None:
        fields |= {"host.bytes_per_s", "host.latency_s"}
    fields |= {f for f in ("l2_bytes", "clock_hz", "price_usd_per_hour") if getattr(device, f) is not None}
    assert fields == set(device.sources)
    assert all(len(source) > 15 for source in device.sources.values())


@pytest.mark.parametrize("device", device_catalogue().values(), ids=lambda d: d.name)
def test_magnitudes_are_those_of_an_accelerator(device):
    peak = device.first_peak(("bf16", "fp16"), "the test")
    assert 10e9 < device.memory_bytes < 320e9
    assert 200e9 < device.hbm_bytes_per_s < 10e12
    assert device.memory_bytes / device.hbm_bytes_per_s < 0.1
    assert 0.1e12 < peak / device.tdp_w < 5e12
    assert device.network.bytes_per_s <= device.link.bytes_per_s or device.link.kind == "PCIe"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h100", "h100-sxm"),
        ("A100", "a100-80gb-sxm"),
        ("a100-40", "a100-40gb-sxm"),
        ("h200_sxm", "h200"),
        ("V100", "v100-32"),
    ],
)
def test_aliases_and_spelling(alias, name):
    assert load_device(alias).name == name


def test_aliases_are_unique():
    names = [n for d in device_catalogue().values() for n in (d.name, *d.aliases)]
    assert len(names) == len(set(names))


def test_unknown_hardware_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown hardware 'h100-smx'.*h100-sxm"):
        load_device("h100-smx")


PROFILE = """
[my-gpu]
title = "Mine"
vendor = "Me"
peak = { bf16 = [1e14, "measured"] }
memory_bytes = [8e10, "label"]
hbm_bytes_per_s = [2e12, "label"]
n_cores = [100, "label"]
link = { kind = "PCIe", latency_s = [1e-6, "guess"], bytes_per_s = [3e10, "label"] }
network = { kind = "Ethernet", latency_s = [1e-5, "guess"], bytes_per_s = [1e10, "label"] }
devices_per_node = [4, "label"]
tdp_w = [300, "label"]
"""


def test_a_profile_file_loads(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE)
    device = load_device(path)
    assert (device.name, device.peak("bf16"), device.sources["peak.bf16"]) == ("my-gpu", 1e14, "measured")
    with pytest.raises(ValueError, match="my-gpu has no fp8 arithmetic"):
        device.peak("fp8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hbm_bytes_per_s = [2e12", "hbm_bytes_per_s = [-2e12", r"hbm_bytes_per_s: expected a positive finite number"),
        ("memory_bytes =", "memory_byte =", r"memory_byte is not a setting.*did you mean memory_bytes"),
        ('tdp_w = [300, "label"]', "tdp_w = 300", r'tdp_w: expected \[number, "source"\]'),
        ('n_cores = [100, "label"]', "", r"n_cores is missing"),
        ("bf16 = [1e14", "bf17 = [1e14", r"peak\.bf17 is not an arithmetic"),
        ("[my-gpu]", "[my-gpu", r"is not TOML"),
    ],
)
def test_a_bad_profile_is_refused_by_key(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_devices(path)


def test_a_device_of_ones_own_may_be_like_one_of_the_catalogue(tmp_path):
    path = tmp_path / "my-gpu.toml"
    path.write_text('[my-gpu]\nlike = "v100-16"\ntitle = "Mine"\nhbm_bytes_per_s = [1e12, "the sheet on my desk"]\n')
    mine, other = load_device(path), load_device("v100-16")
    assert (mine.name, mine.title, mine.aliases) == ("my-gpu", "Mine", ())
    assert (mine.hbm_bytes_per_s, mine.memory_bytes) == (1e12, other.memory_bytes)
    assert mine.sources == {**other.sources, "hbm_bytes_per_s": "the sheet on my desk"}


@pytest.mark.parametrize("base", ["v100-61", "my-gpu", "[]"])
def test_a_device_is_like_one_that_there_is(base, tmp_path):
    path = tmp_path / "my-gpu.toml"
    path.write_text(f'[my-gpu]\nlike = "{base}"\ntitle = "Mine"\n'.replace('"[]"', "[]"))
    with pytest.raises(
        ValueError, match=r"my-gpu\.like names .* neither a full device of this file nor one of the catalogue"
    ):
        load_device(path)


def test_a_missing_profile_is_an_error():
    with pytest.raises(ValueError, match=r"profile nowhere\.toml does not exist"):
        load_device("nowhere.toml")


def test_ring_all_reduce_by_hand():
    link = Interconnect(kind="NVLink", latency_s=1e-6, bytes_per_s=100e9)
    # Four devices: six steps of a quarter each.
    assert link.ring_all_reduce_s(4e6, 4) == pytest.approx(6 * (1e-6 + 1e6 / 100e9), rel=1e-12)
    assert link.ring_all_reduce_s(4e6, 1) == 0.0
    assert link.send_s(1e6) == pytest.approx(11e-6)


def test_a_grace_is_nearer_than_a_pcie_host_and_a_card_reaches_its_host_by_its_slot():
    grace, board = load_device("gb200"), load_device("b200")
    assert grace.host is not None
    assert board.host is not None
    assert grace.host.bytes_per_s > 3 * board.host.bytes_per_s
    assert load_device("l40s").host == load_device("l40s").link
    assert load_device("tpu-v7").host is None


@pytest.mark.parametrize("name", ["gb200", "gb300"])
def test_sixteen_devices_of_a_rack_stay_on_nvlink_and_those_of_boards_do_not(name):
    rack, board = (
        deploy(
            model="llama-3.1-405b", hardware=of, parallel={"tensor": 16}, cost=Calibrated.for_stack("vllm")
        ).cost.kernels  # type: ignore[attr-defined]
        for of in (name, "b200")
    )
    within, across = (kernels.collective_s("all_reduce", 64e6, 16) for kernels in (rack, board))
    assert within < 0.5 * across
    assert within > 64e6 * 2 * 15 / 16 / (2 * 900e9)


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_is_known_by_the_name_that_its_driver_prints(printed, name):
    assert load_device(printed).name == name
