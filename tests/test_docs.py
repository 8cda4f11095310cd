"""What stands in code blocks of the pages is true: Python runs, commands run or can at least be read."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import yaml

from dualpipe_jax.__main__ import COMMANDS, main
from dualpipe_jax.pods import Plan
from dualpipe_jax.pods.plain import plain
from models import deepseek, tiny, weights
from train.checks import check
from train.config import make_schedule
from train.generate.options import parse as parse_generating
from train.options import parse
from train.prepare.options import parse as parse_preparing
from train.processes.launch import HEARTBEAT_S

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
ELSEWHERE = {"README.md": "test_readme.py", "quickstart.md": "test_docs_quickstart.py"}
ELSEWHERE |= {"own_moe.md": "test_docs_own_moe.py", "understand.md": "test_docs_understand.py"}
"""Pages whose Python blocks run in tests of their own."""


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text()) if found == language]


LONG = {"python": {"serving.md", "train.md"}, "bash": {"experts.md", "pods.md", "schedules.md"}}
"""Pages whose blocks take as long as a hundred other tests."""


def with_blocks(language: str) -> list:
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in LONG[language] else [])
        for page in PAGES
        if page.name not in ELSEWHERE and blocks(page, language)
    ]


def published_checkpoint(folder: Path) -> None:
    """A small one, under the name that the page gives it."""
    config = tiny(vocab=300, num_layers=2, num_mtp_layers=0)
    model = deepseek(config)

    def made(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return model.layout.rows
        return np.full(leaf.shape, 0.02, "float32")

    params = jax.tree.map(made, jax.eval_shape(model.init, jax.random.key(0)))
    weights.save(folder / "DeepSeek-V2-Lite", config, params)
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=byte_level, show_progress=False)
    library.train_from_iterator([], trainer)
    library.save(str(folder / "DeepSeek-V2-Lite" / "tokenizer.json"))


IN_A_PROCESS = {"pods.md": {f"SLURM_{name}": "0" for name in ("LOCALID", "PROCID")} | {
    "SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "localhost",
}}  # fmt: skip
"""Pages whose blocks must run before JAX is loaded -> the environment that they need: SLURM's, of a single task."""


def program(folder: Path) -> None:
    """The file that the page shows; and a plan, which its commands write."""
    (folder / "plan.json").write_text(json.dumps({"plan": plain(Plan("v2-lite"))}))
    (text,) = (block for block in blocks(ROOT / "docs/pods.md", "python") if block.startswith("# my_step.py"))
    (folder / "my_step.py").write_text(text)


def measured_loads(folder: Path) -> None:
    """The files of the page's own block, which its commands read."""
    (text,) = (block for block in blocks(ROOT / "docs/experts.md", "python") if "np.save(" in block)
    exec(text.replace('np.save("', f'np.save("{folder}/'), {})


NEEDS = {"experts.md": measured_loads, "pods.md": program}
NEEDS |= {name: published_checkpoint for name in ("train.md", "serving.md")}
"""What must be in the folder where a page's blocks run."""


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_blocks_run_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    NEEDS.get(page.name, lambda folder: None)(tmp_path)
    found = blocks(page, "python")
    if page.name in IN_A_PROCESS:
        environ = {**os.environ, **IN_A_PROCESS[page.name], "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", "\n".join(found)], env=environ, check=True)
        return
    names: dict = {}
    text = page.read_text()
    for block in found:
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, page, "exec"), names)


