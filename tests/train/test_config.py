"""Options: what is refused, in one line and with exit code 2; the devices asked of JAX."""

import dataclasses
import inspect
import re
import subprocess
import sys

import pytest

import models
from dualpipe_jax.arguments import UnfitError
from dualpipe_jax.inspect.compiler import IN_ORDER
from train import config
from train.__main__ import main, report_error
from train.checks import check
from train.config import FLAGS, ConfigError, configure
from train.model import model_config
from train.processes.devices import set_devices

REFUSED = {
    "unknown schedule": (["--schedule", "dualpip"], "no schedule 'dualpip'; did you mean dualpipe or dualpipe_v?"),
    "counts": (["--microbatches", "5"], "dualpipe: got 4 ranks and 5 microbatches"),
    "odd ranks": (["--pp", "3"], "must be even"),
    "devices": (["--pp", "16", "--microbatches", "32"], "--pp 16 --ep 2: needs 32 devices, but"),
    "zero": (["--steps", "0"], "--steps 0: must be at least 1"),
    "seed": (["--seed", str(2**63)], f"--seed {2**63}: must be below 2^32"),
    "no pair": (["--compiler-option", "opt=1", "level"], "--compiler-option level: wants NAME=VALUE"),
    "no number of the model": (["--set", "dim=96", "dim=nan"], "--set dim=nan: wants NAME=NUMBER, such as dim=2048"),
    "no such compiler option": (["--compiler-option", "xla=1"], "--compiler-option xla=1: INVALID_ARGUMENT: No such"),
    "stash": (["--max-stash", "-1"], "--max-stash -1: must not be negative"),
    "rate": (["--learning-rate", "0"], "--learning-rate 0.0: must be above 0"),
    "infinite rate": (["--learning-rate", "inf"], "--learning-rate inf: must be at most 3.403e+38, the largest number"),
    "rate beyond float32": (["--learning-rate", "1e39"], "--learning-rate 1e+39: must be at most 3.403e+38"),
    "infinite weight": (["--mtp-weight", "inf"], "--mtp-weight inf: must be at most 3.403e+38"),
    "infinite decay": (["--weight-decay", "inf"], "--weight-decay inf: must be at most 3.403e+38"),
    "no number": (["--clip", "nan"], "--clip nan: must be above 0"),
    "ep": (["--microbatch-size", "3"], "--microbatch-size 3: --ep 2 devices must share it equally, try 2"),
    "nodes": (["--ep-nodes", "3"], "--ep 2 --ep-nodes 3: as many devices on each node; give a number of nodes that"),
    "no nodes": (["--ep-nodes", "0"], "--ep-nodes 0: must be at least 1"),
    "experts": (["--ep", "3", "--pp", "2", "--microbatch-size", "3"], "--ep 3: must divide the 8 experts"),
    "layers": (["--layers=1", "--pp=8", "--ep=1", "--microbatches=16"], "8 ranks need a layer on each rank"),
    "stages": (["--stages-per-rank", "4"], "dualpipe takes no --stages-per-rank; interleaved_1f1b, "),
    "model": (["--model", "huge"], "--model huge: there are v3, v2, v2-lite, 67b-a2b, small, tiny, byte"),
    "missing data": (["--data", "nowhere.txt"], "--data: cannot read nowhere.txt: No such file or directory"),
    "short data": (["--data", "short"], "--data: 46 bytes to train on, but --sequence"),
    "empty data": (["--data", "empty"], "--data: nothing to read in"),
    "name taken": (["--name", "taken"], "holds a run already; pick another name, remove it, or go on"),
    "name outside": (["--name", "../elsewhere"], "--name ../elsewhere: must be a plain name"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_options_are_refused_in_one_line(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"x" * 50)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "metrics.jsonl").write_text('{"step": 1}\n')
    arguments, message = REFUSED[case]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    assert message in said


@pytest.mark.slow
def test_what_is_refused_while_the_step_is_traced_is_said_in_one_line(tmp_path, capsys):
    """Its folder is there by then, and a warning that there is no report yet need not be the last line."""
    (tmp_path / "text").write_bytes(b"what is learnt " * 300)
    arguments = "--mtp 1 --sequence 1 --model tiny --layers 1 --schedule gpipe --pp 1 --ep 1 --microbatches 1"
    where = ["--data", str(tmp_path / "text"), "--runs", str(tmp_path), "--eval-sequences", "1"]
    assert main([*arguments.split(), "--microbatch-size", "1", "--steps", "1", *where]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == (
        "error: deepseek: sequences of 1 tokens have no target for 1 tokens ahead; give longer ones, or a config with "
        "fewer num_mtp_layers."
    )
    assert not any("Traceback" in line for line in said)


def test_an_error_that_nobody_expected_is_raised(capsys):
    """A ValueError of Python's own, or of the engine's about the trainer, keeps its traceback."""
    assert (
        report_error(UnfitError("it does not fit")) == 2
        and capsys.readouterr().err == "error: it does not fit\n"
    )
    with pytest.raises(ValueError, match="zip"):
        report_error(ValueError("zip() argument 2 is shorter than argument 1"))


def test_options_that_cannot_be_read_exit_with_2(capsys):
    for arguments in (["--steps", "many"], ["--no-such-option"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2


def test_help_names_every_option_without_loading_jax():
    code = (
        "import sys; from train.__main__ import main\n"
        "try: main(['--help'])\n"
        "finally: assert 'jax' not in sys.modules\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for flag in FLAGS:
        assert re.search(rf"{flag}[ ,]", said)
    assert "gpipe,one_f_one_b,interleaved_1f1b" in "".join(said.replace("│", "").split())


def test_the_help_knows_every_model_size():
    said = inspect.getsource(config.ModelConfig)
    assert all(re.search(rf"\b{name}\b", said) for name in models.MODELS)


def test_virtual_devices_are_asked_for():
    environ = {"XLA_FLAGS": "--xla_other=1"}
    set_devices(configure(pp=2, ep=3), environ)
    assert environ["JAX_PLATFORMS"] == "cpu"
    assert environ["XLA_FLAGS"].startswith("--xla_other=1 --xla_force_host_platform_device_count=6 ")
    assert "ynn" not in environ["XLA_FLAGS"]
    narrow: dict[str, str] = {}
    set_devices(configure(pp=2, ep=3, precision="bfloat16"), narrow)
    assert narrow["XLA_FLAGS"].endswith(" --xla_cpu_experimental_ynn_fusion_type=")
    counted = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    set_devices(configure(pp=2, ep=3, precision="bfloat16"), counted)
    assert counted["XLA_FLAGS"].split()[1:] == ["--xla_cpu_experimental_ynn_fusion_type="], (
        "whoever counts them"
    )
    said = "--xla_cpu_experimental_ynn_fusion_type=reduce"
    own = {"XLA_FLAGS": said}
    set_devices(configure(pp=2, ep=3, precision="bfloat16"), own)
    assert own["XLA_FLAGS"].count("ynn") == 1 and own["XLA_FLAGS"].startswith(said), "whose flag it is"
    accelerator: dict[str, str] = {}
    set_devices(configure(devices="accelerator"), accelerator)
    assert accelerator == {}, "left to JAX"
    in_order = {"XLA_FLAGS": "--xla_other=1"}
    set_devices(configure(devices="accelerator", deterministic=True), in_order)
    assert in_order == {"XLA_FLAGS": f"--xla_other=1 {IN_ORDER}"}
    assert "--xla_gpu_deterministic_ops=true" in IN_ORDER.split()


def test_the_users_own_device_count_stays():
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    set_devices(configure(pp=2, ep=2), environ)
    assert environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=8"
    with pytest.raises(ConfigError, match="needs 10 devices, but XLA_FLAGS asks for 8"):
        set_devices(configure(pp=10, ep=1), environ)


def test_a_model_of_ones_own_numbers():
    numbers = model_config(
        configure(
            set=("dim=96", "num-experts=16", "routed_scale=2.5", "num_dense_layers=2"), layers=3, mtp=1
        ),
        300,
    )
    usual = models.byte()
    changed = dict(dim=96, num_experts=16, routed_scale=2.5, num_mtp_layers=1, vocab=300)
    changed |= dict(num_dense_layers=2, num_layers=5)
    assert usual.num_dense_layers != 2
    assert numbers == dataclasses.replace(usual, compute_dtype=numbers.compute_dtype, **changed)
    assert type(numbers.dim) is int


@pytest.mark.parametrize(
    ("given", "words"),
    {
        "dims=3": "model byte: no number dims; there are dense_hidden, dim, ",
        "dim=5.5": "model byte: dim is 5.5, must be a whole number",
        "top_groups=3": "Config: top_groups 3 must lie between 1 and num_groups 1",
        "dim=0": "Config: dim is 0, must be at least 1",
        "dim=-64": "Config: dim is -64, must be at least 1",
        "num_heads=0": "Config: num_heads is 0, must be at least 1",
        "expert_hidden=0": "Config: expert_hidden is 0, must be at least 1",
        "q_lora_rank=-1": "Config: q_lora_rank is -1, must be at least 0",
        "norm_eps=-1": "Config: norm_eps is -1.0, must be above 0",
        "init_std=-1": "Config: init_std is -1.0, must be at least 0",
        "rope_theta=1e39": "Config: rope_theta is 1e+39, more than float32 holds",
    }.items(),
)
def test_numbers_that_a_model_cannot_have(given, words):
    with pytest.raises(ConfigError, match=re.escape(f"--set {given}: ") + ".*" + re.escape(words)):
        model_config(configure(set=(given,)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(set=("dim=96", "vocab=512")), "--set vocab: the text's tokens say it"),
        (
            dict(set=("num-layers=4",), layers=2),
            "--set num_layers: --layers 2, given here, in a file or by the",
        ),
        (dict(set=("num_mtp_layers=1",), mtp=2), "--set num_mtp_layers: --mtp 2, "),
    ],
)
def test_numbers_that_something_else_says(given, words):
    """They would stand in the run's config.json and be true of nothing."""
    with pytest.raises(
        ConfigError, match=re.escape(words) + ".* take .* out|" + re.escape(words) + ".* Take it out"
    ):
        check(configure(**given))
    check(configure(set=("num_layers=4", "num_mtp_layers=1")))


def test_a_schedule_has_one_name_however_it_is_spelt():
    assert config.configure(schedule="1F1B").step == config.configure(schedule="one_f_one_b").step
    assert config.make_schedule(config.configure(schedule="ZB-V", pp=2)).name == "zb_v"
