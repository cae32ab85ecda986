"""Manifests, compose files and values of charts as the servers that they start.

Kubernetes (Deployment, StatefulSet, Pod, LeaderWorkerSet, HorizontalPodAutoscaler, KEDA's ScaledObject), KServe, Dynamo's graphs,
RayService and Ray Serve, docker compose, and the values of vLLM's production stack and of llm-d's modelservice; from knowledge of
their schemas, but for Dynamo's, which a test lays beside the release's.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sim.errors import RooftraceError
from sim.launch.arguments import options_of
from sim.launch.engines import launches
from sim.launch.script import Script, read_container, read_script, split
from sim.scenario.yaml import parse_yaml

_ROUTERS: Mapping[str, str] = {
    "roundrobin": "round_robin",
    "round-robin": "round_robin",
    "random": "random",
    "power-of-two": "power_of_two",
    "least-loaded": "least_outstanding",
    "leastload": "least_outstanding",
    "prefixaware": "prefix",
    "kvaware": "prefix",
    "kv": "dynamo",
}
"""The scenario's routers by the names of the production stack and of Dynamo's frontend."""
CHARTED = next(name for name, launch in launches().items() if launch.chart_command is not None)
"""The engine that charts, Ray Serve and files of options alone start."""
_CHART_COMMAND, _ENTRY = launches()[CHARTED].chart_command, launches()[CHARTED].entry
_IMAGE = str(launches()[CHARTED].image).partition(":")[0]
PREFIX = "rooftrace-"
"""The beginning of the names of what is exported, the pool's name behind it."""
_WITHOUT_SERVERS = frozenset(
    [
        "Service",
        "ConfigMap",
        "Secret",
        "Namespace",
        "ServiceAccount",
        "PersistentVolumeClaim",
        "PersistentVolume",
        "Ingress",
        "Gateway",
        "HTTPRoute",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
        "NetworkPolicy",
        "PodMonitor",
        "ServiceMonitor",
        "PodDisruptionBudget",
    ]
)


def is_document(text: str) -> bool:
    """Whether *text* is YAML with keys, or JSON, rather than a command."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    return first.rstrip() == "---" or first.startswith("{") or re.match(r"(- )?[\w./\"'-]+:(\s|$)", first) is not None


def read_documents(text: str, source: str) -> Script:
    """The servers of all documents in *text*; RooftraceError where it is not YAML."""
    if "{{" in text:
        raise RooftraceError(f"{source} is a template; give what it makes (helm template CHART -f VALUES)")
    found = Script()
    scaled: dict[str, Mapping[str, Any]] = {}
    for part in re.split(r"^---.*$", text, flags=re.MULTILINE):
        document = parse_yaml(part, source)
        for each in _items(document):
            if each.get("kind") in ("HorizontalPodAutoscaler", "ScaledObject"):
                _autoscaler(each, scaled, found)
            else:
                found.add(_document(each))
    for name, settings in scaled.items():
        at = next((i for i, server in enumerate(found.servers) if server.name == name), None)
        if at is None:
            found.not_read(f"what scales {name}, which starts no server here")
        else:
            found.servers[at] = replace(found.servers[at], autoscale=settings)
    return found


def _items(document: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(document, list):
        for each in document:
            yield from _items(each)
    elif isinstance(document, Mapping):
        if document.get("kind") == "List":
            yield from _items(document.get("items"))
        else:
            yield document


def _map(value: Any, *path: str) -> Mapping[str, Any]:
    """The mapping at *path*, empty where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _words(value: Any) -> list[str]:
    """A list of words, or text as a shell takes it apart."""
    return split(value) if isinstance(value, str) else [str(each) for each in _list(value)]


def _name(document: Mapping[str, Any]) -> str | None:
    name = _map(document, "metadata").get("name")
    return name if isinstance(name, str) else None


