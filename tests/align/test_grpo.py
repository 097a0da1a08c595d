"""Tests of GRPO: a run on a task that it can learn, its log, and interrupted runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deskside.align import answers, grpo, samples
from deskside.align.answers import pass_sizes
from deskside.align.grpo import Grpo, RolloutBatch
from deskside.align.grpo_data import Question, QuestionForm, Questions, prepare_questions
from deskside.align.policy_loss import policy_loss
from deskside.align.prepared import FolderSpec
from deskside.align.rollouts import Rollout, RolloutLog
from deskside.align.sampler import (
    ANY_TEMPERATURE,
    SAMPLING_BYTES,
    MemoryHeadroom,
    SampledAnswer,
    Sampler,
    memory_for_sampling,
    sampling_copy,
)
from deskside.cli import grpo as grpo_command
from deskside.config.align import GrpoConfig
from deskside.config.run import RunConfig
from deskside.config.sections import AdapterConfig
from deskside.data.chat import chat_template
from deskside.data.chat.messages import Conversation
from deskside.engine import counter_rng
from deskside.engine.device import KV_CACHE_SHARE, prefill_bytes
from deskside.engine.engine import Engine
from deskside.engine.graphs import WARM_UP
from deskside.engine.sampling import SamplingTensors, draw, ranking_width
from deskside.evaluate.final_number import final_number
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.precision.attach_adapters import attach_adapters
from deskside.precision.lora import is_adapted
from deskside.utils.errors import RunError, UsageError
from deskside.weights import merge_adapters
from deskside.weights.load import load_model
from deskside.weights.merge_adapters import merged
from tests.align import tiny
from tests.budget.test_adapters import Live

KEYS = ("step", "loss", "grad_norm", "reward", "answer_tokens", "entropy", "clipped", "drift", "kl")


def train(folder: Path, model: Path, name: str, *more: str) -> Path:
    data = folder / "questions.jsonl"
    if not data.exists():
        tiny.jsonl(data, tiny.questions())
    argv = tiny.command_line(model, data, folder, name)
    argv += ["--batch.sequence_length", "64", "--align.answer_tokens", "4"]
    grpo_command.run([*argv, "--optim.lr", "2e-3", *more])
    return folder / name


def said(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


def test_the_reward_rises_from_below_a_tenth_to_above_six_tenths(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(
        tmp_path, taught, "learns", "--schedule.steps", "24", "--questions", "16", "--optim.lr", "5e-3"
    )
    summary = json.loads((run / "summary.json").read_text())
    rows = tiny.metrics(run)
    assert rows[0]["reward"] < 0.2
    assert "val_bpb" not in rows[0]
    assert summary["mfu"] is None and all(row["mfu"] is None for row in rows)
    assert summary["before"]["val_reward"] < 0.1
    assert summary["val_reward"] > 0.6
    assert sum(row["reward"] for row in rows[-5:]) / 5 > 0.4
    # The engine's probabilities equal those of training, so nothing is clipped and nothing drifts within a step.
    assert all(row["clipped"] == 0 and abs(row["drift"]) < 1e-6 for row in rows)
    lines = said(run)
    assert [line["position"] for line in lines] == list(range(24 * 16 * 8))
    assert all(line["reward"] == float(final_number(line["text"]) == int(line["answer"])) for line in lines)
    page = (run / "rollouts.md").read_text()
    assert page.count("## Answers from ") == 24
    assert "reward 1: " in page
    assert rows[3]["reward"] == pytest.approx(np.mean([line["reward"] for line in lines[3 * 128 : 4 * 128]]))
    found = tiny.evaluated(run, tmp_path, capsys)
    assert found["bpb"] is None and found["tasks"]["svamp"]["n"] == 4


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.full),
        pytest.param(("--align.steps_per_rollout", "4"), marks=pytest.mark.full),
        ("--align.kl", "0.1", "--align.average", "sequence", "--align.steps_per_rollout", "2"),
    ],
)
def test_killed_and_resumed_is_the_same_run(
    options: tuple[str, ...], taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is written every second step. A round of sampling has four
    steps, so the kill comes within a round.
    """
    more = ("--schedule.steps", "10", "--questions", "4", "--align.group", "4", *options)
    straight = train(tmp_path, taught, "straight", *more)
    for step in (8, 0):
        with monkeypatch.context() as patch:
            tiny.kill_at(patch, step)
            with pytest.raises(tiny.Killed):
                train(tmp_path, taught, "killed" if step else "early", *more)
    assert grpo_command.run(["--resume", str(tmp_path / "early")]) == 0
    tiny.same(tmp_path / "early", straight, KEYS)
    assert grpo_command.run(["--resume", str(tmp_path / "killed")]) == 0
    tiny.same(tmp_path / "killed", straight, KEYS)
    assert said(tmp_path / "killed") == said(straight)
    assert (tmp_path / "killed" / "rollouts.md").read_text() == (straight / "rollouts.md").read_text()
    rows = tiny.metrics(straight)
    if options:
        assert any(row["drift"] > 1e-6 for row in rows)  # the second step of a round is off-policy
    assert all(("kl" in row) == ("--align.kl" in options) for row in rows)
    if "--align.kl" in options:
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
        assert rows[-1]["kl"] > 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--align.average", "fixed", "--align.scale_rewards", "false"), marks=pytest.mark.full),
        pytest.param(
            ("--align.ratio", "sequence", "--align.average", "sequence", "--align.steps_per_rollout", "2"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--align.learn_truncated", "false", "--align.temperature", "0.7"), marks=pytest.mark.full
        ),
        ("--adapter.rank", "4"),
    ],
)
def test_every_variant_runs(options: tuple[str, ...], taught: Path, tmp_path: Path) -> None:
    run = train(tmp_path, taught, "v", "--schedule.steps", "3", "--questions", "12", *options)
    rows = tiny.metrics(run)
    assert all(np.isfinite([row["loss"], row["grad_norm"], row["entropy"]]).all() for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)
    assert abs(rows[0]["drift"]) < 1e-6


