"""The digits of scikit-learn, dealt out to clients.

    python -m tff_tasks.digits

`--help` lists the settings; the defaults were found by trying.
"""

from tff_tasks import command

if __name__ == "__main__":
    command.main("digits")
