"""Images of a workload as a model's encoder sees them: their tokens, their places in prompts, and what encoding takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hwmodels.deployment import Deployment
from hwmodels.image_cost import ImageCost
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import ModelSpec
from hwmodels.model.vision import EncodedImage, Vision
from hwmodels.roofline import Roofline
from sim.engine.spec.images import Image, ImagesSpec
from sim.errors import ScenarioError
from sim.scenario import named
from sim.scenario.assembly.pools import PoolOf
from sim.scenario.encoding import EncodeSettings
from sim.scenario.explain import told_by
from sim.scenario.settings import Scenario
from workloads import DrawnImages, Workload


@dataclass(frozen=True, kw_only=True)
class SeenImages:
    """The images of all requests."""

    vision: Vision
    sizes: tuple[EncodedImage, ...]
    """The sizes that there are."""
    of: tuple[tuple[Image, ...], ...]
    """The images of each request, which stand at the beginning of its prompt, one behind the other."""

    def embeddings(self) -> list[int]:
        """One entry for each request."""
        return [sum(image.embeddings for image in images) for images in self.of]


def imaged(scenario: Scenario, pools: Sequence[PoolOf], workload: Workload) -> tuple[Workload, SeenImages | None]:
    """The workload with the images that its settings ask for and their tokens, and these images; None where it has none.

    ScenarioError where there is nothing to encode them, or no model that reads them.
    """
    drawn = scenario.workload.images
    with told_by(scenario, "workload"):
        if drawn is not None:
            per_request, width, height = (
                getattr(drawn, name).made(f"workload.images.{name}") for name in ("per_request", "width", "height")
            )
            made = DrawnImages(per_request=per_request, width=width, height=height, distinct=drawn.distinct)
            workload = made.on(workload, scenario.seed)
    if workload.image_offsets is None or not workload.image_offsets[-1]:
        return workload, None
    if scenario.encode is None:
        if drawn is None:
            return workload, None
        raise ScenarioError(
            f"{scenario.source}: workload.images: nothing encodes the images; give encode, such as encode: {{at: engine}}"
        )
    with told_by(scenario, "encode"):
        model = _the_model(pools)
        assert model.vision is not None
        seen = _seen(model.vision, workload)
        return _with_tokens(workload, seen, more=drawn is not None), seen


def _the_model(pools: Sequence[PoolOf]) -> ModelSpec:
    """The only model that is served; ValueError for several, and for one that reads no images."""
    models = {deployment.model.name: deployment.model for pool in pools for deployment in pool.deployments}
    if len(models) > 1:
        raise ValueError(
            f"images take other tokens in each model, and {len(models)} are served ({', '.join(models)}); serve one, or leave the "
            "images out"
        )
    (model,) = models.values()
    if model.vision is None:
        raise ValueError(
            f"{model.name} has no encoder of images that is modelled; choose a model whose config.json has a vision_config of "
            "Qwen2.5-VL, Qwen3-VL, Gemma 3, Llama 4, InternVL or Pixtral, such as qwen3-vl-8b, or leave the images out"
        )
    return model


def _seen(vision: Vision, workload: Workload) -> SeenImages:
    numbers: dict[EncodedImage, int] = {}
    found = functools.cache(vision.image)
    of: list[tuple[Image, ...]] = []
    for row in range(len(workload)):
        at, mine = 0, list[Image]()
        for width, height, content in workload.images_of(row):
            size = found(width, height)
            number = numbers.setdefault(size, len(numbers))
            mine.append(
                Image(content=content, first=at, tokens=size.prompt_tokens, embeddings=size.embeddings, size=number)
            )
            at += size.prompt_tokens
        of.append(tuple(mine))
    return SeenImages(vision=vision, sizes=tuple(numbers), of=tuple(of))


def _with_tokens(workload: Workload, seen: SeenImages, *, more: bool) -> Workload:
    """The workload whose prompts hold their images. *more*: their tokens come on top of the prompts'."""
    tokens = np.array([sum(image.tokens for image in images) for images in seen.of], dtype=np.int64)
    if not more:
        short = np.flatnonzero(tokens > workload.prompt_tokens)
        if len(short):
            row = int(short[0])
            raise ValueError(
                f"row {row} of the trace has a prompt of {workload.prompt_tokens[row]} tokens, and its images alone take "
                f"{tokens[row]} in this model; prompts of a trace hold the tokens of their images"
            )
        return workload
    if workload.prefix_blocks is not None:
        raise ValueError(
            "workload.images stand ahead of the text, and this workload names the blocks of its prompts, in which they would have "
            "to be; give a trace with a column images, whose blocks name them too"
        )
    return replace(workload, prompt_tokens=workload.prompt_tokens + tokens)


def image_cost(deployment: Deployment, vision: Vision, *, tensor: int, cost: object = None) -> ImageCost:
    """The times of *vision* on the device of *deployment*, or of *cost*; ValueError where nothing prices them."""
    priced = deployment.cost if cost is None else cost
    if not isinstance(priced, LayerwiseCost):
        raise ValueError(
            "the times of the model's steps come from a file, which says nothing of its encoder; give encode.token_s"
        )
    return ImageCost(vision, priced.kernels, tensor=tensor, launched=deployment.made_by is not Roofline)


def seconds_of(
    deployment: Deployment, seen: SeenImages, settings: EncodeSettings, *, tensor: int
) -> Callable[[tuple[int, ...]], float]:
    """Seconds of one pass over images of these sizes, by their numbers."""
    token_s = settings.token_s
    if token_s is not None:
        return functools.partial(_by_tokens, seen.sizes, token_s)
    return functools.partial(_by_model, seen.sizes, image_cost(deployment, seen.vision, tensor=tensor))


def _by_tokens(sizes: Sequence[EncodedImage], token_s: float, numbers: tuple[int, ...]) -> float:
    return token_s * sum(sizes[number].embeddings for number in numbers)


def _by_model(sizes: Sequence[EncodedImage], cost: ImageCost, numbers: tuple[int, ...]) -> float:
    return cost.seconds([sizes[number] for number in numbers])


def images_in_steps(
    settings: EncodeSettings | None, deployment: Deployment, scheduler: object, seen: SeenImages | None
) -> ImagesSpec | None:
    """The images that a machine encodes in its steps; None where it encodes nothing there. ValueError for what cannot be."""
    if seen is None or settings is None or settings.at != "engine":
        return None
    largest = max(size.embeddings for size in seen.sizes)
    tokens = named.limit_of(scheduler, named.ITERATION_TOKENS) or largest
    budget = max(settings.budget_tokens or tokens, largest)
    return ImagesSpec(
        of=seen.of,
        budget=budget,
        cache=max(settings.cache_tokens or budget, largest),
        seconds=seconds_of(deployment, seen, settings, tensor=deployment.parallel.tensor),
    )


def encoder_bytes(settings: EncodeSettings | None, deployment: Deployment) -> float:
    """The weights of the encoder on one device of a machine that encodes in its steps; 0 where it does not."""
    vision = deployment.model.vision
    if vision is None or settings is None or settings.at != "engine":
        return 0.0
    return vision.weight_bytes / deployment.parallel.tensor
