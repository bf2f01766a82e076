"""Stack Overflow, tags, with logistic regression.

    python -m tff_tasks.stackoverflow_tag --data_dir=data

`--help` lists the settings; all defaults are those of the paper.
"""

from tff_tasks import command

if __name__ == "__main__":
    command.main("stackoverflow_tag")
