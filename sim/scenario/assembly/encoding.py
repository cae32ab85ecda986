"""The machines that encode what comes with prompts, before the prompts are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hwmodels.hardware import load_hardware
from hwmodels.image_cost import ImageCost
from hwmodels.parallel import ParallelConfig
from sim.engine.spec.encoding import EncoderSpec, EncodeSpec
from sim.engine.tiers.links import LinkSpec
from sim.scenario.assembly.images import SeenImages, image_cost
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.encoding import EncodeSettings
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario

if TYPE_CHECKING:
    from workloads import Workload


def encode_of(
    scenario: Scenario, pools: Sequence[PoolOf], workload: Workload, images: SeenImages | None
) -> EncodeSpec | None:
    """The stage that encodes, *images* where the workload has some; None where there is none. ScenarioError for what cannot be, or
    is not modelled."""
    settings = scenario.encode
    if settings is None or settings.at == "engine":
        return None
    says = settings.encoder_tokens is not None or workload.encoder_tokens is not None
    if workload.image_offsets is not None and images is None and not says:
        return None  # none of its requests has an image
    with told_by(scenario, "encode"):
        assert settings.bandwidth_gb_per_s is not None
        machine = EncoderSpec(
            request_s=partial(_seconds, settings.request_s, settings.token_s or 0.0),
            together_s=None if settings.token_s is not None else _together(pools, settings, images),
            batch_s=settings.batch_s,
            max_batch=settings.max_batch,
            link=LinkSpec(settings.bandwidth_gb_per_s * 1e9, latency_s=settings.latency_s),
        )
        bytes_each = settings.bytes_per_token
        if bytes_each is None:
            bytes_each = _embedding_bytes(pools) if images is None else 2.0 * images.vision.out
        return EncodeSpec(
            machines=(machine,) * (settings.replicas if settings.autoscale is None else settings.autoscale.max),
            router=settings.router.made("encode.router"),
            sizes=_sizes(settings.encoder_tokens, workload, images),
            bytes_per_unit=bytes_each,
        )


def _seconds(request_s: float, token_s: float, tokens: int) -> float:
    return request_s + token_s * tokens


def _together(
    pools: Sequence[PoolOf], settings: EncodeSettings, images: SeenImages | None
) -> Callable[[Sequence[int]], float]:
    """Seconds that the model's own encoder takes for the images of requests."""
    if images is None:
        raise ValueError(
            "token_s is missing, the seconds that each token takes; without it images are priced by the model's own encoder, and "
            "this workload has none (workload.images, or a column images of the trace)"
        )
    deployment = pools[0].deployments[0]
    if settings.hardware is None:
        cost = image_cost(deployment, images.vision, tensor=settings.tensor)
    else:
        device, parallel = load_hardware(settings.hardware), ParallelConfig(tensor=settings.tensor)
        there = deployment.made_by(deployment.model, device, parallel, kv_precision=deployment.kv_precision)
        cost = image_cost(deployment, images.vision, tensor=settings.tensor, cost=there)
    return partial(_images_s, images, cost)


def _images_s(images: SeenImages, cost: ImageCost, ids: Sequence[int]) -> float:
    return cost.seconds([images.sizes[image.size] for id_ in ids for image in images.of[id_]])


def _sizes(each: int | None, workload: Workload, images: SeenImages | None) -> list[int]:
    column = workload.encoder_tokens
    if images is not None and (each is not None or column is not None):
        raise ValueError(
            "the workload has images, which say what there is to encode; leave encoder_tokens out"
            + (" (--set encode.encoder_tokens=null)" if each is not None else " of the trace")
        )
    if images is not None:
        return images.embeddings()
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
    """A note where nothing encodes what the trace has, or there is nothing to encode, and that encoders are in no costs."""
    settings, images = scenario.encode, workload.image_offsets is not None and workload.image_offsets[-1] > 0
    if settings is not None and settings.at == "engine" and not images:
        yield "No request has images (workload.images, or a column images of the trace): encode does nothing but hold its weights."
    elif settings is not None and workload.image_offsets is not None and not images and workload.encoder_tokens is None:
        yield "No request has images: the machines that encode are left out."
    elif settings is not None and settings.at == "pool":
        yield "Machines that encode count in times, and not in device-hours, money or energy."
    elif settings is None and (images or workload.encoder_tokens is not None):
        yield "The trace says what there is to encode before prompts, and there is no encode: every prompt is computed at once."
