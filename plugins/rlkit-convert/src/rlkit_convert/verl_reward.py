"""verl's options of the reward: functions, reward models, programs, and DAPO's penalty of long completions."""

from __future__ import annotations

from rlkit_convert.conversion import Conversion
from rlkit_convert.pools import BY_HAND, IN_TRAINER, OwnGpus, place
from rlkit_convert.values import boolean, integer, number, text

MATH = ("gsm8k", "math", "aime", "dapo", "numina", "geo3k", "geometry3k", "deepscaler")
"""Parts of the names of files whose rows verl scores by their final answer."""
MANAGERS = ("naive", "batch", "dapo", "prime")


def reward(conversion: Conversion) -> None:
    """Set the reward; user code is named and not run."""
    path = "custom_reward_function.path"
    if conversion.is_unknown(path, "reward_model.enable"):
        conversion.leave_out("reward")
        return
    if conversion.has(path):
        name = conversion.get("custom_reward_function.name", text, "compute_score")
        managers = [key for key in conversion.options.values if key.endswith("reward_manager")]
        batch = any(conversion.get(key, text, "") == "batch" for key in managers)
        cls = "BatchReward" if batch else "PythonReward"
        conversion.set("reward", cls, path, *(managers if batch else ()))
        function = f"{conversion.get(path, text, '')}:{name}"
        sources = (path, "custom_reward_function.name")
        conversion.set("reward.function", function, *sources)
        _overlong(conversion, {"score": {"class_path": cls, "init_args": {"function": function}}}, *sources)
        if conversion.get("reward_model.enable", boolean, False):
            conversion.ask("reward_model.enable", "reward Composite, of ModelReward and the function")
    elif conversion.get("reward_model.enable", boolean, False):
        conversion.set("reward", "ModelReward", "reward_model.enable")
        conversion.carry("reward.path", "reward_model.model.path", text, "")
        _own_gpus(conversion)
    else:
        why = "verl chooses by data_source; this one is for GSM8K, MATH and similar data"
        conversion.recipe["reward"] = ("MathReward", why)
        _overlong(conversion, {"math": _programs(conversion)})
        files = "data.train_files"
        if conversion.has(files) and not any(name in str(conversion.raw(files)).lower() for name in MATH):
            conversion.ask(files, f"{why}; for others see rlkit docs from-verl, or name a function of your own")
    for key in conversion.options.values:
        if not conversion.carries(key):
            _list_reward(conversion, key)


def _own_gpus(conversion: Conversion) -> None:
    """Put the reward model into a pool if it has GPUs of its own."""
    switch, gpus, nodes = (f"reward_model.{name}" for name in ("enable_resource_pool", "n_gpus_per_node", "nnodes"))
    if not conversion.get(switch, boolean, False):
        for key in filter(conversion.has, (switch, gpus, nodes)):
            conversion.note(key, IN_TRAINER)
    elif conversion.get("actor_rollout_ref.actor.ulysses_sequence_parallel_size", integer, 1) > 1:
        conversion.ask(switch, f"{BY_HAND}, for which fabric.strategy has sequence_parallel: 1")
    else:
        place(conversion, OwnGpus("reward", "reward", gpus, nodes, (switch,)))
        if not conversion.has(gpus):
            conversion.ask(switch, f"{BY_HAND}, with the number of GPUs")


def _list_reward(conversion: Conversion, key: str) -> None:
    """Record what to do about an option of the reward that is not carried over."""
    if "overlong_buffer" in key or key.endswith("max_resp_len"):
        if key.endswith(".log"):
            conversion.note(key, "nothing to do: each part of a Composite is logged")
        elif _overlong_switch(conversion):
            conversion.ask(key, "options of Overlong, in a Composite with the reward; recipe dapo_gsm8k has one")
    elif key.startswith("custom_reward_function.reward_kwargs"):
        conversion.ask(key, "give the function's argument this default")
    elif key == "reward_model.reward_manager":
        manager = conversion.get(key, text, "")
        if manager not in MANAGERS:
            conversion.ask(key, "BatchReward scores the samples of a prompt together; others are written as a plugin")
        elif manager == "prime" and not conversion.has("custom_reward_function.path"):
            code = "CodeReward grades programs, by Router where there are other rows too: rlkit docs from-verl"
            conversion.ask(key, code)
        else:
            conversion.note(key, "nothing to do: rewards run in worker processes with a deadline each")
    elif key.startswith("reward_model.") and conversion.get("reward_model.enable", boolean, False):
        conversion.note(key, "see rlkit plugins show ModelReward for its options")
    elif key.startswith("reward_model.reward_kwargs"):
        conversion.ask(key, "give the function's argument this default")


def _programs(conversion: Conversion) -> object:
    """Return the reward by `data_source` where a Sandbox Fusion service runs programs, and set it; else MathReward."""
    urls = [key for key in conversion.options.values if key.endswith("sandbox_fusion.url")]
    if not urls or not conversion.get(urls[0], text, ""):
        return "MathReward"
    sources = [urls[0]]
    options: dict[str, object] = {"allow_code": True, "url": conversion.get(urls[0], text, ""), "partial": True}
    options |= {"seconds": 10.0, "compile_seconds": 10.0}
    for theirs, ours in (("max_concurrent", "concurrency"), ("memory_limit_mb", "memory_mb")):
        key = f"{urls[0].removesuffix('url')}{theirs}"
        if conversion.has(key):
            options[ours] = conversion.get(key, integer, 64)
            sources.append(key)
    code = {"class_path": "CodeReward", "init_args": options}
    parts = {**dict.fromkeys(("apps", "codecontests", "codeforces", "taco"), code), "*": "MathReward"}
    del conversion.recipe["reward"]
    conversion.set("reward", "Router", urls[0])
    conversion.set("reward.rewards", parts, *sources)
    return {"class_path": "Router", "init_args": {"rewards": parts}}


def _overlong(conversion: Conversion, scorer: dict[str, object], *sources: str) -> None:
    """Add the penalty of DAPO's reward manager, under any name that a version of verl has for it."""
    switch = _overlong_switch(conversion)
    if not switch:
        return
    prefix = switch.removesuffix("enable")
    limits = [key for key in conversion.options.values if key.endswith(".max_resp_len")]
    budget_key = limits[0] if limits else "data.max_response_length"
    budget = conversion.get(budget_key, integer, 512)
    factor = conversion.get(f"{prefix}penalty_factor", number, 1.0)
    buffer = conversion.get(f"{prefix}len", integer, 0)
    if conversion.is_unknown(budget_key, f"{prefix}penalty_factor", f"{prefix}len"):
        return
    if not 0 < buffer <= budget or factor < 0:
        return
    options = {"max_tokens": budget, "buffer": buffer, "factor": factor}
    parts = {**scorer, "length": {"class_path": "Overlong", "init_args": options}}
    for key in [key for key in conversion.recipe if key.partition(".")[0] == "reward"]:
        del conversion.recipe[key]
    conversion.set("reward", "Composite", switch)
    conversion.set("reward.rewards", parts, *sources, f"{prefix}len", f"{prefix}penalty_factor", switch, *limits)


def _overlong_switch(conversion: Conversion) -> str:
    """Return the option that switches the penalty of long completions on; empty if none does."""
    switches = [key for key in conversion.options.values if key.endswith(".enable") and "overlong_buffer" in key]
    return switches[0] if switches and conversion.get(switches[0], boolean, False) else ""
