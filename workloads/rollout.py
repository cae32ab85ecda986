"""Rollouts of reinforcement learning: steps of prompts with several samples each, and a policy that is updated between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workloads.columns import NS_PER_S, IntArray
from workloads.lengths import LengthDistribution
from workloads.streams import Count, FromZero, Positive, Stream, check_bounds, stream
from workloads.workload import Stop, Workload

_MOST_BATCHES = 1_000
"""Batches of prompts that one step may need; a share of informative groups that asks for more is taken for a slip."""


class Groups(NamedTuple):
    """The groups of a rollout in the order in which they are sent; requests are the samples of one group after the other."""

    step: IntArray
    """The step that each group is first sent in, from 0."""
    batch: IntArray
    """The batch that each group is sent with, from 0; batches of one step follow each other."""
    informative: NDArray[np.bool_]
    """Whether a group counts: one whose answers are all right or all wrong teaches nothing, and dynamic sampling drops it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Steps of `prompts` groups, each a prompt with `samples` answers; all are sent at once. A step ends when `wanted` informative
    groups have all of their answers; the weights are then updated for `update_s`, and the next step begins.

    Where all groups of a step have ended and too few of them were informative, as many again are sent (dynamic sampling of DAPO,
    Yu et al., arXiv 2503.14476, section 3.2). `leftover` says what becomes of answers that are under way when a step ends:
    `abort` drops them (over-provisioning: more prompts are sent than wanted); with `continue` they go on with their KV while the
    weights are updated and after it, and count in a later step, which sends as many groups as have been taken (in-flight updates
    of PipelineRL, Piché et al., arXiv 2509.19128); with `recompute` they do so until the new weights are loaded, and are then
    computed again with what they have emitted, where the router sends them (partial rollouts of AReaL, Fu et al., arXiv
    2505.24298, which drop the KV of the old weights).
    """

    prompts: Count
    """Groups that are under way at the beginning of a step."""
    samples: Count = 1
    """Answers of each prompt; their prompts are alike, and a prefix cache finds them."""
    steps: Count = 1
    wanted: Count | None = None
    """Informative groups that end a step; all `prompts` where it is left out."""
    informative: Positive = 1.0
    """The share of groups that are informative, drawn for each; the others are dropped."""
    leftover: Literal["abort", "continue", "recompute"] = "abort"
    """The fate of the answers under way when a step ends."""
    update_s: FromZero = 0.0
    """The time from the end of a step until its weights are there: the update and their transfer."""
    pause_s: FromZero = 0.0
    """The time for which machines then stand still to load them; behind it the next step's prompts are sent."""
    redistribute: Positive | None = None
    """The share of a step's answers that have ended when those under way are spread evenly over the machines, once a step: machines
    with more than their share send theirs to others, where they are computed again. Left out: answers stay where they are."""
    block_tokens: Count = 16
    """Tokens that one id of the generated prompts stands for."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.informative > 1:
            raise ValueError(f"informative is a share above 0, at most 1; got {self.informative!r}")
        if self.redistribute is not None and self.redistribute >= 1:
            raise ValueError(f"redistribute is a share above 0, below 1; got {self.redistribute!r}")
        if self.leftover not in ("abort", "continue", "recompute"):
            raise ValueError(f"leftover is abort, continue or recompute; got {self.leftover!r}")
        if self.of_a_step > self.prompts and self.informative == 1:
            raise ValueError(f"wanted is at most prompts, {self.prompts}; got {self.wanted}")
        if self.leftover != "abort" and self.informative < 1:
            raise ValueError(f"leftover: {self.leftover} is for groups that all count; leave informative out, or abort")

    @property
    def stops_machines(self) -> bool:
        """Whether machines stand still, or give answers back, at some time."""
        return self.pause_s > 0 or self.leftover == "recompute" or self.redistribute is not None

    @property
    def of_a_step(self) -> int:
        """Informative groups that end a step."""
        return self.prompts if self.wanted is None else self.wanted

    def groups(self, seed: int) -> Groups:
        """All groups of the rollout, drawn before it runs."""
        if self.leftover != "abort":
            sizes = [self.prompts, *[self.of_a_step] * (self.steps - 1)]
            of = np.repeat(np.arange(self.steps), sizes)
            return Groups(of, of, np.ones(len(of), bool))
        rng = stream(seed, Stream.INFORMATIVE)
        steps, found = list[int](), list[NDArray[np.bool_]]()
        for step in range(self.steps):
            count = 0
            while count < self.of_a_step:
                if steps.count(step) == _MOST_BATCHES:
                    raise ValueError(
                        f"step {step} has {count} informative groups after {_MOST_BATCHES:,} batches of {self.prompts}, and "
                        f"{self.of_a_step} are wanted; give more prompts or a larger share informative"
                    )
                steps.append(step)
                found.append(rng.random(self.prompts) < self.informative)
                count += int(found[-1].sum())
        return Groups(
            np.repeat(steps, self.prompts), np.repeat(np.arange(len(steps)), self.prompts), np.concatenate(found)
        )

    def workload(self, prompt: LengthDistribution, output: LengthDistribution, seed: int) -> RolloutRequests:
        """The requests of all steps: a prompt length for each group, an output length for each of its samples."""
        groups = self.groups(seed)
        n = len(groups.step)
        prompts = np.maximum(prompt.sample(stream(seed, Stream.PROMPT_LENGTHS), n), 1)
        outputs = np.maximum(output.sample(stream(seed, Stream.OUTPUT_LENGTHS), n * self.samples), 1)
        blocks = -(-prompts // self.block_tokens)
        first = np.repeat(np.cumsum(blocks) - blocks, self.samples)
        counts = np.repeat(blocks, self.samples)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return RolloutRequests(
            prompt_tokens=np.repeat(prompts, self.samples),
            output_tokens=outputs,
            prefix_blocks=np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts),
            prefix_offsets=offsets,
            prefix_block_tokens=self.block_tokens,
            rollout=self,
            groups=groups,
            source=f"{self!r}, prompts {prompt!r}, answers {output!r}, seed {seed}",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RolloutRequests(Workload):
    """The requests of a rollout; `Rollout.workload` makes them."""

    rollout: Rollout
    groups: Groups

    def clients(self) -> _Trainer:
        return _Trainer(self.rollout, self.groups)

    def take(self, rows: ArrayLike) -> NoReturn:
        raise ValueError("the steps of a rollout are whole; give fewer prompts, samples or steps")


def prompts_of(workload: Workload) -> NDArray[np.int64]:
    """The number of the prompt of each row, from 0: one for all samples of a rollout's prompt, one for each other row."""
    rows = np.arange(len(workload), dtype=np.int64)
    return rows // workload.rollout.samples if isinstance(workload, RolloutRequests) else rows


