"""mini-swe-agent, unmodified, with a shell for a few commands: for `PythonAgent`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlkit.interfaces.agent import AgentClient, AgentTask
from tests.hubs.folders import SUBMIT, TASKS

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not looked up on the network
os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.gettempdir()

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

THREADS = ThreadPoolExecutor(64)


class RestrictedShell(LocalEnvironment):
    """Runs the commands that the tasks need, since a policy in training may write any."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        if action["command"] in {*TASKS.values(), SUBMIT}:
            return super().execute(action, cwd, timeout=timeout)
        return {"output": "not permitted\n", "returncode": 126, "exception_info": ""}


async def run(client: AgentClient, task: AgentTask) -> str:
    """Return how the agent has ended."""
    model = LitellmTextbasedModel(
        model_name=f"openai/{client.model}",
        model_kwargs={"api_base": f"{client.url}/v1", "api_key": client.key},
        action_regex=r"^\$ (.*)",
        observation_template="exit status {{ output.returncode }}\n{{ output.output }}",
        cost_tracking="ignore_errors",
    )
    prompts = {"system_template": "Use the shell.", "instance_template": "{{ task }}"}
    agent = DefaultAgent(model, RestrictedShell(cwd=str(task.folder)), **prompts, step_limit=3)
    ended = await asyncio.get_running_loop().run_in_executor(THREADS, agent.run, task.text)
    return str(ended["exit_status"])
