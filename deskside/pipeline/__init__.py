"""`deskside go`: doctor, probe, plan, pretraining, evaluation, export and report inside a number of hours.

    doctor -> probe -> plan -> pretraining, whose first few per cent are the pilot -> evaluation, export -> report

`phases.py` holds what precedes training, `pilot.py` follows the training, and `pipeline_state.py` records the hours
spent, so that an interrupted run continues with what was left.
"""
