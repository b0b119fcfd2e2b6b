"""The agents of quick_selfplay and quick_proposer: one policy in two roles, on the sums that it reads."""

from __future__ import annotations

import asyncio
import re

from rlkit.interfaces.agent import AgentClient, AgentTask, RoleClient

SOLUTIONS = 4
"""Solutions of a proposed sum."""
LARGEST = 99
"""The largest operand of a proposed sum; of larger proposals the last two digits count."""


async def duel(client: AgentClient, task: AgentTask) -> str:
    """Let two players do the prompt's sum, the second with the operands exchanged; who alone is right wins 1.

    The game is zero-sum: the other player gets -1, and both 0 where both are right or both are wrong.
    """
    first, second = operands(task.text)
    players = client.role("first"), client.role("second")
    questions = (f"{first} + {second} = ?", f"{second} + {first} = ?")
    answers = await asyncio.gather(*(ask(p, q) for p, q in zip(players, questions, strict=True)))
    right = [answer == first + second for answer in answers]
    players[0].reward = float(right[0] - right[1])
    players[1].reward = -players[0].reward
    return f"{answers[0]} and {answers[1]}, expected {first + second}"


async def propose(client: AgentClient, task: AgentTask) -> str:
    """Let the policy propose a number by answering the prompt, then add it to the prompt's second operand four times.

    A solution that is right earns 1. With a share p of right ones, the proposal earns 1 - |2 p - 1|: most if the
    solver is right half of the time (R-Zero, arXiv:2508.05004), and -1 if it is no number.
    """
    _, operand = operands(task.text)
    proposer = client.role("proposer")
    number = await ask(proposer, task.text)
    if number is None:
        proposer.reward = -1.0
        return "no number is proposed"
    number %= LARGEST + 1
    solvers = [client.role("solver") for _ in range(SOLUTIONS)]
    answers = await asyncio.gather(*(ask(solver, f"{number} + {operand} = ?") for solver in solvers))
    for solver, answer in zip(solvers, answers, strict=True):
        solver.reward = float(answer == number + operand)
    share = sum(answer == number + operand for answer in answers) / SOLUTIONS
    proposer.reward = 1 - abs(2 * share - 1)
    return f"{number} + {operand}: {answers}"


def operands(text: str) -> tuple[int, int]:
    """Return the two numbers of a sum such as `17 + 25 = ?`."""
    first, second = map(int, re.findall(r"\d+", text))
    return first, second


async def ask(player: RoleClient, question: str) -> int | None:
    """Return the number that the policy answers after `####`; None without one."""
    reply = await player.chat([{"role": "user", "content": question}])
    answer = re.fullmatch(r"#### (\d{1,9})", str(reply["content"]).strip())
    return None if answer is None else int(answer[1])
