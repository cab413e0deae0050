#!/usr/bin/env bash
# What only a Trainium machine can tell, on one trn1.32xlarge in about an hour: run it there, in the environment in which
# lt-trainer-neuron is installed, and keep the folder that it leaves (acceptance-trn1/: one log per check, summary.txt).
#
#   tools/trn1_acceptance.sh [FOLDER]
#
# Checks, each told as ok, FAILED or skipped: the installation, the devices, the compiler on one small model, precompile
# and its key, training at TP 2, TP 8 and with replicated heads at TP 32, two and four pipeline stages, the three
# precisions, flash attention, stop and resume bit for bit, verifying and exporting a checkpoint, speed of Llama 2 7B.
# A check that fails does not end the others; the exit code is the number of those that failed.
set -uo pipefail

OUT=${1:-acceptance-trn1}
CORES=${CORES:-32}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
cd "$OUT" || exit 64
: > summary.txt
export NEURON_COMPILE_CACHE_URL=$OUT/cache
FAILURES=0

told() { printf '%-9s %s\n' "$1" "$2" | tee -a summary.txt; }

check() { # NAME COMMAND...: run a command into NAME.log and tell how it went
    local name=$1
    shift
    if "$@" > "$name.log" 2>&1; then
        told ok "$name"
    else
        told FAILED "$name (exit $?, $OUT/$name.log)"
        FAILURES=$((FAILURES + 1))
        return 1
    fi
}

recipe() { # NAME LINES...: a small run on random rows, 30 steps
    local name=$1
    shift
    cat > "$name.toml" << TOML
[run]
dir = "$OUT/runs/$name"
engine = "neuron"
[model]
hidden_size = 1024
intermediate_size = 2816
n_heads = 32
n_kv_heads = 32
n_layers = 4
vocab_size = 32000
[data]
synthetic = true
seq_len = 2048
document_mask = false
[batch]
global_batch_size = 64
micro_batch_size = 1
[schedule]
max_steps = 30
warmup_steps = 5
[metrics]
log_interval = 1
[checkpoint]
interval = 20
TOML
    printf '%s\n' "$@" >> "$name.toml"
}

# shellcheck disable=SC2329  # called by check
train() { lt-train torchrun "$1.toml" --nproc-per-node "$CORES" "${@:2}"; }

# shellcheck disable=SC2329
falls() { # NAME: every loss is finite, and the last stays near the logarithm of the vocabulary (random rows: 10.37)
    python - "$OUT/runs/$1/metrics.jsonl" << 'PY'
import json, math, sys
losses = [json.loads(line)["loss"] for line in open(sys.argv[1]) if '"loss"' in line]
print(losses)
assert len(losses) >= 30 and all(math.isfinite(loss) for loss in losses), "losses are missing or not finite"
assert abs(losses[-1] - math.log(32000)) < 0.5, "the loss went away"
PY
}

small() { # NAME LINES...: make a recipe, train it, look at its losses
    recipe "$@"
    check "train-$1" train "$1" && check "losses-$1" falls "$1"
}

# 1. What is installed and what is there.
check installed python -c '
from lt_trainer_neuron.sdk import require_installed
require_installed()'
check devices neuron-ls
check python-packages python -m pip list

# 2. Precompile with the options of the run, and train without compiling anything more.
recipe tp8 '[parallel]' 'tp = 8' 'sequence_parallel = true' '[engine.neuron]' 'compile_key = "error"'
check environment lt-train env tp8.toml
# shellcheck disable=SC2329
refuses() { # NAME: a run without its graphs, where the recipe says refuse, ends with 64
    train "$1"
    test $? -eq 64
}
check refuses-without-key refuses tp8
check precompile lt-train precompile tp8.toml
count() { find "$OUT/cache" -name model.neff | wc -l; }
BEFORE=$(count)
check train-tp8 train tp8 && check losses-tp8 falls tp8
check nothing-compiled-after-precompile test "$(count)" -eq "$BEFORE"
check cache-has-no-failures lt-train neuron-cache list --failed

