"""Random graphs of raw ops: the proof's verdicts compared with brute force.

`python -m tests.fuzz.graphs --graphs=1000 --seed=7`; to check a single graph again:
`python -m tests.fuzz.graphs --one=7-123`. With `--alone`, brute force judges the
gradients that the engine makes one example at a time, where the proof ends.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# TensorFlow never frees a traced function: a process judges so many graphs.
_CHUNK, _SECONDS = 50, 600


def _work(seed: str, first: int, count: int, alone: bool) -> None:
    import dataclasses

    from tests.fuzz.graphs.graph import judge

    for number in range(first, first + count):
        print(json.dumps({"begin": number}), flush=True)
        found = judge(f"{seed}-{number}", alone=alone)
        row = {"number": number, **dataclasses.asdict(found)}
        print(json.dumps(row), flush=True)


def _chunk(seed: str, first: int, count: int, alone: bool) -> list[dict]:
    """The judgements of some graphs, of a process that may die."""
    rows: list[dict] = []
    end = first + count
    while first < end:
        command = [sys.executable, "-m", "tests.fuzz.graphs", f"--seed={seed}"]
        command += ["--work", str(first), str(end - first), *["--alone"] * alone]
        try:
            out = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
            text, said = out.stdout, out.stderr[-600:]
        except subprocess.TimeoutExpired as expired:
            text, said = (expired.stdout or b"").decode(), "took too long"
        lines = [json.loads(s) for s in text.splitlines() if s.startswith("{")]
        rows += [line for line in lines if "number" in line]
        begun = [line["begin"] for line in lines if "begin" in line]
        if begun and len(begun) == sum("number" in line for line in lines):
            break
        if not begun:
            raise RuntimeError(f"No graph was begun: {said}")
        last = begun[-1]
        rows.append({"number": last, "verdict": "died", "moves": None, "detail": said})
        first = last + 1
    return rows


def report(rows: list[dict], wrong: tuple[str, ...] = ("proven",)) -> str:
    """Counts the proofs among graphs without an effect, and lists the wrong proofs."""
    still = [r for r in rows if r["moves"] is None]
    still = [r for r in still if r["verdict"] not in ("impossible", "died")]
    proven = [r for r in still if r["verdict"] == "proven"]
    counts = collections.Counter(
        (r["verdict"], "moves" if r["moves"] else "stays") for r in rows
    )
    lines = [f"{verdict}, {what}: {n}" for (verdict, what), n in sorted(counts.items())]
    if still:
        share = len(proven) / len(still)
        lines.append(f"of {len(still)} that do not move, {share:.1%} are proven")
    gaps = collections.Counter(
        (r["verdict"], r.get("gap") or r["detail"].rpartition(": ")[2][:60])
        for r in still
        if r["verdict"] != "proven"
    )
    lines += [f"  not proven, {n}: {v} {gap}" for (v, gap), n in gaps.most_common(25)]
    for row in rows:
        if row["verdict"] == "died":
            lines.append(f"DIED {row['number']}: {row['detail'][-300:]}")
        if row["verdict"] in wrong and row["moves"]:
            lines.append(f"UNSOUND {row['number']}: {row['moves']}: {row['detail']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs; returns 1 if a graph that moves was proven, or an example alone moves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--one", action="append", default=[])
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--work", nargs=2, type=int)
    parser.add_argument("--rows", help="write the judgements to this file")
    args = parser.parse_args(argv)
    if args.work:
        _work(args.seed, *args.work, args.alone)
        return 0
    if args.one:
        from tests.fuzz.graphs.graph import judge

        for seed in args.one:
            print(seed, judge(seed, alone=args.alone))
        return 0
    begin, rows = time.monotonic(), []
    for first in range(args.first, args.first + args.graphs, _CHUNK):
        count = min(_CHUNK, args.first + args.graphs - first)
        rows += _chunk(args.seed, first, count, args.alone)
        if args.rows:
            with open(args.rows, "w") as file:
                json.dump(rows, file)
        if time.monotonic() - begin > args.seconds:
            break
    wrong = ("unknown",) if args.alone else ("proven",)
    print(report(rows, wrong))
    print(f"{len(rows)} graphs, {time.monotonic() - begin:.0f} s; seed {args.seed}")
    return int(any(r["verdict"] in wrong and r["moves"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
