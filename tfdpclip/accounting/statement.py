"""The sentence a privacy claim needs around its epsilon."""

import dataclasses
import math

_ACCOUNTANTS = {
    "pld": "privacy loss distributions (pld), an upper bound",
    "rdp": "Renyi differential privacy (rdp), an upper bound",
    "gdp": "Gaussian differential privacy (gdp)",
}


@dataclasses.dataclass(frozen=True)
class PrivacyStatement:
    """An epsilon with everything it means nothing without.

    `str()` gives the text to print or publish.

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
        if self.epsilon == math.inf:
            claim = "epsilon is infinite"
        else:
            claim = f"({self.epsilon:.4g}, {self.delta:.4g})-differential privacy"
        if self.not_private:
            reasons = "; ".join(self.not_private)
            lines = [f"not private: {reasons}."]
            if self.epsilon != math.inf:
                lines.append(f"With that mended, the same run would have {claim}.")
        else:
            lines = [f"{claim}."]
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


def _noise_in_words(multipliers: tuple[float, ...]) -> str:
    if len(multipliers) <= 4:
        return "; then ".join(f"{z:.6g}" for z in multipliers)
    return (
        f"{multipliers[0]:.6g} first, {multipliers[-1]:.6g} last, least "
        f"{min(multipliers):.6g}, in {len(multipliers)} phases"
    )
