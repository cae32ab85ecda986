"""Hardware in the loop: transformers with random weights really run, beside their simulation and the closed form.

Needs the torch extra (torch and transformers). Random weights make a draft's real acceptance meaningless, so the
speculative loop computes everything and takes its acceptances from the simulator's own draws.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.calibrate import machine
from hwmodels.calibrated import Calibrated
from hwmodels.cost import CostModel
from hwmodels.cpu import cpu_cost
from hwmodels.kernels.cpu import HostParams
from hwmodels.model import ModelSpec, load_model
from hwmodels.overheads import Overheads, serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.profiles import Profile, device_of, read_profile
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from sim.engine import Experiment, ReplicaSpec, run
from sim.errors import RooftraceError
from sim.theory.speculative import speedup
from sim.validation.live_models import Running, scaled_config
from workloads import Trace

MEANINGLESS = (
    "Weights are random, so which drafts a target would accept means nothing here: the loop drafts, verifies and rolls "
    "back for real, and takes each round's acceptances from draws at the given probability."
)
CPU_SCALE = 0.08
"""The share of GPT-2 XL's parameters: about GPT-2 small, which a CPU steps through in tens of milliseconds."""
MODELS = {"cpu": ("gpt2-xl", "gpt2"), "cuda": ("llama-3.1-8b", "llama-3.2-1b")}
_TINY_HIDDEN = 64
_REPEATS, _ENOUGH_S = 5, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """The models to run and where; None leaves the choice to the device."""

    profile: Path
    device: str = "auto"
    target: str | None = None
    draft: str | None = None
    scale: float | None = None
    alpha: float = 0.8
    drafted: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8)
    tokens: int = 48
    prompt: int = 64
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kind of step: seconds measured (median), simulated and of the datasheet-like roofline."""

    name: str
    case: str
    measured_s: float
    spread: float
    """Interquartile range over the median."""
    simulated_s: float
    closed_form_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.measured_s - 1.0

    @property
    def closed_form_error(self) -> float:
        return self.closed_form_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """The speculative loop at one K against autoregressive generation of as many tokens."""

    k: int
    alpha: float
    """Share of the tested drafts that was accepted in these rounds."""
    measured: float
    simulated: float
    closed_form: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1.0

    @property
    def closed_form_error(self) -> float:
        return self.closed_form / self.measured - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveResult:
    """Everything that was compared, and on what."""

    target: str
    draft: str
    device: str
    threads: int
    clock: str
    host: dict[str, float]
    steps: tuple[Step, ...]
    c_measured: float
    c_simulated: float
    speedups: tuple[SpeedUp, ...]

    @property
    def median_step_error(self) -> float:
        """Median size of the error of prefill, decode, chunk and verify steps of the target."""
        return statistics.median(abs(s.error) for s in self.steps if s.name in ("prefill", "decode", "chunk", "verify"))

    @property
    def worst_speedup_error(self) -> float:
        return max(abs(s.error) for s in self.speedups)

    @property
    def best_k(self) -> tuple[int, int]:
        """The K of the largest speed-up, measured and simulated."""
        return (
            max(self.speedups, key=lambda s: s.measured).k,
            max(self.speedups, key=lambda s: s.simulated).k,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        plain = asdict(self)
        for each, of in zip((*plain["steps"], *plain["speedups"]), (*self.steps, *self.speedups), strict=True):
            each |= {"error": of.error, "closed_form_error": of.closed_form_error}
        return plain | {
            "note": MEANINGLESS,
            "median_step_error": self.median_step_error,
            "worst_speedup_error": self.worst_speedup_error,
            "best_k": dict(zip(("measured", "simulated"), self.best_k, strict=True)),
            "c": {"measured": plain.pop("c_measured"), "simulated": plain.pop("c_simulated")},
        }


def run_live(settings: LiveSettings, *, report: Callable[[str], None] = lambda _: None) -> LiveResult:
    """Run everything and compare; RooftraceError where torch, transformers, the device or memory is missing."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise RooftraceError(
            f"live runs need {error.name}, which is not installed; pip install torch transformers"
        ) from None
    try:
        profile = read_profile(settings.profile)
    except ValueError as error:
        raise RooftraceError(str(error)) from None
    transformers.logging.set_verbosity_error()
    try:
        return _Runner(torch, profile, settings).run(report)
    except ValueError as error:
        raise RooftraceError(f"{settings.profile}: {error}") from None
    except (torch.OutOfMemoryError, MemoryError):
        raise RooftraceError("the models do not fit in the device's memory; lower --scale") from None


