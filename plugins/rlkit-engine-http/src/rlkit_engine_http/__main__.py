"""`python -m rlkit_engine_http MODEL --port …`: a server for one model, started by HttpEngine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from aiohttp import web
from rlkit_engine_torch.engine import TorchEngine

from rlkit_engine_http.engine import TOKEN
from rlkit_engine_http.server import SamplingServer, ServerRuntime, application


def main() -> int:
    """Serve until killed; return the exit status."""
    from transformers import AutoConfig, AutoModelForCausalLM

    parser = argparse.ArgumentParser(prog="python -m rlkit_engine_http", description=__doc__)
    parser.add_argument("model", type=Path, help="the folder with the model's config.json; weights come later")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens in a conversation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--max-kv-tokens", type=int, default=262144)
    options = parser.parse_args()
    secret = os.environ.get(TOKEN)
    if not secret:
        print(f"{TOKEN} is not set: the secret that callers must send", file=sys.stderr)
        return 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=dtype).to(device).eval()
    engine = TorchEngine(options.max_rows, options.max_kv_tokens)
    engine.bind(ServerRuntime(policy, options.context, device, options.model))  # type: ignore[arg-type]
    app = application(SamplingServer(engine, policy), secret)
    web.run_app(app, host=options.host, port=options.port, print=None, handler_cancellation=True, access_log=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
