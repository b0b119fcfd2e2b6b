"""Conversations: the state machine by itself, and every path through tools, users and environments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rlkit_authors.models import build_tokenizer
from rlkit_math.calculator import Calculator, evaluate

from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.parser import parse_after_thinking
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit.parsers import HermesParser
from rlkit.rollout.collate import add_rewards, collate
from rlkit.rollout.collect import ConversationSetup, collect
from rlkit.rollout.conversation import LEGAL, Conversation, Limits, Phase
from rlkit.rollout.participants import Participants
from rlkit.rollout.service import RolloutService
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.workers import Workers
from rlkit.testing import ScriptedEngine
from rlkit.types import Completion, Message, Prompt, Request, Sampling, Score, StopReason, Trajectory
from tests.unit import simulation
from tests.unit.hostile import wait

TOKENIZER = build_tokenizer()
PROMPT = Prompt("p", [{"role": "user", "content": "?"}], "7")


def said(*tokens: int, stop: StopReason = StopReason.STOP) -> Completion:
    return Completion(list(tokens), [-0.5] * len(tokens), [3] * len(tokens), stop)


def test_a_conversation_of_three_turns_token_by_token() -> None:
    """Prompt 1 2, the policy says 10 11, a tool 20, the policy 12, the user 30 31, the policy 13."""
    conversation = Conversation(PROMPT, 4, Limits(turns=8))
    conversation.begin([1, 2])
    conversation.sampled(said(10, 11))
    conversation.call_tools(2)
    conversation.reward(0.25)
    conversation.observed("tool", [20])
    conversation.sampled(said(12))
    conversation.interact()
    conversation.reward(-1.0)
    conversation.observed("user", [30, 31])
    conversation.sampled(said(13))
    conversation.complete(StopReason.STOP)
    done = conversation.trajectory("last")
    assert done.tokens == [1, 2, 10, 11, 20, 12, 30, 31, 13]
    assert done.mask == [False, False, True, True, False, True, False, False, True]
    assert done.logps == [0, 0, -0.5, -0.5, 0, -0.5, 0, 0, -0.5]
    assert done.versions == [-1, -1, 3, 3, -1, 3, -1, -1, 3]
    assert [tuple(turn) for turn in done.turns] == [
        ("user", 0, 2), ("assistant", 2, 4), ("tool", 4, 5), ("assistant", 5, 6), ("user", 6, 8), ("assistant", 8, 9)
    ]  # fmt: skip
    assert (done.turn_rewards, done.counts, done.stop) == ([0.25, -1.0, 0.0], {"tool_calls": 2}, StopReason.STOP)


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (Limits(turns=1), StopReason.TURNS),
        (Limits(turns=8, tokens=2), StopReason.LENGTH),
        (Limits(turns=8, tool_calls=0), StopReason.TOOL_CALLS),
        (Limits(turns=8, context=5), StopReason.CONTEXT),
    ],
)
def test_each_limit_ends_it(limits: Limits, stop: StopReason) -> None:
    """Two tokens of prompt and two of the policy, then a call whose answer has one."""
    conversation = Conversation(PROMPT, 0, limits)
    conversation.begin([1, 2])
    assert conversation.budget(2) == 2
    conversation.sampled(said(10, 11))
    conversation.call_tools(1)
    if not conversation.over:
        conversation.observed("tool", [20])
    assert (conversation.phase, conversation.stop) == (Phase.COMPLETED, stop)


@pytest.mark.parametrize(
    ("limits", "tokens", "mask"),
    [
        # after two replies of the user, the policy answers once more; the tool's reply in between is none of the user's
        (Limits(turns=9, user_turns=2), [1, 10, 20, 10, 30, 10, 30, 10], "0101 0101"),
        (Limits(turns=9, user_turns=1), [1, 10, 20, 10, 30, 10], "0101 01"),
        (Limits(turns=3, user_turns=2), [1, 10, 20, 10, 30, 10], "0101 01"),
        (Limits(turns=2, user_turns=2), [1, 10, 20, 10], "0101"),
    ],
)
def test_a_limit_of_each_sides_turns_ends_it_after_a_turn_of_the_policy(
    limits: Limits, tokens: list[int], mask: str
) -> None:
    """The policy calls a tool in its first turn and answers in the others, to which the user replies.

    The last turn is in the run, under the mask and with a reward: it is trained on.
    """
    conversation = Conversation(PROMPT, 0, limits)
    conversation.begin([1])
    while not conversation.over:
        conversation.sampled(said(10))
        is_first = len(conversation.rewards) == 1
        conversation.call_tools(1) if is_first else conversation.interact()
        conversation.reward(1.0)
        conversation.observed(*(("tool", [20]) if is_first else ("user", [30])))
    assert (conversation.phase, conversation.stop) == (Phase.COMPLETED, StopReason.TURNS)
    assert conversation.tokens == tokens
    assert conversation.mask == [bit == "1" for bit in mask.replace(" ", "")]
    assert conversation.rewards == [1.0] * mask.count("1")


def test_a_prompt_that_fills_the_context_and_a_turn_that_is_cut() -> None:
    full = Conversation(PROMPT, 0, Limits(context=2))
    full.begin([1, 2])
    assert (full.phase, full.error) == (Phase.FAILED, "the prompt leaves no room in the context for an answer")
    cut = Conversation(PROMPT, 0)
    cut.begin([1])
    cut.sampled(said(10, stop=StopReason.LENGTH))
    assert (cut.phase, cut.stop) == (Phase.COMPLETED, StopReason.LENGTH)
    with pytest.raises(ValueError, match="the conversation is completed, expected running"):
        cut.sampled(said(11))
    with pytest.raises(ValueError, match="completed cannot become failed"):
        cut.fail("late")


def test_the_policy_never_speaks_twice_in_a_row() -> None:
    conversation = Conversation(PROMPT, 0, Limits(turns=3))
    conversation.begin([1])
    conversation.sampled(said(10))
    with pytest.raises(ValueError, match="the last turn is the policy's, expected another participant's"):
        conversation.sampled(said(11))


class AnyConversation(RuleBasedStateMachine):
    """Whatever is done in whatever order: only legal steps succeed, and the flat run stays consistent."""

    def __init__(self) -> None:
        super().__init__()
        self.conversation = Conversation(PROMPT, 0, Limits(turns=3, tokens=9, tool_calls=3, context=20))
        self.before = self.conversation.phase

    def attempt(self, action: Callable[[], object], *phases: Phase) -> None:
        self.before = self.conversation.phase
        if self.before in phases:
            action()
        else:
            with pytest.raises(ValueError, match=str(self.before)):
                action()
        assert self.conversation.phase == self.before or self.conversation.phase in _reachable(self.before)

    @rule(tokens=st.lists(st.integers(0, 9), max_size=22))
    def begin(self, tokens: list[int]) -> None:
        self.attempt(lambda: self.conversation.begin(tokens), Phase.PENDING)

    def may_sample(self) -> bool:
        conversation = self.conversation
        return conversation.phase is not Phase.RUNNING or (
            conversation.budget(4) > 0 and conversation.turns[-1].role != "assistant"
        )

    @precondition(may_sample)
    @rule(count=st.integers(0, 4), stop=st.sampled_from([StopReason.STOP, StopReason.LENGTH]))
    def sample(self, count: int, stop: StopReason) -> None:
        count = min(count, self.conversation.budget(4))
        self.attempt(lambda: self.conversation.sampled(said(*range(count), stop=stop)), Phase.RUNNING)

    @rule(calls=st.integers(1, 3))
    def call(self, calls: int) -> None:
        self.attempt(lambda: self.conversation.call_tools(calls), Phase.RUNNING)

    @rule()
    def interact(self) -> None:
        self.attempt(self.conversation.interact, Phase.RUNNING)

    @rule(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def tell(self, tokens: list[int]) -> None:
        self.attempt(lambda: self.conversation.observed("tool", tokens), Phase.TOOL_CALLING, Phase.INTERACTING)

    @rule()
    def fail(self) -> None:
        open_phases = [phase for phase, after in LEGAL.items() if after]
        self.attempt(lambda: self.conversation.fail("so it goes"), *open_phases)

    @invariant()
    def the_flat_run_is_consistent(self) -> None:
        conversation = self.conversation
        assert (
            len(conversation.tokens) == len(conversation.mask) == len(conversation.logps) == len(conversation.versions)
        )
        assert [i for turn in conversation.turns for i in range(turn.start, turn.end)] == list(
            range(len(conversation.tokens))
        )
        assert len(conversation.rewards) == sum(turn.role == "assistant" for turn in conversation.turns) <= 3
        assert sum(conversation.mask) <= 9
        assert all((v == -1) != m for m, v in zip(conversation.mask, conversation.versions, strict=True))
        assert (conversation.error is None) == (conversation.phase is not Phase.FAILED)


def _reachable(phase: Phase) -> set[Phase]:
    """One call may take two steps: to run and, a limit being reached, to end."""
    return set(LEGAL[phase]) | {after for step in LEGAL[phase] for after in LEGAL[step]}


TestAnyConversation = AnyConversation.TestCase
TestAnyConversation.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)


class Adder(Tool):
    """Adds; misbehaves for some numbers, and remembers its life."""

    name, description = "add", "Adds."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    timeout = 0.2

    def __init__(self, concurrency: int | None = None) -> None:
        self.concurrency = concurrency
        self.lives: list[list[Any]] = []
        self.running = self.most = 0

    async def create(self, state: State, **kwargs: Any) -> None:
        state["life"] = ["create", kwargs]
        self.lives.append(state["life"])

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> ToolReply | str:
        state["life"] += ["call", kwargs]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if arguments["a"] == 13:
                raise ValueError("unlucky")
            await asyncio.sleep(9 if arguments["a"] == 99 else 0.01)
        finally:
            self.running -= 1
        reward = float("nan") if arguments["a"] == 77 else 0.5
        return ToolReply(str(arguments["a"] + arguments["b"]), reward)

    async def reward(self, state: State, **kwargs: Any) -> float:
        state["life"] += ["reward", kwargs]
        return 2.0

    async def release(self, state: State, **kwargs: Any) -> None:
        state["life"] += ["release", kwargs]
        if kwargs.get("fail"):
            raise RuntimeError("will not go")


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def hold(
    script: Callable[[Request, int], str],
    participants: Participants,
    prompt: Prompt = PROMPT,
    samples: int = 1,
    limits: Limits = Limits(turns=6, tool_calls=8),  # noqa: B008
    *,
    engine: ScriptedEngine | None = None,
    run: Callable[[Coroutine[Any, Any, list[Trajectory]]], list[Trajectory]] = simulation.run,
    **options: Any,
) -> list[Trajectory]:
    """Return the conversations, held on a virtual clock unless `run` is another."""
    engine = engine or ScriptedEngine(script)
    engine.bind(SimpleNamespace(tokenizer=TOKENIZER))  # type: ignore[arg-type]
    template = ChatTemplate(TOKENIZER, {TOKENIZER.eos_token_id}, participants.schemas())
    setup = ConversationSetup(
        engine, template, Sampling(max_tokens=200), samples, 0, 1, 0, participants, limits, **options
    )

    async def finish(group: list[Trajectory]) -> None: ...

    return run(collect(setup, [(0, prompt)], finish))


def tools(**named: Tool) -> Participants:
    return Participants(dict(named), HermesParser())


def test_a_tool_is_called_as_the_recipe_names_it() -> None:
    participants = tools(add=Calculator(), count=Calculator())
    assert [tool.name for tool in participants.tools.values()] == ["add", "count"]
    assert [schema["function"]["name"] for schema in participants.schemas()] == ["add", "count"]


def replies(trajectory: Trajectory) -> str:
    """What the policy was told after its first turn, as text."""
    spans = [t for t in trajectory.turns[1:] if t.role != "assistant"]
    return "".join(TOKENIZER.decode(trajectory.tokens[t.start : t.end]) for t in spans)


def test_a_run_with_a_tool_is_as_written_by_hand() -> None:
    adder = Adder()
    [done] = hold(lambda request, turn: [f"I add.{call(a=3, b=4)}", "#### 7"][turn], tools(add=adder))
    first, last = f"I add.{call(a=3, b=4)}<|im_end|>", "#### 7<|im_end|>"
    told = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    opened = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    pieces = [(opened, False), (first, True), (told, False), (last, True)]
    expected = [(i, mine) for text, mine in pieces for i in TOKENIZER.encode(text, add_special_tokens=False)]
    assert list(zip(done.tokens, done.mask, strict=True)) == expected
    sampled = (
        [-i / 8 for i in range(len(TOKENIZER.encode(first)))],
        [-i / 8 for i in range(len(TOKENIZER.encode(last)))],
    )
    assert [x for x, mine in zip(done.logps, done.mask, strict=True) if mine] == [*sampled[0], *sampled[1]]
    assert (done.text, done.stop, done.counts) == ("#### 7", StopReason.STOP, {"tool_calls": 1})
    assert done.turn_rewards == [0.5, 2.0]  # the call's, and the conversation's at its last turn
    assert adder.lives == [["create", {}, "call", {}, "reward", {}, "release", {}]]
    done.score = Score(10.0)
    batch = add_rewards(collate([done]), [done])
    ends = [turn.end - 1 for turn in done.turns if turn.role == "assistant"]
    assert {i: x for i, x in enumerate(batch.token_rewards[0].tolist()) if x} == {ends[0]: 0.5, ends[1]: 12.0}
    assert done.reward == 12.5


def test_the_row_of_the_data_gives_each_phase_its_arguments() -> None:
    meta = {"tools": {"add": {"create": {"x": 1}, "call": {"y": 2}, "reward": {"z": 3}, "release": {"w": 4}}}}
    adder = Adder()
    hold(lambda request, turn: [call(a=1, b=1), "2"][turn], tools(add=adder), Prompt("p", PROMPT.messages, "2", meta))
    assert adder.lives == [["create", {"x": 1}, "call", {"y": 2}, "reward", {"z": 3}, "release", {"w": 4}]]


def test_a_conversation_has_the_tools_that_its_row_names() -> None:
    first, second = Adder(), Adder()
    prompt = replace(PROMPT, tools=["second"])
    both = tools(first=first, second=second)
    [done] = hold(
        lambda request, turn: [call("first", a=3, b=4), call("second", a=3, b=4), "#### 7"][turn], both, prompt
    )
    told = [message["content"] for message in done.messages if message["role"] == "tool"]
    assert told == ["error: there is no tool 'first'; tools: second", "7"]
    assert (first.lives, len(second.lives)) == ([], 1)
    [alone] = hold(lambda request, turn: call("first", a=3, b=4), both, replace(PROMPT, tools=[]))
    assert (alone.stop, alone.counts, len(alone.turns)) == (StopReason.STOP, {}, 2)


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        (call("subtract", a=1, b=2), "error: there is no tool 'subtract'; tools: add"),
        (call(a=1), "error: the arguments of add do not fit its schema: 'b' is a required property"),
        (call(a="x", b=2), "error: the arguments of add do not fit its schema: a: 'x' is not of type 'integer'"),
        (call(a=13, b=2), "error: ValueError: unlucky"),
        (call(a=99, b=2), "error: did not finish within 0.2 s"),
        ('<tool_call>{"name": "add", "arguments": {</tool_call>', "error: "),
    ],
)
def test_a_call_that_fails_is_told_to_the_policy(turn: str, told: str) -> None:
    adder = Adder()
    [done] = hold(lambda request, number: [turn, "sorry"][number], tools(add=adder))
    assert f"<|im_start|>tool\n{told}" in replies(done)
    assert done.counts == {"tool_calls": 1, "tool_errors": 1}
    assert (done.error, done.text, done.turn_rewards) == (None, "sorry", [0.0, 2.0])
    assert adder.lives[0][-2] == "release"


def test_parallel_calls_are_made_at_once_and_answered_in_order() -> None:
    adder = Adder()
    [done] = hold(
        lambda request, turn: [call(a=1, b=1) + call(a=13, b=0) + call(a=2, b=2), "done"][turn], tools(add=adder)
    )
    told = replies(done)
    assert told.index("tool\n2<") < told.index("unlucky") < told.index("tool\n4<")
    assert (adder.most, done.counts) == (2, {"tool_calls": 3, "tool_errors": 1})


def test_the_deadline_of_a_call_starts_with_its_turn() -> None:
    adder = Adder(concurrency=1)
    done = hold(lambda request, turn: [call(a=1, b=1), "done"][turn], tools(add=adder), samples=40)
    assert adder.most == 1
    assert all(t.counts == {"tool_calls": 1} for t in done)  # 40 calls of 10 ms outlast a deadline of 0.2 s, none fails


def test_a_reward_that_is_no_number_is_counted() -> None:
    meta = {"tools": {"add": {"release": {"fail": True}}}}
    [done] = hold(
        lambda request, turn: [call(a=77, b=1), "x"][turn], tools(add=Adder()), Prompt("p", PROMPT.messages, "2", meta)
    )
    assert done.counts == {"tool_calls": 1, "tool_errors": 1, "release_errors": 1}
    assert done.turn_rewards == [0.0, 2.0]


def test_what_the_policy_only_thinks_of_is_not_called() -> None:
    [done] = hold(lambda request, turn: f"<think>{call(a=1, b=1)}?</think>No need.", tools(add=Adder()))
    assert done.counts == {}
    assert len(done.turn_rewards) == 1


@pytest.mark.parametrize("thinking", ["", "<think>Hm.</think>", "Hm.</think>\n", f"<think>{call(a=2, b=2)}</think>"])
@pytest.mark.parametrize("argument", ["</think>", "a</think> and </think>"])
def test_an_argument_may_hold_the_end_of_thinking(thinking: str, argument: str) -> None:
    text = f"{thinking}{call(a=argument, b=1)} and {call(a=3, b=1)}"
    read_thinking, turn = parse_after_thinking(HermesParser(), text)
    assert read_thinking == thinking.rstrip()
    assert [c.arguments["a"] for c in turn.calls] == [argument, 3]


def test_limits_end_conversations_with_tools() -> None:
    endless = lambda request, turn: call(a=1, b=1)  # noqa: E731
    for limits, stop, turns in (
        (Limits(turns=3), StopReason.TURNS, 3),
        (Limits(turns=9, tool_calls=2), StopReason.TOOL_CALLS, 3),
        (Limits(turns=9, tokens=90), StopReason.LENGTH, 2),
        (Limits(turns=9, context=150), StopReason.CONTEXT, None),
    ):
        adder = Adder()
        [done] = hold(endless, tools(add=adder), limits=limits)
        assert done.stop is stop
        assert turns is None or len(done.turn_rewards) == turns
        assert adder.lives[0][-2] == "release"
    assert len(done.tokens) <= 150


def test_the_last_turn_within_the_limit_tells_the_engine() -> None:
    continues = list[bool]()

    def endless(request: Request, turn: int) -> str:
        continues.append(request.continues)
        return call(a=1, b=1)

    hold(endless, tools(add=Adder()), limits=Limits(turns=3))
    assert continues == [True, True, False]


def test_the_deadline_of_a_conversation_fails_it_and_releases() -> None:
    adder = Adder()
    adder.timeout = 60.0
    [done] = hold(lambda request, turn: call(a=99, b=1), tools(add=adder), seconds=0.2)
    assert done.error == "the conversation took longer than 0.2 s"
    assert adder.lives[0][-2] == "release"


def test_the_deadline_excludes_the_engines_time() -> None:
    """Three turns of 0.2 s each within 0.3 s; a tool that takes long is still ended by what is left."""
    adder = Adder()
    adder.timeout = 60.0
    engine = ScriptedEngine(lambda request, turn: [call(a=1, b=1), call(a=2, b=2), "done"][turn], delay=0.2)
    [done] = hold(engine.script, tools(add=adder), engine=engine, seconds=0.3)
    assert (done.error, done.text) == (None, "done")
    slow = ScriptedEngine(lambda request, turn: call(a=99 * turn, b=1), delay=0.2)
    [ended] = hold(slow.script, tools(add=adder), engine=slow, seconds=0.3)
    assert ended.error == "the conversation took longer than 0.3 s"


class Doubter(Interaction):
    """Doubts twice, breaks where it is told to."""

    async def start(self, prompt: Prompt, state: State) -> None:
        state["left"] = 2

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        assert messages[-1]["role"] == "assistant"
        if messages[-1]["content"] == "break":
            raise RuntimeError("no more")
        state["left"] -= 1
        return Reply([{"role": "user", "content": "Sure?"}], done=state["left"] < 0, reward=-1.0)


@pytest.mark.parametrize(("several", "seconds"), [(None, None), (Doubter, 600.0)])
def test_a_question_and_its_answer_have_no_deadline(several: Any, seconds: float | None) -> None:
    """The engine's queue would use it up, and long answers would fail more often than short ones."""
    parts = {"tools": None, "environment": None, "conversation": None, "interaction": several and several()}
    rollout, train = SimpleNamespace(engine=None, sampling_column=None), SimpleNamespace(seed=0)
    recipe = SimpleNamespace(**parts, sampled_fields={}, rollout=rollout, train=train)
    dialogue = SimpleNamespace(template=None, participants=Participants(), context=64)
    service = SimpleNamespace(recipe=recipe, dialogue=dialogue, engine=None, admission=None, agents=None)
    assert RolloutService.conversation_setup(service, Sampling(), 1, 1).seconds == seconds  # type: ignore[arg-type]


