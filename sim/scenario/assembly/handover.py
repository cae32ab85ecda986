"""Prefill and decode in pools of their own: links, whose way of handing over, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import isclose
from typing import TYPE_CHECKING, Any

from hwmodels.cache import held_bytes, keeps_every_token
from hwmodels.stacks import stacks
from hwmodels.stacks.description import Handover
from hwmodels.transfers import transfer_terms
from policies.routers import Dynamo
from sim.engine.spec.roles import HandoverSpec, KvPath
from sim.engine.tiers.links import LinkSpec
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.assembly.prefix_cache import check_router
from sim.scenario.assembly.replica import Hosted
from sim.scenario.assembly.tiers import fabric_of
from sim.scenario.explain import told_by
from sim.scenario.keys import HandoverSettings, KvLink
from sim.scenario.settings import Scenario
from sim.text import unknown

if TYPE_CHECKING:
    from hwmodels.deployment import Deployment
    from workloads import Workload


WAYS: Mapping[str, Handover] = {
    **{name: stack.handover for name, stack in stacks().items() if stack.handover is not None},
    "splitwise": Handover(
        first_token="prefill",
        room="before_prefill",
        headroom_tokens=0,
        repack=False,
        source="Patel et al., Splitwise, ISCA 2024: the prompt machine gives the first token, and the token machine's memory is "
        "known to have room before layers are sent behind the computation",
    ),
    "plain": Handover(
        first_token="arrival",
        room="after_prefill",
        headroom_tokens=0,
        repack=True,
        source="no serving stack: an assumption",
    ),
}


KEEP_DRAFT_KV = ("draft_model", "eagle", "mtp")
"""Methods of decoding whose draft has a KV cache."""


def handover_of(
    scenario: Scenario, pools: Sequence[PoolOf], built: Sequence[Sequence[Hosted]], workload: Workload
) -> HandoverSpec | None:
    """The way in which the pools hand requests over; None where all of them do both. ScenarioError for what cannot be."""
    if all(pool.role == "both" for pool in pools):
        return None
    settings = _settings(scenario)
    way, policy = way_of(scenario, pools), settings.router or scenario.router
    with told_by(scenario, "handover.router"):
        router = policy.made("handover.router")
    if isinstance(router, Dynamo):
        # Of machines that decode its router counts no prefixes and no prompts to compute (1.6.1, `build_decode_router_override`).
        router = replace(router, overlap_weight=0.0)
    check_router(scenario, router, workload, (hosted.spec.block_tokens for pool in built for hosted in pool))
    _can_hold(scenario, pools, built, workload)
    with told_by(scenario, "handover"):
        return HandoverSpec(
            roles=tuple(pool.role for pool in pools for _ in range(pool.replicas)),
            pools=tuple(number for number, pool in enumerate(pools) for _ in range(pool.replicas)),
            paths=_paths(scenario, pools, way, workload),
            router=router,
            first_token=way.first_token,
            room=way.room,
            local_tokens=settings.local_prefill_tokens,
            headroom_tokens=way.headroom_tokens,
        )


def _settings(scenario: Scenario) -> HandoverSettings:
    return scenario.handover or HandoverSettings()


def way_of(scenario: Scenario, pools: Sequence[PoolOf]) -> Handover:
    """The way that is asked for, or that of the decode pools' serving stack, with what the scenario says otherwise."""
    settings = _settings(scenario)
    over = {
        key: value
        for key in ("first_token", "room", "headroom_tokens", "repack")
        if (value := getattr(settings, key)) is not None
    }
    return replace(WAYS[whose(scenario, pools)], **over)


def whose(scenario: Scenario, pools: Sequence[PoolOf]) -> str:
    """The name of the way in `WAYS`."""
    like = _settings(scenario).like
    if like is not None and like != "dynamo":
        return like
    # Dynamo leaves it to the engine behind it.
    stacks = list(
        dict.fromkeys(each.serving_stack for pool in pools if pool.role == "decode" for each in pool.scenarios)
    )
    if len(stacks) > 1:
        raise ScenarioError(
            f"{scenario.source}: handover.like: the decode pools have the serving stacks {' and '.join(stacks)}, which hand over "
            "differently; say whose way it is"
        )
    return stacks[0] if stacks[0] in WAYS else "plain"


