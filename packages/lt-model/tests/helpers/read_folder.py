"""Program that writes transformers' logits of each folder of a model, given as arguments after a file of token ids."""

import sys

import torch
import transformers

print(transformers.__version__, transformers.__file__)  # noqa: T201
ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        torch.save(model.eval()(input_ids=ids, use_cache=False).logits, f"{folder}/logits.pt")
