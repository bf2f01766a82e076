"""Shakespeare, the next character, with a recurrent network.

    python -m tff_tasks.shakespeare_character --data_dir=data

`--help` lists the settings; all defaults are those of the paper.
"""

from tff_tasks import command

if __name__ == "__main__":
    command.main("shakespeare_character")
