"""Steps as files: they run without TensorFlow, and give the same results."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import (
    compiled,
    compiled_tables,
    models,
    paper_models,
    run_steps,
    step_files,
)
from tfdpclip.gradients.forms.base_form import sum_weighted

L = tf.keras.layers
CELL = step_files.Cell("tiny", 16)
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jaxlib") is None, reason="jaxlib is not installed"
)
# As on a machine that has neither.
WITHOUT = """
import runpy, sys
for name in ("tensorflow", "keras", "tfdpclip", "benchmarks", "driver_kit"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def tiny() -> models.Task:
    def build():
        layers = [L.Embedding(9, 4), L.Conv1D(5, 2, activation="relu"), L.Flatten()]
        return tf.keras.Sequential([L.Input((6,), dtype="int32"), *layers, L.Dense(3)])

    return models.Task(build, models.tokens(6, 9, 3))


def write(folder, variants, cell=CELL):
    makers = {
        name: lambda name=name: step_files.made(cell, name, tiny())
        for name in ("plain", *variants)
    }
    return step_files.write(folder, cell.fields(), makers)


def run(folder, *flags):
    """Runs a folder's own copy of the runner; returns its process and its findings."""
    output = folder.parent / "found.json"
    command = [sys.executable, "-c", WITHOUT, str(folder / "run_steps.py")]
    flags = ("--repeats=2", "--seconds=0.1", *flags, f"--output={output}")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*command, str(folder), *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    found = json.loads(output.read_text())[0] if output.exists() else None
    return done, found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a plain and two private steps, which no test changes."""
    folder = tmp_path_factory.mktemp("steps") / "tiny"
    names = ("quantile_unchecked", "quantile_no_noise_unchecked")
    return folder, write(folder, names)


@pytest.fixture
def copied(written, tmp_path):
    folder = tmp_path / "steps"
    shutil.copytree(written[0], folder)
    return folder


@pytest.mark.slow
@needs_jax
def test_a_step_runs_without_tensorflow_and_does_what_tensorflow_does(written):
    folder, manifest = written
    done, found = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, private, bare = found["steps"].values()
    for row in (plain, private, bare):
        assert row["agrees"] and row["difference"] < 1e-4
        assert row["flops"] > 0 and row["bytes"] > 0 and row["compile_s"] > 0
        assert len(row["times_ms"]) == 3 and row["repeats"] == 2
    # The noise of a file equals the second runtime's, number by number.
    count = [
        sum(n for n, _ in row["kernels"]["always"].values())
        for row in (plain, private, bare)
    ]
    assert count[0] < count[1] and plain["ratios"] == [1, 1, 1]
    assert "agrees" in done.stdout and "kernels more" in done.stdout
    names = [about["name"] for about in manifest["steps"][1]["arguments"]]
    assert any("StateVar" in name or "state" in name.lower() for name in names)


@pytest.mark.slow
def test_arguments_are_shared_and_results_say_what_they_update(written):
    _, manifest = written
    plain, private, _ = manifest["steps"]
    shapes = [tuple(about["shape"]) for about in plain["arguments"][:3]]
    assert shapes == [(16, 6), (16,), (9, 4)]
    for one, other in zip(plain["arguments"][:3], private["arguments"], strict=False):
        assert one["array"] == other["array"]
    for step in (plain, private):
        updated = {about["updates"] for about in step["results"]} - {None}
        shapes = {tuple(step["arguments"][i]["shape"]) for i in updated}
        assert {(9, 4), (2, 4, 5), (25, 3)} <= shapes and (16, 6) not in shapes
        assert step["results"][0]["updates"] is None


def test_a_program_of_one_batch_alone_is_refused():
    @tf.function(jit_compile=True)
    def step(x, count):
        return tf.reduce_sum(x) * tf.ones([count])

    with pytest.raises(step_files.ExportError, match="took data 1 for constants"):
        step_files.Step(step, (tf.constant([1.0, 2.0]), tf.constant(3)))


def changed_arrays(folder, change):
    with np.load(folder / run_steps.ARRAYS) as stored:
        arrays = dict(stored)
    change(arrays)
    np.savez(folder / run_steps.ARRAYS, **arrays)


def manifest_of(folder):
    return json.loads((folder / run_steps.MANIFEST).read_text())


def one_weight(folder):
    step = manifest_of(folder)["steps"][0]
    about = next(a for a in step["arguments"] if a["shape"] == [9, 4])

    def change(arrays):
        arrays[about["array"]][0, 0] += 1e-3

    changed_arrays(folder, change)


def one_array_less(folder):
    key = manifest_of(folder)["steps"][0]["arguments"][0]["array"]
    changed_arrays(folder, lambda arrays: arrays.pop(key))


def half_of(name):
    def change(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def other_version(folder):
    found = {**manifest_of(folder), "version": 0}
    (folder / run_steps.MANIFEST).write_text(json.dumps(found))


@pytest.mark.parametrize(
    "change, message",
    [
        (one_weight, r"arguments? .*of .* are not what was written"),
        (one_array_less, "arrays.npz lacks the arguments data 0"),
        (half_of("arrays.npz"), "arrays.npz is broken"),
        (half_of("plain.hlo"), "plain.hlo is not what was written"),
        (half_of("steps.json"), "steps.json is broken"),
        (lambda f: (f / "plain.hlo").unlink(), "plain.hlo is missing"),
        (lambda f: (f / "arrays.npz").unlink(), "arrays.npz is broken"),
        (lambda f: (f / "steps.json").unlink(), "has no steps.json"),
        (other_version, "is of version 0"),
    ],
)
def test_what_was_changed_or_broken_is_said(copied, change, message):
    change(copied)
    with pytest.raises(run_steps.StepFileError, match=message):
        run_steps.read(copied)


@pytest.mark.slow
@needs_jax
def test_a_result_that_is_not_tensorflows_is_found(copied):
    manifest = manifest_of(copied)
    result = manifest["steps"][1]["results"][1]

    def change(arrays):
        value = arrays.pop(result["array"]) + np.float32(1e-2)
        result["array"] = step_files.digest(value)
        arrays[result["array"]] = value

    changed_arrays(copied, change)
    (copied / run_steps.MANIFEST).write_text(json.dumps(manifest))
    done, found = run(copied)
    assert done.returncode == 1
    assert f"DIFFERS in {result['name']}" in done.stdout
    assert [row["agrees"] for row in found["steps"].values()] == [True, False, True]


@needs_jax
def test_a_broken_folder_ends_the_program_with_a_reason(copied):
    half_of("plain.hlo")(copied)
    done, found = run(copied)
    assert done.returncode == 1 and found is None
    assert "plain.hlo is not what was written" in done.stderr
    assert "Traceback" not in done.stderr


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("policy", step_files.POLICIES)
def test_the_self_check_and_both_policies_agree(tmp_path, optimizer, policy):
    cell = step_files.Cell("tiny", 16, optimizer, policy)
    folder = tmp_path / "steps"
    # Each check takes seconds to compile, here and there.
    others = [f"{name}_unchecked" for name in ("normalized", "automatic", "fixed")]
    write(folder, ("quantile", *others), cell)
    done, found = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    # The check is a branch of the program.
    assert found["steps"]["quantile"]["kernels"]["in branches"]
    assert not found["steps"]["plain"]["kernels"]["in branches"]


@needs_jax
@pytest.mark.slow
def test_a_step_is_split_over_devices(written):
    done, found = run(written[0], "--devices=4")
    assert done.returncode == 0, done.stdout + done.stderr
    plain, private, _ = found["steps"].values()
    assert "all-reduce" in plain["collectives"]
    assert "all-reduce" in private["collectives"]


HLO = """HloModule step, is_scheduled=true

%fused (p: f32[8,2]) -> f32[8,2] {
  %p = f32[8,2]{1,0} parameter(0)
  ROOT %t = f32[8,2]{1,0} tanh(f32[8,2]{1,0} %p)
}

%body (q: (s32[], f32[8,2])) -> (s32[], f32[8,2]) {
  %q = (s32[], f32[8,2]{1,0}) parameter(0)
  %g = f32[8,2]{1,0} get-tuple-element((s32[], f32[8,2]{1,0}) %q), index=1
  ROOT %c = (s32[], f32[8,2]{1,0}) custom-call(%g), custom_call_target="own"
}

%rare (r: f32[8,2]) -> f32[2,8,2] {
  %r = f32[8,2]{1,0} parameter(0)
  ROOT %big = f32[2,8,2]{2,1,0} broadcast(f32[8,2]{1,0} %r), dimensions={1,2}
}

ENTRY %main (x: f32[8,2], /*index=1*/y: pred[]) -> f32[8,2] {
  %x = f32[8,2]{1,0} parameter(0)
  %y = pred[] parameter(1)
  %f = f32[8,2]{1,0} fusion(f32[8,2]{1,0} %x), kind=kLoop, calls=%fused
  %a = f32[8,2]{1,0} all-reduce(f32[8,2]{1,0} %f), to_apply=%fused
  %w = (s32[], f32[8,2]{1,0}) while(%a), condition=%fused, body=%body
  %n = f32[2,8,2]{2,1,0} conditional(%y, %x), branch_computations={%rare, %rare}
  ROOT %z = f32[8,2]{1,0} copy(f32[8,2]{1,0} %f)
}
"""


def test_kernels_are_counted_where_they_run():
    found = run_steps.kernels(HLO)
    always = {kind: count for kind, (count, _) in found["always"].items()}
    assert always["fusion kLoop"] == always["copy"] == always["while"] == 1
    assert always["custom-call own"] == always["conditional"] == 1
    assert found["always"]["copy"] == [1, 64]
    assert found["in branches"] == {"broadcast": [2, 256]}
    assert found["fused"]["tanh"] == [1, 64]


def test_what_devices_exchange_and_which_arrays_there_are_is_read():
    assert run_steps.collectives(HLO) == {"all-reduce": [1, 64]}
    assert run_steps.occurrences(HLO, "2,2,8") == 2
    assert run_steps.occurrences(HLO, "8,8") == 0
    assert run_steps.largest_arrays(HLO)[0][:2] == [128, "f32[2,8,2]"]


def test_no_program_has_a_gradient_of_a_table_for_each_example():
    batch, tokens, rows, width = 16, 30, 501, 7

    def build():
        return paper_models.embedding(rows, width, tokens)

    task = models.Task(build, models.tokens(tokens, rows, 10))
    cell = step_files.Cell("table", batch)
    step = step_files.made(cell, "quantile_unchecked", task)
    assert run_steps.occurrences(step.text, f"{batch},{tokens},{width}")
    assert run_steps.occurrences(step.text, f"{rows},{width}")
    for shape in (f"{batch},{rows},{width}", f"{batch},{rows}"):
        assert not run_steps.occurrences(step.text, shape)


@pytest.mark.parametrize("lora", [False, True])
def test_transformers_on_paper_have_the_weights_that_they_say(lora):
    size = paper_models.Size(width=16, blocks=2, heads=2, vocabulary=50, length=8)
    model = paper_models.transformer(size, 2, lora)
    trained = sum(np.prod(v.shape) for v in model.trainable_variables)
    if lora:
        # Four projections of each block, and the head.
        assert trained == 2 * 4 * 2 * paper_models.RANK * 16 + 16 * 10 + 10
    else:
        assert trained == model.count_params() == size.parameters()
    sizes = paper_models.SIZES
    assert 0.95e8 < sizes["100M"].parameters() < 1.15e8
    assert 0.95e9 < sizes["1B"].parameters() < 1.05e9


@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="of what CPUs do"
)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_weighted_sum_under_xla_is_a_product_of_two_rows(count):
    """For a single row, XLA makes a slow loop; see `forms.sum_weighted`."""
    rng = np.random.default_rng(0)
    values = tf.constant(rng.standard_normal((count, 3, 4)).astype("float32"))
    weights = tf.constant(rng.random(count).astype("float32"))
    compiled_sum = tf.function(sum_weighted, jit_compile=True)
    wanted = np.tensordot(weights, values, 1)
    np.testing.assert_allclose(compiled_sum(weights, values), wanted, rtol=1e-5)
    np.testing.assert_allclose(sum_weighted(weights, values), wanted, rtol=1e-5)
    if count:
        text = compiled_sum.experimental_get_compiler_ir(weights, values)(stage="hlo")
        assert f"f32[2,{count}]" in text


def found_of(platform="cpu", difference=1e-7):
    def step(count, milliseconds):
        return {
            "compile_s": 1.0,
            "flops": 2.0 * count,
            "bytes": 10.0 * count,
            "kernels": {"always": {"dot": [count, 8]}, "in branches": {}, "fused": {}},
            "difference": difference,
            "agrees": difference < 1e-3,
            "times_ms": [milliseconds] * 3,
            "ratios": [milliseconds / 2.0] * 3,
            "repeats": 9,
        }

    return {
        "cell": CELL.fields(),
        "written_by": {"tensorflow": "2.14.1"},
        "platform": platform,
        "device": "A GPU" if platform == "gpu" else "cpu",
        "jaxlib": "0.4.18",
        "steps": {"plain": step(2, 2.0), "quantile": step(3, 3.0)},
    }


def test_results_of_another_machine_are_added_and_shown(tmp_path):
    elsewhere = tmp_path / "results.json"
    elsewhere.write_text(json.dumps([found_of("gpu"), found_of(difference=0.5)]))
    arguments = [f"--add={elsewhere}", f"--output_dir={tmp_path / 'out'}"]
    for _ in range(2):  # Known results are not added again.
        compiled.main(arguments)
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "## Steps on A GPU, jaxlib 0.4.18" in text and "## Steps on cpu" in text
    assert text.count("| tiny | 16 | sgd | float32 | 2.00 | 1.50 (1.50-1.50) |") == 2
    assert text.count("dot +1") == 2 and text.count("DIFFERS") == 1
    rows = compiled_tables.rows_of(found_of("gpu"))
    assert [row["device"] for row in rows] == ["A GPU"] * 2
    assert rows[1]["more"] == "dot +1" and rows[0]["more"] == ""


@pytest.mark.parametrize(
    "flag",
    [
        *("--models=none", "--modes=none", "--optimizers=none", "--policies=none"),
        *("--batch_sizes=0", "--repeats=0", "--seconds_per_cell=nan"),
    ],
)
def test_errors_name_the_flag(flag, capsys):
    with pytest.raises(SystemExit):
        compiled.arguments([flag])
    assert flag.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]


def test_writing_only_needs_a_place(capsys):
    with pytest.raises(SystemExit):
        compiled.arguments(["--only_write"])
    assert "--folder" in capsys.readouterr().err


@needs_jax
@pytest.mark.slow
def test_the_commands_of_the_page_write_run_and_add(tmp_path, monkeypatch, capsys):
    chosen = ["--models=mlp", "--batch_sizes=16", "--modes=quantile_unchecked"]
    chosen += ["--optimizers=sgd", "--policies=float32", "--seconds_per_cell=0.2"]
    output = tmp_path / "out"
    compiled.main([*chosen, f"--output_dir={output}"])
    assert "| mlp | 16 | sgd | float32 |" in (output / "tables.md").read_text()
    monkeypatch.setattr(compiled, "_run", lambda *_: pytest.fail("measured again"))
    compiled.main([*chosen, f"--output_dir={output}"])
    monkeypatch.undo()
    # For a machine without TensorFlow.
    steps = tmp_path / "steps"
    compiled.main([*chosen, "--only_write", f"--folder={steps}"])
    assert not (tmp_path / "runs").exists()
    command = [sys.executable, str(steps / "run_steps.py")]
    folders = [str(path) for path in steps.iterdir() if path.is_dir()]
    results = tmp_path / "results.json"
    done = subprocess.run(
        [*command, *folders, "--repeats=2", f"--output={results}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiled.main([f"--add={results}", f"--output_dir={tmp_path / 'added'}"])
    assert "| mlp | 16 |" in (tmp_path / "added" / "tables.md").read_text()


def test_the_command_knows_what_it_names():
    assert set(compiled.MODELS) <= set(models.NAMES)
    assert set(compiled.MODES) <= set(step_files.VARIANTS)
    names = [case.name for case in paper_models.CASES]
    assert len(set(names)) == len(names)
