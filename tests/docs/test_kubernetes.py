"""The manifests of docs/deploy/kubernetes fit Kubernetes' schemas, each other, and what the server offers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.host.options.server import parse_arguments, server_parser
from tests.docs.blocks import ROOT

yaml = pytest.importorskip("yaml", reason="the extra dev is not installed")

FOLDER = ROOT / "docs" / "deploy" / "kubernetes"
DOCKERFILE = FOLDER.parent / "Dockerfile.gpu"
FILES = sorted(FOLDER.glob("*.yaml"))
KUBERNETES = "1.33"
# Custom resources have no schema in any package: what each must have, by kind, as paths in it.
CUSTOM = {
    "InferencePool": {
        "apiVersion": "inference.networking.k8s.io/v1",
        "paths": (
            "selector.matchLabels",
            "targetPorts.0.number",
            "endpointPickerRef.name",
            "endpointPickerRef.port.number",
        ),
    },
    "LeaderWorkerSet": {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "paths": (
            "replicas",
            "leaderWorkerTemplate.size",
            "leaderWorkerTemplate.restartPolicy",
            "leaderWorkerTemplate.workerTemplate.spec.containers.0.args",
        ),
    },
    "Gateway": {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "paths": ("gatewayClassName", "listeners.0.name", "listeners.0.port", "listeners.0.protocol"),
    },
    "HTTPRoute": {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "paths": ("parentRefs.0.name", "rules.0.backendRefs.0.name", "rules.0.matches.0.path.value"),
    },
}


def documents() -> list[dict[str, Any]]:
    return [document for path in FILES for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in documents() if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def server() -> dict[str, Any]:
    pod = named("Deployment", "minisgl")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return container


def test_there_are_manifests() -> None:
    assert [path.name for path in FILES] == ["autoscaling.yaml", "inference-gateway.yaml", "nodes.yaml", "server.yaml"]


@pytest.mark.parametrize("document", documents(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_a_manifest_fits_its_schema(document: dict[str, Any]) -> None:
    custom = CUSTOM.get(document["kind"])
    if custom is None:
        kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra dev is not installed")
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    assert document["apiVersion"] == custom["apiVersion"]
    for path in custom["paths"]:
        value: Any = document["spec"]
        for part in path.split("."):
            value = value[int(part) if part.isdigit() else part]
        assert value


def image_arguments() -> list[str]:
    """Of `minisgl serve`, which stand in the image."""
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)[1])
    return list(entry[entry.index("serve") + 1 :])


def test_the_server_takes_its_options() -> None:
    container = server()
    arguments = [*image_arguments(), *container["args"]]
    options, rest = server_parser("minisgl serve").parse_known_args(arguments)
    assert rest == []
    assert options.host == "0.0.0.0"
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == int(re.search(r"--dp=(\d+)", " ".join(container["args"]))[1])
    spec = named("Deployment", "minisgl")["spec"]["template"]["spec"]
    assert f"--uid {spec['securityContext']['runAsUser']} " in DOCKERFILE.read_text(encoding="utf-8")
    exit_timeout = int(re.search(r"--exit-timeout=(\d+)", " ".join(container["args"]))[1])
    assert spec["terminationGracePeriodSeconds"] >= exit_timeout + 10


def test_a_group_of_pods_is_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = named("LeaderWorkerSet", "minisgl-nodes")["spec"]["leaderWorkerTemplate"]
    template = spec["workerTemplate"]
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra dev is not installed")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "minisgl-nodes-0"}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    assert spec["restartPolicy"] in ("None", "RecreateGroupOnPodRestart")
    (container,) = template["spec"]["containers"]
    monkeypatch.setenv(container["env"][0]["name"], "the secret of the group")
    monkeypatch.setenv("LWS_GROUP_SIZE", str(spec["size"]))
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "minisgl-nodes-0.minisgl-nodes.default")
    arguments = [
        *image_arguments(),
        *(one.replace("$(LWS_GROUP_SIZE)", str(spec["size"])) for one in container["args"]),
    ]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for index in range(spec["size"]):
        monkeypatch.setenv("LWS_WORKER_INDEX", str(index))
        parsed = parse_arguments(arguments)
        assert parsed.server.node_rank == index
        options = parsed.engine_parameters
        assert options["rendezvous"] == f"minisgl-nodes-0.minisgl-nodes.default:{ports['rendezvous']}"
        assert int(options["tp"]) == spec["size"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    assert {port["targetPort"] for port in named("Service", "minisgl-nodes-server")["spec"]["ports"]} <= set(ports)
    policy = named("NetworkPolicy", "minisgl-nodes")["spec"]
    labels = template["metadata"]["labels"]
    among_nodes, for_clients = policy["ingress"]
    assert policy["podSelector"]["matchLabels"] == labels == among_nodes["from"][0]["podSelector"]["matchLabels"]
    assert {one["port"] for one in for_clients["ports"]} == {ports[name] for name in ports if name != "rendezvous"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_makes_the_volumes_that_it_claims(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    made = {one["metadata"]["name"] for one in yaml.safe_load_all(text) if one["kind"] == "PersistentVolumeClaim"}
    assert set(re.findall(r"claimName: ([\w-]+)", text)) == made


def test_the_page_says_how_long_a_start_may_take() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    minutes = {}
    for name in ("server.yaml", "nodes.yaml"):
        found = re.search(
            r"startupProbe:.*?periodSeconds: (\d+).*?failureThreshold: (\d+)", (FOLDER / name).read_text(), re.DOTALL
        )
        assert found is not None
        minutes[name] = int(found[1]) * int(found[2]) / 60
    assert minutes == {"server.yaml": 30, "nodes.yaml": 60}
    assert "30 minutes in `server.yaml`, an hour in `nodes.yaml`, downloads included" in page


def test_ports_are_those_of_the_server() -> None:
    container = server()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    defaults = vars(server_parser("minisgl serve").parse_args([]))
    for name in ("http", "grpc", "metrics", "health", "openai"):
        assert ports[name] == defaults[f"{name}_port"]
    assert f":{ports['kv-events']}" in " ".join(container["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert {port["targetPort"] for port in named("Service", "minisgl")["spec"]["ports"]} <= set(ports)
    assert named("InferencePool", "minisgl")["spec"]["targetPorts"] == [{"number": ports["openai"]}]
    annotations = named("Deployment", "minisgl")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])


def test_selectors_find_their_pods() -> None:
    for name in ("minisgl", "minisgl-epp"):
        spec = named("Deployment", name)["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels == named("Service", name)["spec"]["selector"]
        mounted = {mount["name"] for mount in spec["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    pool = named("InferencePool", "minisgl")["spec"]
    assert pool["selector"] == named("Deployment", "minisgl")["spec"]["selector"]
    picker = named("Service", pool["endpointPickerRef"]["name"])
    assert pool["endpointPickerRef"]["port"]["number"] == picker["spec"]["ports"][0]["port"]
    scaled = named("HorizontalPodAutoscaler", "minisgl")["spec"]["scaleTargetRef"]
    assert named(scaled["kind"], scaled["name"])["apiVersion"] == scaled["apiVersion"]


def test_metrics_are_those_of_the_server() -> None:
    known = set(re.findall(r'_Series\(\s*"(minisgl_\w+)"', _source("serving/metrics.py")))
    used = set(re.findall(r"minisgl_\w+", "".join(path.read_text(encoding="utf-8") for path in FILES)))
    page = re.findall(r"`?(minisgl_(?:requests|kv)_\w+)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert used >= {"minisgl_requests_waiting", "minisgl_kv_cache_usage_ratio"}
    assert used | set(page) <= known
    operations = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert all(f"`{name}" in operations for name in used)


def _source(path: str) -> str:
    return (Path(ROOT) / "minisgl_backend" / path).read_text(encoding="utf-8")
