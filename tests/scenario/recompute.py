"""Every figure of a summary, worked out once more from a run's columns with pandas, by what the documents say that it is.

Nothing of `sim.metrics` and `sim.results.costs` is used. What the columns do not have (arithmetic and traffic, rounds of
speculation, power) is taken from the run's own totals, and what is made of it is worked out here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sim.protocols import protocol
from workloads import Rollout

_NAMES = ("finished", "rejected", "unfinished", "aborted", "lost")
_ENDS = ("", "_low", "_high")
_STATES = ("off", "starting", "ready", "draining", "failed")
_WHOLE = ("itl_s", "mfu", "mbu", "saturated", "speculation")


def summary_of(columns: Any, manifest: Mapping[str, Any], slo: Mapping[str, float | None]) -> dict[str, Any]:
    """The summary of a run of a scenario, nested as in `summary.json`; without `wall_s`."""
    return _Run(columns, manifest, slo).summary()


def differences(found: Any, expected: Any, at: str = "", *, within: float = 1e-9) -> Iterator[str]:
    """Differences of two summaries: each figure that is not there, or is off by more than the share *within*."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in dict.fromkeys((*found, *expected)):
            if key not in found or key not in expected:
                yield f"{at}{key}: {'the summary has none' if key not in found else 'only the summary has it'}"
            else:
                yield from differences(found[key], expected[key], f"{at}{key}.", within=within)
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple) and len(found) == len(expected):
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{at}{i}.", within=within)
    elif isinstance(found, int | float) and isinstance(expected, int | float) and not isinstance(found, bool):
        # Sums in another order, and times in seconds that were nanoseconds.
        if not math.isclose(found, expected, rel_tol=within, abs_tol=2e-9):
            yield f"{at[:-1]}: {found!r}, and not {expected}"
    elif found != expected:
        yield f"{at[:-1]}: {found!r}, and not {expected!r}"


def _statistics(seconds: pd.Series) -> dict[str, float | None]:
    """Mean, median, population standard deviation, quantiles by linear interpolation and the largest."""
    seconds = seconds.dropna()
    names = ("mean", "median", "std", "p50", "p90", "p95", "p99", "max")
    if seconds.empty:
        return dict.fromkeys(names)
    quantiles = seconds.quantile([0.5, 0.9, 0.95, 0.99]).tolist()
    return dict(zip(names, (seconds.mean(), quantiles[0], seconds.std(ddof=0), *quantiles, seconds.max()), strict=True))


def _over(amount: float | None, by: float) -> float | None:
    return None if amount is None or by <= 0 else amount / by