def test_a_user_answers_until_done() -> None:
    [done] = hold(lambda request, turn: f"{turn}", Participants(interaction=Doubter()), check="strict")
    assert [turn.role for turn in done.turns] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert (done.turn_rewards, done.text, done.error) == ([-1.0, -1.0, -1.0], "2", None)
    assert replies(done) == 2 * "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_the_user_replies_at_most_so_often() -> None:
    """The user grades the turn after the last reply, too: its reward counts, what it says then is not read."""
    limits = Limits(turns=6, user_turns=1)
    [done] = hold(lambda request, turn: f"{turn}", Participants(interaction=Doubter()), limits=limits)
    assert [turn.role for turn in done.turns] == ["user", "assistant", "user", "assistant"]
    assert (done.turn_rewards, done.text, done.stop, done.mask[-1]) == ([-1.0, -1.0], "1", StopReason.TURNS, True)


def test_a_user_who_breaks_fails_the_conversation() -> None:
    [done] = hold(lambda request, turn: "break", Participants(interaction=Doubter()))
    assert done.error.startswith("ParticipantError: Doubter of tests: RuntimeError: no more (")


class Countdown(Environment):
    """Begins with the seed; each action counts one down."""

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        state.update(left=2, seed=seed)
        return f"seed {seed}"

    async def step(self, action: str, state: State) -> Observation:
        state["left"] -= 1
        reward = float("inf") if action == "inf" else 1.0
        return Observation(f"{state['left']} left", reward, state["left"] == 0)


