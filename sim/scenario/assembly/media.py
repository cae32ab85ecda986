"""Images and speech as a model's encoders see them: their tokens, their places in prompts, and what encoding takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hwmodels.deployment import Deployment
from hwmodels.encoder_cost import EncoderCost
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import ModelSpec
from hwmodels.model.tower import Encoded, Tower
from hwmodels.roofline import Roofline
from policies.view import encodes
from sim.engine.spec.images import Image, ImagesSpec
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.memory import block_tokens_of
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.assembly.prefix_cache import caches
from sim.scenario.encoding import EncodeSettings
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from workloads import Drawn, Workload
from workloads.columns import IntArray
from workloads.media import Medium
from workloads.prompt_parts import Part, named_by_content

_KEPT_BYTES = 100 << 20
"""Bytes of embeddings that SGLang keeps (0.5.23: SGLANG_VLM_CACHE_SIZE_MB)."""
_SPEECH_FROM = 1 << 42
"""Numbers of the contents of clips, beside those of images, which are smaller."""


@dataclass(frozen=True, kw_only=True)
class SeenMedia:
    """The images and the clips of speech of all requests."""

    towers: Mapping[Medium, Tower]
    """The model's encoders of what there is."""
    sizes: tuple[tuple[Medium, Encoded], ...]
    """The sizes that there are."""
    of: tuple[tuple[Image, ...], ...]
    """Images and clips of each request, in their order in the prompt: those of a trace at the beginning, images ahead of clips."""

    def embeddings(self) -> list[int]:
        """One entry for each request."""
        return [sum(each.embeddings for each in items) for items in self.of]


def with_media(scenario: Scenario, pools: Sequence[PoolOf], workload: Workload) -> tuple[Workload, SeenMedia | None]:
    """The workload with the images and clips that its settings ask for and their tokens, and these; None where it has none.

    ScenarioError where there is nothing to encode them, or no model that reads them.
    """
    drawn = list(_drawn(scenario))
    with told_by(scenario, "workload"):
        if drawn and (beside := set(media_in(workload)) - {each.medium for _, each in drawn}):
            raise ValueError(
                f"the trace has {'images' if 'image' in beside else 'speech'} in its prompts, and what is drawn comes on top of "
                "them; have all drawn, or nothing"
            )
        for _, each in drawn:
            workload = each.on(workload, scenario.seed)
    if not media_in(workload):
        return workload, None
    if scenario.encode is None:
        if not drawn:
            return workload, None
        key, _ = drawn[0]
        raise ScenarioError(
            f"{scenario.source}: workload.{key}: nothing encodes the {key}; give encode, such as encode: {{at: engine}}"
        )
    with told_by(scenario, "encode"):
        asked: dict[Medium, Any] = {"image": scenario.workload.images, "audio": scenario.workload.audio}
        behind: dict[Medium, int] = {medium: each.after_tokens for medium, each in asked.items() if each is not None}
        seen = _seen(_the_model(pools), workload, behind)
        workload = _with_tokens(workload, seen, more=bool(drawn))
    scenarios = [each for pool in pools for each in pool.scenarios]
    with told_by(scenario):
        if any(map(caches, scenarios)):
            workload = _named(workload, seen, scenarios, drawn=bool(drawn))
    return workload, seen


def media_in(workload: Workload) -> list[Medium]:
    """The media that some request has."""
    found: dict[Medium, IntArray | None] = {"image": workload.image_offsets, "audio": workload.audio_offsets}
    return [medium for medium, offsets in found.items() if offsets is not None and offsets[-1]]


