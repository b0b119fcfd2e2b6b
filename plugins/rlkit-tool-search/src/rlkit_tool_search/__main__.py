"""`python -m rlkit_tool_search --corpus docs.jsonl --port 8000`: the search server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlkit.base.errors import RlkitError
from rlkit_tool_search.index import open_index
from rlkit_tool_search.server import SearchServer


def main() -> int:
    """Serve until interrupted; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rlkit_tool_search", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="one JSON object a line: id, title, text")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options = parser.parse_args()
    try:
        with SearchServer(open_index(options.corpus), options.host, options.port) as server:
            print(f"{len(server.index)} passages at http://{options.host}:{server.server_port}", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        return 130
    except RlkitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"cannot listen at {options.host}:{options.port}: {error}; choose another --port", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
