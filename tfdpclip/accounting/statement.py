"""The sentence a privacy claim needs around its epsilon."""

import dataclasses
import json
import math
from typing import Any

from tfdpclip import _arguments
from tfdpclip._notebook import ShownAsText
from tfdpclip._version import __version__

#: How a statement can be written.
FORMATS = ("text", "markdown", "json")
_MECHANISM = "clipped sums of the records of a step with Gaussian noise, composed"
_SETTING = (
    "whoever sees the model and everything released while it trained (central "
    "differential privacy: whoever trains sees the data)"
)
_NOT_COVERED = (
    "metrics and validation scores, unless they were computed on public data",
    "any other use of the same data, outside of the steps that are counted here",
)
_ACCOUNTANTS = {
    "pld": "privacy loss distributions (pld), an upper bound",
    "rdp": "Renyi differential privacy (rdp), an upper bound",
    "gdp": "Gaussian differential privacy (gdp)",
}


@dataclasses.dataclass(frozen=True)
class PrivacyStatement(ShownAsText):
    """An epsilon with everything it means nothing without.

    `str()` gives the text to print or publish; `render` a section of a model card,
    with what reporting guidelines ask for (Ponomareva et al. 2023, "How to DP-fy ML").

    Attributes:
      epsilon: What was spent; infinity if a step had no noise.
      delta: At this delta.
      relation: The neighbouring relation, in words.
      unit: What a record is.
      steps: Number of noise draws.
      noise_multipliers: z of each phase.
      sampling: The schemes, in words.
      accountant: `"pld"`, `"rdp"` or `"gdp"`.
      clips: The clip rules, in words.
      assumptions: What must hold for the claim.
      not_private: Why the run is not private at all, if so.
      matrices: By what the noise of different steps is correlated, in words.
    """

    epsilon: float
    delta: float
    relation: str
    unit: str
    steps: int
    noise_multipliers: tuple[float, ...]
    sampling: tuple[str, ...]
    accountant: str
    clips: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    not_private: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self._claim()
        rows = [
            ("neighbours", self.relation),
            ("unit", self.unit),
            ("sampling", "; then ".join(self.sampling)),
            ("steps", str(self.steps)),
            ("noise", _noise_in_words(self.noise_multipliers)),
            ("correlation", "; then ".join(self.matrices)),
            ("clip", "; then ".join(self.clips)),
            ("accountant", _ACCOUNTANTS.get(self.accountant, self.accountant)),
        ]
        lines += [f"  {name + ':':<12} {text}" for name, text in rows if text]
        lines += [f"  assuming     {text}" for text in self.assumptions]
        return "\n".join(lines)

    def _claim(self) -> list[str]:
        if self.epsilon == math.inf:
            claim = "epsilon is infinite"
        else:
            claim = f"({self.epsilon:.4g}, {self.delta:.4g})-differential privacy"
        if not self.not_private:
            return [f"{claim}."]
        lines = [f"not private: {'; '.join(self.not_private)}."]
        if self.epsilon != math.inf:
            lines.append(f"With that mended, the same run would have {claim}.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The statement as JSON-ready values; an infinite epsilon is None."""
        content = {
            "private": not self.not_private and self.epsilon != math.inf,
            **dataclasses.asdict(self),
            "mechanism": _MECHANISM,
            "setting": _SETTING,
            "not_covered": _NOT_COVERED,
            "computed_by": f"tfdpclip {__version__}",
        }
        if self.epsilon == math.inf:
            content["epsilon"] = None
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in content.items()
        }

    def render(self, format: str = "text") -> str:
        """The statement as text.

        Args:
          format: `"text"`; `"markdown"`, a section of a model card; or `"json"`.

        Raises:
          ValueError: If the format is another one.

        >>> from tfdpclip import accounting, sampling
        >>> ledger = accounting.Ledger(delta=1e-5)
        >>> ledger.begin(noise_multiplier=5.0, sampling=sampling.FullBatch())
        >>> ledger.record(1)
        >>> print(ledger.statement().render("markdown").splitlines()[2])
        (0.726, 1e-05)-differential privacy.
        """
        _arguments.choice("format", format, FORMATS)
        if format == "json":
            return json.dumps(self.to_dict(), indent=2)
        return str(self) if format == "text" else self._markdown()

    def _markdown(self) -> str:
        rows = [
            ("Guarantee holds against", _SETTING),
            ("Neighbouring data sets", self.relation),
            ("Unit of privacy", self.unit),
            ("Mechanism", _MECHANISM),
            ("Clip", "; then ".join(self.clips)),
            ("Noise multiplier", _noise_in_words(self.noise_multipliers)),
            ("Sampling", "; then ".join(self.sampling)),
            ("Steps", str(self.steps)),
            ("Accountant", _ACCOUNTANTS.get(self.accountant, self.accountant)),
            ("Computed by", f"tfdpclip {__version__}"),
        ]
        lines = [
            "## Privacy",
            "",
            " ".join(self._claim()),
            "",
            "| | |",
            "| --- | --- |",
        ]
        lines += [f"| {name} | {_cell(text)} |" for name, text in rows if text]
        for title, texts in (
            ("Assumes", self.assumptions),
            ("Not covered", _NOT_COVERED),
        ):
            if texts:
                lines += ["", f"{title}:", "", *(f"* {text}" for text in texts)]
        return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _noise_in_words(multipliers: tuple[float, ...]) -> str:
    if len(multipliers) <= 4:
        return "; then ".join(f"{z:.6g}" for z in multipliers)
    return (
        f"{multipliers[0]:.6g} first, {multipliers[-1]:.6g} last, least "
        f"{min(multipliers):.6g}, in {len(multipliers)} phases"
    )
