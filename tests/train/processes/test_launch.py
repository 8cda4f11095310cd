"""Which process of how many: every launcher's environment, and what to say where it tells too little."""

import signal
import socket
import subprocess
import sys

import pytest

from train.__main__ import main
from train.checks import check, check_alone
from train.config import ConfigError, LaunchConfig, configure
from train.processes.devices import set_devices
from train.processes.launch import Launch, bind_address, detect_launch

SLURM = {
    "SLURM_JOB_ID": "771",
    "SLURM_STEP_NODELIST": "node[003-006]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"}
ACCELERATOR = LaunchConfig(devices="accelerator")


@pytest.fixture
def kubernetes_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "kubernetes" else None)


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "asked, environ",
    [
        (LaunchConfig(), {"PATH": "/bin"}),
        (ACCELERATOR, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}),  # srun -n 1
        (ACCELERATOR, without(SLURM, "SLURM_STEP_NODELIST")),  # in sbatch's own shell
        (ACCELERATOR, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}),
        (ACCELERATOR, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "notebook"}),  # no indexed job
        (ACCELERATOR, {"TPU_WORKER_HOSTNAMES": "localhost"}),
        (LaunchConfig(), {"TPU_WORKER_HOSTNAMES": "a,b"}),  # virtual devices on a TPU machine
    ],
    ids=["a shell", "one task", "sbatch", "mpirun -n 1", "a pod", "one TPU machine", "virtual devices"],
)
def test_a_cluster_around_one_process_is_no_launcher(asked, environ):
    assert detect_launch(asked, environ) is None


OPTIONS = LaunchConfig(coordinator="10.0.0.5:8476", num_processes=4, process_id=3)
NAMED = LaunchConfig(coordinator="train-0.train:8476", num_processes=8)


@pytest.mark.parametrize(
    "asked, environ, expected",
    [
        (OPTIONS, {}, Launch("options", "10.0.0.5:8476", 4, 3, "deactivate")),
        (ACCELERATOR, SLURM, Launch("SLURM", None, 4, 2, "slurm")),
        (LaunchConfig(), OPEN_MPI, Launch("Open MPI", None, 8, 7, "ompi")),
        (LaunchConfig(), SLURM | OPEN_MPI, Launch("Open MPI", None, 8, 7, "ompi")),
        (NAMED, KUBERNETES, Launch("Kubernetes", "train-0.train:8476", 8, 3, "deactivate")),
    ],
)
def test_launchers_are_recognised(asked, environ, expected):
    assert detect_launch(asked, environ) == expected


def test_open_mpi_5_needs_the_address_alone():
    environ = without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri")
    with pytest.raises(ConfigError, match="Open MPI: --coordinator not known.*Open MPI 5"):
        detect_launch(LaunchConfig(), environ)
    found = detect_launch(LaunchConfig(coordinator="head:1234"), environ)
    assert found == Launch("Open MPI", "head:1234", 8, 7, "deactivate")