def _of_role(pools: Sequence[PoolOf], role: str) -> list[tuple[int, PoolOf]]:
    return [(number, pool) for number, pool in enumerate(pools) if pool.role == role]


def _deployments(pool: PoolOf) -> dict[str, Deployment]:
    return dict(zip(pool.serves, pool.deployments, strict=True))


def check_models(scenario: Scenario, pools: Sequence[PoolOf]) -> None:
    """ScenarioError unless each model that is prefilled is decoded somewhere and the other way round, and both keep the same KV."""
    sides = {role: [pool for _, pool in _of_role(pools, role)] for role in ("prefill", "decode")}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        there = {name for pool in sides[other] for name in pool.serves}
        for pool in sides[role]:
            missing = next((name for name in pool.serves if name not in there), None)
            if missing is not None:
                raise ScenarioError(
                    f"{scenario.source}: pools.{pool.name}: {missing} is to {role} here, and the pools that {other} host "
                    f"{', '.join(sorted(there))}; KV is of use to the same model alone"
                )
    for sender in sides["prefill"]:
        for receiver in sides["decode"]:
            for name in set(sender.serves) & set(receiver.serves):
                one, two = _deployments(sender)[name], _deployments(receiver)[name]
                if one.model != two.model:
                    raise ScenarioError(
                        f"{scenario.source}: pools.{receiver.name}: {name} is another model here than at pools.{sender.name}; KV "
                        "is of use to the same model alone"
                    )
                if one.kv_precision != two.kv_precision:
                    raise ScenarioError(
                        f"{scenario.source}: pools.{receiver.name}.kv_precision is {two.kv_precision} and pools.{sender.name}'s is "
                        f"{one.kv_precision}, and KV is sent as it is kept; give both the same kv_precision"
                    )


def _can_hold(
    scenario: Scenario, pools: Sequence[PoolOf], built: Sequence[Sequence[Hosted]], workload: Workload
) -> None:
    """ScenarioError where no machine of a kind could hold even the shortest prompt; longer ones are rejected one by one."""
    if not len(workload):
        return
    shortest = int(workload.prompt_tokens.min())
    for role in ("prefill", "decode"):
        rooms = [
            (hosted.spec.kv_blocks * hosted.spec.block_tokens, pool.name)
            for (pool, each) in zip(pools, built, strict=True)
            if pool.role == role
            for hosted in each
        ]
        most, name = max(rooms)
        if most < shortest:
            raise ScenarioError(
                f"{scenario.source}: pools.{name}: the KV cache of a machine holds {most:,} tokens and the shortest prompt has "
                f"{shortest:,}, so that no request could ever be served; give the pool more memory, or a larger parallel.tensor"
            )


def _paths(
    scenario: Scenario, pools: Sequence[PoolOf], way: Handover, workload: Workload
) -> dict[tuple[int, int], KvPath]:
    names = {pool.name: number for number, pool in enumerate(pools)}
    found: dict[tuple[int, int], KvPath] = {}
    said: dict[tuple[int, int], str] = {}
    for name, link in (scenario.links or {}).items():
        ends = tuple(
            _end(scenario, pools, f"links.{name}.{key}", getattr(link, key), role)
            for key, role in (("sender", "prefill"), ("receiver", "decode"))
        )
        between = names[ends[0]], names[ends[1]]
        if between in found:
            raise ScenarioError(
                f"{scenario.source}: links.{name}: links.{said[between]} joins {ends[0]} and {ends[1]} already; leave out one, or "
                "give concurrent_transfers"
            )
        said[between] = name
        found[between] = _path(scenario, name, link, pools[between[0]], pools[between[1]], way, workload)
    for i, sender in _of_role(pools, "prefill"):
        for j, receiver in _of_role(pools, "decode"):
            if (i, j) not in found and set(sender.serves) & set(receiver.serves):
                raise ScenarioError(
                    f"{scenario.source}: links: none joins {sender.name} and {receiver.name}, which host the same model; give one, "
                    f"such as links: {{net: {{sender: {sender.name}, receiver: {receiver.name}}}}}"
                )
    return found


