"""Which way imports run (docs and house plan): each part of the project may know only the parts below it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ENGINE = "contract", "schedule", "parallel", "split", "pair", "varying"
PODS = "bounds", "cache", "kept", "plain", "plan", "planner", "request", "results"
NO_JAX = "probe.findings", *(f"pods.{s}" for s in PODS)
"""Of rooms that load JAX, what does not."""
MAY_IMPORT = {
    "present": (),
    "arguments": (),
    "installing": (),
    "schedule": ("present",),
    "ranges": (),
    "step_options": ("ranges", "schedule"),
    "balance": ("present",),
    "torus": (),
    "convolution": (),
    "varying": (),
    "gradient_sum": ("varying",),
    "made_once": (),
    "ynnpack": (),
    "parallel": ("torus", "varying", "gradient_sum", "made_once"),
    "split": ("convolution", "varying", "gradient_sum", "made_once"),
    "contract": (),
    "functional": (),
    "pair": ("split",),
    "engine": ENGINE,
    "inspect": ("present", "torus", "convolution"),
    "worker": (),
    "processes": ("inspect",),
    "probe": (*ENGINE[1:], "engine", "inspect", "worker"),
    "pods": (*ENGINE, "ranges", "step_options", "balance", "engine", "inspect", "processes", "worker"),
    "profile": ("present", "schedule", "inspect", "pods"),
    "command": ("present", "schedule", "step_options", "balance", "inspect", "processes", "worker", *NO_JAX),
}
MAY_IMPORT = {
    f"dualpipe_jax.{part}": tuple(f"dualpipe_jax.{b}" for b in ("arguments", "installing", *below))
    for part, below in MAY_IMPORT.items()
}
MAY_IMPORT |= {
    "models": tuple(
        f"dualpipe_jax.{part}"
        for part in (
            "arguments",
            "parallel",
            "pair",
            "split",
            "contract",
            "functional",
            "gradient_sum",
            "made_once",
            "varying",
            "ynnpack",
        )
    ),
    "models.decode": (
        "models",
        *(f"dualpipe_jax.{p}" for p in ("arguments", "functional", "parallel", "pair", "ynnpack")),
    ),
    "models.serve": ("models.config", "models.decode"),
    "train": ("dualpipe_jax", "models"),
}
"""Part of the project -> what of ours it may import, besides itself."""

NUMPY_ONLY = "dualpipe_jax.schedule", "dualpipe_jax.balance"


def sources(part: str) -> list[Path]:
    path = ROOT / part.replace(".", "/")
    return [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else sorted(path.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full dotted names of all that a file imports, wherever in the file it does."""
    package = path.relative_to(ROOT).parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            start = ".".join((*base, *filter(None, [node.module])))
            names |= {f"{start}.{alias.name}" for alias in node.names}
    return names


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_run_downwards(part):
    allowed = (part, *MAY_IMPORT[part])
    assert sources(part), f"{part} has no sources: has it moved?"
    ours = ("dualpipe_jax", "models", "train", "tests", "benchmarks")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(part)
        for name in sorted(imported(path))
        if any(is_within(name, root) for root in ours) and not any(is_within(name, a) for a in allowed)
    ]
    assert not wrong, f"{part} may import only {allowed}:\n" + "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions count; those of a package mean its __init__, whose own imports are not followed."""
    ours = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for part in ("dualpipe_jax", "models", "train")
        for path in sources(part)
    }
    below = {
        name: {other for it in imported(path) for other in (it, it.rpartition(".")[0]) if other in ours}
        - {name}
        for name, path in ours.items()
    }
    while leaves := [name for name, others in below.items() if not others & below.keys()]:
        for name in leaves:
            del below[name]
    assert not below, f"each of these imports another of them, or what does: {sorted(below)}"


def test_nothing_imports_the_trainer():
    outside = [path for part in ("dualpipe_jax", "models", "benchmarks") for path in sources(part)]
    wrong = [str(path) for path in outside if any(is_within(name, "train") for name in imported(path))]
    assert not wrong


@pytest.mark.parametrize("part", NUMPY_ONLY)
def test_the_ground_floor_needs_only_python_and_numpy(part):
    foreign = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(part)
        for name in imported(path)
        if name.split(".")[0]
        not in {*sys.stdlib_module_names, "numpy", "dualpipe_jax", "matplotlib", "scipy"}  # the last two late
    }
    assert not foreign


def test_importing_what_others_are_shown_by_loads_the_standard_library_alone():
    code = "import sys; before = {*sys.modules}; import dualpipe_jax.present.numbers, dualpipe_jax.present.table, "
    code += "dualpipe_jax.present.figure; print(*{m.split('.')[0] for m in {*sys.modules} - before})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {*loaded.split()} <= {*sys.stdlib_module_names, "dualpipe_jax"}


@pytest.mark.parametrize("part", [*NUMPY_ONLY, "dualpipe_jax.pods.results", "dualpipe_jax.pods.planner"])
def test_importing_what_needs_no_jax_loads_none(part):
    code = f"import sys, {part}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"jax", "jaxlib", "flax", "optax", "matplotlib", "scipy"} & set(loaded.split())


@pytest.mark.parametrize("name", ["show", "compare", "search"])
def test_the_help_of_a_subcommand_about_schedules_loads_no_numpy(name):
    code = "import sys\nfrom dualpipe_jax.__main__ import main\ntry:\n    main([sys.argv[1], '--help'])\n"
    code += "except SystemExit:\n    print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    loaded = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, check=True
    ).stderr
    assert "tyro" in loaded.split() and not {"numpy", "jax", "matplotlib", "scipy"} & {*loaded.split()}


def test_nobody_changes_jax_config_at_import():
    """A library that changes jax.config changes it for everyone who imports it."""
    packages = ("dualpipe_jax", "models", "train")
    changing = [
        str(path.relative_to(ROOT))
        for part in packages
        for path in sources(part)
        if re.search(r"\bconfig\.update\(", path.read_text())
    ]
    assert not changing


def test_the_option_for_ynnpack_is_spelt_in_one_place():
    """A docstring may name it among other words."""
    option = "xla_cpu_experimental_ynn_fusion_type"
    spelt = [
        str(path.relative_to(ROOT))
        for part in ("dualpipe_jax", "models", "train")
        for path in sources(part)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and str(node.value).strip("-=") == option
    ]
    assert spelt == ["dualpipe_jax/ynnpack.py"]


def test_importing_everything_leaves_jax_config_alone():
    code = (
        "import jax\n"
        "before = dict(jax.config.values)\n"
        "import dualpipe_jax.engine, dualpipe_jax.parallel, dualpipe_jax.schedule, models\n"
        "assert dict(jax.config.values) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_two_tests_share_a_file_name():
    """Pytest takes the second for the first, but only when both are collected in one run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()
