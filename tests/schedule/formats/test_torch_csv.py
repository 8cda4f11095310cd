"""PyTorch's CSV there and back; and, where PyTorch is installed, through its own parser and runtime."""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, Placement, ScheduleError, parse_grid, validate
from dualpipe_jax.schedule.formats.torch_csv import from_torch_csv, to_torch_csv
from dualpipe_jax.schedule.recipes import chimera, dualpipe, dualpipe_v, one_f_one_b, zb_h1, zb_v

COUNTS = (2, 4), (4, 8), (8, 16)
ONE_PIPE = [recipe for recipe in ALL_SCHEDULES if recipe(4, 8).placement.num_pipes == 1]
TWO_PIPES = [recipe for recipe in ALL_SCHEDULES if recipe not in ONE_PIPE]


@pytest.fixture
def torch_schedules():
    pytest.importorskip("torch", reason="no PyTorch: pip install -e '.[torch]' on Linux or macOS")
    from torch.distributed.pipelining import schedules

    return schedules


def load(torch_schedules, schedule, csv):
    """The schedule in PyTorch's runtime, as rank 0 would have it; no process group, so it cannot step."""
    runtime = torch_schedules._PipelineScheduleRuntime(
        fake_stages(schedule.placement.stages_on[0], schedule.placement.num_stages, schedule.num_ranks),
        schedule.microbatches_per_pipe,
    )
    runtime._load_csv(str(csv))
    return runtime


def fake_stages(stages, num_stages, num_ranks):
    return [
        types.SimpleNamespace(
            stage_index=stage, num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=None
        )
        for stage in stages
    ]


def test_schedules_come_back():
    for recipe, counts, aligned in itertools.product(ALL_SCHEDULES, COUNTS, (False, True)):
        schedule = recipe(*counts)
        placement = schedule.placement if schedule.placement.num_pipes > 1 else None
        assert from_torch_csv(to_torch_csv(schedule, aligned), placement, schedule.name) == schedule


def test_text():
    assert to_torch_csv(dualpipe_v(2, 3)).splitlines() == [
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3B1,(3F2;0B0)OVERLAP_F_B,3B2,0I1,0W1,0I2,0W2",
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,2B1,1B1,2I2,1I2,2W2,1W2",
    ]


def test_aligned_columns_are_steps_of_one_slot_each():
    assert to_torch_csv(zb_h1(3, 3), aligned=True).splitlines() == [
        "0F0,0F1,0F2,,,0I0,0W0,0I1,0W1,0I2,0W2",
        ",1F0,1F1,,1I0,1F2,1I1,1W0,1I2,1W1,1W2",
        ",,2F0,2I0,2F1,2I1,2F2,2I2,2W0,2W1,2W2",
    ]
    assert to_torch_csv(one_f_one_b(2, 2), aligned=True) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
    columns = [line.split(",") for line in to_torch_csv(dualpipe(2, 4), aligned=True).splitlines()]
    assert columns[0][4] == "(3F1;0B0)OVERLAP_F_B" and columns[1][4] == "(1F1;2B0)OVERLAP_F_B"


def test_columns_without_time_hold_schedules_that_hang_too():
    hangs = parse_grid("0F0 0B0\n1B0 1F0", Placement.linear(2))
    assert from_torch_csv(to_torch_csv(hangs)) == hangs
    with pytest.raises(ValueError, match=r"parsed never ends; call validate"):
        to_torch_csv(hangs, aligned=True)


def test_what_pytorch_adds_is_left_out():
    text = (
        "0UNSHARD,0F0,0SEND_F0, 0RECV_B0 ,0I0,,0W0,0REDUCE_GRAD,0RESHARD\r\n1RECV_F0,1F0,1B0,1SEND_B0\r\n\r\n"
    )
    assert from_torch_csv(text, name="x") == parse_grid("0F0 0I0 0W0\n1F0 1B0", Placement.linear(2), "x")

    plain = to_torch_csv(one_f_one_b(2, 3))
    first, second = plain.splitlines()
    blanks = f"\ufeff\n{first}\n\n  \n{second}\n\n"  # and a byte order mark
    assert from_torch_csv(blanks) == from_torch_csv(plain)