def _document(document: Mapping[str, Any]) -> Script:
    kind = document.get("kind")
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind](document)
    if kind is not None:
        found = Script()
        found.not_read(f"{kind} {_name(document) or ''}".strip())
        if str(kind) not in _WITHOUT_SERVERS:
            found.notes[-1] += ", a kind that is not known"
        return found
    for key, read in _VALUES.items():
        if key in document:
            return read(document)
    options = options_of(CHARTED)
    if document and all(f"--{str(key).replace('_', '-')}" in options for key in document):
        words = [word for key, value in document.items() for word in _option(str(key), value)]
        return read_script(shlex.join([*_ENTRY, *words]))
    found = Script()
    found.not_read(f"keys {', '.join(map(str, list(document)[:8]))}")
    return found


def _option(key: str, value: Any) -> list[str]:
    """A key of a config as an option; None is left to the server."""
    name = "--" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", key).replace("_", "-").lower()
    if value is None or value is True:
        return [] if value is None else [name]
    if value is False:
        return [f"--no-{name[2:]}"]
    if isinstance(value, Mapping):
        return [name, json.dumps(value)]
    return [name, *map(str, value)] if isinstance(value, list) else [name, str(value)]


def _count(value: Any, default: int = 1) -> int:
    return value if type(value) is int and value >= 0 else default


def _pod(spec: Mapping[str, Any], more: Sequence[str] = ()) -> Script:
    """Servers of a pod's containers; *more*: options behind those of each."""
    found = Script()
    hardware = _device_of(spec)
    for each in _list(spec.get("containers")):
        if isinstance(each, Mapping):
            found.add(_container(each, more), lambda server: replace(server, hardware=hardware))
    return found


def _container(each: Mapping[str, Any], more: Sequence[str] = ()) -> Script:
    variables = _variables(each.get("env") or each.get("envs") or [])
    command, args = _words(each.get("command")), [*_words(each.get("args")), *more]
    extra = variables.pop("VLLM_ADDITIONAL_ARGS", "")
    if not command and each.get("modelCommand") == _CHART_COMMAND:
        command = list(_ENTRY)
    if command[-1:] == ["-c"] and len(args) > 1 + len(more):
        args = args[:1]  # What follows a script are its own arguments.
    return read_container(str(each.get("image", "")), command or None, [*args, *_words(extra)], variables)


def _variables(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(name): "" if value is None else str(value) for name, value in given.items()}
    found = {}
    for each in _list(given):
        if isinstance(each, Mapping) and "value" in each:
            found[str(each.get("name"))] = str(each["value"])
        elif isinstance(each, str):
            name, _, value = each.partition("=")
            found[name] = value
    return found


_PRODUCTS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "gpu.nvidia.com/class",
    "amd.com/gpu.product-name",
)


