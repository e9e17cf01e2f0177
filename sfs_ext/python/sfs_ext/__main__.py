"""``python -m sfs_ext WORKLOAD.json [-o TRACE.json]``: what would vLLM do with this workload?"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sfs_ext import replay as replay_module


def read_workloads(path: Path) -> Iterator[dict[str, Any]]:
    """One JSON object, or JSON lines; gzipped or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    try:
        yield json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sfs_ext", description=replay_module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("workload", type=Path, help="JSON object or JSON lines, gzipped or not")
    parser.add_argument("-o", "--output", type=Path, help="where to write; default: stdout")
    arguments = parser.parse_args()
    try:
        lines = [
            json.dumps(replay_module.replay_workload(workload))
            for workload in read_workloads(arguments.workload)
        ]
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        print(f"{arguments.workload}: {reason}", file=sys.stderr)
        return 1
    text = "".join(line + "\n" for line in lines)
    if arguments.output:
        arguments.output.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