def test_the_lines_place_the_stages():
    text = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0"
    alone, both = from_torch_csv(text), from_torch_csv(text, Placement.bidirectional(2))
    assert (alone.placement, alone.name, alone.num_microbatches) == (Placement.v(2), "parsed", 1)
    assert (both.placement, both.num_microbatches) == (Placement.bidirectional(2), 2)


def test_two_pipes_and_a_v_read_back_as_what_they_are():
    two = itertools.product((dualpipe, chimera), ((2, 2), (2, 6), (4, 8), (8, 20)))
    for make, counts in (*two, *itertools.product((zb_v, dualpipe_v), ((1, 2), (2, 6), (4, 8)))):
        schedule = make(*counts)
        assert validate(from_torch_csv(to_torch_csv(schedule), name=schedule.name)) == schedule


def test_what_hangs_as_two_pipes_as_well_is_taken_for_one():
    lines = to_torch_csv(dualpipe(4, 8)).splitlines()
    parsed = from_torch_csv("\n".join(",".join(line.split(",")[::-1]) for line in lines))
    assert parsed.placement == Placement.v(4)
    with pytest.raises(ScheduleError):
        validate(parsed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,,1X0", r"line 2, cell 3: cannot read '1X0'; expected an action such as 0F0"),
        ("0F0,0B0junk", r"line 1, cell 2: cannot read '0B0junk'"),
        ("0F0,(1F0;0B0)OVERLAP", r"line 1, cell 2: cannot read '\(1F0;0B0\)OVERLAP'"),
        ('0F0,0B0\n1F0,"1B0\n2F0,2X0', r"line 3, cell 2: cannot read '2X0'"),
        ("0" * 200_000, r"line 1 is no CSV: field larger than field limit"),
        ("(1F0)OVERLAP_F_B", r"line 1, cell 1: cannot read '\(1F0\)OVERLAP_F_B'"),
        ("(1F0;2F0;0B0)OVERLAP_F_B", r"line 1, cell 1: cannot read .* a pair such as \(0F3;3B1\)OVERLAP_F_B"),
        ("0F0,0B0\n1F0,,0F1", r"line 2, cell 3: 0F1, but line 1 runs stage 0 already; .* move it there"),
        ("0F0,0B0\n,,\n1F0", r"line 2 runs nothing; drop it, or pass placement="),
        ("0F0\n\n ,\n1F0", r"line 3 runs nothing"),
        ("0F0\n\n1F0,0B0", r"line 3, cell 2: 0B0, but line 1 runs stage 0 already"),
        ("999999999F0,0F0", r"got stages \[0, 999999999\], but no stage 1; to place them"),
        (
            ",".join(f"{3 * s}F0" for s in range(999)),
            r"got stages \[0, 3, 6, 9, 12, 15, \.\.\.\], but no stage 1",
        ),
        ("0F0\n3F0", r"got stages \[0, 3\], but no stage 1; .* Add what is missing, or pass placement="),
        ("\n", r"got no lines; to place them, one line must run each stage from 0"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=f"from_torch_csv: {message}"):
        from_torch_csv(text)


def test_lines_and_placement_disagree():
    with pytest.raises(ValueError, match="1 lines, but 2 ranks in the placement; give one line for each"):
        from_torch_csv("0F0,0B0", Placement.linear(2))


def test_pytorch_reads_ours(torch_schedules, tmp_path):
    for number, (recipe, counts) in enumerate(itertools.product(ONE_PIPE, COUNTS)):
        schedule = recipe(*counts)
        text = to_torch_csv(schedule, aligned=bool(number % 2))
        (tmp_path / "ours.csv").write_text(text)
        runtime = load(torch_schedules, schedule, tmp_path / "ours.csv")
        assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement.rank_of))
        for order, theirs in zip(schedule.orders, runtime.pipeline_order.values(), strict=True):
            assert [as_slot(action) for action in theirs if action] == [
                tuple((a.stage, a.op.value, a.microbatch) for a in slot) for slot in order
            ], (schedule.name, counts)
        runtime._dump_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
        lowered = (tmp_path / "lowered.csv").read_text()
        assert "REDUCE_GRAD" in lowered and "SEND_B" in lowered
        assert from_torch_csv(lowered, name=schedule.name) == schedule