def test_a_person_s_reward_is_kept_in_the_run(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def short(prompt, completion, answer):\n    return -len(completion)\n")
    more = ("--schedule.steps", "4", "--questions", "4", "--align.reward", f"{file}:short")
    with monkeypatch.context() as patch:
        tiny.kill_at(patch, 4)
        with pytest.raises(tiny.Killed):
            train(tmp_path, taught, "own", *more)
    assert (tmp_path / "own" / "reward.py").read_text() == file.read_text()
    assert all(line["reward"] == -len(line["text"]) for line in said(tmp_path / "own"))
    file.write_text("def short(prompt, completion, answer):\n    return 0\n")
    with pytest.raises(RunError, match="changed since the run started"):
        grpo_command.run(["--resume", str(tmp_path / "own")])


# Parts


def test_samples_end_with_the_token_that_ended_them_and_have_the_model_s_probabilities(taught: Path) -> None:
    model = load_model(str(taught)).model
    template = chat_template.ChatTemplate(taught)
    assert template.turn_end is not None
    prompts = [
        tuple(template.prompt(Conversation([{"role": "user", "content": q["prompt"]}])))
        for q in tiny.questions()[:12]
    ]
    sampler = Sampler(model, False, 5, 64, frozenset({template.turn_end}))
    sampler.rehearse(300)
    found = sampler.sample(prompts, list(range(12)), 3, 0.9, 4)
    alone = [sampler.sample([p], [n], 3, 0.9, 4)[0] for n, p in enumerate(prompts)]
    assert [s.tokens for s in found] == [s.tokens for s in alone]
    for prompt, sampled in zip(prompts, found, strict=True):
        assert sampled.ended == (sampled.tokens[-1] == template.turn_end)
        assert sampled.tokens.count(template.turn_end) == int(sampled.ended)
        ids = torch.tensor([[*prompt, *sampled.tokens]])
        logprobs = (model(ids)[0, :-1].float() / 0.9).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(sampled.logprobs), logprobs[len(prompt) - 1 :].detach(), rtol=0, atol=1e-4
        )
    assert any(s.ended for s in found)


