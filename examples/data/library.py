"""lt-data in a program of one's own: texts in memory, a tokenizer, a pack, batches, and where to go on."""

import json
from itertools import islice

import lt_data

texts = [f"the quick brown fox jumps over {i} lazy dogs. " * (i % 9 + 1) for i in range(300)]
tokenizer = lt_data.Tokenizer.train(texts, vocab_size=300)  # or a folder, or a model of the hub
lt_data.prepare(({"text": text} for text in texts), tokenizer=tokenizer, out="foxes")  # or ["corpus.jsonl"]
store = lt_data.TokenStore("foxes")
rows = lt_data.RowReader(store, lt_data.pack(store, seq_len=64))
stream = lt_data.Stream(rows, global_batch_size=8, seed=1)
for batch in islice(stream, 3):
    print(batch.rows.input_ids.shape, batch.valid_tokens)  # batch.rows.labels are shifted already
saved = json.dumps(stream.state.to_dict())
stream.restore(json.loads(saved))  # also with another number of ranks
