#!/usr/bin/env bash
# What only a GPU shows, in about ten minutes: bash tests/gpu/all.sh [FOLDER], where logs and run folders go.
# Every check runs whatever became of the others, and a table says how each went; PYTHON chooses the environment.
# Exit status: 0 all is well, 1 a check failed, 2 nothing was run.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if ! gpus=$("$python" -c 'import rlkit, torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'); then
    echo "$python has no rlkit: nothing was run; install it (pip install -e '.[test]'), or set PYTHON"
    exit 2
elif [ "$gpus" -eq 0 ]; then
    echo "no GPU: nothing was run"
    exit 2
fi
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
table=$folder/table.txt
: >"$table"
failed=0

# check NAME COMMAND...: note how a command went, with the last line that it printed.
check() {
    local name=$1 start=$SECONDS how=ok
    shift
    timeout 600 "$@" >"$folder/$name.log" 2>&1 || { how=FAILED; failed=1; }
    printf '%-22s %-8s %4d s  %s\n' "$name" "$how" $((SECONDS - start)) "$(tail -n 1 "$folder/$name.log")" |
        cut -c 1-200 | tee -a "$table"
}

# skip NAME WHY: note what was not run.
skip() {
    printf '%-22s %-8s %6s  %s\n' "$1" "not run" "" "$2" | tee -a "$table"
}

# fit NAME OPTIONS...: train the model for some steps, and judge the figures.
fit() {
    local name=$1
    shift
    check "$name" "$python" -m tests.gpu.trial "$folder/model" "$folder/$name" "$@"
}

"$python" -m rlkit doctor >"$folder/doctor.log" 2>&1
check tests "$python" -m pytest -m gpu -p no:cacheprovider tests/gpu
check model "$python" -m tests.gpu.trial --make "$folder/model"
check decode "$python" -m tests.bench.decode
fit alone
fit alone-fp32 --fabric.precision=32-true
fit fsdp2 --fabric.strategy=fsdp2
lora=(--model.lora.rank=32 --train.offload_during_rollout=true --train.checkpoint_activations=true)
fit lora-offload "${lora[@]}"
if [ "$gpus" -gt 1 ]; then
    fit fsdp2-two --fabric.strategy=fsdp2 --fabric.devices=2
else
    skip fsdp2-two "one GPU"
fi

beside=(--rollout.engine=SGLangEngine --rollout.engine.launch.release_memory=true --train.offload_during_rollout=true)
if "$python" -c 'import sglang' 2>"$folder/sglang.log"; then
    fit sglang "${beside[@]}"
    fit sglang-fp32 "${beside[@]}" --fabric.precision=32-true
    fit sglang-torchrun --torchrun "${beside[@]}"
    fit sglang-lora "${beside[@]}" "${lora[@]}" --rollout.engine.launch.adapter_only=true
    if [ "$gpus" -gt 1 ]; then
        fit sglang-tp "${beside[@]}" --rollout.engine.launch.tensor_parallel=2 --fabric.devices=2 --fabric.strategy=fsdp2
        fit sglang-group --rollout.engine=SGLangServer --rollout.engine.first_gpu=1 --rollout.engine.transport=group
    else
        skip sglang-tp "one GPU"
        skip sglang-group "one GPU"
    fi
else
    skip sglang "it cannot be imported: $(tail -n 1 "$folder/sglang.log")"
fi
echo "logs: $folder"
exit "$failed"
