"""Recipe: sections, sources of values, resolution, TOML, learning-rate schedule."""
