"""The program for a first hour with a GPU, at tiny shapes on the CPU."""

import json
import math
import os
import subprocess
import sys
import time

import jax
import pytest

import convbert_jax
from benchmarks.on_gpu import pytorch, session, steps
from convbert_jax.recipes.planning import traced
from tests import compiling
from tests.conftest import REPOSITORY

OPS = ("dynamic_conv", "span_dynamic_conv", "depthwise_conv")


def call(*arguments, timeout=300):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.on_gpu", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": compiling.CHEAPLY},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def smoked(tmp_path_factory):
    path = tmp_path_factory.mktemp("on_gpu") / "lines.jsonl"
    sections = "--sections=versions,ceilings,numerics,op"
    result = call("--smoke", sections, "--limit=120", f"--json={path}")
    assert result.returncode == 0, result.stderr
    return result, read(path)


def named(lines, section, kind="figures"):
    return {x["name"]: x for x in lines if (x["section"], x["kind"]) == (section, kind)}


def test_sections_come_in_order_and_every_case_has_a_line(smoked):
    result, lines = smoked
    assert list(dict.fromkeys(x["section"] for x in lines)) == [
        "versions",
        "ceilings",
        "numerics",
        "op",
    ]
    assert not [x for x in lines if x["kind"] == "left_out"]
    planned = {(x["section"], case) for x in lines if x["kind"] == "plan" for case in x["cases"]}
    said = [(x["section"], x["name"]) for x in lines if x["kind"] != "plan"]
    assert sorted(said) == sorted(planned)
    for line in lines:
        assert line["kind"] == "plan" or line["name"] in result.stdout


def test_the_only_errors_are_those_of_what_needs_a_gpu(smoked):
    _, lines = smoked
    errors = [x for x in lines if x["kind"] == "error"]
    assert {x["name"] for x in errors} == {"attention, tiny, bfloat16, cudnn"}
    assert all("it needs a gpu" in x["error"] for x in errors)
    takes = named(lines, "numerics")["takes dynamic_conv, pallas_gpu, float32"]
    assert not takes["taken"]
    assert "needs a gpu" in takes["why"]


def test_versions_and_ceilings(smoked):
    _, lines = smoked
    versions = named(lines, "versions")
    assert versions["packages"]["jax"]
    assert versions["device"]["platform"] == "cpu"
    ceilings = named(lines, "ceilings")
    assert sum("gb_per_s" in x and x["gb_per_s"] > 0 for x in ceilings.values()) == 4
    assert sum("tflop_per_s" in x and x["tflop_per_s"] > 0 for x in ceilings.values()) == 2


@pytest.mark.parametrize("op", OPS)
def test_kernels_are_compared_with_float64(smoked, op):
    figures = named(smoked[1], "numerics")
    for dtype, least in (("float32", 1e-9), ("bfloat16", 1e-4)):
        line = figures[f"{op}, tiny, {dtype}, kernel"]
        errors = {key: value for key, value in line.items() if key.startswith("error_")}
        assert len(errors) == (6 if op == "span_dynamic_conv" else 3)
        assert line["ok"]
        # not compared with itself, nor bfloat16 with float32
        assert least < errors["error_out"] < line["allowed"]
        assert len(set(line["seeds"])) == 2


@pytest.mark.parametrize("op", OPS)
def test_shares_are_bytes_by_time(smoked, op):
    figures = named(smoked[1], "op")
    for direction in ("forward", "forward_backward"):
        for form in ("xla", "kernel"):
            line = figures[f"{op}, 2 x 24 x 32, {direction}, {form}"]
            rate = line["bytes"] / line["ms"] / 1e6
            assert math.isclose(line["gb_per_s"], rate, rel_tol=1e-6)
            assert math.isclose(line["share_of_copy"], rate / line["copy_gb_per_s"], rel_tol=1e-6)


def test_without_a_gpu_it_refuses():
    result = call()
    assert result.returncode == 1
    assert result.stderr.startswith("benchmarks.on_gpu needs an NVIDIA GPU")
    assert "--smoke" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sections=numerics,speed"], "there is no 'speed', but versions, ceilings"),
        (["--limit=0"], "--limit is 0, but must be above 0"),
        ([f"--json={__file__}"], "is there already"),
    ],
)
def test_wrong_arguments(arguments, said):
    result = call("--smoke", *arguments)
    assert result.returncode == 2
    assert said in result.stderr


def test_a_section_is_ended_at_its_limit_and_says_what_is_missing(tmp_path):
    path = tmp_path / "lines.jsonl"
    result = call("--smoke", "--sections=numerics", "--limit=0.2", f"--json={path}")
    assert result.returncode == 0, result.stderr
    lines = read(path)
    assert lines
    assert all(line["kind"] in ("error", "left_out", "plan") for line in lines)
    assert any("time limit" in line.get("error", "") for line in lines)


@pytest.mark.parametrize(("size", "variant"), steps.CASES)
def test_variants_are_configs(size, variant):
    config = convbert_jax.load_config(size, **steps.VARIANTS[variant])
    assert config.name == size
    assert (config.model.attention == "cudnn") == ("cudnn" in variant)
    assert (config.model.convolution == "xla") == ("by xla" in variant)
    assert config.model.scan_unroll == (1 if variant == "scanned" else config.model.layers)
    assert (config.compute_dtype == "float32") == (variant == "float32")


@pytest.mark.parity
@pytest.mark.parametrize("size", ["small", "base"])
def test_pytorch_has_models_of_our_sizes(size):
    """ConvBERT's discriminator with its head has as many parameters as ours."""
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = convbert_jax.load_config(size)
    with torch.device("meta"):
        network, _ = pytorch._convbert(config, "meta")
    found = sum(p.numel() for n in ("discriminator", "head") for p in network[n].parameters())
    shapes = jax.eval_shape(traced.make_task(config, jax.devices()[0]).init, jax.random.key(0))
    ours = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if "generator" not in jax.tree_util.keystr(path)
    )
    assert found == ours


def test_what_fails_does_not_stop_the_rest(tmp_path, capsys):
    path = tmp_path / "lines"
    path.touch()
    one = session.Session("op", str(path), time.time() + 60)
    one.plan(["bad", "good", "crashed"])
    one.run("bad", lambda: {"x": 1 / 0})
    one.run("good", lambda: {"x": 2.0})
    assert [x["kind"] for x in read(path)] == ["plan", "error", "figures"]
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().out
    assert session.missing_cases(str(path), 0) == ["crashed"]


def test_no_case_begins_too_late(tmp_path):
    path = tmp_path / "lines"
    path.touch()
    one = session.Session("op", str(path), time.time() - 1)
    one.plan(["late"])
    one.run("late", lambda: {"x": 1})
    assert one.prepare({"late": lambda: int}) == {}
    assert session.missing_cases(str(path), 0) == ["late"]