class _Trainer:
    """The one client of a run: it sends the batches of a step, waits for the groups that it wants, and updates the weights."""

    starts_ns: Sequence[int] = (0,)

    def __init__(self, rollout: Rollout, groups: Groups) -> None:
        self._samples, self._wanted, self._steps = rollout.samples, rollout.of_a_step, rollout.steps
        self._aborts = rollout.leftover == "abort"
        self._update_ns, self._pause_ns = (round(each * NS_PER_S) for each in (rollout.update_s, rollout.pause_s))
        self._drops_kv = rollout.leftover == "recompute"
        self._share = rollout.redistribute
        self._informative = groups.informative.tolist()
        firsts = np.searchsorted(groups.batch, np.arange(int(groups.batch[-1]) + 2))
        self._batches = list(zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True))
        self._next = 0
        self._left = [rollout.samples] * len(groups.batch)
        """Answers of each group that have not ended."""
        self._under_way = dict[int, None]()
        """Rows that were sent and have not ended, in the order in which they were sent."""
        self._step = self._taken = 0
        self._spread = False
        """Answers under way are still to be spread over the machines in this step."""
        self._sent = 0
        """Answers that were under way at the beginning of the step, or sent in it."""
        self._gone: list[int] = []
        self._stops: list[Stop] = []

    def start(self, now_ns: int, /) -> Iterator[tuple[int, int]]:
        """Send the next batch."""
        first, last = self._batches[self._next]
        self._next += 1
        for row in range(first * self._samples, last * self._samples):
            self._under_way[row] = None
            yield row, now_ns
        self._sent = len(self._under_way)
        self._spread = self._share is not None

    def ended(self, row: int, now_ns: int, /) -> Iterator[tuple[int, int]]:
        if row not in self._under_way:
            return  # It was aborted.
        del self._under_way[row]
        if self._spread and len(self._under_way) <= (1 - (self._share or 0)) * self._sent:
            self._spread = False
            self._stops.append(Stop(now_ns, now_ns, drops_kv=True, only_fuller=True))
        group = row // self._samples
        self._left[group] -= 1
        if self._left[group] == 0 and self._informative[group]:
            self._taken += 1
            if self._taken == self._wanted:
                yield from self._end_step(now_ns)
                return
        if self._aborts and not self._under_way:
            yield from self.start(now_ns)

    def _end_step(self, now_ns: int) -> Iterator[tuple[int, int]]:
        self._step, self._taken = self._step + 1, 0
        last = self._step == self._steps
        if self._aborts or last:
            self._gone += self._under_way
            self._under_way.clear()
            self._spread = False
        if not last:
            loaded_ns = now_ns + self._update_ns
            if self._drops_kv or self._pause_ns:
                self._stops.append(Stop(loaded_ns, loaded_ns + self._pause_ns, drops_kv=self._drops_kv))
            yield from self.start(loaded_ns + self._pause_ns)

    def stops(self) -> list[Stop]:
        stops, self._stops = self._stops, []
        return stops

    def cancelled(self) -> list[int]:
        gone, self._gone = self._gone, []
        return gone
