"""Manifests of Kubernetes, values of llm-d's modelservice chart, and KServe's services for what was simulated.

From knowledge of apps/v1, autoscaling/v2, keda.sh/v1alpha1, serving.kserve.io and of llm-d's chart, whose schemas were not at hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from hwmodels.device import device_catalogue
from hwmodels.stacks import stacks
from sim.errors import RooftraceError
from sim.launch.arguments import release_of
from sim.launch.chosen import Chosen, Export
from sim.launch.documents import CHARTED, METRICS, PREFIX
from sim.launch.engines import launches
from sim.launch.start import Launch
from sim.launch.writers import commands, of_the_whole
from sim.launch.writing import Writing, model_name
from sim.scenario import Scenario

_PORT = 8000
_BEHIND_PROXY = 8200
"""Port of a server of llm-d that decodes, in front of which its proxy stands."""
_PRODUCT = "nvidia.com/gpu.product"
PRODUCTS: Mapping[str, str] = {
    "a100-40gb-sxm": "NVIDIA-A100-SXM4-40GB",
    "a100-80gb-sxm": "NVIDIA-A100-SXM4-80GB",
    "a100-80gb-pcie": "NVIDIA-A100-80GB-PCIe",
    "a10": "NVIDIA-A10",
    "a30": "NVIDIA-A30",
    "a40": "NVIDIA-A40",
    "l4": "NVIDIA-L4",
    "l40s": "NVIDIA-L40S",
    "h100-sxm": "NVIDIA-H100-80GB-HBM3",
    "h100-pcie": "NVIDIA-H100-PCIe",
    "h200": "NVIDIA-H200",
    "h20": "NVIDIA-H20",
    "b200": "NVIDIA-B200",
    "b300": "NVIDIA-B300",
    "gb200": "NVIDIA-GB200",
    "gb300": "NVIDIA-GB300",
}
"""Labels of nodes by device, as NVIDIA's feature discovery writes what its driver calls them."""
_MOST_IN_A_POD = 8


