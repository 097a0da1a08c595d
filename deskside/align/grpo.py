"""Group-relative policy optimization (Shao et al. 2024, arXiv 2402.03300): sample several answers to each question,
and make those with a reward above their group's mean more likely.

A row of the configured batch is one answer with its question, so a step has batch.tokens / batch.sequence_length
answers, in whole groups; in the forward pass, answers are packed into fewer rows. The `tokens` of a run count whole
rows, filled or not. losses.py has the loss and its options.

The answers of a step are sampled by the weights before it (or `steps_per_rollout` steps ago), with random numbers
that depend only on the seed and on the position of the answer in the run, so a resumed run samples the same
answers. The sampling probabilities are those of the engine, at the sampling temperature; the ratio to the training
probabilities corrects for differences in their arithmetic.

Reported metrics of each step: mean and standard deviation of the rewards, answer length in tokens, the share of
truncated answers, the share of answers in groups with unequal rewards (only these give a gradient), entropy, the
share of clipped tokens, `drift`: k3 per token between the sampling and the trained weights, and with align.kl `kl`:
k3 from the initial weights.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deskside.align import answers, rewards
from deskside.align.answers import (
    AnswerBatch,
    Text,
    check_compute,
    full_row_texts,
    lay_out,
    moved,
    pack_units,
)
from deskside.align.grpo_data import Question, Questions
from deskside.align.losses import advantages, policy_terms
from deskside.align.prepared import describe_data
from deskside.align.rollouts import Rollout, RolloutLog
from deskside.align.sampler import (
    KV_CACHE_SHARE,
    Left,
    Sampled,
    Sampler,
    answers_bytes,
    copy_of,
    memory_for_sampling,
)
from deskside.align.samples import SampledAnswers
from deskside.budget.shape import num_params
from deskside.config.align import GrpoConfig
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.data.tokenizer import load as load_tokenizer
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.train.objective import Batches, Evaluation, Loss, RowDataset, Session
from deskside.train.prepare.preflight import MEASURE_SHARE, REPORT_SHARE, SAMPLE_SHARE
from deskside.utils.errors import RunError, UsageError

REFERENCE = "reference.safetensors"  # in the run directory: the initial weights, for align.kl
REWARD_FILE = "reward.py"
EXTRAS: tuple[str, ...] = (
    "answers", "answer_tokens", "reward", "reward_square", "cut_off", "informative", "entropy", "clipped", "drift",
    "kl",
)  # fmt: skip


@dataclass(frozen=True)
class RolloutBatch(AnswerBatch):
    """S sampled answers.

    sampled_SL: log-probabilities at sampling. reference_SL: of the initial weights. learnt_S: bool, the answers
    that count in the loss. cut_off_S: bool, the truncated answers.
    """

    sampled_SL: Tensor
    reference_SL: Tensor | None
    advantage_S: Tensor
    reward_S: Tensor
    learnt_S: Tensor
    cut_off_S: Tensor


class Grpo(SampledAnswers):
    """The GRPO objective; see the module and `train.objective.Objective`."""

    name, command, extras, measured_first = "grpo", "deskside grpo", EXTRAS, True

    def __init__(self, options: GrpoConfig) -> None:
        self.options = options
        self.rewards = rewards.parse(options.reward)
        self.opened: dict[str, Questions] = {}
        self.reference: Transformer | None = None
        self.rollout_seconds = 0.0

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> Questions:
        check_compute(config)
        options, rows = self.options, config.batch.tokens // sequence_length
        if rows % options.group:
            raise UsageError(
                f"batch.tokens: {rows} answers per step are not whole groups of {options.group}; use a multiple of "
                f"{options.group * sequence_length}"
            )
        self.opened[split] = Questions(
            path, split, sequence_length, options.group, options.answer_tokens, config.model.vocab_size
        )
        self.folder = path
        return self.opened[split]

    def begin(self, session: Session) -> None:
        self.session = session
        describe_data(self.opened["train"].index, session.say)
        for questions in self.opened.values():
            if questions.left_out:
                session.say(
                    f"{questions.split}: {questions.left_out:,} questions leave no room for "
                    f"{self.options.answer_tokens} tokens of answer in {questions.sequence_length} and are left out"
                )
        self._keep_reward_file(session)
        steps, config = self.options.steps_per_rollout, session.config
        self.answers_per_step = config.batch.tokens // config.batch.sequence_length
        if (self.answers_per_step // self.options.group) % session.world.size:
            raise UsageError(
                f"batch.tokens: {self.answers_per_step // self.options.group} questions per step do not divide among "
                f"{session.world.size} processes; use a larger batch"
            )
        ends = session.run.read_json("generation_config.json")["eos_token_id"]
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        self.tokenizer = load_tokenizer(session.run.tokenizer)
        self.log = RolloutLog(session.run.path, session.world.rank, steps > 1)
        with session.precision.high_precision(), memory_for_sampling():
            left = Left.of(session.world.device)
            self._keep_reference(session)  # first, because the sampler divides the memory that is left
            if left is not None and self.reference is not None:
                left = left.without(self.reference)
            self.sampler = Sampler(
                session.model,
                config.adapter is not None,
                steps * self.answers_per_step // session.world.size,
                config.batch.sequence_length,
                self.ends,
                left,
            )
            if left is not None:  # only memory is tested
                self.sampler.rehearse(self.opened["train"].vocab_size)
            if session.budget.limit is not None:
                self._fit_into_time(session)
        self.sample_before(session)

    def seconds_beside_step(self) -> float:
        return self.rollout_seconds / self.options.steps_per_rollout

    def _fit_into_time(self, session: Session) -> None:
        """Measure the speed of sampling, to get its time in a step and the number of held-out questions that fit.

        Raises UsageError if there is no time for one optimizer step.
        """
        budget, val, options = session.budget, self.opened["val"], self.options
        count = options.steps_per_rollout * self.answers_per_step // session.world.size
        prompts = [q.tokens for q in self.opened["train"].questions]
        pace = self.sampler.measure_pace(prompts, count, options.temperature)
        lanes = self.sampler.engine.max_batch
        seconds = pace.seconds(count, options.answer_tokens, lanes)
        self.rollout_seconds = session.world.broadcast([seconds])[0]
        most = budget.share(MEASURE_SHARE)
        size, total = session.world.size, len(val.questions)
        asked = next(
            (
                n
                for n in range(total, 1, -1)
                if pace.seconds(-(-n // size), options.answer_tokens, lanes) <= most
            ),
            1,
        )
        asked = int(session.world.broadcast([asked])[0])
        measuring = pace.seconds(-(-asked // size), options.answer_tokens, lanes)
        later = 4 * measuring + budget.share(2 * SAMPLE_SHARE + REPORT_SHARE)
        step = self.seconds_beside_step() + self.answers_per_step * session.row_seconds
        if session.world.broadcast([float(budget.left() - later < step)])[0]:
            raise budget.too_short(
                f"a step takes {step:.0f} s, {self.seconds_beside_step():.0f} s of it for {self.answers_per_step} "
                f"answers of {options.answer_tokens} tokens, and {max(0.0, budget.left() - later):.0f} s are left",
                step,
                later,
            )
        if asked < total:
            session.say(
                f"{asked} of {total} held-out questions are asked, so that the run ends on time; more --hours take in "
                "more"
            )
            val.questions = [val.questions[n] for n in (np.arange(asked) * total // asked).tolist()]

    def keeps_bytes(self, config: RunConfig, model: Transformer) -> int:
        """Return the memory of the model's copies and of the answers to one question, the minimum for sampling."""
        dtype = model.activation_dtype
        copies = (2 if self.options.kl else 1) * num_params(config.model) * dtype.itemsize
        answers = answers_bytes(config.model, dtype, self.options.group, config.batch.sequence_length)
        return int((copies + answers) / KV_CACHE_SHARE)

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches:
        return _RolloutLoader(self, cast(Questions, dataset), options)

    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        texts = [full_row_texts(dataset.sequence_length, 1, dataset.vocab_size) for _ in range(rows)]
        made = [Sampled(tuple(row[0].tokens[1:].tolist()), (-1.0,) * row[0].scored, True) for row in texts]
        question = Question("", "", (0,))
        rollouts = [[Rollout(0, question, sampled, "", 0.0, 1.0)] for sampled in made]
        count = rows * (dataset.sequence_length if self.options.average == "token" else 1)
        return self._batch(cast(Questions, dataset), rollouts, count * passes_everywhere, device, dry=True)

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss:
        batch, options = cast(RolloutBatch, batch), self.options
        found = answers.score(model, batch, context, compute, options.temperature)
        terms = policy_terms(
            found.logprobs_SL,
            batch.sampled_SL,
            batch.advantage_S,
            batch.mask_SL & batch.learnt_S[:, None],
            options,
            batch.reference_SL,
        )
        apart_SL = (found.logprobs_SL.detach() - batch.sampled_SL) * batch.mask_SL
        extra = {
            "answers": torch.ones_like(batch.reward_S).sum(),
            "answer_tokens": batch.mask_SL.sum().float(),
            "reward": batch.reward_S.sum(),
            "reward_square": batch.reward_S.square().sum(),
            "cut_off": batch.cut_off_S.sum().float(),
            "informative": (batch.advantage_S != 0).sum().float(),
            "entropy": found.entropy_SL.sum(),
            "clipped": terms.clipped_SL.sum().float(),
            "drift": (apart_SL.exp() - apart_SL - 1).sum(),
            "kl": terms.kl_SL.sum(),
        }
        return Loss(terms.loss, found.balance, extra)

    def row(self, extra: Mapping[str, float], count: float) -> dict[str, float]:
        texts, tokens = max(1.0, extra["answers"]), max(1.0, extra["answer_tokens"])
        mean = extra["reward"] / texts
        found = {
            "reward": mean,
            "reward_std": max(0.0, extra["reward_square"] / texts - mean**2) ** 0.5,
            "answer_tokens": tokens / texts,
            "cut_off": extra["cut_off"] / texts,
            "informative": extra["informative"] / texts,
            "entropy": extra["entropy"] / tokens,
            "clipped": extra["clipped"] / tokens,
            "drift": extra["drift"] / tokens,
        }
        return found | ({"kl": extra["kl"] / tokens} if self.options.kl else {})

    def measure(self, session: Session, max_tokens: int | None) -> Evaluation:
        """Return the mean reward of greedy answers to held-out questions."""
        questions, world = cast(Questions, session.validation), session.world
        wanted = len(questions.questions)
        if max_tokens is not None:
            wanted = min(wanted, max(world.size, max_tokens // questions.sequence_length))
        chosen = np.unique(np.arange(wanted) * len(questions.questions) // wanted)[world.rank :: world.size]
        mine = [questions.questions[n] for n in chosen.tolist()]
        self.sampler.renew()
        made = self.sampler.sample(
            [q.tokens for q in mine], [0] * len(mine), 0, 0.0, self.options.answer_tokens
        )
        values = self._judge(mine, made)
        totals = torch.tensor(
            [sum(values), sum(len(s.tokens) for s in made), len(mine)],
            dtype=torch.float64,
            device=world.device,
        )
        reward, tokens, count = world.all_reduce_sum(totals).tolist()
        row = {"val_reward": reward / count, "val_answer_tokens": tokens / count}
        said = f"mean reward {row['val_reward']:.3f} on {int(count):,} held-out questions, answered greedily"
        return Evaluation(
            row, {**row, "val_questions": int(count)}, said, int(count) * questions.sequence_length
        )

    # Sampling

    def roll_out(self, questions: Sequence[Question], positions: Sequence[int], seed: int) -> list[Rollout]:
        """Sample and score answers with the present weights. A question is repeated for each answer of its group."""
        self.sampler.renew()
        made = self.sampler.sample(
            [q.tokens for q in questions],
            positions,
            seed,
            self.options.temperature,
            self.options.answer_tokens,
        )
        values = self._judge(questions, made)
        grouped_GS = torch.tensor(values, dtype=torch.float64).view(-1, self.options.group)
        better = advantages(grouped_GS, self.options.scale_rewards).flatten().tolist()
        found = [
            Rollout(position, question, sampled, self._text(sampled), value, advantage)
            for position, question, sampled, value, advantage in zip(
                positions, questions, made, values, better, strict=True
            )
        ]
        self.log.add(found, self.options.group)
        return found

    def _judge(self, questions: Sequence[Question], made: Sequence[Sampled]) -> list[float]:
        cases = [(q.prompt, self._text(s), q.answer) for q, s in zip(questions, made, strict=True)]
        return self.rewards.of(cases)

    def _text(self, sampled: Sampled) -> str:
        tokens = sampled.tokens[:-1] if sampled.ended else sampled.tokens
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    # Batches

    def batches(
        self, questions: Questions, rollouts: Sequence[Rollout], micro_rows: int, device: torch.device
    ) -> list[Batch]:
        """Pack this rank's answers of a step. All ranks call this at the same time."""
        learnt = [r for r in rollouts if self.options.learn_truncated or r.sampled.ended]
        counted = float(len(rollouts))
        if self.options.average == "token":
            counted = float(sum(len(r.sampled.tokens) for r in learnt))
        total = torch.tensor([counted], dtype=torch.float64, device=device)
        everywhere = max(1, int(self.session.world.all_reduce_sum(total).item()))
        rooms = np.array([len(r.question.tokens) + len(r.sampled.tokens) - 1 for r in rollouts], np.int64)
        rows: list[list[Rollout]] = [
            [rollouts[n] for n in row] for row in pack_units(rooms, questions.sequence_length)
        ]
        found: list[Batch] = []
        at = 0
        for size in passes(len(rows), micro_rows):
            part = rows[at : at + size]
            part += [[] for _ in range(size - len(part))]
            found.append(self._batch(questions, part, everywhere, device))
            at += size
        return found

    def _batch(
        self,
        questions: Questions,
        rows: list[list[Rollout]],
        everywhere: int,
        device: torch.device,
        dry: bool = False,
    ) -> RolloutBatch:
        texts = [[_text_of(rollout) for rollout in row] for row in rows]
        fields = lay_out(
            texts, questions.sequence_length, questions.max_boundaries(len(rows)) + 1, questions.filler
        )
        flat = [rollout for row in rows for rollout in row]
        sampled_SL = torch.zeros(fields["mask_SL"].shape)
        sampled_SL[fields["mask_SL"]] = torch.tensor([v for r in flat for v in r.sampled.logprobs])
        keep = [self.options.learn_truncated or r.sampled.ended for r in flat]
        own = {
            "sampled_SL": sampled_SL,
            "reference_SL": torch.zeros_like(sampled_SL) if dry and self.options.kl else None,
            "advantage_S": torch.tensor([r.advantage for r in flat]),
            "reward_S": torch.tensor([r.reward for r in flat]),
            "learnt_S": torch.tensor(keep, dtype=torch.bool),
            "cut_off_S": torch.tensor([not r.sampled.ended for r in flat], dtype=torch.bool),
        }
        count = sum(len(r.sampled.tokens) for r in flat) if self.options.average == "token" else len(flat)
        batch = RolloutBatch(**moved({**fields, **own}, device), num_valid=count, num_valid_step=everywhere)
        return self._with_reference(batch) if self.reference is not None and not dry else batch

    # Initial weights

    @torch.no_grad()
    def _with_reference(self, batch: RolloutBatch) -> RolloutBatch:
        assert self.reference is not None
        context = answers.evaluation_context(self.session, batch)
        scores = answers.score(
            self.reference, batch, context, self.session.config.compute, self.options.temperature
        )
        return RolloutBatch(**{**vars(batch), "reference_SL": scores.logprobs_SL})

    def _keep_reference(self, session: Session) -> None:
        if not self.options.kl:
            return
        path = session.run.path / REFERENCE
        self.reference = copy_of(session.model, session.config.adapter is not None)
        named = dict(self.reference.named_parameters())
        if session.resumed:
            if not path.is_file():
                raise RunError(f"{path}: is missing; align.kl needs the initial weights of the run")
            with torch.no_grad():
                for name, tensor in load_file(path).items():
                    named[name].copy_(tensor)
        elif session.world.is_rank_zero:
            try:
                save_file({name: p.detach().contiguous() for name, p in named.items()}, path)
            except OSError as error:
                raise RunError(f"{path}: cannot be written: {error.strerror}") from None

    def _keep_reward_file(self, session: Session) -> None:
        """Copy the user's reward function into the run, and check that a resumed run uses the same one."""
        if self.rewards.file is None:
            return
        kept = session.run.path / REWARD_FILE
        if not session.resumed:
            if session.world.is_rank_zero:
                shutil.copyfile(self.rewards.file, kept)
        elif not kept.is_file() or kept.read_bytes() != self.rewards.file.read_bytes():
            raise RunError(
                f"reward: {self.rewards.file} changed since the run started; restore it from {kept}"
            )


def passes(rows: int, most: int) -> list[int]:
    """Return the number of rows of each forward pass: `most`, and for the rest that, a half, a quarter or an eighth
    of it.

    So a compiled step sees at most four shapes, and more than half of the last pass is filled.
    """
    sizes = sorted({-(-most // part) for part in (1, 2, 4, 8)})
    whole, left = divmod(rows, most)
    return [most] * whole + ([next(size for size in sizes if size >= left)] if left else [])


def _text_of(rollout: Rollout) -> Text:
    question = rollout.question.tokens
    return Text(np.array([*question, *rollout.sampled.tokens], np.int64), len(question))


class _RolloutLoader:
    """A loader of optimizer steps of sampled answers. One round of sampling gives `steps_per_rollout` steps."""

    def __init__(self, objective: Grpo, questions: Questions, options: LoaderOptions):
        self.objective, self.questions, self.options = objective, questions, options
        self.at = options.start_row
        self.round = objective.options.steps_per_rollout * options.rows_per_step
        self.rollouts: list[Rollout] = []
        # A round that has been used by a step is kept whole.
        objective.log.cut(-(-self.at // self.round) * self.round)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        options, objective = self.options, self.objective
        begin = self.at - self.at % self.round
        if not self.rollouts or self.rollouts[0].position < begin:
            self.rollouts = self._round_from(begin)
        mine = set(self._mine(self.at, self.at + options.rows_per_step))
        rollouts = [r for r in self.rollouts if r.position in mine]
        self.at += options.rows_per_step
        return objective.batches(self.questions, rollouts, options.micro_batch_rows, options.device)

    def _mine(self, first: int, last: int) -> list[int]:
        """Return this rank's positions of each step in the range."""
        share = self.options.rows_per_step // self.options.world_size
        steps = range(first + self.options.rank * share, last, self.options.rows_per_step)
        return [p for step in steps for p in range(step, step + share)]

    def _round_from(self, begin: int) -> list[Rollout]:
        """Return the round that begins at a position: sampled now, or read from the log after a resume."""
        positions = self._mine(begin, begin + self.round)
        group = self.questions.group
        first = np.array(positions[::group], np.int64) // group
        questions = [q for q in self.questions.at(self.options.seed, first) for _ in range(group)]
        if self.at == begin:
            return self.objective.roll_out(questions, positions, self.options.seed)
        said = {row["position"]: row for row in self.objective.log.read(begin, begin + self.round)}
        if set(said) != set(positions):
            raise RunError(
                f"{self.objective.log.lines}: the sampled answers of the next step are missing; start the run "
                "again"
            )
        return [
            Rollout(
                position,
                question,
                Sampled(tuple(row["token_ids"]), tuple(row["logprobs"]), row["ended"]),
                row["text"],
                row["reward"],
                row["advantage"],
            )
            for position, question, row in zip(
                positions, questions, (said[p] for p in positions), strict=True
            )
        ]

    def close(self) -> None:
        pass
