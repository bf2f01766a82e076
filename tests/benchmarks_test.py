"""The benchmarks run, write readable files, and compare comparable numbers."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import math
import pathlib
import subprocess

import pytest
import tensorflow as tf

from benchmarks import (
    cells,
    every_row,
    federated_round,
    federated_tasks,
    federated_tasks_worker,
    fit_time,
    growth,
    memory,
    op_times,
    records,
    replicas,
    roofline,
    scaling,
    sections,
    smoke,
    step_time,
    task_data,
    timing,
    to_accuracy,
    whole_fit,
)
from benchmarks.peers import installed
from tests import stack
from tff_tasks import command
from tff_tasks.registry import task_class

TINY = ["--models=mlp", "--batch_sizes=16", "--repeats=2", "--seconds_per_cell=5"]


def rows_of(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_command_writes_table_report_and_figure_and_resumes(tmp_path, monkeypatch):
    arguments = [*TINY, "--modes=quantile", "--peers=", f"--output_dir={tmp_path}"]
    step_time.main(arguments)
    rows = rows_of(tmp_path / "step_time.csv")
    assert [row["variant"] for row in rows] == ["plain", "quantile"]
    for row in rows:
        assert (row["status"], row["repeats"], row["model"]) == ("ok", "2", "mlp")
        assert row["parameters"] == "669706" and row["batch_size"] == "16"
        assert float(row["median_ms"]) > 0 and float(row["first_step_s"]) > 0
    assert float(rows[0]["ratio"]) == 1.0
    assert float(rows[1]["plain_ms"]) == float(rows[0]["median_ms"])
    assert math.isfinite(float(rows[1]["ratio"]))
    text = (tmp_path / "report.md").read_text()
    assert "| mlp | 16 |" in text and "step_time_tfdpclip_sgd.png" in text
    png = (tmp_path / "step_time_tfdpclip_sgd.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    # Neither names nor paths of the machine.
    found = (tmp_path / "environment.json").read_text()
    assert str(pathlib.Path.home()) not in found and str(tmp_path) not in found
    assert "tensorflow" in json.loads(found)["versions"]

    def forbidden(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(cells, "run", forbidden)
    step_time.main(arguments)
    assert rows_of(tmp_path / "step_time.csv") == rows


def test_environment_of_other_results_is_refused(tmp_path):
    installed.record(tmp_path, ["tensorflow"])
    installed.record(tmp_path, ["tensorflow"])
    path = tmp_path / "environment.json"
    before = json.loads(path.read_text())
    before["machine"]["cpu"] = "another"
    path.write_text(json.dumps(before))
    with pytest.raises(ValueError, match="output_dir"):
        installed.record(tmp_path, ["tensorflow"])


def test_all_models_are_made_and_timed_by_name():
    from benchmarks import models, variants

    assert set(step_time.MODELS) == set(models.NAMES)
    asked_for = {"joint", "buffered_3", "toeplitz_16", "quantile_unchecked"}
    asked_for |= {"views_4", "views_16"}
    assert {*cells.OURS, *asked_for} == set(variants.OURS)
    for name in {axis.model for axis in scaling.AXES}:
        assert name in models.NAMES
    for name in ("mnist_cnn", "lstm", "gru", "transformer"):
        models.checked_model(models.make(name))
    with pytest.raises(ValueError, match="name must be one of"):
        models.make("none")
    wrong = dataclasses.replace(models.make("mlp"), parameters=1)
    with pytest.raises(ValueError, match="task makes"):
        models.checked_model(wrong)


@pytest.mark.slow
def test_large_models_have_their_parameters():
    from benchmarks import models

    for name in models.NAMES:
        models.checked_model(models.make(name))


def test_unknown_variant_is_an_error_of_its_own():
    from benchmarks import variants

    spec = timing.Spec("mlp", 2, ("plain", "nothing", "tfp_fast"))
    makers, parameters = variants.makers(spec)
    assert parameters == 669_706
    with pytest.raises(ValueError, match="variants must be of"):
        makers["nothing"]()


def test_absent_peer_is_skipped_with_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFDPCLIP_PEER_ENVIRONMENTS", str(tmp_path / "none"))
    monkeypatch.setattr(cells, "run", lambda *args, **kwargs: {})
    monkeypatch.setattr(step_time, "_measure", lambda *args: None)
    step_time.main(
        [*TINY, "--modes=quantile", "--peers=opacus_ghost", f"--output_dir={tmp_path}"]
    )
    assert "skipped opacus" in capsys.readouterr().out


def test_table_refuses_other_columns_and_keeps_first_rows(tmp_path):
    table = cells.Table(tmp_path / "t.csv", ("a", "b"), ("a",))
    table.add([{"a": 1, "b": 0.5}, {"a": 1, "b": 0.7}, {"a": 2, "b": math.nan}])
    table.add([{"a": 2, "b": 3.0}])
    again = cells.Table(tmp_path / "t.csv", ("a", "b"), ("a",))
    assert again.rows == [{"a": "1", "b": "0.5"}, {"a": "2", "b": ""}]
    assert again.find({"a": 2}) == {"a": "2", "b": ""} and again.find({"a": 3}) is None
    with pytest.raises(ValueError, match="output_dir"):
        cells.Table(tmp_path / "t.csv", ("a", "c"), ("a",))


@pytest.mark.parametrize("edge", [1, 2, 3, 31, 64, 100, 777])
def test_largest_batch_is_found(edge):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= edge

    found = memory.largest(fits, 10_000)
    assert found <= edge < max(found + 1, 1.1 * found) + 1
    assert len(tried) <= 2 * math.log2(edge + 1) + 6
    assert memory.largest(lambda size: True, edge) == edge


def test_memory_rows_compare_with_the_same_frameworks_plain(tmp_path, monkeypatch):
    peaks = {"plain": (100.0, 200.0), "quantile": (100.0, 250.0)}

    def run(framework, spec, **kwargs):
        (name,) = spec.variants
        start, peak = peaks[name]
        if kwargs.get("memory_limit_mib") is not None:
            peak = start + spec.batch_size * (2.0 if name == "quantile" else 1.0)
        cell = {"status": "ok", "start_mib": start, "peak_mib": peak, "note": ""}
        return {name: cell}

    monkeypatch.setattr(cells, "run", run)
    memory.main(
        ["--models=mlp", "--batch_sizes=64", "--modes=quantile", "--peers="]
        + ["--largest_batch", "--memory_budget=612", f"--output_dir={tmp_path}"]
    )
    row = rows_of(tmp_path / "memory.csv")[1]
    assert float(row["ratio"]) == 1.25 and float(row["step_ratio"]) == 1.5
    plain, row = rows_of(tmp_path / "largest_batch.csv")
    assert (plain["largest_batch"], row["largest_batch"]) == ("512", "256")
    assert row["ratio"] == "0.5"
    text = (tmp_path / "report.md").read_text()
    assert "1.25 (1.50)" in text and "Largest batch in 612 MiB" in text


def test_growth_faster_than_plain_is_called_so(tmp_path):
    rows = []
    for variant, power in (("plain", 1.0), ("same", 1.05), ("worse", 1.5)):
        for value in (8, 16, 32, 64):
            row = dict.fromkeys(("batch_size", "parameters", "status", "note"), "")
            row.update(axis="layers", model="mlp", variant=variant, value=str(value))
            row.update(median_ms=f"{value**power}", step_mib="")
            rows.append(row)
    found = {row["variant"]: row for row in growth.exponents(rows)}
    times = {
        row["variant"]: row
        for row in growth.exponents(rows)
        if row["quantity"] == "median_ms"
    }
    assert times["same"]["grows_faster"] == "no"
    assert times["worse"]["grows_faster"] == "FASTER"
    assert times["worse"]["difference"] == pytest.approx(0.5, abs=1e-5)
    assert times["worse"]["last_ratio"] == pytest.approx(8.0)
    # No memory was measured: not known, rather than fine.
    assert found["worse"]["quantity"] == "step_mib"
    assert found["worse"]["grows_faster"] == "?"
    cells.Table(tmp_path / "scaling.csv", scaling.COLUMNS, ("value", "variant")).add(
        rows
    )
    names = [path.name for path in sections.write(tmp_path)]
    assert "scaling_time.png" in names
    assert "FASTER" in (tmp_path / "report.md").read_text()


def test_smoke_fails_above_the_limit_only(monkeypatch, capsys):
    factor = {"quantile": 1.5, "batch": 1.0}

    def run(framework, spec, **kwargs):
        return {
            name: {"status": "ok", "times": [factor.get(name, 1.0)] * 3}
            for name in spec.variants
        }

    def fit(*case, **told):
        return [
            {"variant": name, "epoch_s": 1.0, "ratio": factor.get("fit", 1.5)}
            for name in told["variants"]
        ]

    monkeypatch.setattr(cells, "run", run)
    monkeypatch.setattr(fit_time, "measure", fit)
    assert smoke.main([]) == 0
    factor["fit"] = 1.01 * smoke.limit("whole_fit")
    assert smoke.main(["--models=whole_fit"]) == 1
    assert "TOO SLOW" in capsys.readouterr().out
    factor["batch"] = 1.01 * smoke.limit("mlp")
    assert smoke.main(["--models=mlp"]) == 1
    factor["batch"] = 1.0
    assert "TOO SLOW" in capsys.readouterr().out
    if stack.FEDERATED:
        assert smoke.main(["--models=aggregation"]) == 0
        factor["distributed"] = 14.0
        assert smoke.main(["--models=mlp,aggregation"]) == 1
    with pytest.raises(SystemExit):
        smoke.main(["--factor=nan"])


@pytest.mark.parametrize(
    "command, flag",
    [
        (step_time.arguments, "--models=none"),
        (step_time.arguments, "--peers=none"),
        (step_time.arguments, "--seconds_per_cell=nan"),
        (step_time.arguments, "--repeats=0"),
        (memory.arguments, "--memory_budget=inf"),
        (federated_round.arguments, "--seconds=nan"),
        (federated_round.arguments, "--modes=none"),
        (federated_tasks.arguments, "--tasks=none"),
        (federated_tasks.arguments, "--variants=plain"),
        (federated_tasks.arguments, "--seconds=0"),
        (federated_tasks.arguments, "--clients=0"),
    ],
)
def test_errors_name_the_flag(command, flag, capsys):
    with pytest.raises(SystemExit):
        command([flag])
    # The last line, below the usage.
    assert flag.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "peer, model",
    [("opacus_hooks", "mnist_cnn"), ("opacus_ghost", "lstm"), ("jax_vmap", "mlp")],
)
def test_peers_run_where_they_are_installed(peer, model):
    framework = cells.framework_of(peer)
    if installed.python_of(framework) is None:
        pytest.skip(installed.how_to_create(framework))
    spec = timing.Spec(model, 4, ("plain", peer), repeats=2, seconds=10.0)
    found = cells.run(framework, spec, timeout=200)
    assert [cell["status"] for cell in found.values()] == ["ok", "ok"], found


@pytest.mark.skipif(not stack.FEDERATED, reason="TensorFlow Federated is not installed")
@pytest.mark.slow
def test_federated_rounds_run(tmp_path):
    federated_round.main(
        ["--parameters=1e4", "--clients=10"]
        + ["--aggregators=central,distributed,floor_central,floor_distributed"]
        + ["--repeats=2", "--seconds=5", f"--output_dir={tmp_path}"]
    )
    rows = rows_of(tmp_path / "federated.csv")
    names = ["plain", "central", "distributed", "floor_central", "floor_distributed"]
    assert [row["aggregator"] for row in rows] == names
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.slow
def test_federated_tasks_are_timed_on_the_batches_of_a_round():
    options = {"examples": 7}
    spec = timing.Spec("digits", 4, ("plain", "local", "evaluation"), options)
    made, parameters = federated_tasks_worker.makers(spec)
    assert list(made) == ["plain", "local", "evaluation"] and parameters == 2410
    for maker in made.values():
        maker()()
    round_ = federated_tasks_worker.Round(spec)
    batches = [batch for one in round_.datasets() for batch in one]
    assert [len(y) for _, y in batches] == [5, 3] * 4
    with pytest.raises(ValueError, match="variants must be of plain, local"):
        federated_tasks_worker.makers(dataclasses.replace(spec, variants=("none",)))


@pytest.mark.slow
@pytest.mark.parametrize("task", federated_tasks.SIZES)
def test_made_up_files_are_those_of_the_task(tmp_path, task):
    flags = task_data.write(task, tmp_path, clients=4, examples=6)
    config = command.config_from(task, flags)
    made = task_class(task)(config.options)
    source = made.load(config.data_dir)["train"]
    if task != "digits":
        assert list(source.counts.values()) == [6] * 4
    assert len(made.encode(source.examples(source.client_ids[0]))[0]) >= 6


@pytest.mark.skipif(not stack.FEDERATED, reason="TensorFlow Federated is not installed")
@pytest.mark.slow
def test_rounds_of_tasks_run_and_are_not_measured_again(tmp_path, monkeypatch):
    arguments = ["--tasks=digits", "--clients=4", "--repeats=2", "--seconds=5"]
    federated_tasks.main([*arguments, f"--output_dir={tmp_path}"])
    rows = rows_of(tmp_path / "federated_tasks.csv")
    assert [row["variant"] for row in rows] == list(federated_tasks.VARIANTS)
    assert {row["status"] for row in rows} == {"ok"}
    assert "A round of federated tasks" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(cells, "run", lambda *_, **__: pytest.fail("measured again"))
    federated_tasks.main([*arguments, f"--output_dir={tmp_path}"])


@pytest.mark.slow
def test_operations_of_a_step_are_told_apart(tmp_path):
    op_times.main(["--cells=mlp:16", f"--output_dir={tmp_path}"])
    rows = rows_of(tmp_path / "op_times.csv")
    found = {row["op"]: row for row in rows}
    assert float(found["noise, compiled"]["plain_ms"]) == 0
    assert float(found["noise, compiled"]["private_ms"]) > 0
    assert all(
        float(found["MatMul"][f"{name}_ms"]) > 0 for name in ("plain", "private")
    )
    differences = [abs(float(row["difference_ms"])) for row in rows]
    assert differences == sorted(differences, reverse=True)
    text = (tmp_path / "op_times.md").read_text()
    assert "## mlp, B = 16" in text and "| noise, compiled | 0.00 |" in text


def test_a_cell_without_a_batch_size_is_refused(capsys):
    with pytest.raises(SystemExit):
        op_times.main(["--cells=mlp"])
    assert "model:batch_size" in capsys.readouterr().err


def test_a_cell_that_fails_says_why(tmp_path, monkeypatch):
    def run(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nTypeError: no\n")

    monkeypatch.setattr(op_times.subprocess, "run", run)
    with pytest.raises(RuntimeError, match="mlp, B=2, plain failed: TypeError: no"):
        op_times.main(["--cells=mlp:2", f"--output_dir={tmp_path}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_steps_are_timed_on_replicas_and_on_workers(tmp_path):
    workers = "" if stack.KERAS_3 else "2"
    arguments = ["--replicas=2", f"--workers={workers}", "--seconds_per_cell=0.1"]
    assert replicas.main([*arguments, f"--output_dir={tmp_path}"]) == 0
    rows = rows_of(tmp_path / "replicas.csv")
    assert [row["kind"] for row in rows] == ["replicas", "workers"][: len(rows)]
    assert len(rows) == 1 + bool(workers)
    for row in rows:
        assert float(row["private_ms"]) > 0 and float(row["ratio"]) > 0.2
        # 784 x 512 x 512 x 10 with biases, and a count.
        assert int(row["bytes_reduced"]) == 4 * (401_920 + 262_656 + 5_130 + 1)


def traced(function, *shapes):
    @tf.function
    def traced(*arguments):
        return function(*arguments)

    return traced.get_concrete_function(*map(tf.TensorSpec, shapes)).graph


def test_operations_and_bytes_of_kernels_are_those_of_their_shapes():
    graph = traced(lambda a, b: tf.nn.relu(a @ b), [3, 5], [5, 7])
    product, relu = sorted(roofline.kernels(graph), key=lambda kernel: -kernel.flops)
    assert (product.op, product.flops) == ("MatMul", 2 * 3 * 5 * 7)
    assert product.bytes == 4 * (3 * 5 + 5 * 7 + 3 * 7)
    assert (relu.flops, relu.bytes) == (3 * 7, 2 * 4 * 3 * 7)


def test_the_three_convolutions_have_the_same_operations():
    def both(x, kernel):
        y = tf.nn.conv2d(x, kernel, 1, "SAME")
        return tf.gradients(y, [x, kernel])

    found = roofline.kernels(traced(both, [2, 6, 6, 3], [3, 3, 3, 4]))
    wanted = 2 * (2 * 6 * 6 * 4) * (3 * 3 * 3)
    flops = {k.op: k.flops for k in found if "Conv" in k.op}
    # The gradients do not need the convolution's own output.
    assert flops == {
        "Conv2DBackpropInput": wanted,
        "Conv2DBackpropFilter": wanted,
    }


def test_the_cheaper_branch_counts_and_a_loop_is_refused():
    def branch(a):
        return tf.cond(a[0, 0] > 0, lambda: a @ a, lambda: tf.nn.relu(a))

    assert "MatMul" not in [k.op for k in roofline.kernels(traced(branch, [900, 900]))]

    def loop(a):
        return tf.while_loop(lambda a: a[0] > 0, lambda a: (a - 1,), (a,))

    with pytest.raises(roofline.LoopError, match="is a loop"):
        roofline.kernels(traced(loop, [9]))


def test_a_kernel_takes_the_longest_of_three_times():
    device = roofline.Device(flops=10.0, bandwidth=5.0, launch=1.0)
    for kernel, seconds in (((30, 5), 3.0), ((30, 20), 4.0), ((1, 1), 1.0)):
        assert device.seconds(roofline.Kernel("Op", *kernel)) == seconds


@pytest.mark.slow
def test_a_gpu_is_estimated(capsys):
    roofline.main(["--cells=mlp:16"])
    names, _, row = capsys.readouterr().out.strip().splitlines()
    cells_of = [line.strip("| ").split(" | ") for line in (names, row)]
    row = dict(zip(*cells_of, strict=True))
    assert float(row["operations"]) >= 0.9 and float(row["private / plain"]) > 1
    with pytest.raises(SystemExit):
        roofline.main(["--cells=lstm:16"])
    assert "is a loop" in capsys.readouterr().err


@pytest.mark.slow
def test_a_whole_fit_is_timed_once_and_reported(tmp_path, monkeypatch):
    arguments = [
        *("--models=mlp", "--batch_sizes=16", "--examples=64", "--epochs=2"),
        *("--turns=1", f"--output_dir={tmp_path}"),
    ]
    whole_fit.main(arguments)
    rows = list(csv.DictReader((tmp_path / "whole_fit.csv").open()))
    assert [row["variant"] for row in rows] == list(fit_time.VARIANTS)
    plain, *_, plan, _ = rows
    # The table has six digits of each.
    assert float(plan["ratio"]) == pytest.approx(
        float(plan["epoch_s"]) / float(plain["epoch_s"]), rel=1e-4
    )
    # The run spent the planned epsilon.
    assert 2.9 < float(plan["epsilon"]) <= 3
    assert "| mlp | 64 | 16 |  |" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(fit_time, "measure", lambda *_, **__: pytest.fail("again"))
    whole_fit.main(arguments)
    with pytest.raises(SystemExit):
        whole_fit.main(["--models=none"])


@pytest.mark.slow
@pytest.mark.parametrize("task", to_accuracy.TASKS)
def test_an_accuracy_is_reached_at_the_epsilon_that_was_asked_for(
    task, tmp_path, capsys
):
    arguments = [
        *("--data=synthetic", "--libraries=tfdpclip", "--epochs=1", "--turns=1"),
        *(f"--task={task}", f"--output_dir={tmp_path}"),
    ]
    to_accuracy.main(arguments)
    (row,) = csv.DictReader((tmp_path / "to_accuracy.csv").open())
    assert 2.9 < float(row["spent"]) <= 3 and 0 <= float(row["accuracy"]) <= 1
    assert "tfdpclip seconds" in capsys.readouterr().out
    assert "From arrays to an accuracy" in (tmp_path / "report.md").read_text()
    to_accuracy.main(arguments)
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        to_accuracy.main(["--libraries=none"])


def test_runs_to_an_accuracy_are_shown_by_their_mean(tmp_path):
    rows = [
        f"mnist,{name},2,3,{turn},{seconds},{accuracy},{spent}"
        for name, spent in (("keras", "inf"), ("tfdpclip", 2.9999))
        for turn, (seconds, accuracy) in enumerate([(8, 0.9), (10, 0.92)])
    ]
    table = "\n".join([",".join(to_accuracy.COLUMNS), *rows, ""])
    (tmp_path / "to_accuracy.csv").write_text(table)
    sections.write(tmp_path)
    report = (tmp_path / "report.md").read_text()
    # The half interval of two runs is 12.7 times half their difference.
    assert "| mnist | 2 | tfdpclip | 2 | 9.0 ± 12.7 | 91.0 ± 12.7 | 3.00 |" in report
    assert "| mnist | 2 | keras | 2 | 9.0 ± 12.7 | 91.0 ± 12.7 |  |" in report


def test_plays_are_comedies_or_tragedies(tmp_path, capsys):
    words = " ".join(["word"] * 330)
    for name in ("hamlet", "tempest", "sonnets"):
        (tmp_path / f"{name}_gut.txt").write_text(words)
    found = to_accuracy.passages(tmp_path)
    assert found["x"].shape == (16, 32) and found["test_x"].shape == (4, 32)
    assert sum(found["y"]) + sum(found["test_y"]) == 10
    (tmp_path / "hamlet_gut.txt").unlink()
    with pytest.raises(SystemExit):
        to_accuracy.main(["--task=plays", f"--data={tmp_path}"])
    assert "no comedies and tragedies" in capsys.readouterr().err


@pytest.mark.slow
def test_records_from_disk_are_counted_and_not_rows(tmp_path, capsys):
    paths = records.write_files(tmp_path, 12, 8)
    for variant in records.VARIANTS:
        stream = records._elements(variant, paths, 8, 4)
        counts = [next(stream) for _ in range(40)]
        # Of 160 on average; binomial draws are 60 off less than once in 10^8.
        assert 100 < sum(counts) < 220, variant
    told = ["--files=12", "--side=8", "--batch_size=4", "--seconds=0.01", "--turns=1"]
    records.main([*told, "--cores=1", f"--output_dir={tmp_path}"])
    rows = list(csv.DictReader((tmp_path / "records.csv").open()))
    assert [row["variant"] for row in rows] == list(records.VARIANTS)
    assert all(float(row["images_per_s"]) > 0 for row in rows)
    with pytest.raises(SystemExit):
        records.main([*told, "--cores=1000"])
    assert "--cores: there are" in capsys.readouterr().err


def test_every_row_is_repeated_by_flags_that_exist(tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, int("memory" in command[2]))

    monkeypatch.setattr(every_row.subprocess, "run", run)
    with pytest.raises(SystemExit, match="These failed: benchmarks.memory --models="):
        every_row.main([f"--output_dir={tmp_path}"])
    assert len(commands) == len(every_row.PARTS)
    helps = {}
    for _, _, name, *flags in commands:
        if name not in helps:
            main = importlib.import_module(name).main
            with pytest.raises(SystemExit):
                main(["--help"])
            helps[name] = capsys.readouterr().out
        for flag in flags:
            assert f"{flag.partition('=')[0]} " in helps[name].replace("]", " "), flag
    commands.clear()
    every_row.main(["--only=scaling,report", f"--output_dir={tmp_path}"])
    assert [c[2] for c in commands] == ["benchmarks.scaling", "benchmarks.report"]
    with pytest.raises(SystemExit):
        every_row.main(["--only=none"])
