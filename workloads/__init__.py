"""Workloads: request traces, the files they come from, and generators of synthetic ones.

A `Workload` is columns of integers and when they are sent; a `Trace` has arrivals, a `ClosedLoop` waits for answers.
`readers` recognises the formats of published traces, `exports` those of tools; `sessions`, `shared_prefix`, `conversations`,
`rollout` and `servegen` make requests that depend on each other or begin alike; `media` draws images and speech, and `prompt_parts`
names the blocks of prompts that hold them. The room must not know what serves the requests. Read `workload` first, then `readers`.
"""

from workloads.adapters import check_adapters, draw_adapters, keyed_by_adapter
from workloads.arrivals import ArrivalProcess, Deterministic, Gamma, Mmpp, Pareto, Poisson, arrivals_ns
from workloads.chains import chained
from workloads.classes import ServiceClass
from workloads.conversations import Conversations
from workloads.curves import Piecewise, Sinusoidal, read_rates
from workloads.follows import Follows
from workloads.functions import FunctionCounts, FunctionInvocations, read_function_counts, read_function_invocations
from workloads.gamma_windows import GammaWindows, fit_gamma_windows, gamma_windows_from_counts
from workloads.generators import azure_conversation_like, closed_loop, synthesize
from workloads.join import concat, merge
from workloads.lengths import Empirical, Fixed, LengthDistribution, LogNormal, Resampled, Uniform, Zipf, split_total
from workloads.loops import ClosedLoop
from workloads.media import Drawn
from workloads.mix import draw_classes, predict_outputs, token_costs, with_classes
from workloads.popularity import assign_models, multi_model, power_law_rates
from workloads.readers import FORMATS, read_trace
from workloads.reuse import ReuseCurve, reuse
from workloads.rollout import Rollout
from workloads.servegen import ServeGen
from workloads.sessions import read_sessions
from workloads.shared_prefix import LoadStage, SharedPrefix
from workloads.streams import Stream, stream
from workloads.trace import Trace
from workloads.workload import Cancelling, Clients, Stop, Stopping, Workload

__all__ = [
    "FORMATS",
    "ArrivalProcess",
    "Cancelling",
    "Clients",
    "ClosedLoop",
    "Conversations",
    "Deterministic",
    "Drawn",
    "Empirical",
    "Fixed",
    "Follows",
    "FunctionCounts",
    "FunctionInvocations",
    "Gamma",
    "GammaWindows",
    "LengthDistribution",
    "LoadStage",
    "LogNormal",
    "Mmpp",
    "Pareto",
    "Piecewise",
    "Poisson",
    "Resampled",
    "ReuseCurve",
    "Rollout",
    "ServeGen",
    "ServiceClass",
    "SharedPrefix",
    "Sinusoidal",
    "Stop",
    "Stopping",
    "Stream",
    "Trace",
    "Uniform",
    "Workload",
    "Zipf",
    "arrivals_ns",
    "assign_models",
    "azure_conversation_like",
    "chained",
    "check_adapters",
    "closed_loop",
    "concat",
    "draw_adapters",
    "draw_classes",
    "fit_gamma_windows",
    "gamma_windows_from_counts",
    "keyed_by_adapter",
    "merge",
    "multi_model",
    "power_law_rates",
    "predict_outputs",
    "read_function_counts",
    "read_function_invocations",
    "read_rates",
    "read_sessions",
    "read_trace",
    "reuse",
    "split_total",
    "stream",
    "synthesize",
    "token_costs",
    "with_classes",
]
