"""EMNIST character recognition with a convolutional network.

    python -m tff_tasks.emnist_character --data_dir=data

`--help` lists the settings; all defaults are those of the paper.
"""

from tff_tasks import command

if __name__ == "__main__":
    command.main("emnist_character")
