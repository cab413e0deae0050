"""Token store on disk: manifest, shards and their Megatron indexes."""
