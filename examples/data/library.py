"""lt-data in a program of one's own: texts in memory, a tokenizer, a pack, batches, and where to go on."""

import json
from itertools import islice

import lt_data
from lt_data.torch import StreamLoader

texts = [f"the quick brown fox jumps over {i} lazy dogs. " * (i % 9 + 1) for i in range(300)]
tokenizer = lt_data.Tokenizer.train(texts, vocab_size=300)  # or a folder, or a model of the hub
lt_data.prepare(({"text": text} for text in texts), tokenizer=tokenizer, out="foxes")  # or ["corpus.jsonl"]
store = lt_data.TokenStore("foxes")
rows = lt_data.RowReader(store, lt_data.pack(store, seq_len=64))
loader = StreamLoader(rows, batch_size=8, seed=1)  # num_workers=2: the same batches, from two processes
for batch in islice(loader, 3):
    print(batch["input_ids"].shape, int(batch["valid_tokens"]))  # labels are shifted already
saved = json.dumps(loader.state_dict())
loader.load_state_dict(json.loads(saved))  # also with another number of ranks