def _end(scenario: Scenario, pools: Sequence[PoolOf], key: str, name: str | None, role: str) -> str:
    able = [pool.name for _, pool in _of_role(pools, role)]
    if name is None:
        if len(able) > 1:
            raise ScenarioError(f"{scenario.source}: {key}: several pools {role} ({', '.join(able)}); say which")
        return able[0]
    if name in able:
        return name
    other = next((pool for pool in pools if pool.name == name), None)
    if other is not None:
        raise ScenarioError(
            f"{scenario.source}: {key}: {name} has role {other.role}, and a link goes from prefill to decode"
        )
    raise ScenarioError(unknown(f"{scenario.source}: {key}: no pool is called {name}", name, able))


def _path(
    scenario: Scenario,
    name: str,
    link: KvLink,
    sender: PoolOf,
    receiver: PoolOf,
    way: Handover,
    workload: Workload,
) -> KvPath:
    shared = next(each for each in sender.serves if each in receiver.serves)
    one, two = _deployments(sender)[shared], _deployments(receiver)[shared]
    per_token, per_sequence = kv_bytes(two, workload)
    bandwidth, latency_s = bandwidth_of(link, one, two)
    if link.sent == "layers" and way.room == "after_prefill":
        raise ScenarioError(
            f"{scenario.source}: links.{name}.sent layers: KV that goes while the prompt is computed needs room before that; give "
            "handover.room: before_prefill, or sent: whole"
        )
    repacks = way.repack and not _same_layout(one, two)
    return KvPath(
        link=LinkSpec(
            bandwidth,
            latency_s=latency_s,
            concurrent_transfers=link.concurrent_transfers,
            slowdowns=link.degraded,
            limits=fabric_of(link.fabric),
        ),
        shared=link.shared,
        bytes_per_token=per_token,
        bytes_per_sequence=per_sequence,
        layers=one.model.n_layers if link.sent == "layers" else 1,
        repack_s_per_byte=repack_s_per_byte(two) if repacks else 0.0,
    )


def kv_bytes(receiver: Deployment, workload: Workload) -> tuple[float, float]:
    """Bytes that cross for a token and for a sequence: all that the receiver's ranks keep, each getting its own.

    Heads that are replicated, there being fewer than ranks, are sent to each rank that keeps them, as the measured transfers were
    (docs/pools.md); so are latents, which every rank keeps. Of windows and states, which do not grow with a prompt, what a mean
    prompt leaves is sent with each.
    """
    ranks = receiver.parallel.tensor
    if keeps_every_token(receiver.model):
        return sum(receiver.stage_kv_bytes_per_token) * ranks, 0.0
    mean = max(int(workload.prompt_tokens.mean()), 1)
    caches = receiver.stage_caches()
    far = 1 << 24
    per_token = sum(held_bytes(cache, 2 * far) - held_bytes(cache, far) for cache in caches) / far
    constant = sum(held_bytes(cache, mean) for cache in caches) - per_token * mean
    return per_token * ranks, max(constant, 0.0) * ranks


def bandwidth_of(link: KvLink, sender: Deployment, receiver: Deployment) -> tuple[float, float]:
    """Bytes a second of one transfer, and its fixed cost in seconds."""
    given = None if link.bandwidth_gb_per_s is None else link.bandwidth_gb_per_s * 1e9
    if given is None:
        ends = (sender, receiver)
        gpus = min(each.parallel.tensor * each.parallel.pipeline for each in ends)
        given = gpus * min(each.device.network.bytes_per_s for each in ends)
    share, fixed_s = (1.0, 0.0) if link.connector is None else transfer_terms(link.connector)
    return given * share, fixed_s if link.latency_s is None else link.latency_s


def repack_s_per_byte(receiver: Deployment) -> float:
    """Seconds for each byte of arrived KV, which all ranks read and write once at the datasheet's bandwidth: an assumption."""
    return 2.0 / (receiver.device.hbm_bytes_per_s * receiver.parallel.tensor * receiver.parallel.pipeline)