class _Pool(NamedTuple):
    """One kind of server."""

    name: str
    part: Scenario
    command: Writing
    args: list[str]

    @property
    def devices(self) -> int:
        parallel = self.part.parallel
        return parallel.gpus

    @property
    def launch(self) -> Launch:
        return launches()[self.command.target]

    @property
    def called(self) -> str:
        return f"{PREFIX}{self.name.lower().replace('_', '-')}"

    def selector(self) -> dict[str, str]:
        device = self.part.device_name
        if device in PRODUCTS:
            return {_PRODUCT: PRODUCTS[device]}
        known = device_catalogue().get(device)
        amd = ", ROCm's image and amd.com/gpu in the place of nvidia.com/gpu" if known and known.vendor == "AMD" else ""
        self.command.not_carried(f"hardware: {device}; give the pods a nodeSelector of its nodes{amd}")
        return {}

    @property
    def environment(self) -> list[dict[str, Any]]:
        if self.command.role == "both" or self.launch.address_variable is None:
            return []
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        return [{"name": self.launch.address_variable, "valueFrom": address}]

    @property
    def resources(self) -> dict[str, Any]:
        return {"limits": {"nvidia.com/gpu": str(self.devices)}}

    def container(self, name: str, port: int = _PORT) -> dict[str, Any]:
        image = str(self.launch.image).format(release_of(self.command.target))
        args = [*self.args, "--port", str(port), *self.launch.listens]
        found: dict[str, Any] = {"name": name, "image": image, "command": list(self.launch.entry), "args": args}
        if self.environment:
            found["env"] = self.environment
        found["ports"] = [{"containerPort": port}]
        found["resources"] = self.resources
        found["readinessProbe"] = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 5}
        found["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        return found

    def pod(self, container: Mapping[str, Any]) -> dict[str, Any]:
        """A pod of *container*, with the memory that it shares where it mounts some."""
        if self.devices > _MOST_IN_A_POD:
            self.command.not_carried(
                f"a pod of {self.devices} GPUs is more than a machine has; start it over several by a LeaderWorkerSet"
            )
        selector = self.selector()
        found = {**({"nodeSelector": selector} if selector else {}), "containers": [dict(container)]}
        if "volumeMounts" in container:
            found["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        return found


def _pools(scenario: Scenario) -> list[_Pool]:
    found = []
    for name, command in commands(scenario, None):
        found.append(_Pool(name or "server", command.scenario, command, command.words[1:]))
    names = [pool.called for pool in found]
    if len(set(names)) < len(names):
        raise RooftraceError(f"names of pools become names of Kubernetes, and two are alike there: {', '.join(names)}")
    return found


def _export(chosen: Chosen, documents: Sequence[Mapping[str, Any]], pools: Sequence[_Pool], left: list[str]) -> Export:
    reasons = "".join(f"# {reason}\n" for reason in chosen.reasons)
    left = [*of_the_whole(chosen.scenario), *left]
    left += [
        f"pool {each.name}: {t}" if chosen.scenario.pools else t for each in pools for t in each.command.left_out()
    ]
    text = reasons + "---\n".join(yaml.safe_dump(dict(each), sort_keys=False, width=1_000) for each in documents)
    return Export(text=text, left_out=tuple(dict.fromkeys(left)))


def kubernetes(chosen: Chosen) -> Export:
    """A Deployment and a Service a pool, what scales it, and the proxy of a pair that prefills and decodes."""
    scenario = chosen.scenario
    pools, left = _pools(scenario), []
    documents: list[dict[str, Any]] = []
    for pool in pools:
        documents.append(_deployment(pool.called, pool.part.replicas, pool.pod(pool.container("server"))))
        documents.append(_service(pool.called))
        documents += _scaler(pool)
    sides = {pool.command.role: pool for pool in pools}
    if {"prefill", "decode"} <= set(sides):
        documents += _proxy(pools)
        left.append("the proxy's options are from knowledge: hold them against the release that you take")
    left += _router_left_out(scenario, pools, "a Service spreads connections over its pods at random")
    return _export(chosen, documents, pools, left)


def _router_left_out(scenario: Scenario, pools: Sequence[_Pool], why: str) -> Iterator[str]:
    policy = scenario.router.policy
    if (scenario.pools or pools[0].part.replicas > 1 or pools[0].part.autoscale) and policy != "random":
        for pool in pools:
            pool.command.carries("router")
        yield f"router: {policy} {scenario.router.settings or ''}".rstrip() + f" ({why})"


def _deployment(name: str, replicas: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": dict(labels)},
            "template": {"metadata": {"labels": dict(labels)}, "spec": dict(pod)},
        },
    }


def _service(name: str) -> dict[str, Any]:
    ports = [{"name": "http", "port": _PORT, "targetPort": _PORT}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": ports},
    }


def _proxy(pools: Sequence[_Pool]) -> list[dict[str, Any]]:
    """The proxy that sends a request to a server that prefills, and then to one that decodes."""
    package, program, option = next(
        launch.proxy
        for name, launch in launches().items()
        if launch.proxy is not None and any(pool.command.target == name for pool in pools)
    )
    sides = " ".join(
        f"--{pool.command.role} http://{pool.called}:{_PORT}" for pool in pools if pool.command.role != "both"
    )
    script = f"pip install {package} && {program} {option} {sides} --host 0.0.0.0 --port {_PORT}"
    container = {
        "name": "proxy",
        "image": "python:3.12-slim",
        "command": ["sh", "-c", script],
        "ports": [{"containerPort": _PORT}],
    }
    name = f"{PREFIX}proxy"
    return [_deployment(name, 1, {"containers": [container]}), _service(name)]


def _of_autoscale(pool: _Pool) -> tuple[str, dict[str, Any], list[str]] | None:
    """Policy and settings of what scales a pool, and what no target says; None where nothing does."""
    if pool.part.autoscale is None:
        return None
    pool.command.carries("autoscale")
    given = pool.part.autoscale.model_dump(exclude_defaults=True)
    carried = ("policy", "min", "max", "down_window_s", "up_window_s")
    rest = [f"autoscale.{key}: {value}" for key, value in given.items() if key not in carried]
    policy = pool.part.autoscale.policy
    settings = dict(policy.settings)
    return policy.policy, settings, rest


def _scaler(pool: _Pool) -> list[dict[str, Any]]:
    """A HorizontalPodAutoscaler for target_tracking, KEDA's ScaledObject for concurrency; others are named."""
    found = _of_autoscale(pool)
    if found is None:
        return []
    policy, settings, rest = found
    autoscale = pool.part.autoscale
    assert autoscale is not None
    target, engine = settings.pop("target", None), pool.command.target
    measure = settings.pop("measure", "concurrency") if policy == "target_tracking" else None
    metric = next((m for m, of in METRICS.items() if of == measure and m.startswith(f"{engine}:")), None)
    documents: list[dict[str, Any]] = []
    behaviour = _behaviour(autoscale.down_window_s, autoscale.up_window_s)
    if policy == "target_tracking" and metric is not None:
        metric = metric.replace(":", "_")
        rest.append(f"the metric {metric}: set up an adapter that gives it to Kubernetes")
        if autoscale.min == 0:
            rest.append("autoscale.min: 0; a HorizontalPodAutoscaler keeps one pod, KEDA does not")
        documents.append(_hpa(pool.called, max(autoscale.min, 1), autoscale.max, metric, target, behaviour))
    elif policy == "concurrency" and pool.launch.total is not None:
        rest.append("the address of Prometheus in the ScaledObject: give your own")
        documents.append(
            _scaled_object(pool.called, autoscale.min, autoscale.max, pool.launch.total, target, behaviour)
        )
    else:
        said = f" by {measure}" if measure else ""
        rest.append(f"autoscale: {policy}{said} has no counterpart here; set up what scales {pool.called}")
        settings = {}
    rest += [f"autoscale.policy.{key}: {value}" for key, value in settings.items()]
    for text in rest:
        pool.command.not_carried(text)
    return documents


def _behaviour(down_s: float | None, up_s: float | None) -> dict[str, Any]:
    sides = {"scaleDown": down_s, "scaleUp": up_s}
    return {side: {"stabilizationWindowSeconds": round(s)} for side, s in sides.items() if s is not None}


def _quantity(value: float) -> str:
    return f"{value:g}" if float(value).is_integer() else f"{round(value * 1000)}m"


def _hpa(name: str, fewest: int, most: int, metric: str, target: float, behaviour: Mapping[str, Any]) -> dict[str, Any]:
    pods = {"metric": {"name": metric}, "target": {"type": "AverageValue", "averageValue": _quantity(target)}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": fewest,
            "maxReplicas": most,
            "metrics": [{"type": "Pods", "pods": pods}],
            **({"behavior": dict(behaviour)} if behaviour else {}),
        },
    }


