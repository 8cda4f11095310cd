"""The files of docs/replicas fit the server: its routes, its options, its times, and each other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dualpipe_jax.command.line import read
from models.decode.text import ByteTokenizer
from models.serve import Runner, Served, make_app
from models.serve.app import SLOW_READER_SECONDS
from tests.models.serve.running import Slow
from train.generate.serve import Options

FOLDER = Path(__file__).parent.parent / "docs" / "replicas"
HAPROXY = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
CONFIGURATION = (FOLDER / "haproxy.cfg").read_text()


def routes():
    return {route.path for route in make_app(Runner(Slow(), 1), Served("tiny", ByteTokenizer())).routes}


def asked(words):
    return read(Options, "scripts/serve", words)


def one_number(pattern):
    (found,) = re.findall(pattern, CONFIGURATION)
    return int(found)


def test_what_the_balancer_asks_is_there_and_it_notices_an_end_in_time():
    assert re.findall(r"http-check send meth GET uri (\S+)", CONFIGURATION) == ["/health"]
    assert "/health" in routes()
    noticed = one_number(r"inter (\d+)ms") * (one_number(r"fall (\d+)") + 1) / 1000
    replica = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["one"]
    options = asked(replica["command"])
    assert noticed < options.shutdown_delay
    assert one_number(r"maxconn (\d+)") < options.address_connections <= 256
    assert one_number(r"timeout server (\d+)s") > options.max_seconds + SLOW_READER_SECONDS


@pytest.mark.skipif(HAPROXY is None, reason="there is no haproxy")
def test_haproxy_takes_its_configuration():
    environ = {"BIND": "127.0.0.1:8000", "REPLICA_ONE": "127.0.0.1:8001", "REPLICA_TWO": "127.0.0.1:8002"}
    command = [HAPROXY, "-c", "-f", str(FOLDER / "haproxy.cfg")]
    subprocess.run(command, env=environ, check=True, capture_output=True)


def test_the_compose_file():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    one, two, balancer = (compose["services"][name] for name in ("one", "two", "balancer"))
    assert one == two
    options = asked(one["command"])
    folders = {volume.rsplit(":", 2 if volume.endswith(":ro") else 1)[1] for volume in one["volumes"]}
    assert folders == {str(options.source), str(options.prefix_cache)}
    (path,) = re.findall(rf"http://127.0.0.1:{options.port}(/\w+)", one["healthcheck"]["test"][-1])
    assert path == "/health"
    compile(one["healthcheck"]["test"][-1], "healthcheck", "exec")
    assert int(one["stop_grace_period"].removesuffix("s")) > (
        options.shutdown_delay + options.grace + SLOW_READER_SECONDS
    )
    environment = balancer["environment"]
    assert set(re.findall(r'"\$\{(\w+)\}"', CONFIGURATION)) == environment.keys()
    assert environment["REPLICA_ONE"] == f"one:{options.port}"
    assert environment["REPLICA_TWO"] == f"two:{options.port}"
    assert balancer["ports"] == [f"8000{environment['BIND']}"]
    for file in (
        balancer["volumes"][0].split(":")[0],
        f"{one['build']['context']}/{one['build']['dockerfile']}",
    ):
        assert (FOLDER / file).is_file()


def test_the_manifest():
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    options, (port,) = asked(container["args"]), container["ports"]
    assert port["containerPort"] == options.port
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/health",
        "liveness": "/live",
    }
    assert {"/health", "/live"} <= routes()
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    readiness = container["readinessProbe"]
    assert readiness["periodSeconds"] * (readiness["failureThreshold"] + 1) < options.shutdown_delay
    assert (
        spec["terminationGracePeriodSeconds"] > options.shutdown_delay + options.grace + SLOW_READER_SECONDS
    )
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
        str(options.source),
        str(options.prefix_cache),
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]


def test_the_image_has_what_the_server_needs(tmp_path):
    """What is copied into it, in an empty folder, answers --help by the image's entry point."""
    text = (FOLDER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.M):
        *sources, _ = line.split()
        for source in sources:
            place = FOLDER.parent.parent / source
            if place.is_dir():
                shutil.copytree(place, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(place, tmp_path)
    (entry,) = re.findall(r'^ENTRYPOINT \["python", "-P", "-m", "([\w.]+)"\]$', text, re.M)
    code = f"import {entry} as it; assert it.__file__.startswith({str(tmp_path)!r}), it.__file__; it.main(['--help'])"
    told = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0 and "--shutdown-delay" in told.stdout, told.stderr
