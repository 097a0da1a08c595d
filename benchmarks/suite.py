"""Choose the tests of the long form by a measured run: those that take more than half a second, except for a few.

    python -m pytest -q -n 3 --dist worksteal --junitxml times.xml -o junit_duration_report=call
    python -m benchmarks.suite times.xml

writes `tests/long_form.txt`, whose tests `make test` leaves to `make test-full`, so that it takes less than fifteen
minutes on two cores. Tests that the run left out stay in the list, unless they no longer exist. Times are those of the
test functions, without fixtures: these often serve a whole module.
"""

import argparse
import ast
import functools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from tests.long_form import LIST, function_of, read_list

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 0.5

# Slow, but nothing faster covers as much: what must never break unnoticed.
KEPT = (
    "tests/align/test_dpo.py::test_a_run_learns_what_is_preferred",
    "tests/align/test_sft.py::test_it_learns_to_answer_in_the_template",
    "tests/cli/test_go.py::test_complete_pipeline",
    "tests/dashboard/test_browser.py::test_a_click_opens_a_page_and_a_filter_narrows_it",
    "tests/data/curation/test_curate.py::test_a_killed_curation_continues_with_the_same_bytes",
    "tests/data/corpus/test_prepare.py::test_killed_at_a_random_moment",
    "tests/evaluate/test_sandbox_attacks.py::test_no_attack_passes_escapes_or_ends_the_batch",
    "tests/kernels/test_decode.py::test_kernels_equal_the_torch_form",
    "tests/kernels/test_draw.py::test_kernels_equal_the_torch_form",
    "tests/kernels/test_dropout.py::test_the_kernel_has_the_same_masks",
    "tests/kernels/test_few_tokens.py::test_products_equal_float64",
    "tests/kernels/test_muon.py::test_kernels_equal_the_reference",
    "tests/kernels/test_prefill.py::test_the_kernel_equals_the_torch_form",
    "tests/kernels/test_stochastic_rounding.py::test_kernels_round_as_the_reference_does",
    "tests/kernels/test_weights_24bit.py::test_kernels_write_what_the_reference_does",
    "tests/report/test_claims_document.py::test_computed_claims_stand_in_the_document_as_they_are_computed_now",
    "tests/serve/test_page_functions.py::test_markdown_grows_without_replacing_what_is_complete",
    "tests/serve/test_server.py::test_sigterm_drains_and_exits_with_0",
    "tests/study/test_commands.py::test_from_the_definition_to_the_report",
    "tests/study/test_faults.py::test_kill_9_repeats_nothing_that_is_done",
    "tests/test_hostile_files.py",
    "tests/test_layers.py",
    "tests/test_lint.py",
    "tests/train/test_faults.py::test_a_damaged_checkpoint_is_named_and_the_older_one_used[model.safetensors-truncated]",
    "tests/train/test_graphed_runs.py::test_a_run_is_the_same[fp8]",
    "tests/train/test_parallel.py::test_processes_train_like_one",
    "tests/train/test_resume.py::test_kill_and_resume",
    "tests/utils/test_parsing.py",
)


@functools.cache
def functions_in(file: Path) -> frozenset[str]:
    """Return the names of the functions of a file, of none if there is no such file."""
    if not file.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def exists(test: str, root: Path = ROOT) -> bool:
    """Return whether a file exists, or the function of a test in its file."""
    path, _, function = function_of(test).partition("::")
    return function in functions_in(root / path) if function else (root / path).is_file()


def measured(path: Path) -> dict[str, float]:
    """Return the seconds of each test of pytest's JUnit file."""
    times: dict[str, float] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is None:
            times[f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"] = float(
                case.attrib["time"]
            )
    return times


def long_form(times: dict[str, float], before: Iterable[str], kept: Iterable[str] = KEPT) -> list[str]:
    """Return the slow tests by name: a function if all of its tests are slow, else its slow tests.

    times: seconds of the tests that ran; before: the list so far, of which those that did not run remain; kept: files,
    functions and tests that are not listed. The fastest test of a file is not listed either.
    """
    kept = set(kept)
    kept |= {test for test in times if kept & {test, function_of(test), test.partition("::")[0]}}
    by_function, by_file = defaultdict(set), defaultdict(set)
    for test in times:
        by_function[function_of(test)].add(test)
        by_file[test.partition("::")[0]].add(test)
    fastest = {min(tests, key=lambda test: (times[test], test)) for tests in by_file.values()}
    slow = {test for test, seconds in times.items() if seconds > SECONDS} - kept - fastest
    names = {test for test in before if test not in times and test not in by_function}
    for function, tests in by_function.items():
        names |= {function} if tests <= slow else tests & slow
    return sorted(names)


def main(argv: list[str] | None = None) -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", type=Path, metavar="TIMES.xml", help="pytest's --junitxml")
    options = parser.parse_args(argv)
    times = measured(options.times)
    names = long_form(times, [name for name in read_list() if exists(name)])
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{len(names)} entries in {LIST.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
