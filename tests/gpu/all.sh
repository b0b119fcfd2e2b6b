#!/usr/bin/env bash
# What only a GPU shows, without a network, in commands of under nine minutes each, what may fail first:
#   bash tests/gpu/all.sh [--dry-run] [GROUP] [FOLDER]
# GROUP is core (runs of `fit`), tests, speed, sglang, sglang-more or sglang-speed; all of them without it, nine minutes
# for each. `first`, which first.sh runs, is the riskiest of them and profiles, side by side where no time is measured.
# FOLDER is where logs, run folders and table.txt go; commands that share one share the model too.
# PACK is the folder of an archive of plugins/rlkit-servers/pack/pack.py, for a machine without rlkit or SGLang:
#   python plugins/rlkit-servers/pack/pack.py pack.tgz --sglang 0.5.17 pytest pytest-timeout hypothesis
# --dry-run lists what would be run. Every check runs whatever became of the others, while there is time. PYTHON chooses
# the environment, SECONDS_IN_ALL the time of a group. Exit status: 0 all is well, 1 a check failed, 2 nothing was run.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
dry=0
[ "${1:-}" = --dry-run ] && { dry=1; shift; }
groups="core tests speed sglang sglang-more sglang-speed"
case " $groups first " in *" ${1:-} "*) groups=$1; shift ;; esac
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
limit=${SECONDS_IN_ALL:-540}

[ -n "${PACK:-}" ] && export PYTHONPATH="$PACK${PYTHONPATH:+:$PYTHONPATH}"

# installed: whether rlkit is there for its command too, and not only as a folder beside this script.
installed() {
    "$python" -c 'from importlib.metadata import version; version("rlkit-fabric"); import rlkit, torch' 2>/dev/null
}

gpus=1
if [ "$dry" -eq 0 ]; then
    if ! installed; then
        echo "$python has no rlkit: nothing was run; install it (pip install -e '.[test]'), or set PYTHON, or set PACK" \
            "to the folder of an archive of plugins/rlkit-servers/pack/pack.py"
        exit 2
    fi
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
    if [ "${gpus:-0}" -eq 0 ]; then
        echo "no GPU: nothing was run"
        exit 2
    fi
fi
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
table=$folder/table.txt
: >"$table"

# line NAME HOW SECONDS WHY: add a line to the table.
line() {
    printf '%-18s %-8s %6s  %s\n' "$@" | cut -c 1-200 | tee -a "$table"
}

# check NAME SECONDS COMMAND...: note how a command went, with the last line that it printed; status 3 is "not run".
check() {
    local name=$1 most=$2 start=$SECONDS how=ok status
    shift 2
    if [ "$dry" -eq 1 ]; then
        line "$name" "not run" "$most s" "$*"
        return
    fi
    local left=$((limit - SECONDS))
    if [ "$left" -lt 20 ]; then
        line "$name" "not run" "" "$limit s have passed"
        return
    fi
    timeout --kill-after=10 "$((left < most ? left : most))" "$@" >"$folder/$name.log" 2>&1
    status=$?
    case $status in
        0) ;;
        3) how="not run" ;;
        124 | 137) how=TIMEOUT ;;
        *) how=FAILED ;;
    esac
    line "$name" "$how" "$((SECONDS - start)) s" "$(tail -n 1 "$folder/$name.log")"
}

# model: make the model of `fit` and of benches, unless there is one.
model() {
    if [ "$dry" -eq 1 ] || [ ! -e "$folder/model/tokenizer.json" ]; then
        check model 60 "$python" -m tests.gpu.trial --make "$folder/model"
    fi
}

# fit NAME OPTIONS...: train the model for some steps, and judge the metrics.
fit() {
    local name=$1
    shift
    rm -rf "${folder:?}/$name"
    check "$name" 115 "$python" -m tests.gpu.trial "$folder/model" "$folder/$name" "$@"
}

