"""Analysis of stores, packs and the steps of a run: statistics, inspection, verification."""