def test_the_samples_of_a_prompt_play_the_same_episode() -> None:
    done = hold(lambda request, turn: "go", Participants(environment=Countdown()), samples=3, check="strict")
    starts = {TOKENIZER.decode(t.tokens[: t.turns[0].end]) for t in done}
    assert len(starts) == 1
    assert "<|im_start|>user\n?<|im_end|>\n<|im_start|>user\nseed " in starts.pop()
    assert all(t.turn_rewards == [1.0, 1.0] and t.stop is StopReason.STOP for t in done)
    [broken] = hold(lambda request, turn: "inf", Participants(environment=Countdown()))
    assert broken.error is not None
    assert "expected a finite number" in broken.error


def checked(template: str, says: str, check: str, spell: Any = TOKENIZER, turns: int = 6) -> Trajectory:
    """Hold a conversation with a user under another chat template, in the tokens of the tokenizer `spell`."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens(["four"])
    engine = ScriptedEngine(lambda request, turn: says)
    engine.bind(SimpleNamespace(tokenizer=spell))  # type: ignore[arg-type]
    participants = Participants(interaction=Doubter())
    renders = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    setup = ConversationSetup(engine, renders, Sampling(), 1, 0, 1, 0, participants, Limits(turns=turns), check=check)

    async def finish(group: list[Trajectory]) -> None: ...

    return asyncio.run(collect(setup, [(0, PROMPT)], finish))[0]


def test_a_conversation_that_renders_differently_is_counted() -> None:
    """The template trims what is said, so that the space before `a` is lost."""
    trims = TOKENIZER.chat_template.replace("m['content']", "m['content'] | trim")
    warned, strict = (checked(trims, " a", check) for check in ("warn", "strict"))
    assert warned.counts == strict.counts == {"template_differs": 1}
    assert warned.error is None
    assert "continues with ' a<|im_end|>" in str(strict.error)
    assert "the template renders 'a<|im_end|>" in str(strict.error)
    assert checked(trims, " a", "off").counts == {}


def test_a_turn_in_other_tokens_is_no_difference() -> None:
    """The policy spells `four` byte by byte; the tokenizer has a token for it."""
    done = checked(TOKENIZER.chat_template, "It is four.", "strict")
    assert (done.counts, done.error) == ({}, None)
    assert sum(turn.role == "assistant" for turn in done.turns) == 3


def test_a_conversation_of_one_turn_is_not_compared() -> None:
    """Nothing follows the policy's turn, so nothing of it is ever rendered."""
    trims = TOKENIZER.chat_template.replace("m['content']", "m['content'] | trim")
    done = checked(trims, " a", "strict", turns=1)
    assert (done.counts, done.error, done.stop) == ({}, None, StopReason.TURNS)


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