@pytest.mark.parametrize("page", with_blocks("bash"))
def test_commands_in_blocks_run(page, tmp_path, monkeypatch):
    """In order, in one folder; where a block or a table of output follows, its lines are what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    NEEDS.get(page.name, lambda folder: None)(tmp_path)
    text = page.read_text()
    for match in FENCE.finditer(text):
        if match[1] != "bash":
            continue
        printed = "".join(run(line) for line in joined(match[2]))
        for line in shown_after(text[match.end() :]):
            assert line in printed, f"{page.name}: not printed by {match[2]}"


def run(line: str) -> str:
    program, *arguments = shlex.split(line)
    assert program == "dualpipe", f"{line}: only dualpipe's commands stand in bash blocks"
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(printed):
        assert main(arguments) == 0, line
    printed.seek(0)
    return printed.read()


def shown_after(text: str) -> list[str]:
    """The lines of a text block that follows at once, or of a table before the next block where "printed" is said."""
    if match := re.match(r"\n+```text\n(.*?)^```", text, re.M | re.S):
        return match[1].splitlines()
    before = text.split("\n```")[0]
    table = before.split("\n\n**")[0] if before.startswith("\n\nprinted") else ""
    return re.findall(r"^\|.*\|$", table, re.M)


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", text))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_that_is_named_exists(name, capsys):
    """Of each `dualpipe` command on any page, in a block or in a sentence, shortened or not."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    known = flags(capsys.readouterr().out)
    for page in PAGES:
        for command in re.findall(rf"dualpipe {name}\b[^`]*", page.read_text().replace("\\\n", " ")):
            for line in command.splitlines() if "\n\n" in command else [command]:
                used = flags(line) if f"dualpipe {name}" in line else set()
                assert used <= known, f"{page.name}: {line}"


def shell_lines(page: Path) -> list[str]:
    """Of all blocks."""
    return joined("\n".join(body for _, body in FENCE.findall(page.read_text())))


def joined(text: str) -> list[str]:
    """Its lines, those that go on in the next as one."""
    return re.sub(r"\\\n\s*", " ", text).splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_training_command_would_start(page, tmp_path, monkeypatch):
    """What stands in blocks: options that are read, and fit each other."""
    monkeypatch.chdir(tmp_path)
    NEEDS.get(page.name, lambda folder: None)(tmp_path)
    for line in shell_lines(page):
        if match := re.search(r"""(?:scripts/train|-m train(?: "\$@"' train)?) +(-[^"#]+)""", line):
            command = parse(shlex.split(match[1]))
            check(command.options)
            make_schedule(command.options)
        elif match := re.match("scripts/prepare +([^#]+)", line):
            parse_preparing(shlex.split(match[1]))
        elif match := re.match("scripts/generate +([^#]+)", line):
            parse_generating(shlex.split(match[1]))


def test_the_cluster_starts_what_would_start():
    (job,) = (yaml.safe_load(body) for body in blocks(ROOT / "docs" / "pods.md", "yaml"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    python, dash, train, *arguments = container["command"]
    assert (python, dash, train) == ("python", "-m", "train")
    command = parse(arguments)
    check(command.options)
    assert (
        command.options.launch.num_processes == job["spec"]["completions"] == command.options.step.num_devices
    )


def test_overlap_takes_no_cpus_as_the_page_says(capsys):
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert "| `dualpipe dryrun`, `overlap`, `plan` | `--target cpu:N`, but for `overlap` |" in page
    assert main(["overlap", "--target", "cpu:4", "--pp", "2", "--ep", "2", "--program", "tiny"]) == 2
    assert "on CPU nothing overlaps" in capsys.readouterr().err


def test_a_cluster_waits_as_long_as_is_said():
    page = " ".join((ROOT / "docs" / "pods.md").read_text().split())
    assert f"when one, dead or stopped, gave no sign of life for {HEARTBEAT_S} s." in page


def test_every_script_that_is_named_is_there():
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"scripts/(\w+)", text):
            assert (ROOT / "scripts" / name).is_file(), f"{page.name}: scripts/{name}"
        for name in re.findall(r"(?:scripts/bench |benchmarks/)([a-z0-9_]+)", text):
            assert (ROOT / "benchmarks" / f"{name}.py").is_file(), f"{page.name}: {name}"


def test_pictures_and_pages_that_are_linked_are_there():
    """From the README, which the site's own check does not see."""
    readme = ROOT / "README.md"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", readme.read_text()):
        assert "://" in target or (ROOT / target).exists(), target
