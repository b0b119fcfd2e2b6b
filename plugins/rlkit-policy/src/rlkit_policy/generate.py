"""`rlkit generate`: hold a conversation with a recipe's policy for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rich.console import Console
from rich.text import Text

from rlkit.api.policy import fabric_for, sample, sampling_service
from rlkit.api.prompts import load_data
from rlkit.base.errors import RecipeError
from rlkit.base.text import visible
from rlkit.commands import ALLOW_CODE, parse
from rlkit.types import Prompt, Trajectory
from rlkit_policy.checkpoint import CHECKPOINT, with_checkpoint

PROMPT = (
    "--prompt",
    {
        "action": "append",
        "help": "The user's message, behind the system message of the task's first prompt; several are answered in "
        "turn. Default: that prompt, a validation one if any.",
    },
)
GREEDY = ("--greedy", {"action": "store_true", "help": "Take the likeliest token each time, as validation does."})


def run(argv: Sequence[str]) -> int:
    """Generate and print; return the exit status."""
    parsed = parse("generate", with_checkpoint(argv), [PROMPT, GREEDY, CHECKPOINT, ALLOW_CODE])
    if parsed.recipe.model.scores:
        raise RecipeError(
            "model.head is 'score': a reward model, which generates nothing; rlkit validate shows how it orders answers"
        )
    rollout = parsed.recipe.rollout
    if parsed.options.greedy:
        rollout.sampling = rollout.sampling.most_likely()
    data = load_data(parsed.recipe)
    examples = data.examples(1)
    system = list(takewhile(lambda message: message["role"] in ("system", "developer"), examples[0].messages))
    texts = parsed.options.prompt or ()
    prompts = [Prompt("prompt", [*system, {"role": "user", "content": text}]) for text in texts] or examples
    longest = max(data.lengths.measure(prompts))
    if longest >= data.dialogue.context:
        raise RecipeError(
            f"--prompt has {longest} tokens, expected fewer than the model's context of {data.dialogue.context}"
        )
    fabric = fabric_for(parsed.recipe)
    fabric.launch()
    with sampling_service(parsed.recipe, data, fabric) as service:
        trajectories = sample(service, list(enumerate(prompts)))
    if fabric.is_global_zero:
        console = Console(highlight=False, soft_wrap=True)
        for trajectory in trajectories:
            console.print(paint(trajectory, data.dialogue.tokenizer))
    return 0


def paint(trajectory: Trajectory, tokenizer: object) -> Text:
    """Show the conversation: given tokens dim, sampled ones from green (likely) to red (unlikely)."""
    text = Text()
    for token, sampled, logp in zip(trajectory.tokens, trajectory.mask, trajectory.logps, strict=True):
        style = "dim" if not sampled else "green" if logp > -0.1 else "yellow" if logp > -1.5 else "red"
        text.append(visible(tokenizer.decode([token])), style)  # type: ignore[attr-defined]
    return text
