"""Rollouts of a run on this rank: the engine with the policy's weights, conversations, rewards and workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from rlkit.base.tasks import cancel
from rlkit.distributed.offload import HostOffload, free_cached, use_device
from rlkit.distributed.ranks import Ranks, SideGroup
from rlkit.interfaces.engine import Capability, RolloutEngine
from rlkit.interfaces.reward import RewardManager
from rlkit.models.actor import Actor
from rlkit.models.weights import PolicyWeights
from rlkit.recipe import ConversationLimits, Recipe
from rlkit.rollout.agents import AgentHost
from rlkit.rollout.collect import BusyTimer, ConversationSetup
from rlkit.rollout.conversation import Limits
from rlkit.rollout.dialogue import Dialogue
from rlkit.rollout.gate import Gate
from rlkit.rollout.loop import EventLoop, close_on_loop, warn_on_stderr
from rlkit.rollout.replies import reply_limit
from rlkit.rollout.scoring import RewardCounts, score
from rlkit.rollout.workers import Workers
from rlkit.types import Sampling, Score, Trajectory

R = TypeVar("R")
T = TypeVar("T")

AGENT_TURNS = 64
"""Turns of the policy in an agent's session where the recipe does not limit them."""

WATCH_SECONDS = 0.5
"""How often work is interrupted to check whether the engine has lost its weights."""