def _drawn(scenario: Scenario) -> Iterator[tuple[str, Drawn]]:
    """The key of each setting that has something drawn, and the draws."""
    asked: Mapping[str, tuple[Medium, Any, Mapping[str, str]]] = {
        "images": ("image", scenario.workload.images, {"width": "width", "height": "height"}),
        "audio": ("audio", scenario.workload.audio, {"ms": "milliseconds"}),
    }
    for key, (medium, given, sizes) in asked.items():
        if given is not None:
            made = {name: getattr(given, field).made(f"workload.{key}.{field}") for name, field in sizes.items()}
            per_request = given.per_request.made(f"workload.{key}.per_request")
            yield (
                key,
                Drawn(medium=medium, per_request=per_request, size=made, distinct=given.distinct, zipf=given.zipf),
            )


def _the_model(pools: Sequence[PoolOf]) -> ModelSpec:
    """The only model that is served; ValueError for several."""
    models = {deployment.model.name: deployment.model for pool in pools for deployment in pool.deployments}
    if len(models) > 1:
        raise ValueError(
            f"images and speech take other tokens in each model, and {len(models)} are served ({', '.join(models)}); serve one, or "
            "leave them out"
        )
    (model,) = models.values()
    return model


def _encoder(model: ModelSpec, medium: Medium) -> tuple[Tower, Callable[..., Encoded]]:
    """The encoder of *medium* that *model* has, and what an item of a size becomes in it; ValueError where it has none."""
    if medium == "image" and model.vision is not None:
        return model.vision, functools.cache(model.vision.image)
    if medium == "audio" and model.speech is not None:
        return model.speech, functools.cache(model.speech.clip)
    raise ValueError(f"{model.name} has no encoder of {_NO_ENCODER[medium]} out")


_NO_ENCODER: Mapping[Medium, str] = {
    "image": "images that is modelled; choose a model whose config.json has a vision_config of Qwen2.5-VL, Qwen3-VL, Qwen-Omni, "
    "Gemma 3, Llama 4, InternVL or Pixtral, such as qwen3-vl-8b, or leave the images",
    "audio": "speech that is modelled; choose a model whose config.json has an audio_config of Qwen2-Audio, Qwen2.5-Omni, "
    "Qwen3-Omni or Voxtral, such as qwen2-audio-7b, or leave the clips",
}


def _seen(model: ModelSpec, workload: Workload, behind: Mapping[Medium, int]) -> SeenMedia:
    """*behind*: by medium, the tokens of text ahead of what is drawn."""
    towers: dict[Medium, Tower] = {}
    encoded: dict[Medium, Callable[..., Encoded]] = {}
    for medium in media_in(workload):
        towers[medium], encoded[medium] = _encoder(model, medium)
    numbers: dict[tuple[Medium, Encoded], int] = {}
    of: list[tuple[Image, ...]] = []
    places = sorted(encoded, key=lambda medium: behind.get(medium, 0))
    for row, text in enumerate(workload.prompt_tokens.tolist()):
        at, mine = 0, list[Image]()
        for medium in places:
            text_ahead = min(behind.get(medium, 0), text)
            for *size, content in workload.media_of(medium, row):
                each = encoded[medium](*size)
                number = numbers.setdefault((medium, each), len(numbers))
                content += _SPEECH_FROM if medium == "audio" else 0
                first = text_ahead + at
                mine.append(
                    Image(
                        content=content, first=first, tokens=each.prompt_tokens, embeddings=each.embeddings, size=number
                    )
                )
                at += each.prompt_tokens
        of.append(tuple(mine))
    return SeenMedia(towers=towers, sizes=tuple(numbers), of=tuple(of))


def _with_tokens(workload: Workload, seen: SeenMedia, *, more: bool) -> Workload:
    """The workload whose prompts hold their images and clips. *more*: their tokens come on top of the prompts'."""
    tokens = np.array([sum(each.tokens for each in items) for items in seen.of], dtype=np.int64)
    if not more:
        short = np.flatnonzero(tokens > workload.prompt_tokens)
        if len(short):
            row = int(short[0])
            raise ValueError(
                f"{workload.called(row)} has a prompt of {workload.prompt_tokens[row]} tokens, and its images and clips alone take "
                f"{tokens[row]} in this model; the prompt_tokens of a trace include theirs"
            )
        return workload
    if workload.session is not None and workload.prefix_blocks is not None:
        raise ValueError(
            "workload.images and workload.audio are drawn for each request by itself, and the prompts of a conversation hold those "
            "of its earlier turns; give a trace with a column images or audio_s, whose blocks name them too"
        )
    return replace(workload, prompt_tokens=workload.prompt_tokens + tokens)