class _Runner:
    def __init__(self, torch: Any, profile: Profile, settings: LiveSettings) -> None:
        self.torch, self.profile, self.settings = torch, profile, settings
        own = profile.calibration
        if own is None:
            raise RooftraceError(
                f"{settings.profile} was not taken on this machine; take a profile with rooftrace calibrate first"
            )
        device = "cpu" if profile.kind == "cpu" else "cuda"
        if settings.device not in ("auto", device):
            raise RooftraceError(
                f"{settings.profile} is of a {device}, but --device is {settings.device}; calibrate that device"
            )
        if device == "cuda" and not torch.cuda.is_available():
            raise RooftraceError(f"{settings.profile} is of a CUDA device and there is none here; use a CPU profile")
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.threads, self.clock = own.cores, own.clock if device == "cpu" else "wall"
        if device == "cpu":
            torch.set_num_threads(own.cores)
        self.now = machine.timer(self.clock)
        names = MODELS[device]
        scale = settings.scale or (CPU_SCALE if device == "cpu" else 1.0)
        try:
            self.configs = [
                scaled_config(settings.target or names[0], scale),
                scaled_config(settings.draft or names[1], scale),
            ]
        except ValueError as error:
            raise RooftraceError(str(error)) from None
        if self.configs[0]["vocab_size"] != self.configs[1]["vocab_size"]:
            raise RooftraceError("target and draft need one vocabulary; name two models of one family")
        self.specs = [self._spec(c, n) for c, n in zip(self.configs, ("target", "draft"), strict=True)]
        need = sum(spec.params for spec in self.specs) * (4.0 if device == "cpu" else 2.0)
        have = own.memory_bytes
        if need > 0.6 * have:
            raise RooftraceError(
                f"the two models take {need / 1e9:.1f} GB and this device has {have / 1e9:.1f} GB; lower --scale"
            )

    def _spec(self, config: dict[str, Any], name: str) -> ModelSpec:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            spec = load_model(path)
        spec = spec.with_precision("fp32" if self.device == "cpu" else "bf16")
        width = config.get("n_embd", config.get("hidden_size"))
        layers = config.get("n_layer", config.get("num_hidden_layers"))
        return replace(spec, name=f"{name} ({config['model_type']}, {layers} layers, {width} wide)")

    def _model(self, config: dict[str, Any]) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.pytorch_utils import Conv1D

        torch = self.torch
        kwargs = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
        if config["model_type"] == "gpt2":
            # The same function as GPT-2's gelu_new, in one kernel rather than eight.
            kwargs["activation_function"] = "gelu_pytorch_tanh"
        made = AutoConfig.for_model(config["model_type"], **kwargs)
        torch.manual_seed(self.settings.seed)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=self.dtype)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                # Weights in the layout that was timed: by rows of k on a CPU, by rows of n on a GPU.
                if isinstance(child, torch.nn.Linear) and self.device == "cpu":
                    k, n = child.in_features, child.out_features
                    other = Conv1D(n, k)
                    other.weight.data = child.weight.data.T.contiguous()
                    other.bias.data = torch.zeros(n) if child.bias is None else child.bias.data
                    setattr(module, name, other)
                elif isinstance(child, Conv1D) and self.device != "cpu":
                    k, n = child.weight.shape
                    linear = torch.nn.Linear(k, n, device=self.device, dtype=self.dtype)
                    linear.weight.data, linear.bias.data = child.weight.data.T.contiguous(), child.bias.data
                    setattr(module, name, linear)
        return model.eval()

    def _running(self, model: Any, *, batch: int, room: int) -> Running:
        return Running(self.torch, model, batch=batch, room=room, device=self.device, seed=self.settings.seed)

    def _cost(self, spec: ModelSpec, host: HostParams) -> CostModel:
        if self.device == "cpu":
            return cpu_cost(spec, self.profile, host=host)

        eager = serving_stack("eager")
        own = Overheads(step_s=host.step_s, layer_host_s=min(3e-3, host.layer_s))
        stack = replace(eager, overheads=own, kernels="torch")
        return Calibrated(stack=stack, profile=str(self.settings.profile))(spec, device_of(self.profile))

    def _host(self) -> HostParams:
        """The time that the stack adds to its kernels: steps of models of hardly any arithmetic, less what the profile says."""
        seconds = []
        depths = (2, 8)
        for layers in depths:
            config = dict(self.configs[0])
            if config["model_type"] == "gpt2":
                config |= {"n_embd": _TINY_HIDDEN, "n_head": 1, "n_layer": layers, "vocab_size": 256}
            else:
                config |= {"hidden_size": _TINY_HIDDEN, "num_attention_heads": 1, "num_key_value_heads": 1,
                           "head_dim": _TINY_HIDDEN, "intermediate_size": 4 * _TINY_HIDDEN, "vocab_size": 256,
                           "num_hidden_layers": layers}  # fmt: skip
            running = self._running(self._model(config), batch=1, room=64)
            running.feed(16)
            measured, _ = self._timed(lambda running=running: running.step(1), running.keep())
            if self.device == "cpu":
                kernels = self._cost(self._spec(config, "tiny"), HostParams(step_s=0.0, layer_s=0.0))
                measured -= float(kernels.iteration_s(_decode(1, 17)))
            seconds.append(max(0.0, measured))
        layer_s = max(0.0, (seconds[1] - seconds[0]) / (depths[1] - depths[0]))
        return HostParams(step_s=max(0.0, seconds[0] - depths[0] * layer_s), layer_s=layer_s)

    def _timed(self, call: Callable[[], Any], undo: Callable[[], None]) -> tuple[float, float]:
        """Median seconds of a call and their interquartile range over it; *undo* is not timed."""
        for _ in range(2):
            call()
            undo()
        taken: list[float] = []
        began = time.monotonic()
        while len(taken) < _REPEATS and (len(taken) < 3 or time.monotonic() - began < _ENOUGH_S):
            self.sync()
            start = self.now()
            call()
            self.sync()
            taken.append(self.now() - start)
            undo()
        low, middle, high = statistics.quantiles(taken, n=4, method="inclusive")
        return middle, (high - low) / middle

    def sync(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def run(self, report: Callable[[str], None]) -> LiveResult:
        with self.torch.inference_mode():
            report("host time of the stack")
            host = self._host()
            report("building the models")
            models = [self._model(config) for config in self.configs]
            costs = [self._cost(spec, host) for spec in self.specs]
            device = device_of(self.profile)
            bounds = [Roofline(spec, device, ParallelConfig()) for spec in self.specs]
            steps = self._steps(models, costs, bounds, report)
            by_case = {(s.name, s.case): s for s in steps}
            target, draft = (by_case[name, _context(self._contexts[0])] for name in ("decode", "draft"))
            report("autoregressive generation")
            plain_s = self._generate(models[0])
            simulated_plain_s = self._simulated(costs, None)
            steps.append(
                Step(
                    name="generate", case=f"{self.settings.tokens} tokens after {self.settings.prompt}",
                    measured_s=plain_s, spread=0.0, simulated_s=simulated_plain_s,
                    closed_form_s=self._simulated(bounds, None),
                )
            )  # fmt: skip
            speedups = []
            for k in self.settings.drafted:
                report(f"speculative loop, K = {k}")
                decoding = self._decoding(k)
                seconds, alpha = self._speculate(models, k, decoding)
                speedups.append(
                    SpeedUp(
                        k=k, alpha=alpha, measured=plain_s / seconds,
                        simulated=simulated_plain_s / self._simulated(costs, decoding),
                        closed_form=float(speedup(alpha, k, draft.measured_s / target.measured_s)),
                    )
                )  # fmt: skip
        return LiveResult(
            target=self.specs[0].name,
            draft=self.specs[1].name,
            device=self.profile.name,
            threads=self.threads,
            clock=self.clock,
            host={"step_s": host.step_s, "layer_s": host.layer_s},
            steps=tuple(steps),
            c_measured=draft.measured_s / target.measured_s,
            c_simulated=draft.simulated_s / target.simulated_s,
            speedups=tuple(speedups),
        )

    @property
    def _contexts(self) -> tuple[int, ...]:
        return (128, 384, 768) if self.device == "cpu" else (512, 2048, 4096)

    def _steps(
        self, models: Sequence[Any], costs: Sequence[CostModel], bounds: Sequence[CostModel], report: Any
    ) -> list[Step]:
        cpu = self.device == "cpu"
        found: list[Step] = []

        def add(name: str, case: str, which: int, batch: int, past: int, query: int, totals: Totals) -> None:
            report(f"{name}, {case}")
            running = self._running(models[which], batch=batch, room=past + query)
            running.feed(past)
            measured, spread = self._timed(lambda: running.step(query), running.keep())
            found.append(
                Step(
                    name=name, case=case, measured_s=measured, spread=spread,
                    simulated_s=float(costs[which].iteration_s(totals)),
                    closed_form_s=float(bounds[which].iteration_s(totals)),
                )
            )  # fmt: skip

        for q in (32, 64, 128, 256) if cpu else (128, 512, 2048, 8192):
            add("prefill", f"{q} tokens", 0, 1, 0, q, _prompt(q, 0))
        for past in self._contexts:
            add("decode", _context(past), 0, 1, past, 1, _decode(1, past + 1))
        for batch in (2, 4, 8) if cpu else (4, 16, 64):
            add("decode", f"batch {batch}, {_context(self._contexts[0])}", 0, batch, self._contexts[0], 1,
                _decode(batch, batch * (self._contexts[0] + 1)))  # fmt: skip
        for q, past in ((32, 128), (64, 384), (128, 768)) if cpu else ((256, 512), (512, 2048), (512, 4096)):
            add("chunk", f"{q} tokens after {past}", 0, 1, past, q, _prompt(q, past))
        for k in self.settings.drafted:
            past = self._contexts[0]
            verified = Totals(k + 1, 0, 0, 0, 0, 1, past + k + 1, k + 1, 0, 0)
            add("verify", f"K = {k}, {_context(past)}", 0, 1, past, k + 1, verified)
        add("draft", _context(self._contexts[0]), 1, 1, self._contexts[0], 1, _decode(1, self._contexts[0] + 1))
        return found

    def _generate(self, model: Any) -> float:
        """Seconds of generating the tokens after the prompt's first, one a step (the faster half of repeats)."""

        def once() -> float:
            running = self._running(model, batch=1, room=self.settings.prompt + self.settings.tokens + 1)
            running.feed(self.settings.prompt)
            self.sync()
            start = self.now()
            for _ in range(self.settings.tokens):
                running.step(1)
            self.sync()
            return self.now() - start

        return statistics.median(once() for _ in range(3))

    def _decoding(self, k: int) -> Speculative:
        return Speculative(
            method="draft_model", num_speculative_tokens=k, acceptance=Iid(alpha=self.settings.alpha)
        )  # fmt: skip

    def _speculate(self, models: Sequence[Any], k: int, decoding: Speculative) -> tuple[float, float]:
        """Median seconds of the loop, and the share of tested drafts that its rounds accepted."""
        emitted = decoding.round_tokens(0, 0, self.settings.tokens, k, self.settings.seed).tolist()
        accepted = sum(e - 1 for e in emitted)
        tested = sum(min(e, k) for e in emitted)
        prompt, room = self.settings.prompt, self.settings.prompt + self.settings.tokens + 2 * k + 2

        def once() -> float:
            target = self._running(models[0], batch=1, room=room)
            draft = self._running(models[1], batch=1, room=room)
            target.feed(prompt)
            draft.feed(prompt)
            behind = 1  # tokens that the draft has not seen: the last one out, and a last draft that was accepted
            self.sync()
            start = self.now()
            for out in emitted:
                token = draft.step(behind)
                drafted = [token]
                for _ in range(k - 1):
                    token = draft.step(1, token)
                    drafted.append(token)
                target.step(k + 1)
                kept = out - 1
                target.drop(k - kept)
                draft.drop(max(0, k - 1 - kept))
                behind = 2 if kept == k else 1
            self.sync()
            return self.now() - start

        return statistics.median(once() for _ in range(3)), accepted / tested

    def _simulated(self, costs: Sequence[CostModel], decoding: Speculative | None) -> float:
        """Seconds that the event loop takes for the decode steps of the same request with the same acceptances."""
        s = self.settings
        replica = ReplicaSpec(
            cost=costs[0], scheduler=OrcaPaged(max_sequences=1), kv_blocks=4096, decoding=decoding,
            draft_cost=None if decoding is None else costs[1],
        )  # fmt: skip
        workload = Trace.from_arrays(
            arrival_ns=np.zeros(1, np.int64), prompt_tokens=np.array([s.prompt]), output_tokens=np.array([s.tokens + 1])
        )
        columns = run(Experiment(workload=workload, replicas=(replica,), router=RoundRobin(), seed=s.seed))
        iterations = columns.iterations()
        decodes = iterations["prefill_tokens"] == 0
        return float(iterations["duration_ns"][decodes].sum()) * 1e-9


def _context(tokens: int) -> str:
    return f"{tokens} tokens of context"


def _prompt(query: int, past: int) -> Totals:
    pairs = query * past + query * (query + 1) // 2
    return Totals(query, query, 1, pairs, past + query, 0, 0, 1 if query > 16 else query, 0, 0)


def _decode(batch: int, kv_tokens: int) -> Totals:
    return Totals(batch, 0, 0, 0, 0, batch, kv_tokens, batch, 0, 0)
