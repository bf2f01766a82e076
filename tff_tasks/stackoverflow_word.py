"""Stack Overflow, the next word, with a recurrent network.

    python -m tff_tasks.stackoverflow_word --data_dir=data

`--help` lists the settings; all defaults are those of the paper.
"""

from tff_tasks import command

if __name__ == "__main__":
    command.main("stackoverflow_word")
