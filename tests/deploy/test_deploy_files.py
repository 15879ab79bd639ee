"""The files of deploy/, checked with their own tools: image, compose files, chart, unit, dashboard, alerts, flags."""

from __future__ import annotations

import configparser
import itertools
import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from spillover.cli.main import main
from spillover.cli.serve import serve
from spillover.server.api.probes import PROBES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "spillover"
KUBERNETES = "1.34"
OPERATE = (ROOT / "docs" / "operate.md").read_text()
ALL_ON = {
    "replicas": 3, "gpu": {"count": 2, "runtimeClassName": "nvidia"}, "apiKeys": {"existingSecret": "keys"},
    "huggingFace": {"existingSecret": "hub"}, "persistence": {"enabled": True, "storageClass": "fast"},
    "metrics": {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")},
    "config": {"model": "org/model", "disk": ["/var/lib/spillover/kv:50GB"], "ssl-certfile": "/tls/tls.crt",
               "allowed-host": ["models.example.org"], "enforce-eager": True},
    "shutdown": {"preStopSeconds": 7, "delaySeconds": 11, "drainSeconds": 300},
    "autoscaling": {"enabled": True, "maxReplicas": 7},
    "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "8"}], "podLabels": {"team": "models"},
}


def tool(name: str) -> str:
    """Return the path of a program in this environment, or in PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def done(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=DEPLOY)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def flags_of(file: Path) -> dict[str, Any]:
    """Return the parameters of `spill serve --config FILE`; fail on unknown flags or invalid values."""
    with main.make_context("spill", ["serve"]) as outer:
        return serve.make_context("serve", ["--config", str(file)], parent=outer).params


# The image


def test_the_image_passes_its_linter_and_runs_as_nobody_special() -> None:
    done(tool("hadolint"), "--failure-threshold", "info", "Dockerfile")
    text = (DEPLOY / "Dockerfile").read_text()
    last = text[text.rindex("FROM "):]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert "HEALTHCHECK" in last
    assert re.search(r"SPILLOVER_HEALTH_URL=http://127.0.0.1:8000(/\w+)", text)[1] in PROBES  # type: ignore[index]
    assert {"cpu", "cuda"} <= set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    copied = [name.rstrip("/") for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE)
              for name in line.split()]
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in kept, f"{name} is not in the build's context"


# Compose


def test_compose_files_are_what_their_schema_says_and_mount_what_is_there() -> None:
    files = sorted(DEPLOY.glob("compose*.yaml"))
    assert len(files) == 3
    done(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, files))
    for service in (service for file in files for service in yaml.safe_load(file.read_text())["services"].values()):
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), source


def test_compose_waits_longer_than_the_server_drains() -> None:
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["spillover"]
    flags = flags_of(DEPLOY / "compose" / "serve.toml")
    grace = int(composed["stop_grace_period"].removesuffix("s"))
    assert grace > flags["drain_seconds"] + flags["shutdown_delay_seconds"]
    assert flags["remote"] == "redis://valkey:6379"
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())
    assert scraped["scrape_configs"][0]["job_name"] == "spillover"  # the name that the alerts use


# The unit


@pytest.mark.parametrize("name", ["compose", "systemd"])
def test_every_flag_of_the_example_files_is_one(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / name / "serve.toml").read_text()
    whole = re.sub(r"^# ([a-z-]+ = )", r"\1", text, flags=re.MULTILINE)
    (tmp_path / "serve.toml").write_text(whole)
    assert len(tomllib.loads(whole)) > len(tomllib.loads(text))
    flags_of(tmp_path / "serve.toml")


def test_the_unit_is_one_and_waits_longer_than_the_server_drains(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "spillover.service").read_text()
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    flags = flags_of(DEPLOY / "systemd" / "serve.toml")
    assert int(service["TimeoutStopSec"]) > flags["drain_seconds"] + flags["shutdown_delay_seconds"]
    assert (service["Type"], service["User"], service["KillMode"]) == ("notify", "spillover", "mixed")
    assert flags["api_key_file"], "a reload by SIGHUP would end a server without a file of keys"
    if shutil.which("systemd-analyze"):
        file = tmp_path / "spillover.service"
        file.write_text(text.replace("/opt/spillover/bin/spill", sys.executable))
        done("systemd-analyze", "verify", str(file))


# The chart


@pytest.fixture(scope="module")
def helm() -> str:
    if platform.machine() != "x86_64" and shutil.which("helm") is None:
        pytest.skip("no helm for this machine")
    return tool("helm")


def rendered(helm: str, folder: Path, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the chart's manifests by kind, each checked against Kubernetes' own schema."""
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    text = done(helm, "template", "chat", str(CHART), "--namespace", "models", "-f", str(folder / "values.yaml"))
    manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    for manifest in manifests:
        if manifest["apiVersion"] not in ("monitoring.coreos.com/v1", "keda.sh/v1alpha1"):
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    return {f"{manifest['kind']}/{manifest['metadata']['name']}": manifest for manifest in manifests}


@pytest.mark.parametrize("values", [{}, ALL_ON], ids=["default", "all on"])
def test_the_chart_renders_to_what_kubernetes_takes(helm: str, values: dict[str, Any], tmp_path: Path) -> None:
    made = rendered(helm, tmp_path, values)
    pod = made["Deployment/chat-spillover"]["spec"]["template"]["spec"]
    [container] = pod["containers"]

    config = made["ConfigMap/chat-spillover"]["data"]["serve.json"]
    (tmp_path / "serve.json").write_text(config)
    flags = flags_of(tmp_path / "serve.json")
    grace = pod["terminationGracePeriodSeconds"]
    slept = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert grace > slept + flags["shutdown_delay_seconds"] + flags["drain_seconds"]
    assert "chat-spillover.models.svc" in flags["allowed_hosts"]
    scheme = "HTTPS" if flags["ssl_certfile"] else "HTTP"
    assert {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "startupProbe": {"path": "/startupz", "port": "http", "scheme": scheme},
        "livenessProbe": {"path": "/livez", "port": "http", "scheme": scheme},
        "readinessProbe": {"path": "/readyz", "port": "http", "scheme": scheme}}
    assert all(container[name]["httpGet"]["path"] in PROBES for name in ("startupProbe", "livenessProbe"))
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (container["args"][1], *([flags["api_key_file"]] if flags["api_key_file"] else [])):
        assert str(Path(path).parent) in mounted
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    if not values:
        assert container["image"].endswith("-cpu")
        assert not [name for name in made if name.startswith(("PodDisruptionBudget", "ServiceMonitor"))]
        return
    assert container["image"].endswith("-cuda")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "replicas" not in made["Deployment/chat-spillover"]["spec"]  # set by KEDA
    assert made["ScaledObject/chat-spillover"]["spec"]["maxReplicaCount"] == 7
    assert flags["disk"] == ("/var/lib/spillover/kv:50GB",)
    assert made["PodDisruptionBudget/chat-spillover"]["spec"]["maxUnavailable"] == 1
    alerts = yaml.safe_load((DEPLOY / "observability" / "alerts.yaml").read_text())
    assert made["PrometheusRule/chat-spillover"]["spec"] == alerts
    dashboard = json.loads((DEPLOY / "observability" / "dashboard.json").read_text())
    assert json.loads(made["ConfigMap/chat-spillover-dashboard"]["data"]["spillover.json"]) == dashboard
    assert made["ServiceMonitor/chat-spillover"]["spec"]["endpoints"][0]["scheme"] == "https"


def test_the_chart_passes_its_linter_and_refuses_what_it_decides_itself(helm: str, tmp_path: Path) -> None:
    done(helm, "lint", "--strict", str(CHART))
    for wrong in ({"replica": 2}, {"config": {"port": 9}}, {"shutdown": {"drainSeconds": "long"}}):
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(wrong))
        ended = subprocess.run([helm, "template", "x", str(CHART), "-f", str(tmp_path / "values.yaml")],
                               capture_output=True, text=True, timeout=60)
        assert ended.returncode != 0
        assert "values don't meet the specifications of the schema" in ended.stderr


# Dashboard and alerts


def test_panels_do_not_lie_over_each_other() -> None:
    panels = json.loads((DEPLOY / "observability" / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        apart = (one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
                 or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"])
        assert apart, (one, other)


def test_every_alert_says_what_happened_and_the_docs_what_to_do() -> None:
    [group] = yaml.safe_load((DEPLOY / "observability" / "alerts.yaml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) > 8
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert f"`{rule['alert']}`" in OPERATE, f"docs/operate.md says nothing of {rule['alert']}"