class RolloutService:
    """Samples from the policy and scores what it sampled, on an event loop in a thread of its own.

    The trainer's thread goes on while submitted work, such as scoring, is in progress. A sync of weights runs while it
    waits for that; what ranks agree on meanwhile has a process group of its own. All ranks must create the service.

    Args:
        recipe: Checked.
        dialogue: What conversations are made with.
        actor: The policy, whose weights the engine is synced with.
        ranks: This rank among the others.
        offload: What leaves the device while the engine samples.
        note: Shows a warning; called from any thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        dialogue: Dialogue,
        actor: Actor,
        ranks: Ranks,
        offload: HostOffload | None = None,
        *,
        note: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        self.recipe = recipe
        self.dialogue = dialogue
        self.actor = actor
        self.ranks = ranks
        self.note = note
        self._side_ranks = SideGroup(ranks.fabric)
        self.version = 0
        """Of the policy's weights: the number of steps that changed them."""
        self._offload = offload
        self._on_device = False
        self._loop = EventLoop(partial(use_device, ranks.fabric.device), note)
        concurrent = recipe.rollout.max_conversations or self.engine.capacity
        self.admission: AbstractAsyncContextManager[object]
        self.admission = nullcontext() if concurrent is None else asyncio.Semaphore(concurrent)
        cpus = max(1, (os.cpu_count() or 1) // ranks.fabric.world_size)
        self.agents: AgentHost | None = None
        if recipe.agent is not None:
            limits = recipe.conversation or ConversationLimits(turns=AGENT_TURNS, tool_calls=None)
            self.agents = AgentHost(recipe.agent, dialogue, limits, note)
        self.reward_counts = RewardCounts(recipe.reward)
        self._workers = Workers(recipe.concurrency or min(4, cpus))

    @property
    def engine(self) -> RolloutEngine:
        """The engine that the run uses."""
        return self.recipe.engine

    def conversation_setup(
        self,
        sampling: Sampling,
        samples: int,
        step: int,
        *,
        attempt: int = 0,
        timer: BusyTimer | None = None,
        gate: Gate | None = None,
    ) -> ConversationSetup:
        """Return the settings that the conversations of a step share.

        `rollout.max_conversations` does not hold for those that a gate interrupts on an engine that shares the device:
        they would keep their slots, for which a validation would wait forever.
        """
        is_limited = gate is None or Capability.BESIDE in self.engine.capabilities
        recipe, conversation = self.recipe, self.recipe.conversation or ConversationLimits()
        multi_turn = recipe.tools or recipe.interaction or recipe.environment
        turns, context = conversation.turns if multi_turn else 1, self.dialogue.context
        reply = reply_limit(conversation, context)
        return ConversationSetup(
            self.engine,
            self.dialogue.template,
            sampling,
            samples,
            recipe.train.seed,
            step,
            attempt,
            self.dialogue.participants,
            Limits(turns, conversation.tokens, conversation.tool_calls, context, reply, conversation.user_turns),
            conversation.seconds if multi_turn else None,
            conversation.check,
            timer or BusyTimer(),
            self.admission if is_limited else nullcontext(),
            gate,
            agent=None if self.agents is None else self.agents.converse,
            sampling_column=recipe.rollout.sampling_column,
            fields=recipe.sampled_fields,
        )

    def shard_for_rank(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items that this rank samples: every n-th of them; none where another rank samples for it."""
        return items[self.ranks.index :: self.ranks.count] if self.ranks.lead else []

    def sample(self, work: Coroutine[object, None, T]) -> T:
        """Run work that calls the engine; all ranks must call this."""
        with closing(work), self.engine_on_device():  # a failed sync leaves it unstarted
            return self.wait(self._with_weights(work))

    def wait(self, work: Coroutine[object, None, T]) -> T:
        """Run asynchronous work to its end; a Ctrl-C meanwhile cancels it and waits until it has ended."""
        return self._loop.run(work)

    @contextmanager
    def engine_on_device(self) -> Iterator[None]:
        """Keep the engine ready to sample; all ranks must enter this.

        What rollouts do not need leaves the device first, where the recipe says so; then an engine that shares the
        device takes its memory. Work that samples several times enters this around all of it, so that such an engine
        is synced once.
        """
        if self._on_device:  # agreed: all ranks enter and leave together
            yield
            return
        with ExitStack() as stack:
            if self._offload is not None:
                stack.enter_context(self._offload.off_device())
            elif Capability.READS_POLICY not in self.engine.capabilities:
                free_cached(self.ranks.fabric.device)
            if self.ranks.any(self.engine.needs_weights):
                self.wait(self._sync())
            stack.enter_context(self.engine.on_device())
            stack.callback(setattr, self, "_on_device", False)
            self._on_device = True
            yield

    def sync_weights(self) -> None:
        """Send the engine the weights, under the current version; all ranks must call this.

        An engine that must be synced before it samples anyway is synced then: its memory may be the trainer's now.
        """
        if not self.ranks.any(self.engine.needs_weights):
            self.wait(self._sync())

    async def work(self, function: Callable[[T], R], argument: T, timeout: float) -> R:
        """Call a function in a worker process; see `Runtime.work`."""
        return await self._workers.call(function, argument, timeout)

    async def score(self, reward: RewardManager, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Call a reward with its deadline, errors turned into scores."""
        return await score(reward, trajectories, self._workers)

    async def release(self, trajectories: Sequence[Trajectory]) -> None:
        """Free what the rollouts of agents hold, once they are scored."""
        if self.agents is not None:
            await self.agents.release(trajectories)

    def close(self) -> None:
        """Cancel all work, then close the recipe's parts, the workers and the event loop."""
        with ExitStack() as stack:  # one that raises keeps nothing else open
            stack.callback(self._loop.close)
            stack.callback(self._workers.close)
            if self.agents is not None:
                stack.callback(self._loop.run, self.agents.close())
            stack.callback(self._loop.run, close_on_loop(self.recipe.parts()))
            stack.callback(self._loop.cancel_all)

    async def _with_weights(self, work: Coroutine[object, None, T]) -> T:
        """Do work. If an engine loses its weights meanwhile, all ranks, each of which may hold a part of them, sync
        theirs again once all have done their work or wait for that."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                while not (task.done() or self.engine.needs_weights):
                    await asyncio.wait((task,), timeout=WATCH_SECONDS)
                if task.done():
                    task.result()
                if not await self._side_ranks.any_async(self.engine.needs_weights):
                    return await task
                await self._sync()
        finally:
            await cancel(task)

    async def _sync(self) -> None:
        with nullcontext() if self._offload is None else self._offload.back(self.actor):
            await self.engine.sync(PolicyWeights(self.actor.policy), self.version)
