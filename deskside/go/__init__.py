"""`deskside go`: the whole road inside a number of hours, from doctor to report.

    doctor -> probe -> plan -> pretraining, whose first few per cent are the pilot -> evaluation, export -> report

`command.py` reads the options and drives; `phases.py` holds what comes before training; `pilot.py` follows the
training; `journal.py` keeps the clock of hours, so that a road that was broken off goes on with what was left.
"""

from deskside.go.command import run

__all__ = ["run"]