def _device_of(spec: Mapping[str, Any]) -> str | None:
    """The label of GPUs that a pod asks for."""
    labels = dict(_map(spec, "nodeSelector"))
    required = _map(spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in _list(required.get("nodeSelectorTerms")):
        for rule in _list(_map(term).get("matchExpressions")):
            values = _list(_map(rule).get("values"))
            if _map(rule).get("operator") == "In" and len(values) == 1:
                labels[str(rule.get("key"))] = values[0]
    return next((str(labels[key]) for key in _PRODUCTS if key in labels), None)


def _deployment(document: Mapping[str, Any]) -> Script:
    spec = _map(document, "spec")
    pod = spec if document.get("kind") == "Pod" else _map(spec, "template", "spec")
    return _as_pool(_pod(pod), _name(document), _count(spec.get("replicas")))


def _as_pool(of: Script, name: Any, replicas: int, role: str | None = None) -> Script:
    found = Script()
    name = name if isinstance(name, str) and name else None
    found.add(of, lambda server: replace(
        server, name=_plain(name), named=_ours(name), role=role or server.role, replicas=replicas * server.replicas))  # fmt: skip
    return found


def _ours(name: str | None) -> bool:
    return name is not None and name.startswith(PREFIX)


def _plain(name: str | None) -> str | None:
    """A name as pools have it: of exports without what all of them begin with."""
    return None if name is None else re.sub(r"[^\w-]", "-", name).removeprefix(PREFIX)


def _leader_workers(document: Mapping[str, Any]) -> Script:
    spec = _map(document, "spec")
    template = _map(spec, "leaderWorkerTemplate")
    leader = _map(template, "leaderTemplate", "spec") or _map(template, "workerTemplate", "spec")
    return _as_pool(_pod(leader), _name(document), _count(spec.get("replicas")))


def _dynamo(document: Mapping[str, Any]) -> Script:
    found, spec = Script(), _map(document, "spec")
    router = None
    components = [
        (str(_map(each).get("name")), _map(each), _map(each, "podTemplate", "spec"))
        for each in _list(spec.get("components"))
    ]
    for name, each in _map(spec, "services").items():
        main = _map(each, "extraPodSpec", "mainContainer")
        components.append((str(name), _map(each), {**_map(each, "extraPodSpec"), "containers": [main]}))
    for name, each, pod in components:
        kind = str(each.get("subComponentType") or each.get("type") or each.get("componentType"))
        if kind == "frontend":
            for container in _list(pod.get("containers")):
                mode = _variables(_map(container).get("env")).get("DYN_ROUTER_MODE")
                router = _ROUTERS.get(str(mode))
            continue
        role = kind if kind in ("prefill", "decode") else None
        name = f"{PREFIX}{name}" if _name(document) == PREFIX.rstrip("-") else name
        found.add(_as_pool(_pod(pod), name, _count(each.get("replicas")), role))
    if router is not None:
        found.servers = [replace(server, router=router) for server in found.servers]
    roles = {server.role for server in found.servers}
    if roles == {None, "prefill"}:  # A worker beside one that prefills decodes.
        found.servers = [replace(server, role=server.role or "decode") for server in found.servers]
    return found


def _inference_service(document: Mapping[str, Any]) -> Script:
    predictor = _map(document, "spec", "predictor")
    model = _map(predictor, "model")
    fewest = _count(predictor.get("minReplicas"))
    if model:
        args = [re.sub("^--model_id(=|$)", r"--model\1", word) for word in _words(model.get("args"))]
        uri = model.get("storageUri")
        if isinstance(uri, str) and uri.startswith("hf://"):
            args = ["--model", uri.removeprefix("hf://"), *args]
        pod = {**predictor, "containers": [{**model, "image": "huggingfaceserver", "args": args}]}
    else:
        pod = predictor
    found = _as_pool(_pod(pod), _name(document), max(fewest, 1))
    most = predictor.get("maxReplicas")
    if type(most) is int and most > fewest and found.servers:
        given = _scaling(predictor)
        if given is None:
            found.not_read(f"minReplicas {fewest} to maxReplicas {most}: autoscale says how machines come and go")
        else:
            found.servers[0] = replace(found.servers[0], autoscale={"policy": given, "min": fewest, "max": most})
    return found


def _scaling(predictor: Mapping[str, Any]) -> dict[str, Any] | None:
    """The target that KServe's predictor is scaled by, where it is the number of requests."""
    target = predictor.get("scaleTarget")
    if predictor.get("scaleMetric") == "concurrency" and isinstance(target, int | float):
        return {"policy": "concurrency", "target": target}
    return None


def _llm_service(document: Mapping[str, Any]) -> Script:
    spec = _map(document, "spec")
    uri = str(_map(spec, "model").get("uri", "")).removeprefix("hf://")
    found = Script()
    sides = [("decode" if "prefill" in spec else None, spec)]
    if "prefill" in spec:
        sides.insert(0, ("prefill", _map(spec, "prefill")))
    for role, side in sides:
        more = [word for key, value in _map(side, "parallelism").items() for word in _parallel(str(key), value)]
        pod = _map(side, "template") or {"containers": [{"name": "main"}]}
        containers = [
            {**each, "modelCommand": _CHART_COMMAND, "args": [uri, *_words(each.get("args"))]}
            if i == 0 and not each.get("command")
            else each
            for i, each in enumerate(map(_map, _list(pod.get("containers"))))
        ]
        part = _pod({**pod, "containers": containers}, more)
        found.add(_as_pool(part, role or _name(document), _count(side.get("replicas")), role))
    return found


_DEGREES = {"tensor": "tensor", "pipeline": "pipeline", "data": "data"}


def _parallel(key: str, value: Any) -> list[str]:
    if key == "expert":
        return ["--enable-expert-parallel"] if value else []
    return [f"--{_DEGREES[key]}-parallel-size", str(value)] if key in _DEGREES else [f"--parallelism-{key}", str(value)]


def _modelservice(document: Mapping[str, Any]) -> Script:
    """Values of llm-d's modelservice chart."""
    found = Script()
    artifacts = _map(document, "modelArtifacts")
    model = str(artifacts.get("uri", "")).removeprefix("hf://")
    sides = [role for role in ("prefill", "decode") if role in document and _map(document, role).get("create", True)]
    for role in sides:
        side = _map(document, role)
        more = [word for key, value in _map(side, "parallelism").items() for word in _parallel(str(key), value)]
        containers = [
            {**each, "args": [model, *_words(each.get("args"))]} if each.get("modelCommand") == _CHART_COMMAND else each
            for each in map(_map, _list(side.get("containers")))
        ]
        labels = _map(side, "acceleratorTypes")
        given = {str(labels.get("labelKey")): v for v in _list(labels.get("labelValues"))[:1]}
        selector = {**_map(side, "nodeSelector"), **given}
        part = _pod({**side, "containers": containers, "nodeSelector": selector}, more)
        found.add(_as_pool(part, role, _count(side.get("replicas")), role if len(sides) > 1 else None))
    return found


def _production_stack(document: Mapping[str, Any]) -> Script:
    """Values of vLLM's production stack."""
    found = Script()
    logic = _map(document, "routerSpec").get("routingLogic")
    router = _ROUTERS.get(str(logic))
    if logic is not None and router is None:
        found.not_read(f"routerSpec.routingLogic {logic}")
    for each in map(_map, _list(_map(document, "servingEngineSpec").get("modelSpec"))):
        config = dict(_map(each, "vllmConfig"))
        extra = _words(config.pop("extraArgs", []))
        for key in ("v1", "v0"):
            config.pop(key, None)
        words = [str(each.get("modelURL", "")), *(w for k, v in config.items() for w in _option(k, v)), *extra]
        variables = _variables(each.get("env"))
        image = f"{each.get('repository', _IMAGE)}:{each.get('tag', 'latest')}"
        part = read_container(image, _ENTRY, words, variables)
        hardware = _device_of({"nodeSelector": {
            str(_map(rule).get("key")): value
            for term in _list(each.get("nodeSelectorTerms")) for rule in _list(_map(term).get("matchExpressions"))
            for value in _list(_map(rule).get("values"))[:1]}})  # fmt: skip
        part.servers = [replace(server, hardware=hardware, router=router) for server in part.servers]
        found.add(_as_pool(part, each.get("name"), _count(each.get("replicaCount"))))
    return found


def _compose(document: Mapping[str, Any]) -> Script:
    found = Script()
    for name, each in _map(document, "services").items():
        if not isinstance(each, Mapping):
            continue
        entry = _words(each.get("entrypoint"))
        variables = _variables(each.get("environment") or [])
        part = read_container(str(each.get("image", "")), entry or None, _words(each.get("command")), variables)
        count = max(_count(_map(each, "deploy").get("replicas")), _count(each.get("scale")))
        found.add(_as_pool(part, str(name), count))
    return found


def _ray(document: Mapping[str, Any]) -> Script:
    """Ray Serve's config: its applications with llm_configs."""
    found = Script()
    configs = _list(document.get("llm_configs"))
    for application in _list(document.get("applications")):
        configs = [*configs, *_list(_map(application, "args").get("llm_configs"))]
    for each in configs:
        if not isinstance(each, Mapping):
            found.not_read(f"llm_configs: {each}; give the file itself")
            continue
        loading = _map(each, "model_loading_config")
        words = [str(loading.get("model_source") or loading.get("model_id"))]
        words += [word for key, value in _map(each, "engine_kwargs").items() for word in _option(str(key), value)]
        part = read_script(shlex.join([*_ENTRY, *words]))
        scaling = _map(each, "deployment_config", "autoscaling_config")
        fewest = _count(scaling.get("min_replicas"))
        if scaling.get("max_replicas", fewest) != fewest:
            found.not_read(f"autoscaling_config {json.dumps(dict(scaling))}: autoscale says how machines come and go")
        count = _count(_map(each, "deployment_config").get("num_replicas"), max(fewest, 1))
        device = each.get("accelerator_type")
        part.servers = [replace(server, hardware=None if device is None else str(device)) for server in part.servers]
        found.add(_as_pool(part, loading.get("model_id") if len(configs) > 1 else None, count))
    return found


def _ray_service(document: Mapping[str, Any]) -> Script:
    text = _map(document, "spec").get("serveConfigV2")
    return _ray(_map(parse_yaml(text, "serveConfigV2"))) if isinstance(text, str) else Script()


def _autoscaler(document: Mapping[str, Any], scaled: dict[str, Mapping[str, Any]], found: Script) -> None:
    """The settings of a HorizontalPodAutoscaler or a ScaledObject, by the name of what it scales."""
    spec = _map(document, "spec")
    name = _plain(str(_map(spec, "scaleTargetRef").get("name"))) or ""
    keda = document.get("kind") == "ScaledObject"
    fewest, most = ("minReplicaCount", "maxReplicaCount") if keda else ("minReplicas", "maxReplicas")
    limits = {"min": _count(spec.get(fewest), 0 if keda else 1), "max": _count(spec.get(most))}
    policy = _keda_policy(spec) if keda else _hpa_policy(spec)
    if policy is None:
        found.not_read(
            f"the metric of {document.get('kind')} {_name(document)}: autoscale takes target_tracking and concurrency"
        )
        return
    down = _map(spec, "advanced", "horizontalPodAutoscalerConfig", "behavior") if keda else _map(spec, "behavior")
    windows = {
        key: _map(down, side).get("stabilizationWindowSeconds")
        for key, side in (("down_window_s", "scaleDown"), ("up_window_s", "scaleUp"))
    }
    if down and windows["down_window_s"] is None:
        windows["down_window_s"] = 300  # Kubernetes' own, of a behavior that does not say it
    if any("policies" in _map(down, side) for side in ("scaleDown", "scaleUp")):
        found.not_read(
            f"the policies in behavior of {document.get('kind')} {_name(document)}: Kubernetes' own limits count"
        )
    scaled[name] = {"policy": policy, **limits, **{key: value for key, value in windows.items() if value is not None}}


METRICS: Mapping[str, str] = {name: of for launch in launches().values() for name, of in launch.metrics.items()}
"""The quantities that target_tracking measures, by the servers' metrics."""


def _hpa_policy(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    for each in _list(spec.get("metrics")):
        pods = _map(each, "pods")
        name = str(_map(pods, "metric").get("name"))
        measure = next((of for metric, of in METRICS.items() if name in (metric, metric.replace(":", "_"))), None)
        target = _quantity(_map(pods, "target").get("averageValue"))
        if measure is not None and target is not None:
            return {"policy": "target_tracking", "measure": measure, "target": target}
    return None


def _keda_policy(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    for each in _list(spec.get("triggers")):
        meta = _map(each, "metadata")
        query, target = str(meta.get("query")), _quantity(meta.get("threshold"))
        if "num_requests_running" in query and "num_requests_waiting" in query and target is not None:
            return {"policy": "concurrency", "target": target}
    return None


def _quantity(value: Any) -> float | None:
    """A number as Kubernetes writes it: 24, "24" or 800m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", str(value))
    return None if match is None else float(match[1]) / (1000 if match[2] else 1)


_KINDS: Mapping[Any, Callable[[Mapping[str, Any]], Script]] = {
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "Pod"), _deployment),
    "LeaderWorkerSet": _leader_workers,
    "DynamoGraphDeployment": _dynamo,
    "InferenceService": _inference_service,
    "LLMInferenceService": _llm_service,
    "RayService": _ray_service,
}
_VALUES: Mapping[str, Callable[[Mapping[str, Any]], Script]] = {
    "servingEngineSpec": _production_stack,
    "modelArtifacts": _modelservice,
    "services": _compose,
    "applications": _ray,
    "llm_configs": _ray,
}
"""Files without a kind, by a key that they have."""
