#!/usr/bin/env bash
# What only a GPU shows, within ten minutes and without a network: bash tests/gpu/all.sh [--dry-run] [FOLDER]
# FOLDER is where logs and run folders go; --dry-run lists what would be run. Every check runs whatever became of the
# others, while there is time, and a table says how each went; PYTHON chooses the environment, SECONDS_IN_ALL the time.
# Exit status: 0 all is well, 1 a check failed, 2 nothing was run.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
dry=0
[ "${1:-}" = --dry-run ] && { dry=1; shift; }
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
limit=${SECONDS_IN_ALL:-600}
gpus=1
if [ "$dry" -eq 0 ]; then
    if ! gpus=$("$python" -c 'import rlkit, torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'); then
        echo "$python has no rlkit: nothing was run; install it (pip install -e '.[test]'), or set PYTHON"
        exit 2
    elif [ "$gpus" -eq 0 ]; then
        echo "no GPU: nothing was run"
        exit 2
    fi
fi
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
table=$folder/table.txt
: >"$table"
failed=0

# line NAME HOW SECONDS WHY: add a line to the table.
line() {
    printf '%-18s %-8s %6s  %s\n' "$@" | cut -c 1-200 | tee -a "$table"
}

# check NAME SECONDS COMMAND...: note how a command went, with the last line that it printed; status 3 is "not run".
check() {
    local name=$1 most=$2 start=$SECONDS how=ok status
    shift 2
    if [ "$dry" -eq 1 ]; then
        line "$name" "not run" "" "$*"
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
        124 | 137) how=TIMEOUT failed=1 ;;
        *) how=FAILED failed=1 ;;
    esac
    line "$name" "$how" "$((SECONDS - start)) s" "$(tail -n 1 "$folder/$name.log")"
}

# fit NAME OPTIONS...: train the model for some steps, and judge the figures.
fit() {
    local name=$1
    shift
    check "$name" 120 "$python" -m tests.gpu.trial "$folder/model" "$folder/$name" "$@"
}

[ "$dry" -eq 1 ] || "$python" -m rlkit doctor >"$folder/doctor.log" 2>&1
check model 60 "$python" -m tests.gpu.trial --make "$folder/model"
check tests 240 "$python" -m pytest -m gpu -p no:cacheprovider tests/gpu --ignore=tests/gpu/test_sglang.py
fit alone
check step-trl 120 "$python" -m tests.gpu.bench step "$folder/model"
check decode 60 "$python" -m tests.bench.decode
fit fsdp2 --fabric.strategy=fsdp2
lora=(--model.lora.rank=32 --train.offload_during_rollout=true --train.checkpoint_activations=true)
fit lora-offload "${lora[@]}"
fit alone-fp32 --fabric.precision=32-true
if [ "$gpus" -gt 1 ]; then
    fit fsdp2-two --fabric.strategy=fsdp2 --fabric.devices=2
else
    line fsdp2-two "not run" "" "one GPU"
fi

beside=(--rollout.engine=SGLangEngine --rollout.engine.launch.release_memory=true --train.offload_during_rollout=true)
if [ "$dry" -eq 1 ] || "$python" -c 'import sglang' 2>"$folder/sglang.log"; then
    check sampling-sglang 180 "$python" -m tests.gpu.bench sglang "$folder/model" --prompts=32
    fit sglang "${beside[@]}"
    check tests-sglang 240 "$python" -m pytest -m gpu -p no:cacheprovider tests/gpu/test_sglang.py
    fit sglang-fp32 "${beside[@]}" --fabric.precision=32-true
    fit sglang-torchrun --torchrun "${beside[@]}"
    fit sglang-lora "${beside[@]}" "${lora[@]}" --rollout.engine.launch.adapter_only=true
    if [ "$gpus" -gt 1 ]; then
        fit sglang-tp "${beside[@]}" --rollout.engine.launch.tensor_parallel=2 --fabric.devices=2 --fabric.strategy=fsdp2
        fit sglang-group --rollout.engine=SGLangServer --rollout.engine.first_gpu=1 --rollout.engine.transport=group
    else
        line sglang-tp "not run" "" "one GPU"
        line sglang-group "not run" "" "one GPU"
    fi
else
    line sglang "not run" "" "it cannot be imported: $(tail -n 1 "$folder/sglang.log")"
fi
echo "logs: $folder"
exit "$failed"
