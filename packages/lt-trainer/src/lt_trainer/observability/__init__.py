"""Run logger, throughput, sinks, node monitor, report and live watch."""
