"""Seconds from process start to the end of the first step, cold and with the compile cache.

    python benchmarks/speed/startup.py [--config=configs/tiny.py] [--runs=3] [--json] [-- OVERRIDES]

Each run is a fresh process on data that was prepared once in a temporary folder. Cold runs have an
empty compile cache, warm runs that of the previous run. The seconds come from the program's log
line "First step ... after the program started".
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
FIRST_STEP = re.compile(r"First step ([\d.]+) s after")


def start(arguments: list[str]) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "convbert_jax.main", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(result.stderr)
    return result.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/tiny.py")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="after --: further flags of main.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shared = [
            f"--config={options.config}",
            f"--config.data.directory={folder}/data",
            "--config.train.steps=1",
            "--config.optimizer.warmup_steps=0",
            "--config.train.eval_rows=1",
            *options.overrides,
        ]
        start([*shared, "--mode=prepare", f"--workdir={folder}/prepare"])
        seconds = {"cold": [], "warm": []}
        for run in range(options.runs):
            for kind in seconds:
                log = start(
                    [
                        *shared,
                        f"--workdir={folder}/{kind}{run}",
                        f"--config.train.compile_cache={folder}/cache{run}",
                    ]
                )
                seconds[kind].append(float(FIRST_STEP.search(log)[1]))
    for kind, values in seconds.items():
        row = {
            "config": options.config,
            "compile_cache": kind,
            "median_seconds": statistics.median(values),
            "seconds": values,
        }
        if options.json:
            print(json.dumps(row))
        else:
            print(f"{options.config} {kind}: {row['median_seconds']:.1f} s (of {values})")


if __name__ == "__main__":
    main()
