"""Transformers as the cost models see them: shapes, parameters, cache and number formats, read from config.json (`config`), and the
encoders of images and speech ahead of them (`vision`, `speech`, both a `tower`)."""

from hwmodels.model.catalogue import (
    CATALOGUE,
    catalogue_base,
    fetch_unknown,
    hub_name,
    load_model,
    model_catalogue,
    model_file,
)
from hwmodels.model.config import spec_from_config
from hwmodels.model.spec import (
    EXPAND,
    LOCAL,
    Attention,
    AttentionKind,
    CompressedAttention,
    Experts,
    LatentAttention,
    LinearAttention,
    ModelSpec,
    Rule,
)

__all__ = [
    "CATALOGUE",
    "EXPAND",
    "LOCAL",
    "Attention",
    "AttentionKind",
    "CompressedAttention",
    "Experts",
    "LatentAttention",
    "LinearAttention",
    "ModelSpec",
    "Rule",
    "catalogue_base",
    "fetch_unknown",
    "hub_name",
    "load_model",
    "model_catalogue",
    "model_file",
    "spec_from_config",
]
