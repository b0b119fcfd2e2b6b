#!/usr/bin/env bash
# What matters most on a GPU, in five minutes and without a network, the riskiest first:
#   bash tests/gpu/first.sh [--dry-run] FOLDER
# Runs the group `first` of all.sh, whose options in the environment hold here too. FOLDER gets table.txt, the profiles
# and logs.tar.gz, which has all logs and the metrics of all runs; models and run folders are dropped. The table is
# printed last. Exit status: as all.sh.
set -uo pipefail
dry=()
[ "${1:-}" = --dry-run ] && { dry=(--dry-run); shift; }
if [ $# -ne 1 ]; then
    echo "first.sh needs a folder: bash tests/gpu/first.sh [--dry-run] FOLDER"
    exit 2
fi
mkdir -p "$1" || exit 2
to=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.." || exit 2
work=$(mktemp -d)

# keep: copy what is small to FOLDER, however the checks ended.
keep() {
    cp "$work"/{table.txt,profile-steps.log,profile-passes.log} "$to" 2>/dev/null
    { command -v nvidia-smi && nvidia-smi; } >"$work/gpu.log" 2>&1
    (cd "$work" && find . -name '*.log' -size -20M -o -name table.txt -o -name metrics.jsonl -o -name '*.yaml' |
        grep -v '^./model/' | tar -czf "$to/logs.tar.gz" -T -)
    rm -rf "$work"
}
trap keep EXIT

SECONDS_IN_ALL=${SECONDS_IN_ALL:-260} bash tests/gpu/all.sh "${dry[@]}" first "$work"
status=$?
[ -e "$work/table.txt" ] && { echo; cat "$work/table.txt"; }
exit "$status"