def test_new_weights_give_other_answers(taught: Path, base: Path) -> None:
    model = load_model(str(taught)).model
    sampler = Sampler(model, False, 4, 64, frozenset())
    first = sampler.sample([(5, 6, 7)], [0], 0, 0.0, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert sampler.sample([(5, 6, 7)], [0], 0, 0.0, 8) == first
    sampler.update_weights()
    assert sampler.sample([(5, 6, 7)], [0], 0, 0.0, 8) != first


def test_new_adapters_reach_the_copy_without_a_second_one(
    taught: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the engine's cache has taken the memory that a second copy would need."""
    model = load_model(str(taught)).model
    attach_adapters(model, AdapterConfig(rank=4), 0)
    sampler = Sampler(model, True, 4, 64, frozenset())
    before = {name: parameter.data_ptr() for name, parameter in sampler.copy.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    expected = {name: parameter.detach() for name, parameter in merged(model).named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(merge_adapters, "allocate", lambda *_: pytest.fail("a second copy"))
        sampler.update_weights()
    found = dict(sampler.copy.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name].to(parameter.dtype))
        assert parameter.data_ptr() == before[name]


def test_the_rehearsal_decodes_all_rows_at_once_until_a_graph_would_be_captured(taught: Path) -> None:
    """40 prompts of 254 tokens need several steps, because they exceed the tokens of one step."""
    sampler = Sampler(load_model(str(taught)).model, False, 40, 256, frozenset())
    decode, lanes = sampler.engine._decode, list[int]()

    def counted(going: list[Any], prefilled: int) -> None:
        lanes.append(len(going))
        decode(going, prefilled)

    sampler.engine._decode = counted  # type: ignore[method-assign]
    sampler.rehearse(300)
    assert sampler.engine.max_batch == 40
    assert lanes.count(40) > WARM_UP
    assert sampler.engine.free_tokens == 40 * 256


def test_the_reference_is_there_before_the_sampler_takes_what_memory_is_left(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Noted(Sampler):
        def __init__(self, *arguments: Any) -> None:
            order.append("sampler")
            super().__init__(*arguments)

    def copied(*arguments: Any) -> Transformer:
        order.append("copy")
        return sampling_copy(*arguments)

    monkeypatch.setattr(grpo, "Sampler", Noted)
    monkeypatch.setattr(grpo, "sampling_copy", copied)
    train(tmp_path, taught, "r", "--schedule.steps", "1", "--questions", "4", "--align.kl", "0.1")
    assert order == ["copy", "sampler"]


class Card:
    """A CUDA allocator's numbers, for code that asks torch for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, reserved: int, allocated: int):
        self.reserved, self.allocated, self.segments = reserved, allocated, list[dict[str, Any]]()
        for name, answer in {
            "mem_get_info": lambda *_: (total - self.reserved, total),
            "get_per_process_memory_fraction": lambda *_: 1.0,
            "memory_reserved": lambda *_: self.reserved,
            "memory_allocated": lambda *_: self.allocated,
            "memory_snapshot": lambda *_: self.segments,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)


def test_answers_get_what_training_and_the_copies_leave(
    taught: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies reuse memory that training has freed but will need again, so they must be counted."""
    model = load_model(str(taught)).model
    Card(monkeypatch, total=100 << 20, reserved=60 << 20, allocated=20 << 20)
    headroom = MemoryHeadroom.measure(torch.device("cuda"))
    assert (
        headroom == MemoryHeadroom(free=40 << 20, step=40 << 20)
        and MemoryHeadroom.measure(torch.device("cpu")) is None
    )
    weights = sum(p.nbytes for p in model.parameters())
    assert headroom.after_allocating(model).free == headroom.free - weights
    answer = 64 * model.kv_bytes_per_token(torch.float32)
    drawn = SAMPLING_BYTES * model.config.vocab_size  # a request for 3 lanes uses the graph of 4
    prompts = prefill_bytes(model.config, 4, 256)  # a request for 192 tokens uses the graph of 256
    free = weights + (3 * answer + 4 * drawn + prompts) / KV_CACHE_SHARE

    def rows(free: float) -> int:
        return Sampler(model, False, 40, 64, frozenset(), MemoryHeadroom(int(free), 0)).engine.max_batch

    assert rows(free + 10) == 3 and rows(free - 10) == 2
    with pytest.raises(
        RunError, match=r"training leaves \d+ MiB for sampling, and one answer of 64 tokens needs \d+; give"
    ):
        rows(weights + answer / KV_CACHE_SHARE)  # no memory is reserved for graphs


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_room_that_fitting_leaves_suffices_for_a_question(taught: Path, kl: float) -> None:
    model = load_model(str(taught)).model
    config = RunConfig(model=model.config, batch={"sequence_length": 64, "tokens": 64 * 16})
    objective = Grpo(GrpoConfig(group=8, kl=kl))
    headroom = MemoryHeadroom(objective.reserved_bytes(config, model), 0)
    if kl:
        headroom = headroom.after_allocating(sampling_copy(model, False))
    assert Sampler(model, False, 16, 64, frozenset(), headroom).engine.max_batch >= 8


def test_training_must_have_its_room_beside_the_graphs(taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, total=100 << 20, reserved=60 << 20, allocated=20 << 20)
    headroom = MemoryHeadroom.measure(torch.device("cuda"))
    assert headroom is not None
    card.reserved, card.allocated = 90 << 20, 55 << 20
    graph = {"total_size": 5 << 20, "allocated_size": 0, "segment_pool_id": (0, 1)}
    card.segments = [graph, {"total_size": 40 << 20, "allocated_size": 20 << 20, "segment_pool_id": (0, 0)}]
    headroom.check(torch.device("cuda"))
    graph["total_size"] = 6 << 20
    sampler = Sampler(load_model(str(taught)).model, False, 4, 64, frozenset(), headroom)
    with pytest.raises(
        RunError,
        match=r"sampling leaves a training step 0\.00 GiB too little; give a smaller --batch\.micro_tokens",
    ):
        sampler.rehearse(300)


def test_what_a_row_draws_with_is_counted(taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the logits in 16 bits and, since one kernel draws the random numbers on a GPU, 4 bytes for each logit."""
    rows, V = 16, 20000
    logits = torch.randn(rows, V).bfloat16()
    settings = SamplingTensors.of([ANY_TEMPERATURE] * rows, list(range(rows)), torch.device("cpu"))
    monkeypatch.setattr(counter_rng, "exponentials", lambda *given: torch.ones(given[3].shape))
    with Live() as live:
        draw(logits, settings, ranking_width([ANY_TEMPERATURE], V), torch.zeros(rows, dtype=torch.int64))
    assert (SAMPLING_BYTES - 3) * rows * V < live.peak + logits.nbytes <= SAMPLING_BYTES * rows * V


def test_no_memory_for_sampling_is_one_line(taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More text.")

    monkeypatch.setattr(Engine, "_decode", full)
    sampler = Sampler(load_model(str(taught)).model, False, 4, 64, frozenset())
    with (
        pytest.raises(RunError, match=r"out of memory while sampling \(CUDA out of memory\); give a smaller"),
        memory_for_sampling(),
    ):
        sampler.rehearse(300)


def test_a_run_with_adapters_is_asked_where_it_was_trained(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters are used unmerged. A merged model would be on the host, where it answers slowly."""
    asked: list[bool] = []

    def noted(model: Transformer, *rest: Any) -> Any:
        asked.append(is_adapted(model))
        return answer(model, *rest)

    answer = samples.sample_answers
    monkeypatch.setattr(samples, "sample_answers", noted)
    run = train(tmp_path, taught, "a", "--schedule.steps", "1", "--questions", "4", "--adapter.rank", "4")
    assert asked == [True, True]
    told = json.loads((run / "summary.json").read_text())["samples"]
    assert told and all(sample.keys() >= {"prompt", "text", "before"} for sample in told)


@pytest.mark.parametrize("most", [1, 3, 8, 100, 128])
def test_passes_hold_all_rows_in_few_shapes(most: int) -> None:
    shapes = set()
    for rows in range(1, 3 * most):
        sizes = pass_sizes(rows, most)
        assert rows <= sum(sizes) < rows + max(1, -(-most // 2))
        assert max(sizes) <= most
        shapes |= set(sizes)
    assert len(shapes) <= 4


@pytest.mark.parametrize("average", ["sequence", "token", "fixed"])
def test_packing_and_micro_batches_do_not_change_the_loss(average: Any, taught: Path, tmp_path: Path) -> None:
    chat_template.make_chat_tokenizer(taught, tmp_path / "tokenizer", None)
    file = tiny.jsonl(tmp_path / "q.jsonl", tiny.questions()[:60])
    prepare_questions(
        FolderSpec("questions", (str(file),)), QuestionForm(), tmp_path / "tokenizer", tmp_path / "data"
    )
    model = load_model(str(taught)).model
    config = RunConfig.model_validate({"align": {"name": "grpo"}, "data": {"document_mask": True}})
    objective = Grpo(GrpoConfig(average=average, answer_tokens=9, kl=0.0))

    class World:
        def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
            return value

    class Session:
        world = World()

    objective.session = Session()  # type: ignore[assignment]
    questions = Questions(tmp_path / "data", "train", 96, 8, 9, 320)
    random = np.random.default_rng(0)
    rollouts = [
        Rollout(
            n, q, SampledAnswer(tuple(random.integers(5, 200, k).tolist()), tuple((-random.random(k)).tolist()), True),
            "", float(n % 2), float(random.normal()),
        )
        for n, (q, k) in enumerate(zip(questions.questions[:10], random.integers(1, 10, 10).tolist(), strict=True))
    ]  # fmt: skip

    def total(micro_rows: int) -> tuple[float, list[float]]:
        losses, extra = 0.0, np.zeros(len(objective.metric_names))
        for batch in objective.batches(questions, rollouts, micro_rows, torch.device("cpu")):
            assert batch.tokens_BT.shape[0] <= micro_rows
            context = AttentionContext(cu_seqlens=batch.cu_seqlens, max_seqlen=96)
            found = objective.loss(model, batch, context, config.compute)
            losses += float(found.sum) / batch.num_valid_step
            extra += [float(found.metric_sums[name]) for name in objective.metric_names]
        return losses, extra.tolist()

    alone = 0.0
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.question.tokens, *rollout.sampled.tokens]])
        logprobs = model(ids)[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mine = logprobs[len(rollout.question.tokens) - 1 :][None]
        terms = policy_loss(
            mine, torch.tensor([rollout.sampled.logprobs]), torch.tensor([rollout.advantage]),
            torch.ones_like(mine, dtype=torch.bool), GrpoConfig(average=average, answer_tokens=9),
        )  # fmt: skip
        alone += float(terms.loss)
    alone /= sum(len(r.sampled.tokens) for r in rollouts) if average == "token" else len(rollouts)
    one, three, four = total(1), total(3), total(4)
    assert one[0] == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert three[0] == pytest.approx(one[0], rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(three[1], one[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(four[1], one[1], rtol=1e-4, atol=1e-4)
    row = objective.metrics(dict(zip(objective.metric_names, one[1], strict=True)), 1)
    assert row["reward"] == 0.5
    assert row["reward_std"] == pytest.approx(0.5)


def test_answers_that_were_cut_off_can_be_left_out_of_the_loss(taught: Path) -> None:
    model = load_model(str(taught)).model
    question = Question("", "", (5, 6, 7))
    rollouts = [
        Rollout(n, question, SampledAnswer((8, 9), (-1.0, -1.0), n == 0), "", 0.0, 1.0) for n in (0, 1)
    ]
    fields = answers.lay_out(
        [[answers.TokenizedText(np.array([5, 6, 7, 8, 9]), 3)] for _ in rollouts], 8, 5, 0
    )
    config = RunConfig()
    found, kl = [], []
    for keep in (True, False):
        objective = Grpo(GrpoConfig(learn_truncated=keep, kl=1e-9))
        learnt = torch.tensor([True, keep])
        sampled_SL = torch.full((2, 2), -1.0)
        batch = RolloutBatch(
            **fields, num_valid=4, num_valid_step=4, sampled_SL=sampled_SL, reference_SL=sampled_SL,
            advantage_S=torch.ones(2), reward_S=torch.zeros(2), in_loss_S=learnt, cut_off_S=torch.tensor([False, True]),
            tool_calls_S=torch.zeros(2), tool_failures_S=torch.zeros(2),
        )  # fmt: skip
        context = AttentionContext(cu_seqlens=batch.cu_seqlens, max_seqlen=8)
        loss = objective.loss(model, batch, context, config.compute)
        found.append(float(loss.sum))
        sums = {name: float(value) for name, value in loss.metric_sums.items()}
        kl.append(objective.metrics(sums, 4)["kl"])
    assert found[0] == pytest.approx(2 * found[1])
    assert kl[0] == pytest.approx(kl[1]) and kl[0] > 0  # both answers are the same


def test_the_log_forgets_and_finds_and_refuses_damage(tmp_path: Path) -> None:
    question = Question("a *b*", "7", (1,))
    log = RolloutLog(tmp_path, 0, with_tokens=True)
    for first in (0, 4, 8):
        made = [
            Rollout(first + n, question, SampledAnswer((2, 3), (-0.1, -0.2), True), f"t{n}", n / 4, 0.0)
            for n in range(4)
        ]
        log.add(made, 2)
    assert [row["position"] for row in log.read(2, 9)] == list(range(2, 9))
    assert log.read(0, 1)[0]["logprobs"] == [-0.1, -0.2]
    log.cut(8)
    assert [row["position"] for row in log.read()] == list(range(8))
    assert log.page.read_text().count("## Answers from ") == 2
    assert "\\*b\\*" in log.page.read_text()
    with log.lines.open("ab") as file:
        file.write(b'{"position": 8, "te')
    assert len(log.read()) == 8
    with log.lines.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(RunError, match="line 9 is damaged"):
        log.read()


def test_questions_hold_a_system_message_and_copies_stand_on_one_side(base: Path, tmp_path: Path) -> None:
    chat_template.make_chat_tokenizer(base, tmp_path / "tokenizer", None)
    # A Unicode line separator does not end a line.
    rows: list[dict[str, Any]] = [{"prompt": f"q{n % 40}\u2028", "answer": n % 40} for n in range(120)]
    rows.append(
        {"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "answer": "x"}
    )
    file = tiny.jsonl(tmp_path / "q.jsonl", rows)
    spec = FolderSpec("questions", (str(file),), val_fraction=0.3)
    index = prepare_questions(spec, QuestionForm("Be brief."), tmp_path / "tokenizer", tmp_path / "data")
    assert index["splits"]["train"]["count"] + index["splits"]["val"]["count"] == 120
    assert sum(left["count"] for left in index["left_out"].values()) == 1
    train_, val = (Questions(tmp_path / "data", s, 128, 4, 16, 320) for s in ("train", "val"))
    assert not {q.prompt for q in train_.questions} & {q.prompt for q in val.questions}
    text = chat_template.bpe.load(tmp_path / "data").decode(
        list(val.questions[0].tokens), skip_special_tokens=False
    )
    assert "system\nBe brief.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert val.questions[0].answer.isdigit()
    with pytest.raises(UsageError, match="no question of the"):
        Questions(tmp_path / "data", "val", 32, 4, 16, 320)
    lengths = [len(q.tokens) for q in val.questions]
    needed, positions = min(lengths) + 200, min(lengths) + 150
    with pytest.raises(UsageError, match=f"--batch.sequence-length {needed} "):
        Questions(tmp_path / "data", "val", 32, 4, 200, 320, positions=needed)
    # A row cannot be longer than the model's positions, so the answers have to be shorter.
    with pytest.raises(UsageError, match=f"--align.answer-tokens {positions - max(lengths)} "):
        Questions(tmp_path / "data", "val", 32, 4, 200, 320, positions=positions)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["BASE"], "--data is required"),
        (["BASE", "--data", "Q", "--align.reward", "best"], "'best' does not exist"),
        (["BASE", "--data", "Q", "--questions", "0"], "at least 1"),
        (["BASE", "--data", "Q", "--questions", "4", "--batch.tokens", "512"], "give one of them"),
        (["BASE", "--data", "Q", "--align.group", "1"], "align.group"),
        (["BASE", "--data", "Q", "--batch.sequence_length", "2k"], "batch.sequence_length: "),
        (["BASE", "--data", "Q", "--batch.sequence_length", "64", "--batch.tokens", "192",
          "--align.answer_tokens", "8"], "cannot be split into groups of 8"),
        (["BASE", "--data", "Q", "--align.answer_tokens", "250", "--schedule.steps", "1"], "no question of the"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(
    argv: list[str], error: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tiny.jsonl(tmp_path / "q.jsonl", tiny.questions()[:40])
    argv = [{"BASE": str(base), "Q": str(file)}.get(a, a) for a in argv]
    with pytest.raises(UsageError, match=error) as found:
        grpo_command.run([*argv, "--compute.device", "cpu"])
    assert "\n" not in str(found.value)


def test_what_a_resume_would_ignore_is_refused() -> None:
    with pytest.raises(UsageError, match="give no other options"):
        grpo_command.run(["--resume", "runs/x", "--questions", "8"])


def test_an_answer_that_the_reward_cannot_use_is_found_before_training(base: Path, tmp_path: Path) -> None:
    """It ended the run when the question came up, and again after each --resume."""
    rows = tiny.questions()
    rows[200]["answer"] = "none"
    tiny.jsonl(tmp_path / "questions.jsonl", rows)
    short = ("--batch.tokens", "512", "--align.group", "4", "--schedule.steps", "1")
    with pytest.raises(UsageError, match=r"1 of 4\d\d .*train"):
        train(tmp_path, base, "number", *short, "--align.reward", "0.5*number+0.5*format")
    assert not (tmp_path / "number" / "metrics.jsonl").exists()
    train(tmp_path, base, "exact", *short, "--align.reward", "exact")
