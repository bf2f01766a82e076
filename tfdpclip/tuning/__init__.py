"""Choosing clip norm, batch size and learning rate, and what the choice costs.

Advice that uses public numbers alone (`batch_size_advice`) or public data
(`clip_from_public`) costs no privacy. A search on private data does, which the epsilon
of a single run does not cover: `run_grid` keeps a statement for the search itself.
"""

from tfdpclip.accounting.batch_size import (
    BatchSizeAdvice,
    BatchSizeNoise,
    batch_size_advice,
    batch_size_noise,
)
from tfdpclip.tuning.grid import Grid, GridPoint, geometric, run_grid
from tfdpclip.tuning.grid_result import GridResult
from tfdpclip.tuning.public import (
    PublicClip,
    Recipe,
    clip_from_public,
    three_step_recipe,
)
from tfdpclip.tuning.search_privacy import (
    RandomStopping,
    SearchStatement,
    TrainingPlan,
    search_privacy,
)

__all__ = [
    "BatchSizeAdvice",
    "BatchSizeNoise",
    "Grid",
    "GridPoint",
    "GridResult",
    "PublicClip",
    "RandomStopping",
    "Recipe",
    "SearchStatement",
    "TrainingPlan",
    "batch_size_advice",
    "batch_size_noise",
    "clip_from_public",
    "geometric",
    "run_grid",
    "search_privacy",
    "three_step_recipe",
]