def _named(workload: Workload, seen: SeenMedia, scenarios: Sequence[Scenario], *, drawn: bool) -> Workload:
    """The workload whose blocks are named by their images and clips too, so that equal ones behind equal text are found again. A
    trace's own blocks name them already, and without any there is nothing to be found where all contents differ."""
    contents = [each.content for items in seen.of for each in items]
    if workload.prefix_blocks is None:
        if len(contents) == len(set(contents)):
            return workload
    elif not drawn:
        return workload
    parts = [[Part(each.content, each.first, each.tokens) for each in items] for items in seen.of]
    return named_by_content(workload, parts, math.gcd(*map(block_tokens_of, scenarios)))


def encoder_costs(
    deployment: Deployment, towers: Mapping[Medium, Tower], *, tensor: int, cost: object = None
) -> dict[Medium, EncoderCost]:
    """The times of *towers* on the device of *deployment*, or of *cost*; ValueError where nothing prices them."""
    priced = deployment.cost if cost is None else cost
    if not isinstance(priced, LayerwiseCost):
        raise ValueError(
            "the times of the model's steps come from a file, which says nothing of its encoder; give encode.token_s"
        )
    launched = deployment.made_by is not Roofline
    return {
        medium: EncoderCost(tower, priced.kernels, tensor=tensor, launched=launched) for medium, tower in towers.items()
    }


def seconds_of(
    deployment: Deployment, seen: SeenMedia, settings: EncodeSettings, *, tensor: int
) -> Callable[[tuple[int, ...]], float]:
    """Seconds of one pass over images and clips of these sizes, by their numbers."""
    token_s = settings.token_s
    if token_s is not None:
        return functools.partial(_by_tokens, seen.sizes, token_s)
    return functools.partial(by_model, seen.sizes, encoder_costs(deployment, seen.towers, tensor=tensor))


def _by_tokens(sizes: Sequence[tuple[Medium, Encoded]], token_s: float, numbers: tuple[int, ...]) -> float:
    return token_s * sum(sizes[number][1].embeddings for number in numbers)


def by_model(
    sizes: Sequence[tuple[Medium, Encoded]], costs: Mapping[Medium, EncoderCost], numbers: tuple[int, ...]
) -> float:
    """Seconds of a pass over all images, and of one over all clips."""
    each = [sizes[number] for number in numbers]
    return sum(cost.seconds([size for medium, size in each if medium == of]) for of, cost in costs.items())


def images_in_steps(
    settings: EncodeSettings | None, deployment: Deployment, scheduler: object, seen: SeenMedia | None
) -> ImagesSpec | None:
    """The images and clips that a machine encodes in its steps; None where it encodes none. ValueError for what cannot be."""
    if seen is None or settings is None or settings.at != "engine":
        return None
    largest = max(size.embeddings for _, size in seen.sizes)
    if encodes(scheduler) == "as needed":
        width = max(tower.out for tower in seen.towers.values())
        budget, cache = settings.budget_tokens, settings.cache_tokens or _KEPT_BYTES // (2 * width)
    else:
        tokens = named.limit_of(scheduler, named.ITERATION_TOKENS) or largest
        budget = max(settings.budget_tokens or tokens, largest)
        cache = max(settings.cache_tokens or budget, largest)
    return ImagesSpec(
        of=seen.of,
        budget=budget,
        cache=cache,
        seconds=seconds_of(deployment, seen, settings, tensor=deployment.parallel.tensor),
    )
