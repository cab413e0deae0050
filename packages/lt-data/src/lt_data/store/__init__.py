"""The token store as it lies on the disk: manifest, shards and their Megatron indices."""
