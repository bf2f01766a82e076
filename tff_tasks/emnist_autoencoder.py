"""EMNIST characters through a deep autoencoder.

    python -m tff_tasks.emnist_autoencoder --data_dir=data

`--help` lists the settings; all defaults are those of the paper.
"""

from tff_tasks import command

if __name__ == "__main__":
    command.main("emnist_autoencoder")