# 3. Layouts and precisions.
small tp2 '[parallel]' 'tp = 2'
small tp8-fp32-master '[parallel]' 'tp = 8' '[engine.neuron]' 'precision = "fp32_master_weights"'
small tp8-downcast '[parallel]' 'tp = 8' '[engine.neuron]' 'precision = "downcast"'
small tp8-pp2 '[parallel]' 'tp = 8' 'pp = 2'
recipe tp8-pp4 '[parallel]' 'tp = 8' 'pp = 4' 'sequence_parallel = true'
check precompile-stages lt-train precompile tp8-pp4.toml
BEFORE=$(count)
check train-tp8-pp4 train tp8-pp4 && check losses-tp8-pp4 falls tp8-pp4
check nothing-compiled-after-precompile-stages test "$(count)" -eq "$BEFORE"
small tp8-no-zero1 '[parallel]' 'tp = 8' '[engine.neuron]' 'zero1 = false'
recipe tp32-gqa '[parallel]' 'tp = 32' 'sequence_parallel = true' '[engine.neuron]' 'qkv_linear = true' 'kv_size_multiplier = 4' 'fuse_qkv = true'
sed -i 's/^n_kv_heads = 32/n_kv_heads = 8/' tp32-gqa.toml
check train-tp32-gqa train tp32-gqa && check losses-tp32-gqa falls tp32-gqa
small tp8-flash '[parallel]' 'tp = 8' '[engine.neuron]' 'flash_attention = true'

# 4. Two precisions and two layouts see the same losses, as far as bf16 goes.
check losses-agree python - << PY
import json
def losses(name):
    return [json.loads(line)["loss"] for line in open(f"$OUT/runs/{name}/metrics.jsonl") if '"loss"' in line]
first = losses("tp8-fp32-master")
for name in ("tp8", "tp2", "tp8-downcast", "tp8-pp2", "tp8-pp4", "tp8-flash"):
    worst = max(abs(a - b) for a, b in zip(first, losses(name)))
    print(name, worst)
    # With bf16_sr, the default, a loss has the 8 bits of bf16: near 10 that are steps of 1/16.
    assert worst < (0.05 if name == "tp8-downcast" else 0.2), name
PY

# 5. Stop after step 20, which saves, and resume: every loss is that of tp8, which nothing has stopped, bit for bit.
recipe resumed '[parallel]' 'tp = 8' 'sequence_parallel = true'
# shellcheck disable=SC2329
stop() { # the ranks end with 75, which torchrun turns into 1
    python -m torch.distributed.run --standalone --nproc-per-node "$CORES" -m lt_trainer run resumed.toml \
        --stop-after-step 20
    test -d "$OUT/runs/resumed/checkpoints"
}
check stop stop && check resume train resumed && check resume-is-exact python - << PY
import json
def losses(name):
    rows = [json.loads(line) for line in open(f"$OUT/runs/{name}/metrics.jsonl")]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
print(losses("resumed"))
assert losses("resumed") == losses("tp8")
PY

# 6. A checkpoint for others: every byte of it, and a Hugging Face folder with the same tensors.
NEWEST=$(find runs/tp8/checkpoints -mindepth 1 -maxdepth 1 -type d | sort | tail -n 1)
check verify lt-ckpt verify "${NEWEST:-missing}"
check export lt-ckpt export "${NEWEST:-missing}" --out exported
check export-is-equal lt-ckpt verify exported --against "${NEWEST:-missing}"

# 7. Llama 2 7B as it is: speed and memory beside the plan. About 20 minutes with compiling.
cat > llama2-7b.toml << TOML
[run]
dir = "$OUT/runs/llama2-7b"
engine = "neuron"
[model]
preset = "llama2-7b"
vocab_size = 32000
[data]
synthetic = true
seq_len = 4096
document_mask = false
[batch]
global_batch_size = 256
micro_batch_size = 1
[schedule]
max_steps = 10
warmup_steps = 2
[parallel]
tp = 8
sequence_parallel = true
[metrics]
log_interval = 1
[checkpoint]
interval = 0
TOML
check plan-7b lt-train plan llama2-7b.toml --devices "$CORES" --device trn1
check precompile-7b lt-train precompile llama2-7b.toml
check train-7b train llama2-7b
check speed-7b tail -n 3 runs/llama2-7b/metrics.jsonl && tail -n 1 runs/llama2-7b/metrics.jsonl | tee -a summary.txt

told "$([ "$FAILURES" -eq 0 ] && echo ok || echo FAILED)" "$FAILURES checks failed; logs in $OUT"
exit "$FAILURES"
