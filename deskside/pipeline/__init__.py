"""`deskside go`: doctor, probe, plan, pretraining, evaluation, export and report within a time budget.

    doctor -> probe -> plan -> pretraining, whose first few percent are the pilot -> evaluation, export -> report

`checks.py` contains doctor and probe, and `planning.py` the plan. `pilot.py` observes the training, and
`pipeline_state.py` records the time spent, so that an interrupted pipeline resumes with the time that was left.
"""