def _scaled_object(
    name: str, fewest: int, most: int, total: str, target: float, behaviour: Mapping[str, Any]
) -> dict[str, Any]:
    trigger = {
        "serverAddress": "http://prometheus-operated.monitoring:9090",
        "query": total.format(name),
        "threshold": f"{target:g}",
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"name": name},
            "minReplicaCount": fewest,
            "maxReplicaCount": most,
            "triggers": [{"type": "prometheus", "metadata": trigger}],
            **({"advanced": {"horizontalPodAutoscalerConfig": {"behavior": dict(behaviour)}}} if behaviour else {}),
        },
    }


def _one_or_a_pair(pools: Sequence[_Pool], target: str) -> dict[str, _Pool]:
    """A pool by its role where there is one, or one that prefills and one that decodes; RooftraceError for others."""
    roles = [pool.command.role for pool in pools]
    models = {model_name(pool.part) for pool in pools}
    if (roles != ["both"] and sorted(roles) != ["decode", "prefill"]) or len(models) > 1:
        named = ", ".join(f"{pool.name} ({pool.command.role})" for pool in pools)
        raise RooftraceError(
            f"--for {target} takes one pool, or one that prefills and one that decodes, of one model; got {named}: "
            "--for kubernetes takes any"
        )
    return dict(zip(roles, pools, strict=True))


def _without(args: Sequence[str], option: str) -> list[str]:
    """Words without an option and its value."""
    at = args.index(option) if option in args else len(args)
    return [*args[:at], *args[at + 2 :]]


def _either_side(args: Sequence[str]) -> list[str]:
    """llm-d's servers take the connector of both sides; their proxy says which one a request is on."""
    return [word.replace('"kv_producer"', '"kv_both"').replace('"kv_consumer"', '"kv_both"') for word in args]


