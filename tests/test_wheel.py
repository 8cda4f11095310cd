"""The wheel, installed with what it asks for and nothing else, as a user's `pip install` does it."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import dualpipe_jax
from dualpipe_jax.schedule import CostModel, dualpipe, format_grid

ROOT = Path(__file__).parent.parent
EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_path_to_the_checkout(monkeypatch):
    """With PYTHONPATH set to it, a Python without ``models`` would find them there."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, for building leaves its own folders behind."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("dualpipe_jax", "models", "train", "docs", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    if shutil.which("uv"):
        run(["uv", "build", "--quiet", "--wheel", "--out-dir", out, tree])
    else:
        run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, tree])
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of an environment that holds the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    if shutil.which("uv"):
        run(["uv", "pip", "install", "--quiet", "--python", python, wheel])
    else:
        run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel])
    return python


def run(command, **more):
    """What it prints; its errors are told where it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_one_package_whole(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"dualpipe_jax"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    files = (path for path in (ROOT / "dualpipe_jax").rglob("*") if path.is_file() and path.suffix != ".pyc")
    source = {str(path.relative_to(ROOT)) for path in files}
    assert source <= set(names), "py.typed, the page and the targets among them"


def test_the_command_works_and_starts_at_once(python, tmp_path):
    command = python.parent / "dualpipe"
    assert "show" in run([command, "--help"], cwd=tmp_path)  # the first start compiles bytecode
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run([command, "--help"], cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.5, "seconds of CPU"
    assert run([command, "--version"]) == f"dualpipe {dualpipe_jax.__version__}\n"
    shown = [command, "show", "dualpipe", "--ranks", 4, "--microbatches", 10, "--FB", 2]
    assert run(shown, cwd=tmp_path).startswith(format_grid(dualpipe(4, 10), CostModel(FB=2)))
    run([*shown, "-o", "page.html"], cwd=tmp_path)
    assert "<script" in (tmp_path / "page.html").read_text()


def test_what_is_not_in_it_says_so(python, tmp_path):
    command = [python.parent / "dualpipe", "dryrun", "--target", "v5e:4x4", "--compile", "nothing"]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: --program v3: a name without a module is a model of the trainer" in done.stderr
    program = (ROOT / "tests/pods/own_program.py").read_text()
    (tmp_path / "mine.py").write_text(program.replace("import optax", ""))
    own = ["--program", "mine.py:blocks", "--set", "learns=0", "--json"]
    found = json.loads(run([*command, *own], cwd=tmp_path))
    assert found["memory"]["fits"], "a user's own program needs nothing of the repository"
    done = subprocess.run([python, "-Pc", "import dualpipe_jax.functional"], capture_output=True, text=True)
    assert f"run: {python} -m pip install 'flax>=0.12'" in done.stderr
    done = subprocess.run([python, "-Pc", "import models"], capture_output=True, text=True)
    assert "No module named 'models'" in done.stderr


def test_the_readmes_example_trains_there(python, tmp_path):
    """Nothing but the wheel's own dependencies is needed for it."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    assert run([python, "-Pc", EXAMPLE], cwd=tmp_path, env=environment) == "4.605\n", (
        "ln 100, for the head is zero"
    )


def test_type_checkers_read_its_types(python, tmp_path):
    (tmp_path / "uses.py").write_text(
        "from dualpipe_jax.schedule import dualpipe\nreveal_type(dualpipe(4, 8).num_ranks)\ndualpipe('4', 8)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", str(python), "uses.py"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert 'Revealed type is "int"' in done.stdout or 'Revealed type is "builtins.int"' in done.stdout
    assert 'Argument 1 to "dualpipe" has incompatible type "str"' in done.stdout