def _same_layout(one: Deployment, two: Deployment) -> bool:
    """Whether each rank of one side has what a rank of the other side has."""
    return one.parallel.pipeline == two.parallel.pipeline and all(
        isclose(a, b) for a, b in zip(one.stage_kv_bytes_per_token, two.stage_kv_bytes_per_token, strict=False)
    )


def facts_of(scenario: Scenario, pools: Sequence[PoolOf], spec: HandoverSpec | None) -> dict[str, Any]:
    """The manifest's facts about the hand-over; empty where there is none."""
    if spec is None:
        return {}
    way = way_of(scenario, pools)
    links = []
    for (i, j), path in spec.paths.items():
        links.append(
            {
                "sender": pools[i].name,
                "receiver": pools[j].name,
                "bandwidth_bytes_per_s": path.link.bandwidth_bytes_per_s,
                "latency_s": path.link.latency_s,
                "concurrent_transfers": path.link.concurrent_transfers,
                **({"degraded": [asdict(each) for each in path.link.slowdowns]} if path.link.slowdowns else {}),
                "shared": path.shared,
                **({"limits": [asdict(each) for each in path.link.limits]} if path.link.limits else {}),
                "layers": path.layers,
                "bytes_per_token": path.bytes_per_token,
                "bytes_per_sequence": path.bytes_per_sequence,
                "repack_s_per_byte": path.repack_s_per_byte,
            }
        )
    return {
        "handover": {
            "like": whose(scenario, pools),
            "source": way.source,
            "first_token": spec.first_token,
            "room": spec.room,
            "local_prefill_tokens": spec.local_tokens,
            "headroom_tokens": spec.headroom_tokens,
            "router": named.shown_policy(spec.router),
            "links": links,
        }
    }


def notes_of_handover(scenario: Scenario, pools: Sequence[PoolOf], spec: HandoverSpec | None) -> list[str]:
    """Notes about what is assumed of links, what unequal layouts cost, and what is not sent."""
    if spec is None:
        return []
    notes = [
        f"{pool.name} drafts with layers that keep KV of their own: that of prompts is not among what is sent, nor computed there."
        for pool in pools
        if pool.role == "decode" and any(each.decoding.method in KEEP_DRAFT_KV for each in pool.scenarios)
    ]
    by_pools = {
        (_end(scenario, pools, "", link.sender, "prefill"), _end(scenario, pools, "", link.receiver, "decode")): (
            name,
            link,
        )
        for name, link in (scenario.links or {}).items()
    }
    for (i, j), path in spec.paths.items():
        sender, receiver = pools[i], pools[j]
        name, link = by_pools[sender.name, receiver.name]
        if link.bandwidth_gb_per_s is None:
            notes.append(
                f"links.{name} has no bandwidth of its own: {path.link.bandwidth_bytes_per_s / 1e9:.0f} GB/s are taken, from the "
                "datasheets' networks"
                + ("." if link.connector is None else f" and what {link.connector} reached of them.")
            )
        if link.latency_s is None and link.connector is None:
            notes.append(
                f"links.{name} has no latency_s and no connector: transfers take their bytes alone, and measured ones 0.4 to 1.9 "
                "ms more."
            )
        one, two = sender.deployments[0], receiver.deployments[0]
        if not _same_layout(one, two):
            ours, theirs = (sum(each.stage_kv_bytes_per_token) * each.parallel.tensor for each in (one, two))
            more = "" if isclose(ours, theirs) else f", and {theirs / ours:.3g} of the sender's bytes cross"
            cost = (
                f"laying it out anew takes {path.repack_s_per_byte * path.bytes_per_token * 1e9:.3g} us a thousand tokens"
                if path.repack_s_per_byte
                else "each rank reads its part in place, at no further cost"
            )
            notes.append(
                f"{sender.name} divides KV over {_split(one)} and {receiver.name} over {_split(two)} GPUs: {cost}{more}."
            )
    return notes


def _split(deployment: Deployment) -> str:
    parallel = deployment.parallel
    return f"{parallel.tensor} x {parallel.pipeline}" if parallel.pipeline > 1 else str(parallel.tensor)
