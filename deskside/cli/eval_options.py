"""The options of `deskside eval`, which are parsed without torch."""

from dataclasses import dataclass

from deskside.cli.options import option
from deskside.cli.shared_options import JsonOption, ModelOption
from deskside.config.sections import Device


@dataclass(kw_only=True)
class EvalOptions(ModelOption, JsonOption):
    """Measure bits per byte of a model on its validation data or on a text, and run tasks.

    Examples:
      deskside eval runs/demo --json
      deskside eval runs/demo --text book.txt
      deskside eval runs/124m --tasks core --tasks-dir DIR --limit 500
      deskside eval runs/long --long-context 2048,4096,16384
      deskside eval runs/indic --parallel flores200_dev.jsonl.gz --languages en,hi,ta
      deskside eval runs/b --compare runs/a --tasks core --tasks-dir DIR
      deskside eval my-model --tasks gsm8k,humaneval --tasks-dir hf: --chat
    """

    text: str | None = option(
        "evaluate this text: .txt, .jsonl[.gz|.zst] or .parquet with a text field", None, metavar="FILE"
    )
    data: str | None = option("evaluate the validation split of this prepared data", None, metavar="DIR")
    tasks: str | None = option(
        "names of tasks; core: those of the CORE metric; all: every task whose data is found",
        None,
        metavar="NAME,...",
    )
    tasks_dir: str | None = option(
        "directory of the tasks' files; hf: reads them from the Hugging Face Hub", None, metavar="DIR|hf:"
    )
    limit: int | None = option("maximum items per task", None)
    shots: int | None = option("few-shot examples before each question; default: depends on the task", None)
    chat: bool = option("use the model's chat template", False)
    start: bool = option(
        "start every text with the start token, as in training (lm-eval: add_bos_token=True)", False
    )
    long_context: str | None = option(
        "find numbers, follow variables and count words in made texts of these lengths, in tokens; the report of a run "
        "shows the last result",
        None,
        metavar="N,...",
    )
    long_tasks: str | None = option(
        "passkey, multikey, variable_tracking and frequent_words, for --long-context; default: all",
        None,
        metavar="NAME,...",
    )
    trials: int | None = option("texts of each length and depth, for --long-context; default: 5", None)
    parallel: str | None = option(
        "measure bits per sentence on records that have the same sentence in several languages, such as FLORES",
        None,
        metavar="FILE",
    )
    languages: str | None = option("fields of the languages, for --parallel", None, metavar="NAME,...")
    compare: str | None = option(
        "another model, or a file that --items wrote for it: the differences on the same items of --tasks, with paired "
        "intervals",
        None,
        metavar="MODEL|FILE",
    )
    items: str | None = option("write the result of each item to a new JSON Lines file", None, metavar="FILE")
    device: Device = option("auto uses cuda if it is available", "auto")
    sequence_length: int | None = option(
        "context length for bits per byte; default: the run's, or 2048", None
    )
    batch_tokens: int | None = option("tokens per forward pass", None)