def llm_d(chosen: Chosen) -> Export:
    """Values of llm-d's modelservice chart: the pool that decodes, alone or with one that prefills."""
    scenario = chosen.scenario
    pools = _pools(scenario)
    sides = _one_or_a_pair(pools, "llm-d")
    document: dict[str, Any] = {
        "modelArtifacts": {"uri": f"hf://{model_name(pools[0].part)}", "size": "1Ti"},
        "routing": {"servicePort": _PORT, "proxy": {"enabled": len(sides) > 1}},
    }
    left = list(_router_left_out(scenario, pools, "llm-d's scheduler is set up by its own chart"))
    if scenario.router.policy == "llm_d" and not scenario.router.settings:
        left = []
    for role in ("decode", "prefill"):
        pool = sides.get(role) or (sides.get("both") if role == "decode" else None)
        if pool is None:
            document[role] = {"create": False}
            continue
        container = pool.container(pool.command.target, _BEHIND_PROXY if role == "decode" and len(sides) > 1 else _PORT)
        if pool.launch.chart_command is not None:
            # The chart itself puts the model, the tensor degree and the port before these.
            del container["command"]
            args = _without(_either_side(pool.args[1:]), "--tensor-parallel-size")
            container |= {"modelCommand": pool.launch.chart_command, "args": args}
        else:
            container["modelCommand"] = "custom"
        pod = pool.pod(container)
        selector = pod.pop("nodeSelector", {})
        types = {"labelKey": _PRODUCT, "labelValues": list(selector.values())}
        tensor = {"parallelism": {"tensor": pool.part.parallel.tensor}} if pool.launch.chart_command is not None else {}
        document[role] = {"create": True, "replicas": pool.part.replicas, **tensor}
        document[role] |= {**({"acceleratorTypes": types} if selector else {}), **pod}
        if pool.part.autoscale is not None:
            pool.command.carries("autoscale")
            pool.command.not_carried("autoscale: the chart has none; --for kubernetes writes what scales a Deployment")
    _names_left_out(pools)
    return _export(chosen, [document], pools, left)


def _names_left_out(pools: Sequence[_Pool]) -> None:
    for pool in pools:
        if pool.command.role not in ("both", pool.name):
            pool.command.not_carried(f"its name, in whose place its role stands ({pool.command.role})")


def kserve(chosen: Chosen) -> Export:
    """An InferenceService a pool, or an LLMInferenceService for a pair that prefills and decodes."""
    scenario = chosen.scenario
    pools = _pools(scenario)
    left = list(_router_left_out(scenario, pools, "KServe's gateway has its own"))
    if all(pool.command.role == "both" for pool in pools):
        return _export(chosen, [_inference_service(pool) for pool in pools], pools, left)
    sides = _one_or_a_pair(pools, "kserve")
    if any(pool.launch.chart_command is None for pool in pools):
        raise RooftraceError(
            f"--for kserve starts pairs that prefill and decode with {stacks()[CHARTED].title} alone; --for kubernetes takes any"
        )
    for pool in pools:
        if pool.part.autoscale is not None:
            pool.command.carries("autoscale")
            pool.command.not_carried("autoscale: an LLMInferenceService of a pair has none here")
    _names_left_out(pools)
    prefill, decode = (_llm_side(sides[role]) for role in ("prefill", "decode"))
    document = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "LLMInferenceService",
        "metadata": {"name": PREFIX.rstrip("-")},
        "spec": {
            "model": {"uri": f"hf://{model_name(pools[0].part)}", "name": model_name(pools[0].part)},
            "router": {"route": {}, "gateway": {}, "scheduler": {}},
            **decode,
            "prefill": prefill,
        },
    }
    return _export(chosen, [document], pools, left)


def _llm_side(pool: _Pool) -> dict[str, Any]:
    # KServe's own template has the image, the model and the port; this is how it takes more options.
    more = shlex.join(_without(_either_side(pool.args[1:]), "--tensor-parallel-size"))
    environment = [*([{"name": "VLLM_ADDITIONAL_ARGS", "value": more}] if more else []), *pool.environment]
    container = {"name": "main", "env": environment, "resources": pool.resources}
    parallel = {"tensor": pool.part.parallel.tensor}
    return {"replicas": pool.part.replicas, "parallelism": parallel, "template": pool.pod(container)}


def _inference_service(pool: _Pool) -> dict[str, Any]:
    fewest = most = pool.part.replicas
    scale: dict[str, Any] = {}
    found = _of_autoscale(pool)
    autoscale = pool.part.autoscale
    if found is not None and autoscale is not None:
        policy, settings, rest = found
        if policy == "concurrency":
            fewest, most = autoscale.min, autoscale.max
            scale = {"scaleMetric": "concurrency", "scaleTarget": settings.pop("target")}
            rest += [f"autoscale.policy.{key}: {value}" for key, value in settings.items()]
            rest += [f"autoscale.{key}: {value}" for key in ("down_window_s", "up_window_s")
                     if (value := getattr(autoscale, key))]  # fmt: skip
            if pool.part.replicas != max(fewest, 1):
                rest.append(f"replicas: {pool.part.replicas}; KServe starts with the fewest")
        else:
            rest.append(f"autoscale: {policy} has no counterpart in KServe; concurrency has")
        for text in rest:
            pool.command.not_carried(text)
    predictor = {"minReplicas": fewest, "maxReplicas": most, **scale, **pool.pod(pool.container("kserve-container"))}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": pool.called},
        "spec": {"predictor": predictor},
    }