@pytest.mark.parametrize(
    "environ",
    [
        {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"},
        {"TPU_PROCESS_ADDRESSES": "a:8476,b:8476"},
        {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_COORDINATOR_ADDRESS": "a"},
        KUBERNETES | {"TPU_WORKER_HOSTNAMES": "a,b"},
    ],
)
def test_tpu_pods_are_left_to_jax(environ):
    found = detect_launch(ACCELERATOR, environ)
    assert found is not None and found.system == "TPU pod"
    assert (found.coordinator, found.num_processes, found.detection) == (None, None, None)


def test_kubernetes_is_asked_by_jax(kubernetes_package):
    assert detect_launch(ACCELERATOR, KUBERNETES) == Launch("Kubernetes", None, None, 3, None)


def test_kubernetes_without_its_package_needs_options():
    told = "--coordinator and --num-processes not known.*install 'jax\\[k8s\\]'"
    with pytest.raises(ConfigError, match=told):
        detect_launch(ACCELERATOR, KUBERNETES)


def test_virtual_devices_cannot_wait_for_kubernetes_to_count(kubernetes_package):
    with pytest.raises(ConfigError, match="Kubernetes: --devices cpu .* give --num-processes"):
        detect_launch(LaunchConfig(), KUBERNETES)


@pytest.mark.parametrize(
    ("asked", "environ", "says"),
    [
        (LaunchConfig(coordinator="a:1"), {}, "options: --num-processes and --process-id not known"),
        (LaunchConfig(num_processes=2, process_id=0), {}, "options: --coordinator not known"),
        (LaunchConfig(coordinator="a:1", num_processes=2, process_id=2), {}, "--process-id 2: must be from 0 to 1"),
        (LaunchConfig(), SLURM | {"SLURM_PROCID": "two"}, "SLURM_PROCID='two' in the environment: must be a number"),
    ],
)  # fmt: skip
def test_half_an_answer_is_an_error(asked, environ, says):
    with pytest.raises(ConfigError, match=says):
        detect_launch(asked, environ)


@pytest.mark.parametrize(
    ("coordinator", "asked", "binds"),
    [
        ("127.0.0.1:99", None, "127.0.0.1:99"),
        ("localhost:99", None, "localhost:99"),
        ("127.0.0.1:99", "0.0.0.0:99", "0.0.0.0:99"),
        ("192.0.2.77:99", None, None),  # a documentation address: no interface of this machine has it
        ("head-node:99", None, None),
        (None, None, None),
    ],
)
def test_the_service_listens_where_it_is_told(coordinator, asked, binds):
    assert bind_address(coordinator, asked) == binds


def test_an_own_address_is_the_only_one_listened_at():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    assert bind_address("[::1]:99", None) == "[::1]:99"


def test_devices_are_shared_out():
    environ: dict[str, str] = {}
    set_devices(configure(pp=4, ep=2), environ, num_processes=4)
    assert "--xla_force_host_platform_device_count=2" in environ["XLA_FLAGS"]
    told = "--pp 4 --ep 2: 8 devices cannot be shared out equally over 3 processes"
    with pytest.raises(ConfigError, match=told):
        set_devices(configure(pp=4, ep=2), {}, num_processes=3)


@pytest.mark.parametrize("one_gpu", [False, True])
def test_processes_on_gpus_are_allowed(one_gpu):
    check(configure(processes=2, devices="accelerator", pp=2, ep=1, one_gpu=one_gpu))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"processes": 2, "coordinator": "a:1"}, "--processes 2 starts processes on this machine"),
        (
            {"processes": 2, "one_gpu": True},
            "--one-gpu: is for several processes on a GPU; give --processes and",
        ),
        ({"one_gpu": True, "devices": "accelerator"}, "--one-gpu: is for several processes on a GPU"),
        (
            {"restarts": 5},
            "--restarts: is for processes that --processes starts and .*; give --processes, or take it",
        ),
        ({"shrink": True, "num_processes": 2}, "--shrink: is for processes that --processes starts"),
        ({"processes": 0}, "--processes 0: must be at least 1"),
        ({"restarts": -1}, "--restarts -1: must not be negative"),
        ({"patience": 0.0}, "--patience 0.0: must be above 0"),
        ({"coordinator": "head"}, "--coordinator head: must be HOST:PORT"),
    ],
)
def test_options_that_do_not_fit(changes, says):
    with pytest.raises(ConfigError, match=says):
        check(configure(**changes))


@pytest.mark.parametrize(
    "given",
    [("--patience", "60.0"), ("--straggler-every", "7"), ("--coordinator-bind", "10.0.0.1:80")],
    ids=" ".join,
)
def test_options_of_several_processes_do_not_pass_for_those_of_one(given, capsys, monkeypatch):
    monkeypatch.setattr("train.__main__.train", lambda *_, **__: None)
    assert main(given) == 2
    told = "is for one of several processes, and this one is alone; give --processes, or take it out"
    assert capsys.readouterr().err == f"error: {' '.join(given)}: {told}\n"


def test_options_that_ask_for_nothing_fit_one_process():
    config = configure(restarts=0, straggler_every=0)
    check(config)
    check_alone(config)


TOLD_EARLY = """
import os, signal, time
from dualpipe_jax.processes import free_port
from train.config import LaunchConfig
from train.processes.launch import detect_launch, initialize
asked = LaunchConfig(coordinator=f"127.0.0.1:{free_port()}", num_processes=1, process_id=0)
initialize(detect_launch(asked), asked)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
"""


def test_sigterm_ends_one_process_that_has_not_begun_its_steps():
    """As without a coordinator: JAX noted the signal, and nobody asked JAX."""
    done = subprocess.run([sys.executable, "-c", TOLD_EARLY], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGTERM
