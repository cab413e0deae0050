python3 runs/tiny/launch/agent node runs/tiny/launch/stages/download/spec.json --attempt 0 --node-rank 0 --master-addr 127.0.0.1 --master-port PORT --control
python3 runs/tiny/launch/agent node runs/tiny/launch/stages/tokenizer/spec.json --attempt 0 --node-rank 0 --master-addr 127.0.0.1 --master-port PORT --control
python3 runs/tiny/launch/agent node runs/tiny/launch/stages/prepare/spec.json --attempt 0 --node-rank 0 --master-addr 127.0.0.1 --master-port PORT --control --index 0
python3 runs/tiny/launch/agent node runs/tiny/launch/stages/prepare/spec.json --attempt 0 --node-rank 0 --master-addr 127.0.0.1 --master-port PORT --control --index 1
python3 runs/tiny/launch/agent node runs/tiny/launch/stages/merge/spec.json --attempt 0 --node-rank 0 --master-addr 127.0.0.1 --master-port PORT --control
python3 runs/tiny/launch/agent node runs/tiny/launch/stages/train/spec.json --attempt 0 --node-rank 0 --master-addr 127.0.0.1 --master-port PORT --control
python3 runs/tiny/launch/agent node runs/tiny/launch/stages/export/spec.json --attempt 0 --node-rank 0 --master-addr 127.0.0.1 --master-port PORT --control
