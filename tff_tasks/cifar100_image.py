"""CIFAR-100 with a residual network.

    python -m tff_tasks.cifar100_image --data_dir=data

`--help` lists the settings; all defaults are those of the paper.
"""

from tff_tasks import command

if __name__ == "__main__":
    command.main("cifar100_image")