def test_a_function_is_a_tool_that_is_killed_at_its_deadline(workers: Workers) -> None:
    patient, hasty = wait(timeout=60.0), wait(timeout=1.0)
    for tool in (patient, hasty):
        tool.bind(SimpleNamespace(work=workers.call))  # type: ignore[arg-type]
    assert patient.name == "wait"
    assert patient.parameters["properties"]["seconds"] == {"type": "number", "description": "How long."}
    turns = [call("patient", seconds=0.01), call("hasty", seconds=600), "x"]
    [done] = hold(lambda request, turn: turns[turn], tools(patient=patient, hasty=hasty), run=asyncio.run)
    assert "waited 0.01" in replies(done)
    assert "did not finish within 1 s and was killed" in replies(done)
    assert done.counts == {"tool_calls": 2, "tool_errors": 1}


def test_the_calculator() -> None:
    exact = {
        "4938268 / 2": "2469134",
        "1500000.0 + 234567": "1734567",
        "-6 / 4": "-1.5",
        "9e15 * 1": "9000000000000000",
    }
    texts = [asyncio.run(Calculator().call({"expression": x}, {})).text for x in (*exact, "2e16 / 1", "7 / 7")]
    assert texts == [*exact.values(), "2e+16", "1"]
    assert [evaluate(x) for x in ("28+14", " (3 + 4) * 12 ", "-7 // 2", "10 % 4 / 2")] == [42, 84, -4, 1.0]
    for wrong in ("2**9", "__import__('os')", "1 +", "a", "1" * 201, "True"):
        with pytest.raises(ValueError, match="expected"):
            evaluate(wrong)
    calculator = Calculator(bonus=0.25)
    [done] = hold(
        lambda request, turn: [call("calculator", expression="28+14"), "#### 42"][turn], tools(calculator=calculator)
    )
    assert "tool\n42<" in replies(done)
    assert done.turn_rewards == [0.0, 0.25]


@pytest.mark.slow
def test_hundreds_of_conversations_keep_to_themselves() -> None:
    """Sample i adds i to itself in i % 4 turns, then says what it got; nobody gets another's answer."""

    def script(request: Request, turn: int) -> str:
        number = request.key.sample
        return call(a=number, b=number + turn) if turn < number % 4 and number not in (13, 77, 99) else f"end {number}"

    adder = Adder()
    adder.timeout = 30.0
    done = hold(script, tools(add=adder), samples=300)
    for number, trajectory in enumerate(done):
        made = 0 if number in (13, 77, 99) else number % 4
        assert trajectory.text == f"end {number}"
        assert [f"tool\n{2 * number + turn}<" in replies(trajectory) for turn in range(made)] == [True] * made
        assert trajectory.counts.get("tool_calls", 0) == made
    assert len(adder.lives) == 300
    assert all(life[-2] == "release" for life in adder.lives)