def as_slot(action):
    """PyTorch's action, field by field rather than by its text."""
    every = action.sub_actions or [action]
    return tuple((a.stage_index, a.computation_type.value, a.microbatch_index) for a in every)


def test_pytorch_refuses_two_pipes(torch_schedules, tmp_path):
    for recipe in TWO_PIPES:
        schedule = recipe(4, 8)
        (tmp_path / "ours.csv").write_text(to_torch_csv(schedule))
        with pytest.raises(AssertionError, match="Malformed compute schedule"):
            load(torch_schedules, schedule, tmp_path / "ours.csv")


@pytest.mark.parametrize(
    ("theirs", "a_rank"),
    [
        *(("LoopedBFS", 2), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 2)),
        *(("ZBVZeroBubble", 2), ("DualPipeV", 2)),
    ],
)
def test_pytorchs_own_schedules_are_read(torch_schedules, tmp_path, theirs, a_rank):
    for ranks in (2, 4):
        stages = fake_stages(range(a_rank), a_rank * ranks, ranks)
        made = torch_schedules.get_schedule_class(theirs)(stages, 2 * ranks)
        made._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
        read = validate(from_torch_csv((tmp_path / "theirs.csv").read_text()))
        assert (read.num_ranks, read.num_microbatches) == (ranks, 2 * ranks)
        assert dict(enumerate(read.placement.rank_of)) == made.stage_index_to_group_rank
        if theirs == "DualPipeV":
            assert read.orders == dualpipe_v(ranks, 2 * ranks).orders


def test_pytorch_runs_ours(torch_schedules, tmp_path):
    """A process for each rank, over gloo, against the same layers in one piece: losses and gradients."""
    del torch_schedules
    import torch
    from torch_step import make_batch, make_stage

    schedules = {recipe.__name__: recipe(3, 6) for recipe in ONE_PIPE}
    assert "OVERLAP_F_B" in to_torch_csv(schedules["dualpipe_v"])
    for name, schedule in schedules.items():
        (tmp_path / f"{name}.csv").write_text(to_torch_csv(schedule))
    counts = {name: (s.placement.rank_of, s.num_microbatches) for name, s in schedules.items()}
    (tmp_path / "schedules.json").write_text(json.dumps(counts))
    run_ranks(tmp_path, 3)

    for name, schedule in schedules.items():
        stages = [make_stage(stage) for stage in range(schedule.placement.num_stages)]
        x, target = make_batch()
        loss = torch.nn.functional.mse_loss(torch.nn.Sequential(*stages)(x), target)
        loss.backward()
        ranks = [torch.load(tmp_path / f"{name}.rank{rank}.pt") for rank in range(3)]
        written = [line.split(",") for line in to_torch_csv(schedule).splitlines()]
        assert [rank["played"] for rank in ranks] == written
        losses = next(rank["losses"] for rank in ranks if rank["losses"])
        assert len(losses) == schedule.num_microbatches
        torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-12, atol=0)
        gradients = {key: gradient for rank in ranks for key, gradient in rank["gradients"].items()}
        for stage, module in enumerate(stages):
            for parameter_name, parameter in module.named_parameters():
                ours = gradients.pop((stage, parameter_name))
                torch.testing.assert_close(ours, parameter.grad, rtol=1e-10, atol=1e-15)
        assert not gradients


def run_ranks(directory, num_ranks):
    """Run torch_step.py. Whatever happens, none of its processes outlives this."""
    script = pathlib.Path(__file__).with_name("torch_step.py")
    # Gloo would look up the machine's name, which may lead nowhere.
    environment = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script), str(directory), str(num_ranks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    ) as ranks:
        try:
            output, _ = ranks.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, output
