"""Writes the results of `op_table` to docs/results."""

from __future__ import annotations

import collections
import csv
import pathlib

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"
USES = ("loss", "gradient", "mask")

_HEAD = """# Which ops keep examples apart, and are the rest refused?

Every op of `tf.raw_ops` that takes floating numbers was applied to the activations
of a small model: *along* the examples (each row by itself), and *across* the
examples, where the op can be. The result was used in the loss; in a factor of the
gradient alone (`g * loss + stop_gradient((1 - g) * loss)`); and in a mask of the
same kind (`where(mask, loss, stop_gradient(loss))`). By brute force: if replacing
an example moves the gradients of the remaining examples, the step must be refused, or
each example be evaluated by itself.
`python -m tests.gradients.op_table` writes the page; ops_and_isolation.csv beside
it has the effects and the errors' texts.

| entry | meaning |
| --- | --- |
| sound | no other example's gradient moved, and the step was taken |
| graph | gradients of further examples moved; refused from the graph, before any step |
| one by one | taken one example at a time; the sum was that of single examples |
| step | gradients of further examples moved; found by the first comparison |
| refused though sound | a false alarm for these data, from the graph or by the step |
| SILENT | gradients of further examples moved, and the steps were taken |
| cannot run | TensorFlow cannot run or differentiate it |
"""


def write(rows: list[dict]) -> None:
    """Writes the page, and the rows as they are."""
    columns = ("op", "way", "form", "use", "entry", "effect", "said")
    with open(RESULTS / "ops_and_isolation.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            effect = f"{row['effect']:.1e}" if "effect" in row else ""
            writer.writerow({**row, "effect": effect})
    (RESULTS / "ops_and_isolation.md").write_text(page(rows))


def page(rows: list[dict]) -> str:
    """The tables: how many entries of each kind, then an op in each line."""
    called = [row for row in rows if row["use"]]
    parts = [_HEAD, "## How many\n", _counts(called), "\n## Each op\n"]
    by_op: dict = collections.defaultdict(dict)
    for row in called:
        by_op[row["op"], row["way"], row["form"]][row["use"]] = row["entry"]
    lines = ["| op | way | its input | loss | gradient | mask |", "|" + " --- |" * 6]
    for (op, way, form), found in sorted(by_op.items()):
        entries = " | ".join(found.get(use, "") for use in USES)
        lines.append(f"| {op} | {way} | {form} | {entries} |")
    parts += ["\n".join(lines), "\n## Not called\n"]
    for entry, said in (
        ("not called", "No arguments were found with which these give numbers:"),
        ("ends the process", "These end the process, with the arguments tried:"),
    ):
        listed = sorted({row["op"] for row in rows if row["entry"] == entry})
        if listed:
            parts.append(f"{said} {', '.join(listed)}.\n")
    return "\n".join(parts)


def _counts(rows: list[dict]) -> str:
    lines = ["| way | entry | loss | gradient | mask |", "|" + " --- |" * 5]
    for way in ("along", "across"):
        found = collections.Counter(
            (row["entry"], row["use"]) for row in rows if row["way"] == way
        )
        for entry in sorted({entry for entry, _ in found}):
            numbers = " | ".join(str(found[entry, use]) for use in USES)
            lines.append(f"| {way} | {entry} | {numbers} |")
    return "\n".join(lines) + "\n"
