"""What runs teach about this machine: a short one before the first, and each one after its end."""

import datetime
import signal
import sys
import tempfile
from pathlib import Path

from autoshard.calibration.learned import constants_file, learn
from autoshard.calibration.rows import Occasion, row_text
from autoshard.cost.calibration import Calibration, load_calibration, uncalibrated
from autoshard.cost.predict import check_plan
from autoshard.errors import InputError, RunFailed, Stopped
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.run.other_programs import OtherPrograms
from autoshard.run.protocol import Run
from autoshard.runtime.launch import Placing, launch
from autoshard.runtime.machine import builder, user_folder
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster import LOCAL
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Checkpointing, Training
from autoshard.spec.workload import Precision, Workload
from autoshard.units import format_seconds

_MODEL, _SEQ_LEN, _STEPS = "tiny-llama", 256, 8  # a second or two of a laptop


def predicted_here(plan: Plan) -> tuple[Plan, list[str]]:
    """Return a plan for this machine with a prediction that knows it, and notes; measure it if no run has yet."""
    folder = user_folder()
    is_users = plan.provenance.get("calibration") != uncalibrated().name
    if folder is None or plan.cluster.name != LOCAL or plan.prediction is None or is_users:
        return plan, []
    try:
        file, notes = constants_file(folder), list[str]()
        if file is None:
            print("autoshard: measuring this machine, once, for some seconds ...", file=sys.stderr)
            programs = OtherPrograms()
            constants = learn(folder, _measured(plan.mesh.num_ranks, programs))
            busy = f"while {words}, " if (words := str(programs.busy() or "")) else ""
            notes.append(f"this machine was measured for the first time, {busy}and {folder} keeps that")
        else:
            constants = load_calibration(file)
    except (OSError, InputError, RunFailed) as error:
        return plan, [f"the prediction does not know this machine: {error}"]
    checked = check_plan(plan, constants)
    if checked.rejections or checked.plan.prediction is None:
        return plan, notes
    before_s, now_s = plan.prediction.step_time_s, checked.plan.prediction.step_time_s
    if before_s != now_s:
        what = f"{format_seconds(now_s)} a step here, in place of {format_seconds(before_s)}"
        notes.append(f"prediction: {what}: {_short(constants)}")
    return checked.plan, notes


def learn_from_run(row: str) -> list[str]:
    """Fit the constants of this machine to the measured row of a run, too; return notes for the user.

    Later plans for this machine are predicted with these constants.
    """
    folder = user_folder()
    if folder is None:
        return []
    try:
        return [f"plans for this machine are {_short(learn(folder, row))} from now on"]
    except (OSError, InputError) as error:
        return [f"{folder} did not take what this run measured: {error}"]


def _short(constants: Calibration) -> str:
    return constants.basis.partition(":")[0]


def _measured(num_ranks: int, programs: OtherPrograms) -> str:
    """Run some steps of a small model on as many ranks, with a look at other programs; return the measured row."""
    from autoshard.runtime.train import train

    work = Workload(seq_len=_SEQ_LEN, global_batch=2 * num_ranks, precision=Precision.named("bf16"))
    cluster = load_cluster(LOCAL, ranks=num_ranks)
    request = Request(model=load_model(_MODEL), cluster=cluster, workload=work, engines=("torch",))
    plan, build = plan_at(request, Candidate.parse(f"tp=1,pp=1,dp={num_ranks},mbs=2")), builder()
    with tempfile.TemporaryDirectory() as folder:
        training = Training(steps=_STEPS, checkpoint=Checkpointing(to="none"))
        run = Run(folder=Path(folder), training=training)
        report = launch(
            None, num_ranks, lambda say: train(plan, run, build, say), show=lambda _: programs.begin(),
            placing=Placing(folder=run.folder),
        )  # fmt: skip
    if report.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if report.signal:
        raise Stopped(signal.Signals(report.signal).name, report.signal)
    now = datetime.datetime.now(datetime.UTC)
    occasion = Occasion(
        name=f"{_MODEL} {plan.candidate} {now:%Y-%m-%dT%H:%M:%S.%fZ}", step_time_s=report.step_time_s,
        date=f"{now:%Y-%m-%d}", versions="", platform=LOCAL, kind="run",
    )  # fmt: skip
    return row_text(plan, occasion)