# tests NAME SECONDS: run a file of tests; the log has a line for each test, which a timeout leaves there.
tests() {
    check "$1" "$2" "$python" -m pytest -vv -m gpu -p no:cacheprovider "tests/gpu/${1/tests-/test_}.py"
}

# on_two NAME COMMAND...: run a command where there are two GPUs.
on_two() {
    if [ "$gpus" -gt 1 ]; then
        "${@:2}"
    else
        line "$1" "not run" "" "one GPU"
    fi
}

doctor() {
    "$python" -m rlkit doctor >"$folder/doctor.log" 2>&1
}

# as the recipe for 7B
lora=(--model.lora.rank=32 --model.lora.alpha=32 --model.lora.targets=all-linear --model.dtype=bfloat16
    --kl_loss.coef=0.001 --train.checkpoint_activations=true --train.offload_during_rollout=true)
beside=(--rollout.engine=SGLangEngine --rollout.engine.launch.release_memory=true --train.offload_during_rollout=true)

core() {
    model
    fit alone
    fit lora-offload "${lora[@]}"
    fit fsdp2 --fabric.strategy=fsdp2
    fit alone-fp32 --fabric.precision=32-true
    on_two fsdp2-two fit fsdp2-two --fabric.strategy=fsdp2 --fabric.devices=2
}

tests_of_kernels() {
    tests tests-kernels 180
    tests tests-memory 120
    tests tests-gpu 240
}

speed() {
    model
    check decode 120 "$python" -m tests.bench.decode
    check step-trl 300 "$python" -m tests.gpu.bench step "$folder/model"
}

first() {
    export TORCH_LOGS=${TORCH_LOGS:-recompiles}
    [ "$dry" -eq 1 ] || doctor &
    tests tests-kernels 130 &
    tests tests-memory 100 &
    model
    fit alone
    fit lora-offload "${lora[@]}" &
    fit fsdp2 --fabric.strategy=fsdp2 &
    wait
    check profile-steps 100 "$python" -m tests.gpu.profile steps "$folder/model"
    check profile-passes 75 "$python" -m tests.gpu.profile passes "$folder/model"
    check step-trl 100 "$python" -m tests.gpu.bench step "$folder/model" --steps=3 --side=trl
}

# with_sglang COMMANDS...: run commands where SGLang can be imported.
with_sglang() {
    if [ "$dry" -eq 1 ] || "$python" -c 'import sglang' 2>"$folder/sglang.log"; then
        "$@"
    else
        line "$group" "not run" "" "it cannot be imported: $(tail -n 1 "$folder/sglang.log")"
    fi
}

sglang() {
    model
    check sglang-steps 300 "$python" -m tests.gpu.beside "$folder/model"
    fit sglang-lora "${beside[@]}" "${lora[@]}" --rollout.engine.launch.adapter_only=true
}

sglang_more() {
    model
    tests tests-sglang 240
    fit sglang-fp32 "${beside[@]}" --fabric.precision=32-true
    fit sglang-torchrun --torchrun "${beside[@]}"
    on_two sglang-tp fit sglang-tp "${beside[@]}" --rollout.engine.launch.tensor_parallel=2 --fabric.devices=2 \
        --fabric.strategy=fsdp2
    on_two sglang-group fit sglang-group --rollout.engine=SGLangServer --rollout.engine.first_gpu=1 \
        --rollout.engine.transport=group
}

sglang_speed() {
    model
    check sampling-sglang 180 "$python" -m tests.gpu.bench sglang "$folder/model" --prompts=32
}

[ "$dry" -eq 1 ] || [ "$groups" = first ] || doctor
for group in $groups; do
    SECONDS=0
    case $group in
        first) first ;;
        core) core ;;
        tests) tests_of_kernels ;;
        speed) speed ;;
        sglang) with_sglang sglang ;;
        sglang-more) with_sglang sglang_more ;;
        sglang-speed) with_sglang sglang_speed ;;
    esac
done
echo "logs: $folder"
grep -qE '^[^ ]+ +(FAILED|TIMEOUT) ' "$table" && exit 1
exit 0
