"""The machines that encode what comes with prompts, before the prompts are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sim.engine.spec.encoding import EncoderSpec, EncodeSpec
from sim.engine.tiers.links import LinkSpec
from sim.errors import ScenarioError
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario

if TYPE_CHECKING:
    from workloads import Workload


def encode_of(scenario: Scenario, pools: Sequence[PoolOf], workload: Workload) -> EncodeSpec | None:
    """The stage that encodes; None where there is none. ScenarioError for what cannot be, or is not modelled."""
    settings = scenario.encode
    if settings is None:
        return None
    for key, there in (
        ("failures", scenario.failures),
        ("autoscale", next(filter(None, (p.autoscale for p in pools)), None)),
    ):
        if there is not None:
            raise ScenarioError(
                f"{scenario.source}: encode: machines that encode are there from beginning to end, and {key} of the others beside "
                f"them is not modelled; leave out encode or {key}"
            )
    with told_by(scenario, "encode"):
        machine = EncoderSpec(
            request_s=partial(_seconds, settings.request_s, settings.token_s),
            batch_s=settings.batch_s,
            max_batch=settings.max_batch,
            link=LinkSpec(settings.bandwidth_gb_per_s * 1e9, latency_s=settings.latency_s),
        )
        return EncodeSpec(
            machines=(machine,) * settings.replicas,
            router=settings.router.made("encode.router"),
            sizes=_sizes(settings.encoder_tokens, workload),
            bytes_per_unit=_embedding_bytes(pools) if settings.bytes_per_token is None else settings.bytes_per_token,
        )


def _seconds(request_s: float, token_s: float, tokens: int) -> float:
    return request_s + token_s * tokens


def _sizes(each: int | None, workload: Workload) -> list[int]:
    column = workload.encoder_tokens
    if each is None and column is not None:
        return column.tolist()
    if each is None:
        raise ValueError(
            "the workload does not say what there is to encode; give encode.encoder_tokens, a trace with a column encoder_tokens "
            "(workload.columns and --map name one that is called otherwise), or leave encode out (--set encode=null)"
        )
    if column is not None:
        raise ValueError(
            "the trace says what there is to encode; leave encoder_tokens out (--set encode.encoder_tokens=null)"
        )
    return [each] * len(workload)


def _embedding_bytes(pools: Sequence[PoolOf]) -> float:
    sizes = {deployment.model.hidden for pool in pools for deployment in pool.deployments}
    if len(sizes) > 1:
        raise ValueError(
            "the models have different hidden sizes, and one encoder is before all of them; give bytes_per_token"
        )
    return 2.0 * sizes.pop()


def about_encoding(scenario: Scenario, workload: Workload) -> Iterator[str]:
    """A note where nothing encodes what the trace has, and that encoders are in no costs."""
    if scenario.encode is not None:
        yield "Machines that encode count in times, and not in device-hours, money or energy."
    elif workload.encoder_tokens is not None:
        yield "The trace says what there is to encode before prompts, and there is no encode: every prompt is computed at once."
