"""A study of four arms (two factors), as plan and folder, with trials that need not be real."""

from pathlib import Path

from deskside.study.execute.devices import Device
from deskside.study.execute.executor import LocalExecutor
from deskside.study.execute.runner import Runner
from deskside.study.execute.study_folder import StudyFolder, StudyPlan
from deskside.study.spec.expand import expand
from deskside.study.spec.parse_spec import parse
from tests.study import fake_trials

TEXT = """
name = "tiny"
question = "Does it run?"
base = "demo"
seeds = {seeds}
[budget]
steps_per_arm = 4
[[factor]]
name = "depth"
[[factor.level]]
name = "two"
set.model.num_hidden_layers = 2
[[factor.level]]
name = "three"
set.model.num_hidden_layers = 3
[[factor]]
name = "tied"
[[factor.level]]
name = "no"
set.model.tie_word_embeddings = false
[[factor.level]]
name = "yes"
set.model.tie_word_embeddings = true
"""
ARMS = [f"depth_{depth}-tied_{tied}" for depth in ("two", "three") for tied in ("no", "yes")]


def plan(seeds: int = 1) -> StudyPlan:
    study = parse(TEXT.format(seeds=seeds))
    expansion = expand(study)
    return StudyPlan(
        **vars(expansion),
        name=study.name,
        question=study.question,
        created="2026-11-21T00:00:00+00:00",
        command="a test",
        deskside="0",
        memory_fraction=study.memory_fraction,
        claims=study.claims,
        forecasts={arm.id: None for arm in expansion.arms},
    )


def begin(folder: Path, seeds: int = 1) -> StudyFolder:
    """Return a study that has begun, with no trial run."""
    made = StudyFolder(folder)
    made.create(plan(seeds), TEXT.format(seeds=seeds))
    return made


def runner(folder: StudyFolder, devices: int = 1, lock: int | None = None, **acts: str) -> Runner:
    """Return a runner of fake trials; see `fake_trials.environment`."""
    places = [Device(f"cpu:{n}", fake_trials.environment(**acts)) for n in range(devices)]
    return Runner(folder, folder.read(), LocalExecutor(places), lock=lock, target=fake_trials.TARGET)
