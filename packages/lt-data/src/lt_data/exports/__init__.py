"""Token stores in the formats of other programs, and back: hf, megatron, smp, litespark, litpkds, mds.

One module per format, each with `at_least` (bytes), `write` and `read`; `exporting` and `importing` are what they have
in common. docs/formats/data-exports.md has the mapping of each.
"""
