"""Speed and memory, as ratios to a plain step measured in the same run."""
