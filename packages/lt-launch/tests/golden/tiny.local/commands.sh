python3 -c 'import pathlib, shutil, sysconfig; shutil.copytree(pathlib.Path(sysconfig.get_path('"'"'stdlib'"'"'), '"'"'email'"'"'), '"'"'tiny/text'"'"')'
lt data train-tokenizer tiny/text --vocab-size 512 --out tiny/tokenizer
lt data prepare tiny/text --tokenizer tiny/tokenizer --out tiny/store --unit-bytes 200000
lt data pack tiny/store --seq-len 128 --mode bfd
python3 -P -m lt_trainer torchrun runs/tiny/launch/stages/train/recipe.toml --nproc-per-node 2 -- --nnodes=1 --node-rank=0 --rdzv-backend=static --master-addr=127.0.0.1 --master-port=PORT
lt ckpt export tiny/run --out tiny/model