class _Run:
    def __init__(self, columns: Any, manifest: Mapping[str, Any], slo: Mapping[str, float | None]) -> None:
        self.columns, self.manifest, self.meta, self.slo = columns, manifest, columns.meta, slo
        requests = pd.DataFrame({name: np.asarray(values) for name, values in columns.requests.items()})
        requests["status"] = [_NAMES[code] for code in requests["status"]]
        done = requests["status"] == "finished"
        emits = requests["first_token_ns"] >= 0
        ns = requests["finish_ns"] - requests["arrival_ns"]
        requests["e2el_s"] = (ns * 1e-9).where(done)
        requests["ttft_s"] = ((requests["first_token_ns"] - requests["arrival_ns"]) * 1e-9).where(done & emits)
        requests["queue_s"] = ((requests["scheduled_ns"] - requests["arrival_ns"]) * 1e-9).where(
            done & (requests["scheduled_ns"] >= 0)
        )
        later = requests["output_tokens"] - 1
        tpot = (requests["finish_ns"] - requests["first_token_ns"]) * 1e-9 / later.where(later > 0)
        requests["tpot_s"] = tpot.where(done & emits)
        self.classes = list(manifest.get("classes", ()))
        for key in ("ttft_s", "tpot_s", "e2el_s"):
            requests[f"{key}_limit"] = np.inf if slo.get(key) is None else slo[key]
            if self.classes:
                limits = [each["slo"].get(key) for each in self.classes]
                limit = pd.Series([np.inf if each is None else each for each in limits])
                requests[f"{key}_limit"] = limit.loc[requests["class_index"]].to_numpy()
        self.held = requests["deadline_ns"] if "deadline_ns" in requests else pd.Series(-1, requests.index)
        # A request that emits nothing is answered when it ends.
        first = requests["ttft_s"].where(requests["output_tokens"] > 0, requests["e2el_s"])
        met = done & (first <= requests["ttft_s_limit"]) & (requests["e2el_s"] <= requests["e2el_s_limit"])
        met &= requests["tpot_s"].isna() | (requests["tpot_s"] <= requests["tpot_s_limit"])
        requests["met"] = met & ((self.held < 0) | (ns <= self.held))
        self.requests = requests
        self.iterations = pd.DataFrame(columns.iterations())
        self.iterations["end_ns"] = self.iterations["start_ns"] + self.iterations["duration_ns"]
        gaps, weights = columns.itl()
        self.gaps_s = pd.Series(np.repeat(gaps, weights) * 1e-9)
        transfers = columns.transfers()
        self.transfers = None if transfers is None else pd.DataFrame(transfers)
        # Requests that clients never sent have no arrival.
        sent = requests.loc[requests["arrival_ns"] >= 0, "arrival_ns"]
        self.begin = int(sent.min()) if len(sent) else 0
        last = -1 if self.iterations.empty else int(self.iterations["end_ns"].max())
        self.end = max(self.begin, last, int(requests["finish_ns"].max()))
        self.fleet = self._stays()
        # Neither a pipeline nor models that share a machine: as many stages and as many replicas as machines and ranks of them.
        ranks = sum(last - first for first, last in self.meta.get("ranks", ()))
        self.one_stage_each = {self.meta["n_stages"], len(self.meta["kv_blocks_total"])} == {self._n_machines() + ranks}

    # Times of machines.

    def _stays(self) -> pd.DataFrame | None:
        """Each time that a machine was in a state, from its log: to the machine's next entry, the last one for ever."""
        fleet = self.meta.get("fleet")
        if fleet is None:
            return None
        log = pd.DataFrame(fleet["log"])
        log["until_ns"] = log.groupby("machine")["at_ns"].shift(-1).fillna(1 << 62).astype(np.int64)
        return log

    def _machine_s(self, states: Sequence[str], begin: int, end: int) -> np.ndarray:
        """Seconds that each machine was in one of these states between two instants."""
        if self.fleet is None:
            return np.full(self._n_machines(), (end - begin) * 1e-9)
        some = self.fleet[self.fleet["state"].isin([_STATES.index(state) for state in states])]
        length = (some["until_ns"].clip(upper=end) - some["at_ns"].clip(lower=begin)).clip(lower=0)
        by_machine = length.groupby(some["machine"]).sum()
        return by_machine.reindex(range(len(self.meta["fleet"]["pools"])), fill_value=0).to_numpy() * 1e-9

    def _n_machines(self) -> int:
        return len(self._machines())

    def _machines(self) -> list[tuple[int, Mapping[str, Any]]]:
        """The devices of each machine, and what the manifest says of them."""
        manifest, fleet = self.manifest, self.meta.get("fleet")
        if "pools" not in manifest:
            scenario = manifest["scenario"]
            parallel = scenario["parallel"]
            n = scenario["replicas"] if fleet is None else sum(role != "encode" for role in fleet["roles"])
            return [(parallel["tensor"] * parallel["pipeline"] * parallel["data"], manifest["hardware"])] * n
        pools = manifest["pools"]
        names = (
            [name for name, pool in pools.items() for _ in range(pool["replicas"])]
            if fleet is None
            else [fleet["names"][i] for i, role in zip(fleet["pools"], fleet["roles"], strict=True) if role != "encode"]
        )
        return [(pools[name]["gpus"] // pools[name]["replicas"], pools[name]["hardware"]) for name in names]

    def _serving_s(self, each: str, begin: int, end: int) -> float:
        """Seconds of stages or of replicas of the machines that could serve."""
        if self.fleet is None:
            n = self.meta["n_stages"] if each == "n_stages" else len(self.meta["kv_blocks_total"])
            return (end - begin) * 1e-9 * n
        return float(self._machine_s(("ready", "draining"), begin, end) @ np.array(self.meta["fleet"][each]))

    # Parts of the summary.

    def summary(self) -> dict[str, Any]:
        window = self.manifest.get("window", self.manifest["scenario"]["window"])
        span_s = (self.end - self.begin) * 1e-9
        found = self._figures(self.requests, span_s)
        found |= {
            "itl_s": _statistics(self.gaps_s),
            **self._throughput(self.begin, self.end, whole=True),
            **self._utilisation(self.begin, self.end, whole=True),
            "saturated": self._saturated(),
            "speculation": self._speculation(),
            **self._adapters(),
            **self._encode(self.requests),
            **self._grammars(self.requests),
            **self._handover(self.requests),
            **self._tiers(self.requests),
            **self._ranks(None, None),
            **self._rollout(),
            **self._fleet_figures(self.requests, self.begin, self.end),
            **self._groups(self.requests, span_s, int(self.requests["arrival_ns"].max())),
            "window": {"rule": "whole", "from_s": 0.0, "to_s": span_s, "requests": len(self.requests), "whole_run": []},
        }
        if window["rule"] != "whole":
            found |= self._of_window(window, found)
        costs = self._costs()
        if costs:
            found["costs"] = costs
            if window["rule"] != "whole":
                found["window"]["whole_run"].append("costs")
        return {**found, **self._trusted(found)}

    def _rollout(self) -> dict[str, Any]:
        """Steps one after the other, answer by answer; which groups there are, and which count, is drawn by the workload."""
        scenario = self.manifest["scenario"]
        if scenario["workload"].get("rollout") is None:
            return {}
        rollout = Rollout(**scenario["workload"]["rollout"])
        drawn = rollout.groups(scenario["seed"])
        answers = self.requests.assign(group=np.arange(len(self.requests)) // rollout.samples)
        answers["ended"] = answers["status"] == "finished"
        counts = answers["status"].value_counts().drop("finished", errors="ignore")
        others = counts.drop("aborted", errors="ignore")
        groups = answers.groupby("group").agg(
            ended=("ended", "all"), end_ns=("finish_ns", "max"), sent_ns=("arrival_ns", "min")
        )
        groups["step"], groups["counts"] = drawn.step, drawn.informative & groups["ended"]
        hands_on = self.fleet is not None or "landed_ns" in answers
        moves = rollout.leftover == "recompute" or rollout.redistribute is not None
        given_up = {"recomputed_tokens": int(answers["recomputed_tokens"].sum())} if moves or rollout.pause_s else {}
        hands_on |= moves
        steps, kept, end_ns = [], set[int](), 0
        for step in range(rollout.steps) if others.empty else ():
            mine = groups[groups["counts"] & ~groups.index.isin(kept)]
            begin_ns = int(groups.loc[groups["step"] == step, "sent_ns"].min())
            if rollout.leftover == "abort":
                mine = mine[mine["step"] == step]
            elif step:
                begin_ns = end_ns
            taken = mine.sort_values("end_ns", kind="stable").head(rollout.of_a_step)
            kept |= set(taken.index)
            end_ns = int(taken["end_ns"].max())
            after_s = (answers.loc[answers["group"].isin(taken.index), "finish_ns"] - begin_ns).clip(lower=0) * 1e-9
            idle_s = 0.0
            for replica in range(len(self.meta["kv_blocks_total"])):
                there = answers[(answers["replica"] == replica) & (answers["scheduled_ns"] >= 0)]
                there = there[(there["scheduled_ns"] <= end_ns) & (there["finish_ns"] > begin_ns)]
                idle_s += (
                    end_ns - there["finish_ns"].clip(upper=end_ns).max() if len(there) else end_ns - begin_ns
                ) * 1e-9
            p90, p99 = np.quantile(after_s, [0.9, 0.99], method="inverted_cdf")
            steps.append({
                "begin_s": begin_ns * 1e-9, "step_s": (end_ns - begin_ns) * 1e-9, "p90_s": p90, "p99_s": p99,
                "idle_s": None if hands_on else idle_s,
            })  # fmt: skip
        lasting = pd.Series([each["step_s"] for each in steps])
        tails = [1 - each["p90_s"] / each["step_s"] for each in steps if each["step_s"] > 0]
        idle_s = None if hands_on else sum(each["idle_s"] for each in steps)
        return {
            "rollout": {
                "steps": steps,
                "step_s": _statistics(lasting),
                "tail_share": np.mean(tails) if tails else None,
                **given_up,
                "idle_s": idle_s,
                "idle_share": None
                if idle_s is None
                else _over(idle_s, len(self.meta["kv_blocks_total"]) * lasting.sum()),
                "answers": {
                    "kept": len(kept) * rollout.samples,
                    "dropped": int((answers["ended"] & ~answers["group"].isin(kept)).sum()),
                    "aborted": int(counts.get("aborted", 0)),
                    **others.to_dict(),
                },
            }
        }

    def _trusted(self, found: dict[str, Any]) -> dict[str, Any]:
        """Limits, what the protocol reports, and how far to trust the figures, by what the manifest says of the deployment."""
        of_requests = ("ttft_s", "tpot_s", "e2el_s")
        more: dict[str, Any] = {}
        if not self.classes and any(self.slo.get(key) is not None for key in of_requests):
            more["request_limits"] = {key: self.slo[key] for key in of_requests if self.slo.get(key) is not None}
        for each in self.classes:
            limits = {key: value for key, value in each["slo"].items() if key in of_requests and value is not None}
            if limits:
                found["classes"][each["name"]]["request_limits"] = limits
        asked = self.manifest["scenario"]["workload"]
        if asked["protocol"] is not None:
            reported = protocol(asked["protocol"]).figures(self.columns, asked["concurrency"])
            more["reported"] = {key: None if math.isnan(value) else value for key, value in reported._asdict().items()}
        models = {
            name if len(pool["models"]) == 1 else f"{name}/{model['serves']}": model
            for name, pool in self.manifest.get("pools", {"": {"models": [self.manifest]}}).items()
            for model in pool["models"]
        }
        for part in ("trust", "memory"):
            said = {
                name: {key: value for key, value in of[part].items() if key != "why_not"} for name, of in models.items()
            }
            more[part] = said.get("", said)
        if "interval" not in self.manifest:
            more["intervals"] = {"why_not": next(iter(models.values()))["trust"]["why_not"]}
        elif found["saturated"]:
            more["intervals"] = {"why_not": "the run is saturated, and the runs that were held back are not"}
        else:
            factors, figures = self.manifest["interval"], {}
            for name in ("ttft_s", "tpot_s"):
                if (mean := found[name]["mean"]) is not None:
                    low, high = (mean * factor for factor in factors[name])
                    if name == "tpot_s":
                        low = max(low, min(mean, factors["tpot_floor_s"]))
                    figures[f"{name}.mean"] = {"low": low, "high": high}
            more["intervals"] = {"level": 0.9, "basis": factors["basis"], "figures": figures}
            if not figures:
                more["intervals"] = {"why_not": "no request has a TTFT"}
            elif not self.manifest["workload"]["closed_loop"]:
                terms = self.manifest.get("hardware", {}).get("serving_stack", {}).get("terms", {})
                front_end_s = terms.get("admission_s", 0.0) + terms.get("admission_serial_s", 0.0)
                waits_s = found["queue_s"]["mean"] - front_end_s
                if terms and waits_s >= found["ttft_s"]["mean"] / 2:
                    more["intervals"]["waiting_share"] = waits_s / found["ttft_s"]["mean"]
        return more

    def _figures(self, requests: pd.DataFrame, span_s: float) -> dict[str, Any]:
        limited = self._limited(requests)
        found: dict[str, Any] = {"requests": self._counts(requests)}
        found |= {key: _statistics(requests[key]) for key in ("ttft_s", "tpot_s", "e2el_s", "queue_s")}
        found["slo_attainment"] = requests["met"].mean() if limited and len(requests) else None
        found["preemptions"] = int(requests["preemptions"].sum())
        if "prefix_hit_tokens" in requests:
            queries, hits = self._looked_up(requests), int(requests["prefix_hit_tokens"].sum())
            found["prefix_cache"] = {
                "hit_rate": hits / queries if queries else None,
                "queries": queries,
                "hits": hits,
                "hits_after_preemption": int(requests["prefix_hit_again_tokens"].sum()),
                "evictions": self.meta["prefix_evictions"],
            }
        return found

    def _limited(self, requests: pd.DataFrame) -> bool:
        """Whether any request is held to anything: a limit of the scenario or of a class, or a deadline."""
        limits = [each["slo"] for each in self.classes] or [self.slo]
        stated = any(value is not None for each in limits for value in each.values())
        return stated or bool((self.held.loc[requests.index] >= 0).any())

    def _counts(self, requests: pd.DataFrame) -> dict[str, int]:
        by_name = requests["status"].value_counts()
        found = {"total": len(requests), **{name: int(by_name.get(name, 0)) for name in _NAMES[:3]}}
        found |= {name: int(by_name[name]) for name in _NAMES[3:] if name in by_name}
        if "shortened_tokens" in requests:
            lacking = requests.loc[requests["status"] == "finished", "shortened_tokens"]
            found |= {"degraded": int((lacking >= 0).sum()), "shortened_tokens": int(lacking.clip(lower=0).sum())}
        return found

    @staticmethod
    def _looked_up(requests: pd.DataFrame) -> int:
        return int(requests.loc[requests["scheduled_ns"] >= 0, "prompt_tokens"].sum())

    def _throughput(self, begin: int, end: int, *, whole: bool) -> dict[str, Any]:
        """Rates: of the run over its makespan, of a window over what happens after its first instant up to its last."""
        requests, span_s = self.requests, (end - begin) * 1e-9
        done = requests["status"] == "finished"
        answer = requests["first_token_ns"].where(
            requests["first_token_ns"] >= 0, requests["finish_ns"].where(done, -1)
        )
        if whole:
            emitted, answered = requests["emitted_tokens"].sum(), answer >= 0
        else:
            done &= (requests["finish_ns"] > begin) & (requests["finish_ns"] <= end)
            answer = requests["first_token_ns"].where(requests["first_token_ns"] >= 0, requests["finish_ns"])
            answered = (answer > begin) & (answer <= end)
            ends = self.iterations["end_ns"]
            emitted = self.iterations.loc[(ends > begin) & (ends <= end), "emitted_tokens"].sum()
        prompts = requests.loc[answered, "prompt_tokens"].sum()
        return {
            "output_tokens_per_s": _over(emitted, span_s),
            "total_tokens_per_s": _over(prompts + emitted, span_s),
            "requests_per_s": _over(done.sum(), span_s),
            "goodput_requests_per_s": _over((done & requests["met"]).sum(), span_s)
            if self._limited(requests)
            else None,
            "makespan_s": span_s,
        }

    def _utilisation(self, begin: int, end: int, *, whole: bool) -> dict[str, Any]:
        iterations, meta = self.iterations, self.meta
        n = iterations["start_ns"].between(begin, end, inclusive="left").sum() if not whole else len(iterations)
        found: dict[str, Any] = {"iterations": int(n)}
        busy_s = (iterations["end_ns"].clip(upper=end) - iterations["start_ns"].clip(lower=begin)).clip(
            lower=0
        ).sum() * 1e-9
        # Iterations are rounded one by one, and the run's total once; those of a pipeline do not say which stage works.
        if whole and (not self.one_stage_each or abs(busy_s - meta["busy_ns"] * 1e-9) <= 1e-9 * len(iterations)):
            busy_s = meta["busy_ns"] * 1e-9
        if whole or self.one_stage_each:
            found["busy_fraction"] = _over(busy_s, self._serving_s("n_stages" if whole else "n_tenants", begin, end))
        held_s, largest = self._held_blocks(begin, end)
        mean = _over(held_s, self._serving_s("n_tenants", begin, end))
        found["kv_utilization"] = {"mean": mean if n else None, "max": largest if n else None}
        if whole:
            peaks = np.full((1, 2), 0.0) if self.fleet is None else self._machine_s(("ready", "draining"), begin, end)
            if self.fleet is None:
                span_s = (end - begin) * 1e-9
                could = (span_s * (meta.get("peak_flops_per_s") or 0.0), span_s * (meta.get("peak_bytes_per_s") or 0.0))
            else:
                could = tuple(peaks[: len(meta["machine_peaks"])] @ np.array(meta["machine_peaks"]))
            found |= {"mfu": _over(meta.get("flops"), could[0]), "mbu": _over(meta.get("hbm_bytes"), could[1])}
        return found

    def _held_blocks(self, begin: int, end: int) -> tuple[float, float]:
        """Share of blocks in use times seconds, and the largest share: what is in use when an iteration starts is held to the
        replica's next, or where it falls idle to the end of all that are under way."""
        held, largest = 0.0, 0.0
        for replica, mine in self.iterations.groupby("replica", sort=False):
            share = mine["kv_blocks_used"] / self.meta["kv_blocks_total"][int(str(replica))]
            until = np.minimum(mine["start_ns"].shift(-1).fillna(np.inf), mine["end_ns"].cummax())
            inside = (until.clip(upper=end) - mine["start_ns"].clip(lower=begin)).clip(lower=0)
            held += float((share * inside).sum()) * 1e-9
            at_all = inside > 0 if (begin, end) != (self.begin, self.end) else inside >= 0
            largest = max(largest, share[at_all].max() if at_all.any() else 0.0)
        return held, largest

    def _of_window(self, window: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        arrivals = self.requests["arrival_ns"]
        last = int(arrivals.max())
        if window["rule"] == "after_warmup":
            done = self.requests[self.requests["status"] == "finished"].sort_values("arrival_ns", kind="stable")
            begin, end = int(done["arrival_ns"].iloc[_warmup(done["e2el_s"].to_numpy())]), last
        else:
            begin = self.begin + round((window["from_s"] or 0.0) * 1e9)
            end = last if window["to_s"] is None else min(last, self.begin + round(window["to_s"] * 1e9))
        inside = self.requests[arrivals.between(begin, end)]
        span_s = (end - begin) * 1e-9
        whole_run = [*_WHOLE]
        if not self.one_stage_each:
            whole_run.append("busy_fraction")
        whole_run += ["adapters"] if "adapters" in whole else []
        whole_run += ["handover.link_use"] if "handover" in whole else []
        whole_run += ["prefix_cache.evictions"] if "prefix_cache" in whole else []
        whole_run += ["kv_tiers, but for hits and load_s"] if "kv_tiers" in whole else []
        return {
            **self._figures(inside, span_s),
            **self._throughput(begin, end, whole=False),
            **self._utilisation(begin, end, whole=False),
            **self._encode(inside),
            **self._grammars(inside),
            **self._handover(inside),
            **self._tiers(inside),
            **self._ranks(begin, end),
            **self._fleet_figures(inside, begin, end),
            **self._groups(inside, span_s, end),
            "window": {
                "rule": window["rule"],
                "from_s": (begin - self.begin) * 1e-9,
                "to_s": (end - self.begin) * 1e-9,
                "requests": len(inside),
                "whole_run": whole_run,
            },
        }

    def _groups(self, requests: pd.DataFrame, span_s: float, last: int) -> dict[str, Any]:
        models, tenants = self.manifest.get("models", ()), self.manifest.get("tenants", ())
        found: dict[str, Any] = {}
        for key, column, names in (
            ("models", "model_index", models if len(models) > 1 else ()),
            ("classes", "class_index", [each["name"] for each in self.classes]),
            ("tenants", "tenant_index", tenants),
        ):
            if not names:
                continue
            found[key] = {}
            for row, name in enumerate(names):
                mine = requests[requests[column] == row]
                figures = self._figures(mine, span_s)
                found[key][name] = {
                    each: figures[each] for each in ("requests", "ttft_s", "tpot_s", "e2el_s", "slo_attainment")
                }
                found[key][name]["output_tokens_per_s"] = _over(mine["emitted_tokens"].sum(), span_s)
        if tenants:
            found["fairness"] = self._fairness(requests, tenants, last)
        return found

    def _fairness(self, requests: pd.DataFrame, tenants: Sequence[str], last: int) -> dict[str, Any]:
        """Tokens over the weight of the class up to the last arrival: a prompt's with the first token, later ones evenly."""
        begin = int(requests.loc[requests["arrival_ns"] >= 0, "arrival_ns"].min())
        ended = requests[requests["finish_ns"] >= 0]
        first = ended["first_token_ns"].where(ended["first_token_ns"] >= 0, ended["finish_ns"])
        share = ((max(last, begin) - first) / (ended["finish_ns"] - first).clip(lower=1)).clip(0, 1)
        tokens = (
            ended["prompt_tokens"]
            + ended["emitted_tokens"].clip(upper=1)
            + share * (ended["emitted_tokens"] - 1).clip(lower=0)
        )
        tokens = tokens.where((first <= max(last, begin)) & (first > begin), 0.0)
        if self.classes:
            tokens = tokens / pd.Series([each["weight"] for each in self.classes]).loc[ended["class_index"]].to_numpy()
        served = tokens.groupby(ended["tenant_index"]).sum().reindex(range(len(tenants)), fill_value=0.0)
        squares = float((served**2).sum())
        jain = float(served.sum()) ** 2 / (len(served) * squares) if squares else None
        return {"jain": jain, "service_per_weight": dict(zip(tenants, served.tolist(), strict=True))}

    def _saturated(self) -> bool | None:
        """Whether the queue grows over the second half of the arrivals: its mean step over 16 bins, by Student's t at 1 %."""
        queued = self.requests[(self.requests["status"] != "rejected") & (self.requests["arrival_ns"] >= 0)]
        arrivals, starts = queued["arrival_ns"], queued.loc[queued["scheduled_ns"] >= 0, "scheduled_ns"]
        if arrivals.empty or arrivals.min() == arrivals.max():
            return None
        at = np.linspace((int(arrivals.min()) + int(arrivals.max())) / 2, int(arrivals.max()), 17)
        arrived = np.array([(arrivals <= t).sum() for t in at])
        waiting = arrived - np.array([(starts <= t).sum() for t in at])
        came = arrived[-1] - arrived[0]
        if came < 64:
            return None
        steps = pd.Series(np.diff(waiting))
        return bool(waiting[-1] - waiting[0] >= 0.05 * came and steps.mean() > 2.602 * steps.std() / 4)

    def _adapters(self) -> dict[str, Any]:
        """From each machine's loads, and its sums over iterations."""
        each = [replica.adapters for replica in self.columns.replicas if replica.adapters is not None]
        if not each:
            return {}
        loads = pd.DataFrame([load for one in each for load in one.loads], columns=["at", "adapter", "to", "ns"])
        busy_ns = sum(one.busy_ns for one in each)
        found: dict[str, Any] = {
            "max_loras": each[0].max_loras,
            "running_mean": sum(one.adapter_ns for one in each) / busy_ns if busy_ns else None,
            "running_max": max(one.most_running for one in each),
            "waiting_for_slot_mean": sum(one.waiting_ns for one in each) / busy_ns if busy_ns else None,
        }
        for to, name in enumerate(("disk", "slot")):
            mine = loads[loads["to"] == to]
            found |= {f"{name}_loads": len(mine), f"{name}_load_s": int(mine["ns"].sum()) * 1e-9}
        return {"adapters": found}

    def _speculation(self) -> dict[str, Any] | None:
        """From how many rounds accepted how many tokens, by drafted positions and tokens verified besides the one before them."""
        counts = self.meta.get("speculation")
        if counts is None:
            return None
        rows = [
            (depth, drafted, accepted, rounds)
            for (depth, drafted), by_accepted in counts.items()
            for accepted, rounds in enumerate(by_accepted)
        ]
        table = pd.DataFrame(rows, columns=["depth", "drafted", "accepted", "rounds"])
        table = table[table["rounds"] > 0]
        n, deepest = int(table["rounds"].sum()), int(table["depth"].max()) if len(table) else 0
        drafts = int((table["rounds"] * table["drafted"]).sum())
        accepted = int((table["rounds"] * table["accepted"]).sum())
        at = [int(table.loc[table["accepted"] > i, "rounds"].sum()) for i in range(deepest)]
        of = [int(table.loc[table["depth"] > i, "rounds"].sum()) for i in range(deepest)]
        # A token is tried where all before it were accepted: those accepted, and one more where a round ended early.
        tried = accepted + int(table.loc[table["accepted"] < table["depth"], "rounds"].sum())
        return {
            "num_drafts": n,
            "num_draft_tokens": drafts,
            "num_accepted_tokens": accepted,
            "num_accepted_tokens_per_pos": at,
            "mean_acceptance_length": 1 + accepted / n if n else None,
            "draft_acceptance_rate": accepted / drafts if n else None,
            "acceptance_rate_per_pos": [one / other for one, other in zip(at, of, strict=True)],
            "alpha": accepted / tried if n else None,
        }

    def _encode(self, requests: pd.DataFrame) -> dict[str, Any]:
        if "encode_ns" in requests:
            done = requests[requests["status"] == "finished"]
            times = _statistics(done[done["encoded_images"] > 0]["encode_ns"] * 1e-9)
            return {"images": {**self._images(done), "encode_s": times}}
        if "encoder" not in requests:
            return {}
        over = requests[(requests["status"] == "finished") & (requests["encoder"] >= 0)]
        instants = ("arrival_ns", "encode_begin_ns", "encoded_ns", "encode_landed_ns", "scheduled_ns")
        names = ("queue_s", "encode_s", "transfer_s", "prompt_queue_s")
        stages = {
            name: _statistics((over[end] - over[begin]) * 1e-9)
            for name, begin, end in zip(names, instants[:-1], instants[1:], strict=True)
        }
        kept = {"images": self._images(over)} if "encoded_images" in requests else {}
        return {"encode": {"requests": len(over), "stages": stages, **kept}}

    def _images(self, requests: pd.DataFrame) -> dict[str, Any]:
        encoded, hits = int(requests["encoded_images"].sum()), int(requests["image_hits"].sum())
        return {"encoded": encoded, "hits": hits, "hit_rate": hits / (hits + encoded) if hits + encoded else None}

    def _grammars(self, requests: pd.DataFrame) -> dict[str, Any]:
        if "grammar_wait_ns" not in requests:
            return {}
        waits = requests[(requests["status"] == "finished") & (requests["grammar_wait_ns"] > 0)]["grammar_wait_ns"]
        return {"structured_output": {"waited": len(waits), "compile_wait_s": _statistics(waits * 1e-9)}}

    def _handover(self, requests: pd.DataFrame) -> dict[str, Any]:
        if "landed_ns" not in requests:
            return {}
        done = requests[requests["status"] == "finished"]
        over = done[done["joined_ns"] >= 0]
        instants = ("arrival_ns", "scheduled_ns", "prefilled_ns", "sent_ns", "landed_ns", "joined_ns", "finish_ns")
        names = ("queue_s", "prefill_s", "wait_s", "transfer_s", "decode_queue_s", "decode_s")
        whole = float((over["finish_ns"] - over["arrival_ns"]).sum())
        stages = {}
        for name, begin, end in zip(names, instants[:-1], instants[1:], strict=True):
            length = over[end] - over[begin]
            stages[name] = {**_statistics(length * 1e-9), "share": length.sum() / whole if whole else None}
        links = self.meta.get("links", [])
        could = sum(link["places"] for link in links) * (self.end - self.begin)
        return {
            "handover": {
                "requests": len(over),
                "stayed": len(done) - len(over),
                "sent_bytes": int(requests["sent_bytes"].sum()),
                "found_tokens": int(requests["found_at_decode_tokens"].sum()),
                "link_use": sum(link["busy_ns"] for link in links) / could if could else None,
                "stages": stages,
            }
        }

    def _tiers(self, requests: pd.DataFrame) -> dict[str, Any]:
        """Transfers are those of the run, whatever the window."""
        if "load_ns" not in requests:
            return {}
        held, queries = requests.loc[requests["load_ns"] > 0, "load_ns"], self._looked_up(requests)
        found: dict[str, Any] = {
            "load_s": _statistics(held * 1e-9),
            "hits_after_preemption": int(requests["tier_again_hit_tokens"].sum()),
            "swapped_tokens": int(requests["swap_hit_tokens"].sum()) if "swap_hit_tokens" in requests else 0,
        }
        for kind in ("host", "disk", "remote", "peer"):
            if f"{kind}_hit_tokens" not in requests:
                continue
            hits = int(requests[f"{kind}_hit_tokens"].sum())
            found[kind] = {"hits": hits, "hit_rate": hits / queries if queries else None, **self._crossed(kind)}
        return {"kv_tiers": found}

    def _crossed(self, kind: str) -> dict[str, Any]:
        """The bytes that crossed the links of tiers of this kind: from the transfers, but for what these do not say."""
        facts = self.meta.get("tiers", {}).get(kind)
        if facts is None:
            return {}
        assert self.transfers is not None
        kinds = self._kinds_of_tiers()
        where = zip(self.transfers["replica"], self.transfers["tier"], strict=True)
        mine = self.transfers[np.array([tier >= 0 and kinds[replica][tier] == kind for replica, tier in where], bool)]
        loads, stores = mine[mine["what"] == 0], mine[mine["what"] != 0]

        def mean(ns: pd.Series) -> float | None:
            return ns.mean() * 1e-9 if len(ns) else None

        own = ("capacity_bytes", "used_bytes", "evicted_blocks", "loaded_tokens", "skipped_short", "skipped_slower")
        return {
            **{name: facts[name] for name in own},
            "loads": len(loads),
            "load_bytes": int(loads["bytes"].sum()),
            "stores": len(stores),
            "store_bytes": int(stores["bytes"].sum()),
            "load_wait_mean_s": mean(loads["begin_ns"] - loads["asked_ns"]),
            "load_mean_s": mean(loads["arrived_ns"] - loads["asked_ns"]),
            "store_wait_mean_s": mean(stores["begin_ns"] - stores["asked_ns"]),
            "link_busy_s": facts["link_busy_ns"] * 1e-9,
        }

    def _kinds_of_tiers(self) -> list[list[str]]:
        """The kinds of each replica's tiers, nearest first: a machine of ranks is as many replicas."""
        scenario, found = self.manifest["scenario"], []
        pools = scenario["pools"] or {None: {}}
        fleet = self.meta.get("fleet")
        for number, pool in enumerate(pools.values()):
            tiers = ((pool.get("memory") or {}).get("tiers") or scenario["memory"]["tiers"]) or []
            data = (pool.get("parallel") or {}).get("data") or scenario["parallel"]["data"]
            n = pool.get("replicas") or scenario["replicas"]
            if fleet is not None:
                n = fleet["pools"].count(number)
            n *= data * len(pool.get("models") or [1])
            found += [[tier["kind"] for tier in tiers]] * n
        return found

    def _ranks(self, begin: int | None, end: int | None) -> dict[str, Any]:
        """How evenly ranks were filled, over the steps that they take together."""
        machines = self.meta.get("ranks", [])
        if not machines:
            return {}
        iterations = self.iterations
        if begin is not None:
            iterations = iterations[iterations["start_ns"].between(begin, end, inclusive="left")]
        tokens, kv = [], []
        steps = busy = places = 0
        for first, last in machines:
            mine = iterations[iterations["replica"].between(first, last)]
            by_step, n = mine.groupby("start_ns"), last - first + 1
            steps, busy, places = steps + by_step.ngroups, busy + len(mine), places + n * by_step.ngroups
            for column, into in (("rows", tokens), ("kv_tokens", kv)):
                total = by_step[column].sum()
                into.append((by_step[column].max() * n / total)[total > 0])
        sizes = sorted({last - first + 1 for first, last in machines})

        def mean(parts: list[pd.Series]) -> float | None:
            values = np.concatenate([part.to_numpy() for part in parts])
            return float(values.mean()) if len(values) else None

        return {
            "ranks": {
                "per_machine": sizes[0] if len(sizes) == 1 else sizes,
                "steps": steps,
                "token_imbalance": mean(tokens),
                "kv_imbalance": mean(kv),
                "idle_share": 1 - busy / places if places else None,
            }
        }

    def _fleet_figures(self, requests: pd.DataFrame, begin: int, end: int) -> dict[str, Any]:
        fleet, stays = self.meta.get("fleet"), self.fleet
        if fleet is None or stays is None:
            return {}
        seconds = {state: float(self._machine_s((state,), begin, end).sum()) for state in _STATES}
        span_s, up = (end - begin) * 1e-9, seconds["ready"] + seconds["draining"]
        starting: dict[str, float] = {}
        for stay in stays[stays["state"] == _STATES.index("starting")].itertuples():
            name = fleet["phases"][fleet["pools"][stay.machine]][stay.phase]
            starting[name] = starting.get(name, 0.0) + max(0, min(stay.until_ns, end) - max(stay.at_ns, begin)) * 1e-9
        held = requests.loc[requests["held_ns"] > 0, "held_ns"]
        counts = ("starts", "called_back", "drains", "drains_cut_short", "failures", "outages_missed", "asked_below_least",
                  "asked_above_most", "in_flight")  # fmt: skip
        edges = sorted({begin, *(t for t in (*stays["at_ns"], *stays["until_ns"]) if begin < t < end)})
        ready = stays[stays["state"] == _STATES.index("ready")]
        roles = np.array(fleet["roles"])
        sides = [
            (roles != "decode") & (roles != "encode"),
            *(roles == role for role in ("decode", "encode") if role in roles),
        ]
        most, without = 0, 0
        for one, other in zip(edges, [*edges[1:], end], strict=True):
            there = ready[(ready["at_ns"] <= one) & (ready["until_ns"] > one)]["machine"].to_numpy()
            most = max(most, len(there))
            without += (other - one) * any(not side[there].any() for side in sides)
        return {
            "fleet": {
                "machine_hours": (sum(seconds.values()) - seconds["off"]) / 3600,
                "machine_s": seconds,
                "starting_s": starting,
                "machines_mean": _over(up, span_s),
                "machines_max": most,
                "without_machine_s": without * 1e-9,
                "availability": up / (up + seconds["failed"]) if up + seconds["failed"] else None,
                **{name: fleet[name] for name in counts},
                "requests": {
                    **{
                        name: fleet[name]
                        for name in ("resumed", "retried", "held_to_the_end", "chosen_again", "discarded_tokens")
                    },
                    "lost": int((requests["status"] == "lost").sum()),
                    "held": len(held),
                },
                "held_s": _statistics(held * 1e-9),
            }
        }

    def _costs(self) -> dict[str, Any] | None:
        meta, requests = self.meta, self.requests
        machines = self._machines()
        if meta.get("power_share_s") is None or meta.get("busy_s") is None:
            return None
        from hwmodels.power import basis_of, power_model

        asked = self.manifest["scenario"].get("costs") or {}
        price, pue, carbon = asked.get("usd_per_device_hour"), asked.get("pue", 1.0), asked.get("carbon_g_per_kwh")
        there = self._machine_s(_STATES[1:], self.begin, self.end)[: len(machines)]
        hours = sum(n * s for (n, _), s in zip(machines, there, strict=True)) / 3600
        prices = [facts["price_usd_per_hour"] for _, facts in machines]
        if price is not None:
            assert set(prices) == {price}
        usd = None
        if all(each is not None for each in prices):
            usd = sum(n * s / 3600 * each for (n, _), s, each in zip(machines, there, prices, strict=True))
        joule, of_tokens = np.zeros(4), np.zeros(2)
        for (n, facts), power_s, busy_s, s in zip(machines, meta["power_share_s"], meta["busy_s"], there, strict=True):
            model, full_w = power_model(facts["name"]), n * facts["tdp_w"] * pue
            drawn_s = power_s + model.idle * max(0.0, s - busy_s)
            whole_s = max(s, busy_s) * facts.get("power_limit_w", facts["tdp_w"]) / facts["tdp_w"]
            low, high = model.watt
            joule += full_w * np.array([drawn_s, low * drawn_s, min(high * drawn_s, whole_s), whole_s])
            of_tokens += full_w * drawn_s * np.array(model.joule)
        answered = requests["first_token_ns"] >= 0
        computed = (
            requests["computed_prompt_tokens"] if "computed_prompt_tokens" in requests else requests["prompt_tokens"]
        )
        into, out = int(computed[answered].sum()), int(requests["emitted_tokens"].sum())
        part, span_s = meta.get("prompt_share"), (self.end - self.begin) * 1e-9

        def per_million(usd: float | None, tokens: float) -> float | None:
            return None if usd is None or not tokens else usd / tokens * 1e6

        both = usd is not None and part is not None
        return {
            "device_hours": hours,
            "usd": usd,
            "usd_per_hour": None if usd is None or not span_s else usd / (span_s / 3600),
            "usd_per_month": None if usd is None or not span_s else usd / (span_s / 3600) * 730,
            "price_basis": "; ".join(
                dict.fromkeys(
                    f"{facts['name']}: {facts['sources']['price_usd_per_hour']}"
                    for _, facts in machines
                    if facts["price_usd_per_hour"] is not None
                )
            ),
            "usd_per_m_output": per_million(usd, out),
            "usd_per_m_input": per_million(usd * part if both else None, into),
            "usd_per_m_generated": per_million(usd * (1 - part) if both else None, out),
            "usd_per_m_cached": None if usd is None else 0.0,
            "prompt_share": part,
            **(self._costs_by_class(computed.where(answered, 0), usd, part, per_million) if both else {}),
            **dict(zip(("joule", "joule_low", "joule_high", "tdp_joule"), joule, strict=True)),
            "power_basis": basis_of(facts["name"] for _, facts in machines),
            **{
                f"joule_per_output_token{end}": each / out if out else None
                for end, each in zip(_ENDS, (joule[0], *of_tokens), strict=True)
            },
            **{f"mean_w{end}": _over(each, span_s) for end, each in zip(_ENDS, joule[:3], strict=True)},
            "carbon_g": None if carbon is None else joule[0] / 3.6e6 * carbon,
        }

    def _costs_by_class(self, computed: pd.Series, usd: float, part: float, per_million: Any) -> dict[str, Any]:
        """The cost of prompts by computed tokens and of answers by emitted ones, but for attention's share of the time, which
        goes by what was attended to."""
        if not self.classes or len(self.manifest.get("models", ())) > 1:
            return {}
        requests = self.requests
        prompts = requests["prompt_tokens"].where(requests["first_token_ns"] >= 0, 0)
        cached, emitted = prompts - computed, requests["emitted_tokens"]
        attended = computed * cached + computed * (computed + 1) / 2
        read = emitted * requests["prompt_tokens"] + emitted * (emitted - 1) / 2

        def shares(tokens: pd.Series, by: pd.Series, attention: float) -> pd.Series:
            sums = [
                each.groupby(requests["class_index"]).sum().reindex(range(len(self.classes)), fill_value=0)
                for each in (tokens, by)
            ]
            if not sums[0].sum():
                return sums[0] * 0.0
            by_tokens, by_context = (each / each.sum() if each.sum() else None for each in sums)
            return (1 - attention) * by_tokens + attention * (by_tokens if by_context is None else by_context)

        paid_in = part * usd * shares(computed, attended, self.meta["prompt_attention_share"])
        paid_out = (1 - part) * usd * shares(emitted, read, self.meta["decode_kv_share"])
        found = {}
        for row, each in enumerate(self.classes):
            mine = requests["class_index"] == row
            into, again, out = (int(tokens[mine].sum()) for tokens in (computed, cached, emitted))
            found[each["name"]] = {
                "usd": paid_in[row] + paid_out[row],
                "usd_input": paid_in[row],
                "usd_generated": paid_out[row],
                "input_tokens": into,
                "cached_tokens": again,
                "output_tokens": out,
                "usd_per_m_output": per_million(paid_in[row] + paid_out[row], out),
                "usd_per_m_input": per_million(paid_in[row], into),
                "usd_per_m_generated": per_million(paid_out[row], out),
                "usd_per_m_cached": 0.0,
            }
        return {"classes": found}


def _warmup(values: np.ndarray) -> int:
    """MSER-5: over means of five values the cut with the least squared standard error of what is left, in the first half."""
    means = values[: len(values) // 5 * 5].reshape(-1, 5).mean(axis=1)
    errors = [
        ((means[cut:] - means[cut:].mean()) ** 2).sum() / len(means[cut:]) ** 2 for cut in range(len(means) // 2 + 1)
    ]
    return 5 * int(np.argmin(errors))
