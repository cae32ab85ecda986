"""The `decoding:` section of a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from policies.acceptance import BetaAlpha, Rule, Tree, check_rule
from policies.decoding import Method as Drafting
from sim.scenario.chosen import Own
from sim.scenario.section import FilePath, ModelName, Section
from sim.text import shown

Method = Literal["autoregressive", Drafting]
ALSO_MTP = ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "NEXTN", "MTP")
"""Other names of mtp: those that vLLM had for each family before 0.32.0 and still takes, SGLang's and TensorRT-LLM's."""
_SAME_NUMBER = {
    "num_nextn_predict_layers": "TensorRT-LLM's num_nextn_predict_layers is",
    "max_draft_len": "TensorRT-LLM's max_draft_len is",
    "speculative_num_steps": "SGLang's speculative_num_steps is",
    "speculative_num_draft_tokens": "SGLang's speculative_num_draft_tokens less one, without a tree, is",
}
"""The names that stacks have for the tokens drafted in a round."""


def _by_one_name(method: object) -> object:
    return "mtp" if method in ALSO_MTP else method


AnyMethod = Annotated[
    Method,
    BeforeValidator(_by_one_name),
    WithJsonSchema({"type": "string", "enum": [*get_args(Method), *ALSO_MTP]}),
]
Probability = Annotated[float, Field(ge=0, le=1)]
WITHOUT_DRAFT = {"ngram": "n-gram look-up runs no model", "medusa": "Medusa's heads run inside the target's own step"}


class TwoStates(Section):
    """Acceptance in runs: a good and a bad state, by the chance of staying in each or by the autocorrelation."""

    alpha_good: Probability
    alpha_bad: Probability
    stay_good: Probability | None = None
    """Chance that the round after a good one is good."""
    stay_bad: Probability | None = None
    lag1: Annotated[float, Field(gt=-1, lt=1)] | None = None
    """Autocorrelation of accepted counts from one round to the next, in place of the two chances."""
    good_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of good rounds, with lag1; a half where it is left out."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        stays = [self.stay_good, self.stay_bad]
        if self.lag1 is None:
            if None in stays or self.good_share is not None:
                raise ValueError("two_state needs stay_good and stay_bad, or lag1 (and good_share)")
        elif stays != [None, None]:
            raise ValueError("two_state takes stay_good and stay_bad, or lag1, not both")
        return self


class Distributions(Section):
    """Next-token probabilities of target and draft: one list each, or one list per drafted position."""

    target: list[float] | list[list[float]]
    draft: list[float] | list[list[float]]


class AcceptanceSettings(Section):
    """The number of drafted tokens that a round accepts, stated by exactly one of the kinds."""

    alpha: Probability | None = None
    """Every drafted token alike, given that those before it were accepted."""
    per_position: list[float] | None = None
    """One rate for each drafted position; `kind` says which rate."""
    kind: Literal["conditional", "unconditional"] | None = None
    mean_length: float | None = None
    """Tokens per round, the target's own counted, when `at_k` are drafted."""
    at_k: Annotated[int, Field(ge=1)] | None = None
    """Drafted tokens behind mean_length; num_speculative_tokens where it is left out."""
    lengths: list[float] | None = None
    """A curve: tokens per round, the target's own counted, when 1, 2, ... are drafted. Rates by position are fitted to it."""
    beta: BetaAlpha | None = None
    two_state: TwoStates | None = None
    recorded: FilePath | None = None
    """A CSV with the columns request, round, accepted."""
    recorded_k: Annotated[int, Field(ge=1)] | None = None
    """Tokens drafted in the recording; num_speculative_tokens where it is left out."""
    distributions: Distributions | None = None
    tree: Tree | None = None
    published: Annotated[str, Field(min_length=1)] | None = None
    """Rates by the name they are known under, such as deepseek-v3 (`policies.acceptance.PUBLISHED`)."""
    policy: Own | None = None
    """A process of one's own, as package.module:Class; every other key is a setting of that class."""

    @model_validator(mode="before")
    @classmethod
    def _settings_of_the_policy(cls, data: Any) -> Any:
        given: Any = {"policy": data} if isinstance(data, str) and ":" in data else data
        if not isinstance(given, Mapping):
            return given
        own = given.get("policy")
        own = {"policy": own} if isinstance(own, str) else own
        if not isinstance(own, Mapping):
            return given
        settings = {key: value for key, value in given.items() if key != "policy" and value is not None}
        return {"policy": {**own, **settings}}

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = ("alpha", "per_position", "mean_length", "lengths", "beta", "two_state", "recorded", "distributions", "tree",
                 "published", "policy")  # fmt: skip
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(kinds)}; got {' and '.join(given) or 'none'}")
        for key, of in (("kind", "per_position"), ("at_k", "mean_length"), ("recorded_k", "recorded")):
            if getattr(self, key) is not None and given != [of]:
                raise ValueError(f"{key} belongs to {of}; got it with {given[0]}")
        if self.per_position is not None and self.kind is None:
            raise ValueError(
                "per_position needs kind: conditional (given that those before were accepted) or unconditional"
            )
        return self


