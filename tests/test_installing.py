"""The command that installs what is missing: it works from where the user stands."""

import functools
import http.server
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from dualpipe_jax import installing
from dualpipe_jax.installing import install_command
from tests.loading import load

ROOT = Path(__file__).parent.parent
PIP = f"{sys.executable} -m pip install"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """As an installed wheel: nothing beside the package says that it is a checkout."""
    monkeypatch.setattr(installing, "_ROOT", tmp_path)
    return tmp_path


def test_a_checkout_installs_its_extra():
    assert install_command("jax[cuda13]", extra="cuda") == f"{PIP} -e '{ROOT}[cuda]'"


def test_packages_are_installed_by_their_names():
    assert install_command("grain", "array_record") == f"{PIP} grain array_record"
    assert install_command("jax[k8s]") == f"{PIP} 'jax[k8s]'"


def test_a_wheel_installs_what_its_extra_requires(wheel):
    assert install_command("jax[cuda13]", extra="cuda") == f"{PIP} 'jax[cuda13]>=0.10'"
    assert install_command("matplotlib", extra="plot") == f"{PIP} 'matplotlib>=3.9'"
    (wheel / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert install_command("matplotlib", extra="plot") == f"{PIP} 'matplotlib>=3.9'", "another's project"


def test_files_that_were_copied_install_the_packages(wheel, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_command("jax[cuda13]", extra="cuda") == f"{PIP} 'jax[cuda13]'"
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    assert install_command("jax[cuda13]", extra="cuda") == f"{PIP} 'jax[cuda13]'"


def test_environments_of_uv_have_no_pip(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/uv")
    assert install_command("scipy") == f"uv pip install --python {sys.executable} scipy"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert install_command("scipy") == f"{PIP} scipy"


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("cuda", "tpu", "plot", "flax", "tensorboard", "wandb"):
        assert name in extras


def test_no_text_names_an_installation_of_its_own():
    wrong = [
        str(path)
        for part in ("dualpipe_jax", "models", "train")
        for path in (ROOT / part).rglob("*.py")
        if "pip install" in path.read_text()
    ]
    assert not wrong, f"{wrong}: dualpipe_jax.installing.install_command says what works"


def test_a_linked_environment_is_not_made_anew_under_its_owner(tmp_path):
    """Its state says that it was set up for another checkout, which is what is wiped."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    shutil.copytree(ROOT / "scripts", ours / "scripts")
    shutil.copyfile(ROOT / "pyproject.toml", ours / "pyproject.toml")
    theirs.mkdir()
    (theirs / ".state").write_text("1 /theirs train,test")
    (ours / ".venv").symlink_to(theirs)
    ended = subprocess.run(
        [ours / "scripts" / "train", "--help"], capture_output=True, text=True, env=os.environ | {"VENV": ""}
    )
    assert (
        ended.returncode == 2
        and f"is a link to {theirs}, which is not set up for {ours}: remove" in ended.stderr
    )
    assert [file.name for file in theirs.iterdir()] == [".state"]
    assert (theirs / ".state").read_text() == "1 /theirs train,test"


@pytest.mark.parametrize("given, wanted", [("C", "C.UTF-8"), ("POSIX", "C.UTF-8"), ("C.UTF-8", "C.UTF-8")])
def test_a_checkout_whose_place_has_an_umlaut_is_set_up_in_the_c_locale(given, wanted, tmp_path):
    """In ASCII setuptools cannot write that place, nor Python read it: so all gets another, here one that tells it."""
    root = tmp_path / "wä lk"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "_env", root / "scripts")
    (root / "pyproject.toml").write_text("")
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\n[ "$1" = pip ] && printf %s "$LC_ALL" >"$TOLD"\nexit 0\n')
    uv.chmod(0o755)
    told = tmp_path / "told"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LC_ALL": given, "TOLD": str(told)}
    run = ["bash", "-c", '. "$0/scripts/_env"; ensure_venv', root]
    subprocess.run(run, env=environment, check=True, capture_output=True)
    assert told.read_text() == wanted


def test_pips_newest_wheel_is_found_in_a_plain_listing_of_a_folder_too(tmp_path):
    """As ``python -m http.server`` lists one, which is an index, with addresses that are names alone."""
    fetch = load(ROOT / "scripts" / "_get_pip.py")
    (tmp_path / "pip").mkdir()
    for version in ("9.0.3", "25.1.1"):
        (tmp_path / "pip" / f"pip-{version}-py3-none-any.whl").touch()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}"
        assert fetch.newest_wheel(index) == f"{index}/pip/pip-25.1.1-py3-none-any.whl"
        server.shutdown()
