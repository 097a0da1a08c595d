"""Group-relative policy optimization (Shao et al. 2024, arXiv 2402.03300).

Several answers are sampled to each question. Training makes answers with a reward above the mean of their group more
likely, and the others less likely. policy_loss.py has the loss and its options.

Each answer, with its question, counts as one row of the configured batch, so a step has batch.tokens /
batch.sequence_length answers, in whole groups. The `tokens` of a run count these rows at full length. In the forward
pass, the answers are packed into fewer rows.

The answers of a step are sampled with the weights before it, or before the first of the `steps_per_rollout` steps that
share a round of sampling. Their random numbers depend only on the seed and on the position of the answer in the run, so
a resumed run samples the same answers. Their log-probabilities come from the inference engine, at the sampling
temperature. The importance ratio in the loss also corrects for the engine's different rounding.

Metrics of each step: mean and standard deviation of the rewards; answer length in tokens; the share of truncated
answers; the share of answers with an advantage that is not zero (others give a gradient only from align.kl); entropy;
the share of clipped tokens, of those that count in the loss; `drift`, which is k3 (policy_loss.py) per token between
the weights that sampled and the trained weights; with align.kl `kl`, which is k3 per token in the loss from the initial
weights; and with align.tools the number of calls per answer, and the share of them that failed.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from deskside.align import answers
from deskside.align.answers import check_supported, passes_of, worst_case_texts
from deskside.align.grpo_data import Question, Questions
from deskside.align.policy_loss import advantages, policy_loss
from deskside.align.prepared import describe_data
from deskside.align.reward_server import RewardCase
from deskside.align.rewards import parse as parse_reward
from deskside.align.rollout_batch import RolloutBatch, loss_count, pack_rollouts, rollout_batch
from deskside.align.rollout_loader import RolloutLoader
from deskside.align.rollouts import Rollout, RolloutLog
from deskside.align.sampler import (
    KV_CACHE_SHARE,
    MemoryHeadroom,
    SampledAnswer,
    Sampler,
    answers_bytes,
    memory_for_sampling,
    sampling_copy,
)
from deskside.align.samples import AlignObjective
from deskside.align.tool_turns import DEFAULT_TURNS, ToolTurns
from deskside.align.tools import Tools
from deskside.budget.shape import num_params
from deskside.config.align import GrpoConfig
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.data.tokenizer import load as load_tokenizer
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.train.objective import Batches, Evaluation, Loss, RowDataset, Session
from deskside.train.time_budget import EVALUATE_SHARE, REPORT_SHARE, SAMPLE_SHARE
from deskside.utils.errors import OutsideError, RunError, UsageError
from deskside.utils.format import plural

REFERENCE = "reference.safetensors"  # file in the run directory with the initial weights, for align.kl
METRICS: tuple[str, ...] = (
    "answers", "answer_tokens", "reward", "reward_square", "cut_off", "informative", "entropy", "clipped", "drift",
    "kl", "loss_tokens", "tool_calls", "tool_failures",
)  # fmt: skip


class Grpo(AlignObjective):
    """Group-relative policy optimization; implements `train.objective.Objective`."""

    name, command, metric_names, evaluate_first = "grpo", "deskside grpo", METRICS, True
    reads_weights = True

    def __init__(self, options: GrpoConfig) -> None:
        self.options = options
        self.reward = parse_reward(options)
        self.tools = None if options.tools is None else Tools.parse(options.tools)
        self.tool_turns: ToolTurns | None = None
        self.datasets: dict[str, Questions] = {}
        self.reference: Transformer | None = None
        self.rollout_seconds = 0.0

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> Questions:
        check_supported(config)
        options, rows = self.options, config.batch.tokens // sequence_length
        if rows % options.group:
            raise UsageError(
                f"batch.tokens: {rows} answers per step cannot be split into groups of {options.group}; use a "
                f"multiple of {options.group * sequence_length}"
            )
        self.datasets[split] = Questions(
            path,
            split,
            sequence_length,
            options.group,
            options.answer_tokens,
            config.model.vocab_size,
            config.model.max_position_embeddings,
        )
        self.folder = path
        self.reward.check_answers([question.answer for question in self.datasets[split].questions], split)
        return self.datasets[split]

    def begin(self, session: Session) -> None:
        self.session = session
        describe_data(self.datasets["train"].index, session.say)
        for questions in self.datasets.values():
            if questions.left_out:
                session.say(
                    f"{questions.split}: {plural(questions.left_out, 'question')} too long for a row of "
                    f"{questions.sequence_length} tokens with an answer of {self.options.answer_tokens}; left out"
                )
        self._keep_user_file(session, "reward", self.reward.file)
        self._keep_user_file(session, "tools", None if self.tools is None else self.tools.file)
        steps, config = self.options.steps_per_rollout, session.config
        self.answers_per_step = config.batch.tokens // config.batch.sequence_length
        questions_per_step, processes = self.answers_per_step // self.options.group, session.world.size
        if questions_per_step % processes:
            raise UsageError(
                f"batch.tokens: {questions_per_step} questions per step cannot be shared evenly by {processes} "
                f"processes; use a multiple of {self.options.group * processes * config.batch.sequence_length}"
            )
        ends = session.run.read_json("generation_config.json")["eos_token_id"]
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        self.tokenizer = load_tokenizer(session.run.tokenizer)
        if self.tools is not None:
            folder, turns = session.run.path, self.options.tool_turns or DEFAULT_TURNS
            self.tool_turns = ToolTurns(self.tools, folder, self.ends, turns)
        self.log = RolloutLog(session.run.path, session.world.rank, steps > 1, session.world.size)
        with session.precision.high_precision(), memory_for_sampling():
            headroom = MemoryHeadroom.measure(session.world.device)
            self._load_reference(session)  # first, because the sampler is sized by the remaining memory
            if headroom is not None and self.reference is not None:
                headroom = headroom.after_allocating(self.reference)
            self.sampler = Sampler(
                session.model,
                config.adapter is not None,
                steps * self.answers_per_step // session.world.size,
                config.batch.sequence_length,
                self.ends,
                headroom,
            )
            if headroom is not None:
                self.sampler.rehearse(self.datasets["train"].vocab_size)
            if session.budget.limit is not None:
                self._fit_into_time(session)
        self.sample_before(session)

    def extra_step_seconds(self) -> float:
        return self.rollout_seconds / self.options.steps_per_rollout

    def _fit_into_time(self, session: Session) -> None:
        """Measure the speed of sampling. Set its time per round, and drop held-out questions if all take too long.

        Raises UsageError if there is no time for one optimizer step.
        """
        budget, val, options = session.budget, self.datasets["val"], self.options
        count = options.steps_per_rollout * self.answers_per_step // session.world.size
        prompts = [q.tokens for q in self.datasets["train"].questions]
        pace = self.sampler.measure_pace(prompts, count, options.temperature)
        lanes = self.sampler.engine.max_batch
        seconds = pace.seconds(count, options.answer_tokens, lanes)
        self.rollout_seconds = session.world.broadcast([seconds])[0]
        size, total = session.world.size, len(val.questions)

        def evaluation_seconds(count: int) -> float:
            return pace.seconds(-(-count // size), options.answer_tokens, lanes)

        num_questions = total
        while num_questions > 1 and evaluation_seconds(num_questions) > budget.share(EVALUATE_SHARE):
            num_questions -= 1
        num_questions = int(session.world.broadcast([num_questions])[0])
        # At most four evaluations follow: two rehearsals, one before the first step, and the final one.
        later = 4 * evaluation_seconds(num_questions) + budget.share(2 * SAMPLE_SHARE + REPORT_SHARE)
        step = self.extra_step_seconds() + self.answers_per_step * session.row_seconds
        if session.world.broadcast([float(budget.left() - later < step)])[0]:
            raise budget.too_short(
                f"a step takes {step:.0f} s, {self.extra_step_seconds():.0f} s of it for {self.answers_per_step} "
                f"answers of {options.answer_tokens} tokens, and {max(0.0, budget.left() - later):.0f} s are left",
                step,
                later,
            )
        if num_questions < total:
            session.say(
                f"{num_questions} of {total} held-out questions are used, so that the run ends on time; a longer run "
                "(--hours) uses more"
            )
            val.questions = [
                val.questions[i] for i in (np.arange(num_questions) * total // num_questions).tolist()
            ]

    def reserved_bytes(self, config: RunConfig, model: Transformer) -> int:
        """Return the bytes of the sampling copy, of the reference, and of the answers to one question at a time."""
        dtype = model.activation_dtype
        weights = (2 if self.options.kl else 1) * num_params(config.model) * dtype.itemsize
        cache = answers_bytes(config.model, dtype, self.options.group, config.batch.sequence_length)
        return int((weights + cache) / KV_CACHE_SHARE)

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches:
        return RolloutLoader(self, cast(Questions, dataset), options)

    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        texts = [worst_case_texts(dataset.sequence_length, 1, dataset.vocab_size) for _ in range(rows)]
        question = Question("", "", (0,))
        rollouts = []
        for (text,) in texts:
            sampled = SampledAnswer(tuple(text.tokens[1:].tolist()), (-1.0,) * text.num_targets, True)
            rollouts.append([Rollout(0, question, sampled, "", 0.0, 1.0)])
        count = rows * (dataset.sequence_length if self.options.average == "token" else 1)
        batch = rollout_batch(
            cast(Questions, dataset), rollouts, self.options, count * passes_everywhere, device
        )
        if self.options.kl:
            batch = replace(batch, reference_SL=torch.zeros_like(batch.sampled_SL))
        return batch

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss:
        batch, options = cast(RolloutBatch, batch), self.options
        scores = answers.score(model, batch, context, compute, options.temperature)
        in_loss_SL = batch.mask_SL & batch.in_loss_S[:, None]
        terms = policy_loss(
            scores.logprobs_SL,
            batch.sampled_SL,
            batch.advantage_S,
            in_loss_SL,
            options,
            batch.reference_SL,
        )
        log_ratio_SL = (scores.logprobs_SL.detach() - batch.sampled_SL) * batch.mask_SL
        metric_sums = {
            "answers": torch.ones_like(batch.reward_S).sum(),
            "answer_tokens": batch.mask_SL.sum().float(),
            "reward": batch.reward_S.sum(),
            "reward_square": batch.reward_S.square().sum(),
            "cut_off": batch.cut_off_S.sum().float(),
            "informative": (batch.advantage_S != 0).sum().float(),
            "entropy": scores.entropy_SL.sum(),
            "clipped": terms.clipped_SL.sum().float(),
            "drift": (log_ratio_SL.exp() - log_ratio_SL - 1).sum(),
            "kl": terms.kl_SL.sum(),
            "loss_tokens": in_loss_SL.sum().float(),
            "tool_calls": batch.tool_calls_S.sum(),
            "tool_failures": batch.tool_failures_S.sum(),
        }
        return Loss(terms.loss, scores.router, metric_sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        num_answers, tokens = max(1.0, sums["answers"]), max(1.0, sums["answer_tokens"])
        mean, loss_tokens = sums["reward"] / num_answers, max(1.0, sums["loss_tokens"])
        metrics = {
            "reward": mean,
            "reward_std": max(0.0, sums["reward_square"] / num_answers - mean**2) ** 0.5,
            "answer_tokens": tokens / num_answers,
            "cut_off": sums["cut_off"] / num_answers,
            "informative": sums["informative"] / num_answers,
            "entropy": sums["entropy"] / tokens,
            "clipped": sums["clipped"] / loss_tokens,
            "drift": sums["drift"] / tokens,
        }
        if self.options.kl:
            metrics["kl"] = sums["kl"] / loss_tokens
        if self.options.tools is not None:
            metrics["tool_calls"] = sums["tool_calls"] / num_answers
            metrics["tool_failures"] = sums["tool_failures"] / max(1.0, sums["tool_calls"])
        return metrics

    def evaluate(self, session: Session, max_tokens: int | None) -> Evaluation:
        """Return the mean reward of greedy answers to held-out questions."""
        questions, world = cast(Questions, session.validation), session.world
        count = len(questions.questions)
        if max_tokens is not None:
            count = min(count, max(world.size, max_tokens // questions.sequence_length))
        chosen = np.unique(np.arange(count) * len(questions.questions) // count)[world.rank :: world.size]
        mine = [questions.questions[i] for i in chosen.tolist()]
        sampled, rewards = self._answer(mine, [0] * len(mine), 0, 0.0)
        totals = torch.tensor(
            [sum(rewards), sum(s.num_sampled for s in sampled), len(mine)],
            dtype=torch.float64,
            device=world.device,
        )
        reward, tokens, count = world.all_reduce_sum(totals).tolist()
        count = int(count)
        metrics = {"val_reward": reward / count, "val_answer_tokens": tokens / count}
        message = (
            f"mean reward {metrics['val_reward']:.3f} on {count:,} held-out questions, answered greedily"
        )
        return Evaluation(
            metrics, {**metrics, "val_questions": count}, message, count * questions.sequence_length
        )

    # Sampling

    def roll_out(self, questions: Sequence[Question], positions: Sequence[int], seed: int) -> list[Rollout]:
        """Sample answers with the present weights, and compute their rewards and advantages.

        questions: one per answer, so the `group` answers to a question repeat it. positions: see `rollouts.py`.
        """
        samples, rewards = self._answer(questions, positions, seed, self.options.temperature)
        rewards_GS = torch.tensor(rewards, dtype=torch.float64).view(-1, self.options.group)
        advantages_N = advantages(rewards_GS, self.options.scale_rewards).flatten().tolist()
        rollouts = [
            Rollout(
                position,
                question,
                sampled,
                self._text(sampled.tokens[: len(sampled.tokens) - sampled.ended]),
                reward,
                advantage,
            )
            for position, question, sampled, reward, advantage in zip(
                positions, questions, samples, rewards, advantages_N, strict=True
            )
        ]
        self.log.add(rollouts, self.options.group)
        return rollouts

    def _answer(
        self, questions: Sequence[Question], streams: Sequence[int], seed: int, temperature: float
    ) -> tuple[list[SampledAnswer], list[float]]:
        """Sample answers with the present weights, and compute their rewards.

        All ranks call this together. If the reward server gives one of them no rewards, all raise OutsideError.
        """
        world, rewards, failure = self.session.world, list[float](), None
        self.sampler.update_weights()
        with world.wait_at_end():  # tools and rewards have no time limit, and a server is asked several times
            samples = self._sample(questions, streams, seed, temperature)
            cases = [
                RewardCase(q.prompt, self._text(s.last_turn), q.answer, q.columns)
                for q, s in zip(questions, samples, strict=True)
            ]
            try:
                rewards = self.reward.compute_all(cases)
            except OutsideError as error:
                failure = error
        failed = torch.tensor([float(failure is not None)], dtype=torch.float64, device=world.device)
        if world.all_reduce_max(failed).item():
            raise failure or OutsideError("the reward server gave another process no rewards")
        return samples, rewards

    def _sample(
        self, questions: Sequence[Question], streams: Sequence[int], seed: int, temperature: float
    ) -> list[SampledAnswer]:
        prompts, limit = [q.tokens for q in questions], self.options.answer_tokens
        if self.tool_turns is None:
            return self.sampler.sample(prompts, streams, seed, temperature, limit)
        return self.tool_turns.sample(self.sampler, prompts, streams, seed, temperature, limit)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    # Batches

    def batches(
        self, questions: Questions, rollouts: Sequence[Rollout], micro_rows: int, device: torch.device
    ) -> list[Batch]:
        """Pack this rank's answers of a step into micro-batches. All ranks call this together."""
        count = float(loss_count(rollouts, self.options))
        total = torch.tensor([count], dtype=torch.float64, device=device)
        step_count = max(1, int(self.session.world.all_reduce_sum(total).item()))
        return [
            self._with_reference(rollout_batch(questions, part, self.options, step_count, device))
            for part in passes_of(pack_rollouts(rollouts, questions.sequence_length), micro_rows)
        ]

    # Reference

    @torch.no_grad()
    def _with_reference(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with the log-probabilities of the initial weights, if align.kl needs them."""
        if self.reference is None:
            return batch
        context = answers.evaluation_context(self.session, batch)
        scores = answers.score(
            self.reference, batch, context, self.session.config.compute, self.options.temperature
        )
        return replace(batch, reference_SL=scores.logprobs_SL)

    def _load_reference(self, session: Session) -> None:
        """Keep a copy of the initial weights for align.kl, in memory and in the run directory for a resumed run."""
        if not self.options.kl:
            return
        path = session.run.path / REFERENCE
        self.reference = sampling_copy(session.model, session.config.adapter is not None)
        named = dict(self.reference.named_parameters())
        if session.resumed:
            if not path.is_file():
                raise RunError(
                    f"{path}: the initial weights of the run are missing, which align.kl needs; restore the file"
                )
            with torch.no_grad():
                for name, tensor in load_file(path).items():
                    named[name].copy_(tensor)
        elif session.world.is_rank_zero:
            try:
                save_file({name: p.detach().contiguous() for name, p in named.items()}, path)
            except OSError as error:
                raise RunError(f"{path}: cannot be written: {error.strerror}") from None

    def _keep_user_file(self, session: Session, what: str, file: Path | None) -> None:
        """Copy a file with the user's functions into the run, and check that a resumed run uses the same one."""
        if file is None:
            return
        recorded = session.run.path / f"{what}.py"
        if not session.resumed:
            if session.world.is_rank_zero:
                shutil.copyfile(file, recorded)
        elif not recorded.is_file() or recorded.read_bytes() != file.read_bytes():
            raise RunError(f"{what}: {file} changed since the run started; restore it from {recorded}")