class Draft(Section):
    """The cost of a draft pass: a model of its own, a share of the target's step, or a time."""

    model: ModelName | None = None
    """Catalogue name or path to a config.json; its weights and KV cache take memory."""
    tensor: Annotated[int, Field(ge=1)] | None = None
    """GPUs of the replica that share the draft model; as many as the target's where it is left out."""
    allow_vocabulary_mismatch: bool = False
    """Accept a draft model whose vocabulary size is not the target's."""
    cost_ratio: Annotated[float, Field(ge=0)] | None = None
    """A pass takes this share of the target's plain step at the same batch."""
    step_s: Annotated[float, Field(ge=0)] | None = None
    """A pass takes this time at any batch."""

    @model_validator(mode="after")
    def _one_cost(self) -> Self:
        ways = ("model", "cost_ratio", "step_s")
        given = [way for way in ways if getattr(self, way) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(ways)}; got {' and '.join(given) or 'none'}")
        if self.model is None:
            misplaced = "tensor" if self.tensor is not None else "allow_vocabulary_mismatch"
            if self.tensor is not None or self.allow_vocabulary_mismatch:
                raise ValueError(f"{misplaced} belongs to a draft model; got it with {given[0]}")
        return self


class DecodingSettings(Section):
    """One token a step, or several drafted and verified at once. Names follow vLLM."""

    method: AnyMethod = "autoregressive"
    num_speculative_tokens: int | list[list[int | None]] | Literal["adaptive"] | None = None
    """Tokens drafted per round: a number, rows [lowest batch, highest batch, k] (null: no end), or adaptive. With method mtp it may
    be left out: as many as the model has layers for it."""
    max_speculative_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most that adaptive may choose; 8 where it is left out."""
    acceptance: AcceptanceSettings | None = None
    rule: Rule | None = None
    """The rule by which distributions lead to acceptance; modified_rejection where it is left out."""
    b: Annotated[float, Field(gt=0)] | None = None
    """Upper end of the uniform number of rule lenient."""
    draft: Draft | None = None
    """The drafter; with method mtp the target's own extra layers, where it is left out."""
    overhead_s: Annotated[float, Field(ge=0)] = 0.0
    """Fixed time of every step that verifies drafted tokens, beside target and draft."""

    @model_validator(mode="before")
    @classmethod
    def _by_its_name_here(cls, data: Any) -> Any:
        for key, is_ in _SAME_NUMBER.items():
            if isinstance(data, dict) and key in data:
                raise ValueError(f"{is_} num_speculative_tokens here; write it so")
        return data

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _a_number_or_rows(cls, value: Any) -> Any:
        rows = isinstance(value, list) and all(
            isinstance(row, list) and all(x is None or (isinstance(x, int) and not isinstance(x, bool)) for x in row)
            for row in value
        )
        if (
            value is not None
            and value != "adaptive"
            and not rows
            and (not isinstance(value, int) or isinstance(value, bool))
        ):
            raise ValueError(
                f"expected a whole number, rows such as [[1, 8, 5], [9, null, 0]], or adaptive; got {shown(value)}"
            )
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.method == "autoregressive":
            fields = type(self).model_fields
            given = [name for name in fields if name != "method" and getattr(self, name) != fields[name].default]
            if given:
                raise ValueError(f"method autoregressive drafts nothing, so {given[0]} means nothing; leave it out")
            return self
        if self.acceptance is None:
            raise ValueError(f"method {self.method} needs acceptance, such as acceptance: {{alpha: 0.8}}")
        own_layers = self.method == "mtp" and self.draft is None
        if self.num_speculative_tokens is None and self.acceptance.tree is None and not own_layers:
            raise ValueError(f"method {self.method} needs num_speculative_tokens")
        if self.max_speculative_tokens is not None and self.num_speculative_tokens != "adaptive":
            raise ValueError("max_speculative_tokens is for num_speculative_tokens: adaptive")
        if self.method in WITHOUT_DRAFT and self.draft is not None:
            raise ValueError(
                f"{WITHOUT_DRAFT[self.method]}, so draft means nothing with method {self.method}; "
                "say what it costs as overhead_s"
            )
        if self.method not in WITHOUT_DRAFT and self.draft is None and not own_layers:
            beside = ""
            if self.method == "eagle":
                beside = (
                    "; SGLang's EAGLE on a model with layers of its own for it (NEXTN) is method mtp, which needs none"
                )
            raise ValueError(
                f"method {self.method} needs draft: {{model: NAME}}, {{cost_ratio: C}} or {{step_s: T}}{beside}"
            )
        check_rule(self.rule or "modified_rejection", self.b)
        if self.rule in ("naive_match", "lenient") and self.acceptance.distributions is None:
            raise ValueError(
                f"what rule {self.rule} accepts follows from the two distributions; give acceptance.distributions, "
                "or the acceptance that the rule leads to and leave rule out"
            )
        return self
