"""How one process of several finds the others. No JAX until ``initialize``: devices are set before it is imported."""

import dataclasses
import importlib.util
import ipaddress
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from dualpipe_jax.installing import install_command
from train.config import ConfigError, LaunchConfig

Environ = Mapping[str, str]

INITIALIZATION_S = 300
"""Seconds that the first process waits for the last."""

HEARTBEAT_S = 60
"""Seconds without a sign of life of one process after which the coordination service ends every process. With 20, a
loaded machine that was compiling was once taken for dead; JAX's default is 100."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How this process joins the others. Values that are None are left to JAX's own detection.

    Attributes:
      system: the origin of these values: "options", "Open MPI", "SLURM", "TPU pod" or "Kubernetes".
      coordinator: ``host:port`` of process 0.
      num_processes: the number of processes.
      process_id: the number of this process.
      detection: JAX's name of the system. "deactivate" keeps JAX from asking other systems.
    """

    system: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    detection: str | None = None


def detect_launch(asked: LaunchConfig, environ: Environ = os.environ) -> Launch | None:
    """How this process joins others, by its options and the launcher's environment variables; None if it is alone.

    Options win over the environment, and may complete it. A system is recognised by variables that only its launched
    jobs have: a shell in a SLURM allocation, or a pod that belongs to no indexed job, is a run of its own.

    Raises:
      ConfigError: too little is known, or the known values contradict each other.
    """
    # In JAX's own order: mpirun within a SLURM job is Open MPI's, a TPU pod on Kubernetes is a TPU pod.
    found = _open_mpi(environ) or _slurm(environ)
    if found is None and asked.devices != "cpu":
        found = _tpu_pod(environ)
    found = found or _kubernetes(environ)
    given = {name: value for name in FLAGS if (value := getattr(asked, name)) is not None}
    if found is None and not given:
        return None
    launch = dataclasses.replace(found or Launch("options"), **given)
    if found is None or (None not in (launch.coordinator, launch.num_processes) and found.detection is None):
        launch = dataclasses.replace(launch, detection="deactivate")
    missing = [flag for name, flag in FLAGS.items() if getattr(launch, name) is None]
    if missing and (found is None or not _detected_by_jax(launch, environ)):
        raise ConfigError(
            f"{launch.system}: {' and '.join(missing)} not known; one process of several needs --coordinator "
            "HOST:PORT, --num-processes N and --process-id I" + HINTS.get(launch.system, "")
        )
    if launch.num_processes is None:
        if asked.devices == "cpu":
            raise ConfigError(
                f"{launch.system}: --devices cpu shares its devices out before JAX can ask how many processes "
                "there are; give --num-processes"
            )
        return launch
    if launch.process_id is not None and not 0 <= launch.process_id < launch.num_processes:
        raise ConfigError(
            f"--process-id {launch.process_id}: must be from 0 to {launch.num_processes - 1}, for --num-processes is "
            f"{launch.num_processes}"
        )
    return launch if launch.num_processes > 1 or given else None


_OPEN_MPI_URI = "OMPI_MCA_orte_hnp_uri"

FLAGS = {"coordinator": "--coordinator", "num_processes": "--num-processes", "process_id": "--process-id"}

HINTS = {
    "Open MPI": " (Open MPI 5 no longer tells where its first process is)",
    "Kubernetes": f" (or the package `kubernetes`, by which JAX asks the cluster: {install_command('jax[k8s]')})",
}


def _open_mpi(environ: Environ) -> Launch | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size, rank = (_number(environ, f"OMPI_COMM_WORLD_{what}") for what in ("SIZE", "RANK"))
    known = "ompi" if _OPEN_MPI_URI in environ else "deactivate"
    return Launch("Open MPI", None, size, rank, known) if size > 1 else None


def _slurm(environ: Environ) -> Launch | None:
    step = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in environ for name in step):  # srun sets them all; sbatch and salloc do not
        return None
    count, number = _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_PROCID")
    return Launch("SLURM", None, count, number, "slurm") if count > 1 else None


def _tpu_pod(environ: Environ) -> Launch | None:
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    if "," in hosts or "MEGASCALE_COORDINATOR_ADDRESS" in environ:
        return Launch("TPU pod")
    asks_metadata = not hosts and "TPU_SKIP_MDS_QUERY" not in environ
    return Launch("TPU pod") if asks_metadata and _is_tpu_machine() else None


def _kubernetes(environ: Environ) -> Launch | None:
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys():
        return None
    number = _number(environ, "JOB_COMPLETION_INDEX")
    return Launch("Kubernetes", environ.get("JAX_COORDINATOR_ADDRESS"), None, number)


def _detected_by_jax(launch: Launch, environ: Environ) -> bool:
    """Whether JAX finds out the missing values itself."""
    match launch.system:
        case "Open MPI":
            return _OPEN_MPI_URI in environ
        case "Kubernetes":
            return importlib.util.find_spec("kubernetes") is not None
    return True


def _is_tpu_machine() -> bool:
    if importlib.util.find_spec("libtpu") is None:
        return False
    return any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0"))


def _number(environ: Environ, name: str) -> int:
    value = environ.get(name, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{name}={value!r} in the environment: must be a number; give --num-processes and --process-id"
        )
    return int(value)


def bind_address(coordinator: str | None, asked: str | None) -> str | None:
    """The address at which process 0's service listens; None for JAX's own choice, which is every interface.

    The service trusts whoever reaches it, so it listens only at the coordinator's address: for example only on loopback
    for a loopback address. A name, or an address that is not this machine's own (a cluster's virtual one), does not
    tell the interface: then None.
    """
    if asked is not None or coordinator is None:
        return asked
    host = coordinator.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return coordinator
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return None
    return coordinator


def initialize(launch: Launch, asked: LaunchConfig) -> None:
    """Call ``jax.distributed.initialize``, before anything asks JAX for a device.

    Raises:
      ConfigError: the other processes were not found in time.
    """
    import jax

    at_sigterm = signal.getsignal(signal.SIGTERM)
    bind = None
    if launch.process_id in (0, None):
        bind = bind_address(launch.coordinator, asked.coordinator_bind)
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.num_processes,
            launch.process_id,
            cluster_detection_method=launch.detection,
            coordinator_bind_address=bind,
            initialization_timeout=INITIALIZATION_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=HEARTBEAT_S,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"--coordinator {launch.coordinator}: process {launch.process_id} of {launch.num_processes} did not find "
            f"the others within {INITIALIZATION_S} s: {error}"
        ) from None
    if launch.num_processes == 1:
        # JAX notes a SIGTERM from here on, and one process never asks it (``Processes.preempted``).
        signal.signal(signal.SIGTERM, at_sigterm)
