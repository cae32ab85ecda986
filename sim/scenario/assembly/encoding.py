"""The machines that encode what comes with prompts, before the prompts are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hwmodels.hardware import load_hardware
from hwmodels.parallel import ParallelConfig
from sim.engine.spec.encoding import EncoderSpec, EncodeSpec
from sim.engine.tiers.links import LinkSpec
from sim.scenario.assembly.media import SeenMedia, by_model, encoder_costs, media_in
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.encoding import EncodeSettings
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from sim.text import shown

if TYPE_CHECKING:
    from hwmodels.model import ModelSpec
    from workloads import Workload
    from workloads.columns import IntArray


def encode_of(
    scenario: Scenario, pools: Sequence[PoolOf], workload: Workload, media: SeenMedia | None
) -> EncodeSpec | None:
    """The stage that encodes, *media* where the workload has some; None where there is none. ScenarioError for what cannot be, or
    is not modelled."""
    settings = scenario.encode
    if settings is None or settings.at == "engine":
        return None
    says = settings.encoder_tokens is not None or workload.encoder_tokens is not None
    named = workload.image_offsets is not None or workload.audio_offsets is not None
    if named and media is None and not says:
        return None  # none of its requests has an image or a clip
    with told_by(scenario, "encode"):
        assert settings.bandwidth_gb_per_s is not None
        machine = EncoderSpec(
            request_s=partial(_seconds, settings.request_s, settings.token_s or 0.0),
            together_s=None if settings.token_s is not None else _together(pools, settings, media),
            batch_s=settings.batch_s,
            max_batch=settings.max_batch,
            cache=_cache(settings, media),
            link=LinkSpec(settings.bandwidth_gb_per_s * 1e9, latency_s=settings.latency_s),
        )
        bytes_each = settings.bytes_per_token
        if bytes_each is None:
            bytes_each = _embedding_bytes(pools, media)
        return EncodeSpec(
            machines=(machine,) * (settings.replicas if settings.autoscale is None else settings.autoscale.max),
            router=settings.router.made("encode.router"),
            sizes=_sizes(settings.encoder_tokens, workload, media),
            images=None if media is None else media.of,
            bytes_per_unit=bytes_each,
        )


def _seconds(request_s: float, token_s: float, tokens: int) -> float:
    return request_s + token_s * tokens


def _together(
    pools: Sequence[PoolOf], settings: EncodeSettings, media: SeenMedia | None
) -> Callable[[tuple[int, ...]], float]:
    """Seconds that the model's own encoders take for images and clips of these sizes, by their numbers."""
    if media is None:
        raise ValueError(
            "token_s is missing, the seconds that each token takes; without it images and clips are priced by the model's own "
            "encoders, and this workload has none (workload.images, workload.audio, or a column images or audio_s of the trace)"
        )
    deployment, there = pools[0].deployments[0], None
    if settings.hardware is not None:
        device, parallel = load_hardware(settings.hardware), ParallelConfig(tensor=settings.tensor)
        there = deployment.made_by(deployment.model, device, parallel, kv_precision=deployment.kv_precision)
    costs = encoder_costs(deployment, media.towers, tensor=settings.tensor, cost=there)
    return partial(by_model, media.sizes, costs)


def _cache(settings: EncodeSettings, media: SeenMedia | None) -> int:
    """Embeddings that a machine keeps; ValueError where it is not known of which images they are."""
    if settings.cache_tokens and media is None:
        raise ValueError(
            "cache_tokens keeps images and clips by what they hold, and there are none (workload.images, workload.audio, or a "
            "column images or audio_s of the trace); leave it out"
        )
    return settings.cache_tokens or 0


def _sizes(each: int | None, workload: Workload, media: SeenMedia | None) -> list[int]:
    column = workload.encoder_tokens
    if media is not None and (each is not None or column is not None):
        raise ValueError(
            "the workload has images or clips, which say what there is to encode; leave encoder_tokens out"
            + (" (--set encode.encoder_tokens=null)" if each is not None else " of the trace")
        )
    if media is not None:
        return media.embeddings()
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


def _embedding_bytes(pools: Sequence[PoolOf], media: SeenMedia | None) -> float:
    """Bytes of an embedding; ValueError where they differ."""
    if media is None:
        sizes, what = {deployment.model.hidden for pool in pools for deployment in pool.deployments}, "the models"
    else:
        sizes, what = {tower.out for tower in media.towers.values()}, "images and speech"
    if len(sizes) > 1:
        raise ValueError(
            f"embeddings of {what} have different widths here ({shown(sorted(sizes))}); give bytes_per_token"
        )
    return 2.0 * sizes.pop()


def about_encoding(scenario: Scenario, models: Iterable[ModelSpec], workload: Workload) -> Iterator[str]:
    """Notes where nothing encodes what the trace has, there is nothing to encode, or clips are cut, and that encoders are in no
    costs."""
    settings, some = scenario.encode, bool(media_in(workload))
    named = workload.image_offsets is not None or workload.audio_offsets is not None
    if settings is not None and settings.at == "engine" and not some:
        yield (
            "No request has images or speech (workload.images, workload.audio, or a column images or audio_s of the trace): encode "
            "does nothing but hold its weights."
        )
    elif settings is not None and named and not some and workload.encoder_tokens is None:
        yield "No request has images or speech: the machines that encode are left out."
    elif settings is not None and settings.at == "pool":
        yield "Machines that encode count in times, and not in device-hours, money or energy."
    elif settings is None and (some or workload.encoder_tokens is not None):
        yield "The trace says what there is to encode before prompts, and there is no encode: every prompt is computed at once."
    if settings is not None and workload.audio_ms is not None:
        for model in models:
            yield from _cut(model, workload.audio_ms)


def _cut(model: ModelSpec, audio_ms: IntArray) -> Iterator[str]:
    """A note where clips are longer than what *model* takes of one."""
    longest_ms = None if model.speech is None else model.speech.longest_ms
    if longest_ms is not None and (longer := int((audio_ms > longest_ms).sum())):
        yield (
            f"{longer:,} of {len(audio_ms):,} clips of speech are longer than the {longest_ms / 1000:g} s that {model.name} hears "
            "of one, and are cut to that; give shorter clips, or several in place of one."
        )
